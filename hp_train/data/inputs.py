"""What a person names as INPUT, to things that can be read: text and Parquet files, Hugging Face datasets. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from hp_train.data.reading import TEXT_SUFFIXES, InputFile, Task
from hp_train.data.tables import HF_PREFIX, PARQUET, HfDataset, ParquetFile, is_saved_dataset, missing_package
from hp_train.errors import ConfigError

SUFFIXES = (*TEXT_SUFFIXES, PARQUET)


class Input(Protocol):
    """One input, read once from front to back. `num_bytes` is 0 if unknown, `sha256` holds when `tasks` is spent."""

    name: str
    num_bytes: int
    num_read: int

    @property
    def sha256(self) -> str:
        """Hash of what was read."""
        ...

    def tasks(self, field: str, separator: str | None) -> Iterator[Task]:
        """Cut the input into tasks. Raises ConfigError naming the place of what cannot be read."""
        ...


def find_inputs(inputs: Sequence[str | Path], split: str = "train", subset: str | None = None) -> list[Input]:
    """The inputs that `inputs` name, a folder standing for the files in and below it, sorted.

    `split` and `subset` are of the Hugging Face datasets among them. Raises ConfigError.
    """
    found: list[Input] = []
    faults: list[str] = []
    for name in map(str, inputs):
        path = Path(name)
        if name == "":  # as a path it would be the folder that the command is run in
            faults.append("an INPUT is empty; name a file or a folder")
        elif name.startswith(HF_PREFIX) or is_saved_dataset(path):
            spec = name if name.startswith(HF_PREFIX) else HF_PREFIX + name
            if spec == HF_PREFIX:
                faults.append("hf: names no dataset; use hf:NAME or hf:FOLDER")
            found.append(HfDataset(spec, split, subset))
        elif path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(SUFFIXES))
            found += map(_open, inside)
            if not inside:
                faults.append(f"{name} holds no {', '.join(SUFFIXES)} file")
        elif not path.exists():
            faults.append(f"{name} does not exist")
        elif not path.name.endswith(SUFFIXES):
            faults.append(f"{name}: cannot read this kind of file; use {', '.join(SUFFIXES)}, or hf:NAME")
        else:
            found.append(_open(path))
    tables = [item for item in found if isinstance(item, (ParquetFile, HfDataset))]
    faults += filter(None, (missing_package(item.name) for item in tables))
    if not any(isinstance(item, HfDataset) for item in found):
        faults += [
            f"--{option} {value} has no effect: no INPUT is a Hugging Face dataset"
            for option, value, default in (("split", split, "train"), ("subset", subset, None))
            if value != default
        ]
    if faults:
        raise ConfigError(*dict.fromkeys(faults))
    return found


def _open(path: Path) -> Input:
    return ParquetFile(path) if path.name.endswith(PARQUET) else InputFile(path)
