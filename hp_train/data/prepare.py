"""Text to a folder of tokens: read, encode in parallel, write in order. Never torch.

One process reads the inputs and writes the result; encoding runs in `num_workers` processes. At most a few tasks for
each worker are under way, and their results are written in the order of the inputs: memory is bounded, whatever the
size of the corpus, and the bytes do not depend on the number of workers.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from hp_train.data.inputs import Input, find_inputs
from hp_train.data.reading import Encoded, Task, encode_task
from hp_train.data.token_folder import TokenIndex
from hp_train.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, open_tokenizer
from hp_train.data.writer import TokenFolderWriter, token_dtype
from hp_train.errors import ConfigError, HpTrainError
from hp_train.new_folder import refuse_taken

_TASKS_PER_WORKER = 3  # one at work, one waiting, one being written


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a preparation is. `total_bytes` are of the input files as they lie on disk."""

    read_bytes: int
    total_bytes: int
    num_tokens: int
    num_documents: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was written, and how many documents were left out because they hold no tokens."""

    index: TokenIndex
    num_empty_documents: int


def prepare(
    inputs: Sequence[str | Path],
    out: Path,
    tokenizer_name: str = "byte",
    *,
    field: str = "text",
    separator: str | None = None,
    eos: bool = True,
    eos_token: str | None = None,
    split: str = "train",
    subset: str | None = None,
    num_workers: int = 1,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Prepared:
    """Turn the texts of `inputs` into the folder of tokens `out`, which must not exist yet.

    `tokenizer_name` is `byte` or the path of a tokenizer.json. `field` holds the text of a JSONL line or a row of a
    table, `separator` is a line between the documents of a .txt file (None: one document a file), `split` and `subset`
    choose among those of a Hugging Face dataset. With `eos` an end-of-document token follows
    each document: `eos_token`, or the one that the tokenizer is known to have. `report` is called after each task.
    Raises ConfigError for bad inputs and options; then, and if the process dies, there is no folder `out`.
    """
    assert num_workers >= 1
    tokenizer, eos_id, found = check_arguments(
        inputs, out, tokenizer_name, eos=eos, eos_token=eos_token, split=split, subset=subset
    )
    reader = _Reader(found)
    bytes_only = isinstance(tokenizer, ByteTokenizer)
    highest_id = max(255 if bytes_only else tokenizer.vocabulary.size - 1, eos_id or 0)
    encoded = _encode_all(reader.tasks(field, separator), tokenizer, tokenizer_name, num_workers)
    with TokenFolderWriter(out, token_dtype(highest_id), eos_id) as writer, closing(encoded):
        for part in encoded:
            writer.add(part.ids, part.lengths, part.ends_document)
            report(Progress(reader.read_bytes, reader.total_bytes, writer.num_tokens, writer.num_documents))
        if writer.num_tokens == 0:
            raise ConfigError(f"the inputs hold no text: {len(reader.files)} files, {reader.total_bytes:,} bytes")
        index = writer.finish(tokenizer.vocabulary, reader.sources(), None if bytes_only else Path(tokenizer_name))
    return Prepared(index, writer.num_empty_documents)


def check_arguments(
    inputs: Sequence[str | Path],
    out: Path,
    tokenizer_name: str,
    *,
    eos: bool = True,
    eos_token: str | None = None,
    split: str = "train",
    subset: str | None = None,
) -> tuple[ByteTokenizer | FileTokenizer, int | None, list[Input]]:
    """The tokenizer, the id of its end-of-document token and the inputs that `prepare` will read.

    Raises ConfigError with every fault of these arguments, in the order: tokenizer, inputs, out.
    """
    faults: list[str] = []
    tokenizer, eos_id, found = None, None, []
    with _collected(faults):
        tokenizer = open_tokenizer(tokenizer_name)
        eos_id = _end_of_document(tokenizer, tokenizer_name, eos_token) if eos else None
    with _collected(faults):
        found = find_inputs(inputs, split, subset)
    with _collected(faults):
        refuse_taken(out, "--out")
    if faults:
        raise ConfigError(*faults)
    assert tokenizer is not None
    return tokenizer, eos_id, found


@contextmanager
def _collected(faults: list[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        faults.extend(error.messages)


class _Reader:
    """The inputs one after the other, and how much of them has been read."""

    def __init__(self, files: list[Input]) -> None:
        self.files = files
        self.total_bytes = sum(file.num_bytes for file in files)
        self._finished_bytes = 0
        self._current: Input | None = None

    @property
    def read_bytes(self) -> int:
        return self._finished_bytes + (self._current.num_read if self._current else 0)

    def tasks(self, field: str, separator: str | None) -> Iterator[Task]:
        for file in self.files:
            self._current = file
            yield from file.tasks(field, separator)
            self._current = None
            self._finished_bytes += file.num_read

    def sources(self) -> list[dict[str, Any]]:
        return [{"name": file.name, "bytes": file.num_read, "sha256": file.sha256} for file in self.files]


def _end_of_document(tokenizer: ByteTokenizer | FileTokenizer, name: str, eos_token: str | None) -> int:
    """Id of the end-of-document token. Raises ConfigError if the tokenizer has none by that name, or no known one."""
    if eos_token is not None:
        eos_id = tokenizer.token_id(eos_token) if isinstance(tokenizer, FileTokenizer) else None
        if eos_id is None:
            raise ConfigError(f"--eos-token {eos_token}: the tokenizer {name} has no such token")
        return eos_id
    if tokenizer.vocabulary.eos_id is None:
        raise ConfigError(
            f"--tokenizer {name} has no end-of-document token of a known name; use --eos-token TOKEN or --no-eos"
        )
    return tokenizer.vocabulary.eos_id


def _encode_all(
    tasks: Iterator[Task], tokenizer: Tokenizer, tokenizer_name: str, num_workers: int
) -> Generator[Encoded, None, None]:
    """Encode `tasks`, in their order, in this process or in `num_workers` others."""
    if num_workers == 1:
        for task in tasks:
            yield encode_task(task, tokenizer)
        return
    # Spawned, not forked: the caller may run threads (a progress bar), and tokenizers holds a thread pool of its own.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, _start_worker, (tokenizer_name,))
    under_way: deque[Future[Encoded]] = deque()
    try:
        for task in tasks:
            under_way.append(pool.submit(_encode_in_worker, task))
            if len(under_way) == num_workers * _TASKS_PER_WORKER:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool:
        raise HpTrainError("a worker process died, killed from outside or out of memory; try fewer --workers") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker_tokenizer: Tokenizer | None = None  # one for each worker process, set as it starts


def _start_worker(tokenizer_name: str) -> None:
    global _worker_tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent alone decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one core; read at each call of the library
    _worker_tokenizer = open_tokenizer(tokenizer_name)


def _end_with_parent() -> None:
    """A parent killed by signal 9 cannot stop its workers: they notice and go."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(task: Task) -> Encoded:
    assert _worker_tokenizer is not None
    return encode_task(task, _worker_tokenizer)
