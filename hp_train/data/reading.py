"""Input files to pieces of work: a stream of `Task`s, each small enough to hold, in the order of the inputs.

Never torch. Reading is one process's job and does no more than find line ends; parsing and encoding (`encode_task`)
run in the workers. .txt is one document, or several where a separator line is given; .jsonl is a document a line. Both
may be gzipped. `inputs` finds the files, `tables` gives rows of other formats as lines.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from hp_train.data.tokenizer import PIECE_BYTES, Tokenizer, cut_into_pieces, cut_point
from hp_train.errors import ConfigError

TEXT_SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")
MAX_LINE_BYTES = 256 << 20  # one JSONL line is held in memory as a whole
_BLOCK_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Task:
    """Work for one worker: whole JSONL lines if `field` is given, else a piece of plain text of one document.

    `first_line` counts from 1 in `file`; `ends_document` says whether a plain text's document ends with this piece.
    """

    file: str
    first_line: int
    data: bytes
    field: str | None
    ends_document: bool


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a task: `lengths` are the token counts of its parts, `ids` their tokens, end to end. Each part is a
    document, or the end of one; with `ends_document` False the only part is to be continued by the next task."""

    ids: NDArray[np.uint32]
    lengths: NDArray[np.int64]
    ends_document: bool


class InputFile:
    """One input file, read once from front to back. `num_bytes` and `sha256` are of the file as it lies on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.num_bytes = path.stat().st_size
        self.num_read = 0
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of what was read so far: of the whole file once `tasks` is exhausted."""
        return self._hash.hexdigest()

    def saw(self, data: bytes) -> None:
        """Count and hash what was just read."""
        self.num_read += len(data)
        self._hash.update(data)

    def tasks(self, field: str, separator: str | None) -> Iterator[Task]:
        """Cut the file into tasks. Raises ConfigError naming file and line for what cannot be read."""
        with open(self.path, "rb") as raw:
            stream = _Hashed(raw, self)
            try:
                if self.path.suffix == ".gz":
                    with gzip.GzipFile(fileobj=stream) as unzipped:
                        yield from self._tasks(unzipped, field, separator)
                else:
                    yield from self._tasks(stream, field, separator)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ConfigError(f"{self.path} is damaged: {error}") from None

    def _tasks(self, stream: BinaryIO | _Hashed, field: str, separator: str | None) -> Iterator[Task]:
        blocks = _without_mark(stream)
        if ".jsonl" in self.path.suffixes:
            return self._line_tasks(blocks, field)
        return self._text_tasks(blocks, None if separator is None else separator.encode())

    def _line_tasks(self, blocks: Iterator[bytes], field: str) -> Iterator[Task]:
        """Whole lines, about a block of them at a time."""
        rest, line = bytearray(), 1
        for block in blocks:
            end = block.rfind(b"\n") + 1
            if end:
                data = bytes(rest) + block[:end]
                yield Task(str(self.path), line, data, field, ends_document=True)
                rest.clear()
                line += data.count(b"\n")
            rest += block[end:]
            if len(rest) > MAX_LINE_BYTES:
                raise ConfigError(f"{self.path}:{line}: the line is longer than {MAX_LINE_BYTES >> 20} MiB")
        if rest:
            yield Task(str(self.path), line, bytes(rest), field, ends_document=True)

    def _text_tasks(self, blocks: Iterator[bytes], separator: bytes | None) -> Iterator[Task]:
        """Pieces cut just as `cut_into_pieces` cuts a document that is held as a whole."""
        text, line, after_separator = b"", 1, False
        for chunk in blocks if separator is None else _split_at(blocks, separator):
            after_separator = chunk is None
            if chunk is None:
                yield Task(str(self.path), line, text, None, ends_document=True)
                text, line = b"", line + text.count(b"\n") + 1
                continue
            text += chunk
            while len(text) > PIECE_BYTES:
                end = cut_point(text)
                yield Task(str(self.path), line, text[:end], None, ends_document=False)
                line += text.count(b"\n", 0, end)
                text = text[end:]
        if not after_separator:  # a separator at the very end opens no document
            yield Task(str(self.path), line, text, None, ends_document=True)


class _Hashed:
    """A binary file that counts and hashes what is read from it."""

    def __init__(self, raw: BinaryIO, file: InputFile) -> None:
        self._raw = raw
        self._file = file

    def read(self, size: int = -1) -> bytes:
        data = self._raw.read(size)
        self._file.saw(data)
        return data


def encode_task(task: Task, tokenizer: Tokenizer) -> Encoded:
    """Tokens of `task`. Raises ConfigError naming file and line for what is not UTF-8, or not the JSON asked for."""
    _check_utf8(task)
    if task.field is None:
        (ids,) = tokenizer.encode([task.data])
        return Encoded(ids, np.array([len(ids)], dtype=np.int64), task.ends_document)
    documents = [cut_into_pieces(text.encode()) for text in _parse_lines(task, task.field)]
    encoded = tokenizer.encode([piece for pieces in documents for piece in pieces])
    in_order = iter(encoded)
    lengths = [sum(len(next(in_order)) for _ in pieces) for pieces in documents]
    ids = np.concatenate([np.zeros(0, dtype=np.uint32), *encoded])
    return Encoded(ids, np.array(lengths, dtype=np.int64), ends_document=True)


def _check_utf8(task: Task) -> None:
    try:
        task.data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = task.first_line + task.data.count(b"\n", 0, error.start)
        raise ConfigError(f"{task.file}:{line}: not UTF-8 text (byte 0x{task.data[error.start]:02x})") from None


def _parse_lines(task: Task, field: str) -> Iterator[str]:
    for number, line in enumerate(task.data.split(b"\n"), start=task.first_line):
        if not line.strip():
            continue
        where = f"{task.file}:{number}"
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON ({error})") from None
        if not isinstance(document, dict):
            raise ConfigError(f"{where}: not a JSON object but {_type_of(document)}")
        if field not in document:
            raise ConfigError(
                f"{where}: no field {field!r}; it has {', '.join(map(repr, document)) or 'none'}; use --field"
            )
        text = document[field]
        if not isinstance(text, str):
            raise ConfigError(f"{where}: field {field!r} is not text but {_type_of(text)}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{where}: field {field!r} holds half of a surrogate pair, which is no character"
            ) from None
        yield text


def _type_of(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _without_mark(stream: BinaryIO | _Hashed) -> Iterator[bytes]:
    """Blocks of `stream`, less the mark that some editors put in front of UTF-8."""
    first = stream.read(_BLOCK_BYTES).removeprefix(_BYTE_ORDER_MARK)
    if first:
        yield first
    while block := stream.read(_BLOCK_BYTES):
        yield block


def _split_at(blocks: Iterator[bytes], separator: bytes) -> Iterator[bytes | None]:
    """Text of `blocks`, with None in place of each line that equals `separator`. Holds a block, never a whole line."""
    rest = b""  # the beginning of a line, held back while it may still become the separator
    inside_line = False  # the line's beginning has been given out already
    for block in blocks:
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        kept: list[bytes] = []
        for line in lines:
            if inside_line or line.removesuffix(b"\r") != separator:
                kept.append(line + b"\n")
            else:
                yield b"".join(kept)
                yield None
                kept = []
            inside_line = False
        if inside_line or len(rest) > len(separator) + 1:
            kept.append(rest)
            rest, inside_line = b"", True
        yield b"".join(kept)
    yield rest if inside_line or rest.removesuffix(b"\r") != separator else None
