"""Rows of Parquet files and of Hugging Face datasets as documents, in the form that `reading` gives lines of JSONL.

Never torch. The libraries (pyarrow, datasets) are an extra of the package and are imported when such an input is read.
A table is read a batch of rows at a time, and of Parquet the one column that holds the text.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hp_train.data.reading import Task
from hp_train.errors import ConfigError

PARQUET = ".parquet"
HF_PREFIX = "hf:"
_ROWS_PER_TASK = 256
_BLOCK_BYTES = 1 << 22
_SAVED_MARKS = ("dataset_info.json", "dataset_dict.json")  # what `Dataset.save_to_disk` leaves in a folder


def missing_package(name: str) -> str | None:
    """Return what is missing to read the input `name`, one line, or None."""
    package = "pyarrow" if name.endswith(PARQUET) else "datasets"
    if importlib.util.find_spec(package) is not None:
        return None
    return f"{name} needs the package {package}: pip install 'hp-train[data]'"


def is_saved_dataset(folder: Path) -> bool:
    """Say whether `folder` was written by `Dataset.save_to_disk`."""
    return any((folder / mark).is_file() for mark in _SAVED_MARKS)


class ParquetFile:
    """One Parquet file; see `reading.InputFile`, whose interface it has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.num_bytes = path.stat().st_size
        self.num_read = 0
        self.sha256 = ""  # once `tasks` is exhausted

    def tasks(self, field: str, separator: str | None) -> Iterator[Task]:
        """Cut the column `field` into tasks. Raises ConfigError for a file or column that cannot be read."""
        import pyarrow
        from pyarrow.parquet import ParquetFile as Reader

        try:
            reader = Reader(self.path)
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{self.path} is no Parquet file ({_in_one_line(error)})") from None
        with reader:
            names = reader.schema_arrow.names
            if field not in names:
                raise ConfigError(f"{self.path}: no field {field!r}; it has {', '.join(map(repr, names))}; use --field")
            row, rows = 1, max(reader.metadata.num_rows, 1)
            try:
                for batch in reader.iter_batches(_ROWS_PER_TASK, columns=[field]):
                    yield _task(str(self.path), row, field, batch.column(0).to_pylist())
                    row += batch.num_rows
                    self.num_read = self.num_bytes * (row - 1) // rows
            except (pyarrow.ArrowException, OSError) as error:
                raise ConfigError(f"{self.path} is damaged: {_in_one_line(error)}") from None
        self.sha256 = _sha256_of(self.path)
        self.num_read = self.num_bytes


class HfDataset:
    """One split of a Hugging Face dataset: a name on the hub, or a folder. `num_bytes` is not known beforehand."""

    def __init__(self, spec: str, split: str, subset: str | None) -> None:
        self.name = spec
        self.num_bytes = 0
        self.num_read = 0  # bytes of text, of all rows so far
        self._split = split
        self._subset = subset
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of the texts as JSON lines: rows have no bytes of their own."""
        return self._hash.hexdigest()

    def tasks(self, field: str, separator: str | None) -> Iterator[Task]:
        """Cut the field `field` of all rows into tasks. Raises ConfigError for what cannot be opened or read."""
        with _one_line_for(self.name):
            rows = self._rows()
            columns = rows.column_names
            if columns is not None and field in columns:
                rows = rows.select_columns([field])
            batches = iter(rows.iter(batch_size=_ROWS_PER_TASK))
        number = 1
        while True:
            with _one_line_for(self.name):
                batch = next(batches, None)
            if batch is None:
                return
            if field not in batch:
                raise ConfigError(f"{self.name}: no field {field!r}; it has {', '.join(map(repr, batch))}; use --field")
            task = _task(self.name, number, field, batch[field])
            self._hash.update(task.data)
            self.num_read += len(task.data)
            number += len(batch[field])
            yield task

    def _rows(self) -> Any:
        import datasets

        datasets.disable_progress_bars()
        path = self.name.removeprefix(HF_PREFIX)
        if not is_saved_dataset(Path(path)):
            return datasets.load_dataset(path, self._subset, split=self._split, streaming=True)
        saved = datasets.load_from_disk(path)
        if not isinstance(saved, dict):
            return saved  # a single split, whatever its name
        if self._split not in saved:
            raise ConfigError(f"{self.name} has no split {self._split!r}; use --split {' or '.join(saved)}")
        return saved[self._split]


@contextmanager
def _one_line_for(name: str) -> Iterator[None]:
    """Turn whatever the libraries raise of a person's dataset into one line: they document no exceptions."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{name} cannot be read: {_in_one_line(error)}") from error


def _task(name: str, first_row: int, field: str, texts: list[Any]) -> Task:
    lines = "\n".join(json.dumps({field: text}, default=str, ensure_ascii=True) for text in texts)
    return Task(name, first_row, lines.encode(), field, ends_document=True)


def _sha256_of(path: Path) -> str:
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum.update(block)
    return checksum.hexdigest()


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
