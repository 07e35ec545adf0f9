"""The loader: same batches as the source, one step ahead, faults with their samples, and no thread left behind."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from hp_train.data import loader as loader_module
from hp_train.data.loader import DataReadError, Loader, document_mask, to_micro_batch
from hp_train.data.source import IGNORED, Batch


class CountingSource:
    """Rows that name their sample; slow, or failing at one sample, if asked."""

    num_sequences = 1000

    def __init__(self, delay_s: float = 0.0, fails_at: int = -1) -> None:
        self.delay_s = delay_s
        self.fails_at = fails_at
        self.calls = 0

    def batch(self, samples: list[int]) -> Batch:
        self.calls += 1
        time.sleep(self.delay_s)
        if self.fails_at in samples:
            raise OSError("the disk is gone")
        tokens = np.array(samples)[:, None] * 10 + np.arange(4)
        targets = np.where(np.arange(4) < 3, tokens + 1, IGNORED)
        ids = np.array([[0, 0, 1, 1]] * len(samples))
        return Batch(tokens, targets, positions=np.array([[0, 1, 0, 1]] * len(samples)), document_ids=ids)


def two_micro_batches(step: int) -> list[list[int]]:
    return [[4 * step, 4 * step + 1], [4 * step + 2, 4 * step + 3]]


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "data loader"]


def test_steps_come_in_order_with_their_samples() -> None:
    with Loader(CountingSource(), two_micro_batches, "cpu", start_step=5, end_step=8) as loader:
        steps = list(loader)
    assert [step for step, _, _ in steps] == [5, 6, 7]
    for step, micro_batches, wait_s in steps:
        assert [batch.tokens[:, 0].tolist() for batch in micro_batches] == [
            [sample * 10 for sample in samples] for samples in two_micro_batches(step)
        ]
        assert all(batch.num_targets == 6 and batch.tokens.dtype == torch.int64 for batch in micro_batches)
        assert wait_s >= 0
    assert not loader_threads()


def test_the_next_step_is_read_while_the_caller_computes_and_no_further() -> None:
    source = CountingSource()
    with Loader(source, two_micro_batches, "cpu") as loader:
        next(loader)
        deadline = time.monotonic() + 5
        while source.calls < 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)  # time enough to read a third step, were it allowed to
        assert source.calls == 4
    assert not loader_threads()


def test_waiting_is_measured() -> None:
    with Loader(CountingSource(delay_s=0.05), two_micro_batches, "cpu") as loader:
        _, _, first_wait_s = next(loader)
        time.sleep(0.3)
        _, _, second_wait_s = next(loader)
    assert first_wait_s > 0.05 and second_wait_s < first_wait_s / 2


def test_a_fault_is_raised_at_its_step_with_its_samples() -> None:
    loader = Loader(CountingSource(fails_at=6), two_micro_batches, "cpu")
    assert next(loader)[0] == 0
    with pytest.raises(DataReadError, match="reading the data of step 1 failed at samples 6-7") as raised:
        next(loader)
    assert isinstance(raised.value.__cause__, OSError)
    assert (raised.value.step, raised.value.samples) == (1, [6, 7])
    assert not loader_threads()
    with pytest.raises(StopIteration):
        next(loader)


def test_closing_ends_the_thread_whatever_it_is_doing() -> None:
    for delay_s in (0.0, 0.05):
        loader = Loader(CountingSource(delay_s=delay_s), two_micro_batches, "cpu")
        loader.close()
        loader.close()
        assert not loader_threads()


def test_a_read_that_hangs_does_not_keep_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(CountingSource):
        goes_on = threading.Event()

        def batch(self, samples: list[int]) -> Batch:
            self.goes_on.wait(30)
            return super().batch(samples)

    monkeypatch.setattr(loader_module, "_MOST_JOIN_S", 0.05)
    source = Hanging()
    started = time.monotonic()
    with pytest.raises(ZeroDivisionError), Loader(source, two_micro_batches, "cpu"):
        raise ZeroDivisionError
    assert time.monotonic() - started < 10
    [thread] = loader_threads()
    source.goes_on.set()
    thread.join(10)
    assert not loader_threads()


def test_the_mask_keeps_attention_inside_documents_and_causal() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, 3]])
    mask = document_mask(ids)
    assert mask.shape == (2, 1, 5, 5) and mask.dtype == torch.bool
    for row in range(2):
        for query in range(5):
            for key in range(5):
                assert mask[row, 0, query, key] == (key <= query and ids[row, query] == ids[row, key])
    assert mask.any(dim=-1).all(), "a query that attends to nothing would give nan"


def test_masks_are_made_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's micro-batches wait for their turn together; a mask is S times as large as all else of one."""
    made: list[torch.Size] = []

    def counted(ids: torch.Tensor) -> torch.Tensor:
        made.append(ids.shape)
        return document_mask(ids)

    monkeypatch.setattr(loader_module, "document_mask", counted)
    with Loader(CountingSource(), two_micro_batches, "cpu") as loader:
        _, (first, _), _ = next(loader)
    assert made == []
    assert torch.equal(first.attention_mask, document_mask(first.document_ids)) and made == [(2, 4)]


def test_plain_batches_have_neither_mask_nor_positions() -> None:
    tokens = np.arange(8).reshape(2, 4)
    batch = to_micro_batch(Batch(tokens, tokens + 1), "cpu")
    assert batch.attention_mask is None and batch.positions is None and batch.num_targets == 8


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu_equal_to_the_source() -> None:
    source = CountingSource()
    with Loader(source, two_micro_batches, "cuda:0", end_step=50) as loader:
        for step, micro_batches, _ in loader:
            for samples, batch in zip(two_micro_batches(step), micro_batches, strict=True):
                expected = to_micro_batch(source.batch(samples), "cpu")
                for name in ("tokens", "targets", "positions", "attention_mask"):
                    moved = getattr(batch, name)
                    assert moved.device.type == "cuda" and torch.equal(moved.cpu(), getattr(expected, name))
