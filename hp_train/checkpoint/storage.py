"""Where torch.distributed.checkpoint puts tensors and gets them from: safetensors files and JSON, never a pickle.

Imports torch, `layout` and the file formats. DCP plans (who writes which piece, who reads which part of which piece)
and calls a StorageWriter and StorageReader; these do the input and output. The planners here differ from DCP's own
in two ways: they look pieces up in `TensorShard`s, and anything that is not a tensor is refused instead of pickled.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from hp_train.checkpoint.fence import Fence
from hp_train.checkpoint.layout import (
    COMMITTED,
    LATEST,
    MANIFEST,
    METADATA,
    PROGRESS,
    REPLACED,
    FileRecord,
    Manifest,
    commit_mark,
    digest,
    encode_json,
    folder_name,
    saving_name,
    write_durably,
)
from hp_train.checkpoint.metadata_json import Location, Locations, encode_metadata
from hp_train.checkpoint.retention import delete_folder, prune
from hp_train.checkpoint.safetensors_file import Entry, write_safetensors
from hp_train.checkpoint.tensor_shard import TensorShard
from hp_train.errors import CheckpointError
from hp_train.new_folder import sync

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class SavePolicy:
    """How checkpoints of one run are kept, and who saves them."""

    keep_last: int
    keep_every: int | None = None
    attempt: int = 0
    fence: Fence | None = None  # asked before anything that another attempt would see
    on_progress: Callable[[], None] = lambda: None  # called now and then while a save gets on

    def check_fence(self) -> None:
        """Raise SupersededError when the run directory is another attempt's."""
        if self.fence is not None:
            self.fence.check()


class ShardSavePlanner(DefaultSavePlanner):
    """DCP's save planner, replicas deduplicated, over a flat dict of `TensorShard`s."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Return the local tensor of the piece at `index`."""
        shard = self.state_dict[index.fqn]
        assert isinstance(shard, TensorShard), f"{index.fqn} is a {type(shard).__name__}, not a TensorShard"
        return shard.local

    def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor:
        """Return the tensor as it is; DCP's own version would pickle what is not a tensor."""
        return object


class ShardLoadPlanner(DefaultLoadPlanner):
    """DCP's load planner, with its resharding, over a flat dict of `TensorShard`s."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, TensorShard], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep what planning needs; the shards exist already."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the local tensor that the piece at `index` is read into."""
        return self.state_dict[index.fqn].local

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse: DCP's own version unpickles here."""
        raise CheckpointError(f"{read_item.storage_index.fqn} is not a tensor; nothing is unpickled")


@dataclasses.dataclass(frozen=True, slots=True)
class _StoredPiece:
    location: Location
    record: FileRecord


class SafetensorsWriter(StorageWriter):
    """Write one checkpoint: every rank its own safetensors files, then rank 0 metadata, manifest and COMMITTED.

    One instance writes one checkpoint. It grows beside and has its final name when `finish` returns. `policy` says
    what is kept besides and in whose name this is done.
    """

    def __init__(self, checkpoints_dir: Path, step: int, progress: bytes, policy: SavePolicy) -> None:
        self.final = checkpoints_dir / folder_name(step)
        self.folder = checkpoints_dir / saving_name(step, policy.attempt)
        self._step = step
        self._progress = progress
        self._policy = policy
        self._started_s = time.monotonic()

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Take no other place than the one given at construction."""
        assert checkpoint_id is None, "the folder is chosen by checkpoints_dir and step"

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: rank 0 makes the folder once all plans are in."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: make room and the folder, and tell each rank its number."""
        self._policy.check_fence()
        parent = self.folder.parent
        if not parent.is_dir():
            parent.mkdir()  # no parents: a run directory that is lost is not made anew elsewhere
            sync(parent.parent)
        if self.folder.exists():
            delete_folder(self.folder)  # left by a save that was interrupted
        needed = len(self._progress) + sum(_item_bytes(item) for plan in plans for item in plan.items)
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise CheckpointError(
                f"{needed:,} bytes are needed and {free:,} free in {parent}; free some, or lower checkpoint.keep_last"
            )
        self.folder.mkdir()
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces, one file per kind (`model`, `optimizer`)."""
        by_file: dict[str, list[WriteItem]] = defaultdict(list)
        for item in plan.items:
            kind = item.index.fqn.partition(".")[0]
            by_file[f"{kind}-rank_{plan.storage_data:05d}.safetensors"].append(item)
        results: list[WriteResult] = []
        for name, items in sorted(by_file.items()):
            results += self._write_file(name, items, planner)
        if results:
            sync(self.folder)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        entries = [_entry(item, planner, self._policy.on_progress) for item in items]
        record = write_safetensors(self.folder / name, entries)
        return [
            WriteResult(item.index, entry.num_bytes, _StoredPiece(Location(name, entry.key), record))
            for item, entry in zip(items, entries, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, after every rank has written: add the JSON files, commit, take the final name, prune."""
        files: dict[str, FileRecord] = {}
        locations: Locations = {}
        for result in (result for of_rank in results for result in of_rank):
            piece: _StoredPiece = result.storage_data
            files[piece.location.file] = piece.record
            locations[result.index] = piece.location
        for name, content in (
            (METADATA, encode_json(encode_metadata(metadata, locations))),
            (PROGRESS, self._progress),
        ):
            write_durably(self.folder / name, content)
            files[name] = digest(content)
        manifest = Manifest(self._step, files, time.monotonic() - self._started_s).encode()
        write_durably(self.folder / MANIFEST, manifest)
        sync(self.folder)
        self._policy.check_fence()  # the last moment: what follows is seen by whoever resumes
        write_durably(self.folder / COMMITTED, commit_mark(manifest))
        sync(self.folder)
        self._take_final_name()
        self._clean_up()

    def _clean_up(self) -> None:
        """Say which is the latest and delete what is old; the checkpoint stands, whatever becomes of this."""
        try:
            write_durably(self.final.parent / LATEST, f"{self.final.name}\n".encode())
        except OSError as error:
            _LOGGER.warning("%s could not be written: %s", self.final.parent / LATEST, error)
        keep_last, keep_every = self._policy.keep_last, self._policy.keep_every
        prune(self.final.parent, saved_step=self._step, keep_last=keep_last, keep_every=keep_every)

    def _take_final_name(self) -> None:
        # An older save of the same step (one that was damaged, or the same state saved twice) stays readable under
        # another name until this one has taken its place; pruning then removes it.
        replaced = self.final.with_suffix(REPLACED)
        if self.final.exists():
            if replaced.exists():
                delete_folder(replaced)
            self.final.rename(replaced)
        self.folder.rename(self.final)
        sync(self.final.parent)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Return False: never chosen by DCP itself."""
        return False


def _item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None, f"{item.index.fqn} is not a tensor"
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _entry(item: WriteItem, planner: SavePlanner, on_progress: Callable[[], None]) -> Entry:
    data = item.tensor_data
    assert data is not None, f"{item.index.fqn} is not a tensor"
    whole = data.chunk.sizes == data.size
    key = item.index.fqn if whole else f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"

    def resolve() -> torch.Tensor:
        on_progress()
        return planner.resolve_data(item)

    return Entry(key, data.properties.dtype, data.chunk.sizes, resolve)


class SafetensorsReader(StorageReader):
    """Read pieces of tensors from a checkpoint folder whose metadata has been decoded already.

    `aliases` (alias -> stored name) lets a second copy of a tied weight be read under its own name.
    """

    def __init__(self, folder: Path, metadata: Metadata, locations: Locations, aliases: Mapping[str, str]) -> None:
        self._folder = folder
        self._aliases = dict(aliases)
        self._locations = locations
        tensors = dict(metadata.state_dict_metadata)
        for alias, stored in self._aliases.items():
            tensors[alias] = tensors[stored]
        self._metadata = Metadata(tensors)

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Take no other place than the one given at construction."""
        assert checkpoint_id is None, "the folder is chosen at construction"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what was decoded before."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every planned region into its tensor, opening each file once."""
        by_file: dict[str, list[tuple[str, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            index = item.storage_index
            stored = MetadataIndex(self._aliases.get(index.fqn, index.fqn), index.offset)
            location = self._locations[stored]
            by_file[location.file].append((location.key, item))
        for name, items in sorted(by_file.items()):
            with safe_open(self._folder / name, framework="pt", device="cpu") as file:
                for key, item in items:
                    target = planner.resolve_tensor(item)
                    target.copy_(_read_region(file, key, item))
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Return False: never chosen by DCP itself."""
        return False


def _read_region(file: Any, key: str, item: ReadItem) -> torch.Tensor:
    if not item.lengths:
        return file.get_tensor(key)  # a 0-d tensor has no slices
    bounds = zip(item.storage_offsets, item.lengths, strict=True)
    return file.get_slice(key)[tuple(slice(start, start + length) for start, length in bounds)]
