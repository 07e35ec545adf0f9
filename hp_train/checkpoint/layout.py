"""What a checkpoint is on disk, and whether it is whole. No torch.

    checkpoints/step_00000100/
      model-rank_00000.safetensors  optimizer-rank_00000.safetensors  ...   what each rank wrote
      metadata.json    shape, dtype and pieces of every tensor, and the file that holds each piece
      progress.json    step, tokens seen and whatever else the trainer wants back
      manifest.json    size and SHA-256 of every file above, and how long they took to write
      COMMITTED        SHA-256 of manifest.json, written last
    checkpoints/latest     the name of the last one that was committed; for people and tools, nothing here reads it

A checkpoint grows as `step_N.attempt_A.saving` and gets its name once COMMITTED is in it. Each byte is covered: tensors
and JSON by the manifest, the manifest by COMMITTED, COMMITTED by the exact form it must have.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hp_train.errors import CheckpointError

COMMITTED = "COMMITTED"
MANIFEST = "manifest.json"
METADATA = "metadata.json"
PROGRESS = "progress.json"
LATEST = "latest"
FORMAT = 1

SAVING = ".saving"  # being written
REPLACED = ".replaced"  # complete, and moved aside while a newer save of the same step takes its name
DELETING = ".deleting"  # renamed before deletion, so that a half-deleted folder never looks whole

_FOLDER = re.compile(r"step_(\d{8,12})(?:(?:\.attempt_\d+)?(\.saving|\.deleting)|(\.replaced))?")
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and SHA-256 (hex) of one file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Every file of one checkpoint by name, except the manifest itself and COMMITTED.

    `write_s`: how long writing them all took; 0 where it is not known.
    """

    step: int
    files: dict[str, FileRecord]
    write_s: float = 0.0

    def encode(self) -> bytes:
        """Return the text of manifest.json."""
        files = {name: {"bytes": file.num_bytes, "sha256": file.sha256} for name, file in sorted(self.files.items())}
        write_s = round(self.write_s, 3)
        return encode_json({"format": FORMAT, "step": self.step, "write_s": write_s, "files": files})


@dataclass(frozen=True, slots=True)
class StepFolder:
    """A folder under checkpoints/ that belongs to a step; `suffix` is empty for a finished one."""

    path: Path
    step: int
    suffix: str


def folder_name(step: int) -> str:
    """Return the name of the folder of `step`."""
    return f"step_{step:08d}"


def saving_name(step: int, attempt: int) -> str:
    """Return the name under which `attempt` writes the checkpoint of `step`.

    An attempt that does not know yet that it has been superseded must not write into its successor's folder.
    """
    return f"{folder_name(step)}.attempt_{attempt}{SAVING}"


def encode_json(value: object) -> bytes:
    """Return `value` as compact JSON; floats keep every bit. Raises TypeError for what JSON cannot hold."""
    return (json.dumps(value, separators=(",", ":")) + "\n").encode()


def digest(content: bytes) -> FileRecord:
    """Return the record of a file that holds `content`."""
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


def commit_mark(manifest: bytes) -> bytes:
    """Return what COMMITTED must hold, to the byte, for this text of manifest.json."""
    return f"{hashlib.sha256(manifest).hexdigest()}\n".encode()


def step_folders(checkpoints_dir: Path) -> list[StepFolder]:
    """Return all folders of steps, newest step first, a plain name before the same step's `.replaced`."""
    if not checkpoints_dir.is_dir():
        return []
    found = []
    for path in checkpoints_dir.iterdir():
        match = _FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            found.append(StepFolder(path, int(match[1]), match[2] or match[3] or ""))
    return sorted(found, key=lambda folder: (-folder.step, folder.suffix))


def candidates(checkpoints_dir: Path) -> list[StepFolder]:
    """Return the folders that may hold a complete checkpoint, newest first; nothing is checked."""
    return [folder for folder in step_folders(checkpoints_dir) if folder.suffix in ("", REPLACED)]


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a committed checkpoint; tensors and JSON files are not looked at.

    Raises CheckpointError naming the folder when COMMITTED is missing or does not vouch for the manifest.
    """
    try:
        mark = (folder / COMMITTED).read_bytes()
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise CheckpointError(f"checkpoint {folder.name} is incomplete: {missing} is missing") from None
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder.name} cannot be read: {error}") from error
    if mark != commit_mark(text):
        raise CheckpointError(f"checkpoint {folder.name} is damaged: {COMMITTED} and {MANIFEST} disagree")
    manifest = _decode_manifest(folder, text)
    if folder_name(manifest.step) != folder.name.removesuffix(REPLACED):
        raise CheckpointError(f"checkpoint {folder.name} is damaged: its manifest says step {manifest.step}")
    return manifest


def _decode_manifest(folder: Path, text: bytes) -> Manifest:
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            found = content["format"]
            raise CheckpointError(f"checkpoint {folder.name} has format {found}; this version reads {FORMAT}")
        files = {name: FileRecord(int(file["bytes"]), str(file["sha256"])) for name, file in content["files"].items()}
        step, write_s = int(content["step"]), float(content.get("write_s", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {folder.name} is damaged: {MANIFEST} makes no sense ({error!r})") from error
    for name in files:
        if Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(f"checkpoint {folder.name} is damaged: {MANIFEST} names {name!r}, no file of its own")
    for name in (METADATA, PROGRESS):
        if name not in files:
            raise CheckpointError(f"checkpoint {folder.name} is damaged: {MANIFEST} lacks {name}")
    return Manifest(step, files, write_s)


def read_json(folder: Path, manifest: Manifest, name: str) -> object:
    """Return the content of one JSON file after holding it against its checksum. Raises CheckpointError."""
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder.name} cannot be read: {error}") from error
    if digest(content) != manifest.files[name]:
        raise CheckpointError(f"checkpoint {folder.name} is damaged: {name} does not match its checksum")
    try:
        return json.loads(content)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {folder.name} is damaged: {name} is not JSON ({error})") from error


def size_fault(folder: Path, name: str, record: FileRecord) -> str | None:
    """Return what is wrong with the presence or size of a file, or None. Cheap: one stat."""
    try:
        size = (folder / name).stat().st_size
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if size == record.num_bytes else f"{name} has {size} bytes instead of {record.num_bytes}"


def file_fault(folder: Path, name: str, record: FileRecord) -> str | None:
    """Return what is wrong with a file, or None. Reads all of it."""
    fault = size_fault(folder, name, record)
    if fault is not None:
        return fault
    checksum = hashlib.sha256()
    try:
        for block in _blocks(folder / name):
            checksum.update(block)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if checksum.hexdigest() == record.sha256 else f"{name} does not match its checksum"


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield block


def is_committed(folder: Path) -> bool:
    """Return whether COMMITTED, the manifest and every file's size agree; contents are not read."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return False
    return all(size_fault(folder, name, record) is None for name, record in manifest.files.items())


def newest_committed(checkpoints_dir: Path) -> Path | None:
    """Return the newest checkpoint that `is_committed`, or None. Quick, for the command line; checksums come later."""
    return next((folder.path for folder in candidates(checkpoints_dir) if is_committed(folder.path)), None)


def bytes_in(folder: Path) -> int:
    """Return the bytes of all files in and below `folder`, which may lose some meanwhile; 0 where there is none."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file so that after a crash `path` holds all of `content` or does not exist."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
