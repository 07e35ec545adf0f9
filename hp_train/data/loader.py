"""Batches to the device, one step ahead of the training loop.

May import torch, and of ours `data` only. A background thread reads the micro-batches of the next step while the
current one computes, so that disk and hashing cost the loop nothing unless they are slower than it; how long the loop
had to wait is handed over with each step. Reading and pinning are the thread's, copying to the device is the
caller's, on the caller's stream: no synchronisation between streams is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter
from types import TracebackType

import numpy as np
import torch

from hp_train.data.source import IGNORED, Batch, TokenSource

_MOST_JOIN_S = 10.0  # longer than any read that ends takes


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward's worth of sequences, on the device.

    tokens [B, S] int64, targets [B, S] int64 (-100: not predicted), positions [B, S] int64 or None (0, 1, ...),
    document_ids [B, S] int64: attention stays among equal ones; None: plain causal.
    num_targets: how many targets are not -100, counted on the host, so that asking costs no synchronisation.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None
    document_ids: torch.Tensor | None
    num_targets: int

    @property
    def attention_mask(self) -> torch.Tensor | None:
        """Return `document_mask` of the ids, None where there are none. Made at each call: S times as large as they."""
        return None if self.document_ids is None else document_mask(self.document_ids)


class DataReadError(RuntimeError):
    """Reading a step's samples failed; the cause is chained. `step` and `samples` say what was being read."""

    def __init__(self, step: int, samples: list[int]) -> None:
        self.step = step
        self.samples = samples
        super().__init__(f"reading the data of step {step} failed at samples {_spell(samples)}")


class Loader:
    """Iterates over (step, micro-batches of the step, seconds the caller waited for them).

    `samples_of_step(step)` gives the global sample indices of each micro-batch that this rank reads. Begins with
    `start_step` and ends before `end_step` (None: never). A failure in the background is raised at the step it hit, as
    DataReadError. Close it, or leave its `with` block, when no more steps are wanted.
    """

    def __init__(
        self,
        source: TokenSource,
        samples_of_step: Callable[[int], list[list[int]]],
        device: torch.device | str,
        start_step: int = 0,
        end_step: int | None = None,
    ) -> None:
        self._source = source
        self._samples_of_step = samples_of_step
        self._device = torch.device(device)
        self._steps = (start_step, end_step)
        self._ready: SimpleQueue[_Read | None] = SimpleQueue()
        self._may_read = threading.Semaphore(1)  # one step read ahead: the next, while the caller computes this one
        self._closed = False
        self._thread = threading.Thread(target=self._read_steps, name="data loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[int, list[MicroBatch], float]]:
        return self

    def __next__(self) -> tuple[int, list[MicroBatch], float]:
        if self._closed:
            raise StopIteration
        started = perf_counter()
        read = self._ready.get()
        wait_s = perf_counter() - started
        if read is None or read.error is not None:
            self.close()
        if read is None:
            raise StopIteration
        if read.error is not None:
            raise DataReadError(read.step, read.samples) from read.error
        self._may_read.release()
        return read.step, [batch.to(self._device) for batch in read.batches], wait_s

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading and end the thread. Steps that were read ahead are dropped. May be called twice.

        A read that hangs is left behind after a while: it must not keep an error from being told.
        """
        self._closed = True
        self._may_read.release()
        self._thread.join(_MOST_JOIN_S)

    def _read_steps(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins on device 0, where pinning would open a context
        step, end = self._steps
        while end is None or step < end:
            self._may_read.acquire()
            if self._closed:
                return
            read = self._read_step(step)
            self._ready.put(read)
            if read.error is not None:
                return
            step += 1
        self._ready.put(None)

    def _read_step(self, step: int) -> _Read:
        samples: list[int] = []
        batches = []
        try:
            for samples in self._samples_of_step(step):
                batches.append(_HostBatch.of(self._source.batch(samples), pin=self._device.type == "cuda"))
        except BaseException as error:  # whatever it is, it belongs to the caller, who would else wait for ever
            return _Read(step, [], samples, error)
        return _Read(step, batches, samples, None)


@dataclass(frozen=True, slots=True)
class _HostBatch:
    """A `Batch` as torch tensors in (pinned) host memory."""

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None
    document_ids: torch.Tensor | None
    num_targets: int

    @classmethod
    def of(cls, batch: Batch, pin: bool) -> _HostBatch:
        def tensor(array: np.ndarray | None) -> torch.Tensor | None:
            if array is None:
                return None
            return torch.from_numpy(array).pin_memory() if pin else torch.from_numpy(array)

        num_targets = int((batch.targets != IGNORED).sum())
        parts = (batch.tokens, batch.targets, batch.positions, batch.document_ids)
        return cls(*map(tensor, parts), num_targets)

    def to(self, device: torch.device) -> MicroBatch:
        """Start the copies to `device`, on its current stream."""

        def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        parts = (self.tokens, self.targets, self.positions, self.document_ids)
        return MicroBatch(*map(move, parts), self.num_targets)


@dataclass(frozen=True, slots=True)
class _Read:
    """What the thread hands over: a step's batches, or the error and the samples it hit."""

    step: int
    batches: list[_HostBatch]
    samples: list[int]
    error: BaseException | None


def to_micro_batch(batch: Batch, device: torch.device | str) -> MicroBatch:
    """`batch` on `device`, at once: for a few batches, as in evaluation."""
    device = torch.device(device)
    return _HostBatch.of(batch, pin=device.type == "cuda").to(device)


def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """[B, 1, S, S] bool from ids [B, S]: True where query (third axis) and key share a document, the key not later."""
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same.tril_()


def _spell(samples: list[int]) -> str:
    if len(samples) > 1 and samples == list(range(samples[0], samples[-1] + 1)):
        return f"{samples[0]}-{samples[-1]}"
    return ", ".join(map(str, samples)) or "(none yet)"
