"""Writes a folder of prepared tokens, which appears whole or not at all. Never torch."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_train.data.token_folder import (
    DOCUMENTS_FILE,
    INDEX_FILE,
    OFFSET_BYTES,
    SOURCES_FILE,
    TOKENIZER_FILE,
    TOKENS_FILE,
    TokenIndex,
    Vocabulary,
)
from hp_train.errors import HpTrainError
from hp_train.new_folder import NewFolder


def token_dtype(max_token_id: int) -> str:
    """The smallest dtype of tokens.bin that holds ids up to `max_token_id`."""
    return next(name for name in ("uint8", "uint16", "uint32") if max_token_id <= np.iinfo(name).max)


class TokenFolderWriter:
    """Context manager: `add` tokens and documents in order, then `finish`. Without `finish`, no trace stays."""

    def __init__(self, out: Path, dtype: str, eos_id: int | None) -> None:
        self._out = out
        self._new = NewFolder(out, "--out")
        self._dtype = dtype
        self._eos_id = eos_id
        self._offsets = np.zeros(1, dtype=np.int64)
        self.num_tokens = 0
        self.num_documents = 0
        self.num_empty_documents = 0
        self._document_start = 0  # of the document that is being written
        self._longest_document = 0
        self._max_token_id = 0

    def __enter__(self) -> TokenFolderWriter:
        folder = self._new.__enter__().path
        self._tokens = _HashedFile(folder / TOKENS_FILE)
        self._documents = _HashedFile(folder / DOCUMENTS_FILE)
        self._documents.write(_offset_bytes(np.zeros(1, dtype=np.int64)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._tokens.close()
        self._documents.close()
        self._new.__exit__(kind, error, traceback)

    def add(self, ids: NDArray[np.uint32], lengths: NDArray[np.int64], ends_document: bool = True) -> None:
        """Append the tokens `ids` of several documents, `lengths` tokens each; the first continues an open document.

        With `ends_document` False the last one stays open. An end-of-document token follows each closed document,
        if there is such a token; documents without tokens are left out.
        """
        assert lengths.sum() == len(ids)
        ends = np.cumsum(lengths)[: None if ends_document else -1]
        already = self.num_tokens - self._document_start
        sizes = np.diff(ends, prepend=0) + np.where(np.arange(len(ends)) == 0, already, 0)
        self.num_empty_documents += int((sizes == 0).sum())
        ends, sizes = ends[sizes > 0], sizes[sizes > 0]
        if self._eos_id is not None:
            ids = np.insert(ids, ends, self._eos_id)
            ends = ends + np.arange(1, len(ends) + 1)
            sizes = sizes + 1
        offsets = self.num_tokens + ends
        with _disk_faults(self._out):
            self._tokens.write(ids.astype(np.dtype(self._dtype).newbyteorder("<"), copy=False).tobytes())
            self._documents.write(_offset_bytes(offsets))
        self.num_tokens += len(ids)
        self.num_documents += len(offsets)
        if len(offsets):
            self._document_start = int(offsets[-1])
            self._longest_document = max(self._longest_document, int(sizes.max()))
        if len(ids):
            self._max_token_id = max(self._max_token_id, int(ids.max()))

    def finish(self, vocabulary: Vocabulary, sources: list[dict[str, Any]], tokenizer_file: Path | None) -> TokenIndex:
        """Write the index, sync all, give the folder its name. `sources` holds name, bytes, sha256 of each input."""
        assert self._document_start == self.num_tokens, "the last document is still open"
        sources_text = json.dumps(sources, indent=1) + "\n"
        index = TokenIndex(
            dtype=self._dtype,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            longest_document=self._longest_document,
            max_token_id=self._max_token_id,
            vocabulary=vocabulary,
            tokens_sha256=self._tokens.sha256,
            documents_sha256=self._documents.sha256,
            sources_sha256=hashlib.sha256(sources_text.encode()).hexdigest(),
        )
        with _disk_faults(self._out):
            self._tokens.close()
            self._documents.close()
            (self._new.path / SOURCES_FILE).write_text(sources_text, encoding="utf-8")
            (self._new.path / INDEX_FILE).write_text(index.to_json(), encoding="utf-8")
            if tokenizer_file is not None:
                shutil.copyfile(tokenizer_file, self._new.path / TOKENIZER_FILE)
            self._new.publish()
        return index


class _HashedFile:
    """A file that is written once from front to back, and hashed on the way."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        self._hash.update(data)
        self._file.write(data)

    def close(self) -> None:
        self._file.close()


@contextmanager
def _disk_faults(out: Path) -> Iterator[None]:
    """A full or failing disk is no fault of the inputs: one line, exit code 1."""
    try:
        yield
    except OSError as error:
        raise HpTrainError(f"writing {out} failed: {error.strerror}") from error


def _offset_bytes(offsets: NDArray[np.int64]) -> bytes:
    data = offsets.astype("<u8").tobytes()
    assert len(data) == len(offsets) * OFFSET_BYTES
    return data
