"""A checkpoint of any mesh, read on any other: parameters and AdamW state bitwise equal once gathered.

The layouts are those of training: torch's `fully_shard` over one or two data-parallel dimensions, replicas, pipeline
stages with a tied output matrix, and one plain process. Shapes are chosen not to divide: 5 rows over 4 ranks leave one
rank with nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hp_train.checkpoint.layout import METADATA, encode_json, read_json, read_manifest
from hp_train.checkpoint.load import find_checkpoint, load_checkpoint
from hp_train.checkpoint.metadata_json import decode_metadata
from hp_train.checkpoint.save import save_checkpoint, write_shards
from hp_train.checkpoint.state import CheckpointState
from hp_train.checkpoint.storage import SavePolicy
from hp_train.checkpoint.tensor_shard import shard_of
from hp_train.errors import CheckpointError
from tests.checkpoint.whole_runs import assert_same_bits
from tests.distributed.ranks import run_ranks

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHAPES = {EMBEDDING: (5, 6), "model.layers.0.w": (7, 5), "model.layers.0.b": (1,), "model.layers.1.w": (2, 3, 4)}
STAGES = [[EMBEDDING, "model.layers.0.b"], ["model.layers.0.w", "model.layers.1.w", HEAD]]

LAYOUTS = {1: ["single"], 2: ["fsdp", "pp"], 4: ["fsdp", "hsdp", "ddp", "pp_fsdp"]}


class Named(torch.nn.Module):
    """Parameters under Hugging Face's dotted names, which a plain module cannot hold as attributes."""

    def __init__(self, names: list[str], seed: int) -> None:
        super().__init__()
        for name in names:
            # The tied copy starts, as training keeps it, equal to the original.
            generator = torch.Generator().manual_seed(seed + len(EMBEDDING if name == HEAD else name))
            shape = SHAPES[EMBEDDING if name == HEAD else name]
            self.register_parameter(name.replace(".", "/"), torch.nn.Parameter(torch.randn(shape, generator=generator)))

    def by_name(self) -> dict[str, torch.nn.Parameter]:
        return {name.replace("/", "."): parameter for name, parameter in self.named_parameters()}


def build(layout: str, rank: int, world_size: int, seed: int, steps: int) -> CheckpointState:
    """Return the run's part of `rank` after `steps` optimizer steps with made-up gradients."""
    names = list(SHAPES)
    mesh = None
    if layout in ("fsdp", "ddp"):
        mesh = init_device_mesh("cpu", (world_size,))
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    elif layout == "pp_fsdp":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("pp", "shard"))["shard"]
        names = STAGES[rank // (world_size // 2)]
    elif layout == "pp":
        names = STAGES[rank]
    module = Named(names, seed)
    if layout == "ddp":
        for name, parameter in list(module.named_parameters()):
            replica = distribute_tensor(parameter.detach(), mesh, [Replicate()])
            module.register_parameter(name, torch.nn.Parameter(replica))
    elif mesh is not None:
        fully_shard(module, mesh=mesh)
    parameters = module.by_name()
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    for step in range(steps):
        for name, parameter in parameters.items():
            generator = torch.Generator().manual_seed(100 * step + len(EMBEDDING if name == HEAD else name))
            gradient = torch.randn(parameter.shape, generator=generator)
            is_dtensor = isinstance(parameter, DTensor)
            parameter.grad = distribute_tensor(gradient, mesh, parameter.placements) if is_dtensor else gradient
        optimizer.step()
    return CheckpointState(parameters, optimizer, {HEAD: EMBEDDING}, {"layout": layout})


def make_fresh(state: CheckpointState) -> None:
    """Forget what was loaded: other parameters, no optimizer state."""
    state.optimizer.state.clear()
    with torch.no_grad():
        for parameter in state.parameters.values():
            parameter.fill_(-1.0)


def gathered(state: CheckpointState) -> dict[str, torch.Tensor]:
    """Return the whole tensors that this rank has a part of, by stored name; collective over their meshes."""
    tensors = {}
    for name, parameter in state.parameters.items():
        values = {f"model.{name}": parameter.detach()}
        values |= {f"optimizer.{name}.{key}": value for key, value in state.optimizer.state[parameter].items()}
        for key, value in values.items():
            tensors[key] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return tensors


def expect(loaded: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """Check a rank's gathered tensors against the saved run's; a tied copy against its original."""
    assert_same_bits(loaded, {name: saved[name.replace(HEAD, EMBEDDING)] for name in loaded})


def merged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the union over ranks."""
    of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, tensors)
    return {name: tensor for of_rank in of_ranks for name, tensor in of_rank.items()}


def save_all_layouts(rank: int, world_size: int, root: Path) -> None:
    for number, layout in enumerate(LAYOUTS[world_size]):
        state = build(layout, rank, world_size, seed=1000 * number, steps=2)
        save_checkpoint(root / f"{layout}_{world_size}", 2, state, SavePolicy(1))
        expected = merged(gathered(state))
        if rank == 0:
            torch.save(expected, root / f"{layout}_{world_size}.pt")


def load_all_into_all_layouts(rank: int, world_size: int, root: Path) -> int:
    loads = 0
    saved = {path.stem: torch.load(path) for path in sorted(root.glob("*.pt"))}
    for layout in LAYOUTS[world_size]:
        state = build(layout, rank, world_size, seed=7, steps=0)
        for source, tensors in saved.items():
            make_fresh(state)
            folder = find_checkpoint(root / source)
            assert load_checkpoint(folder, state) == {"layout": source.rpartition("_")[0]}
            expect(gathered(state), tensors)
            loads += 1
    return loads


def test_every_layout_reads_every_other(tmp_path: Path) -> None:
    for world_size in (4, 2):
        run_ranks(world_size, save_all_layouts, tmp_path)
    single = build("single", 0, 1, seed=5, steps=2)
    save_checkpoint(tmp_path / "single_1", 2, single, SavePolicy(1))
    torch.save(gathered(single), tmp_path / "single_1.pt")
    for world_size in (4, 2):
        assert run_ranks(world_size, load_all_into_all_layouts, tmp_path) == [7 * len(LAYOUTS[world_size])] * world_size
    assert load_all_into_all_layouts(0, 1, tmp_path) == 7
    for checkpoints in tmp_path.iterdir():
        if checkpoints.is_dir():
            _check_stored_once(checkpoints / "step_00000002")


def _check_stored_once(folder: Path) -> None:
    """Replicas and tied copies add no bytes: the files hold each tensor once, plus their headers."""
    manifest = read_manifest(folder)
    metadata, _ = decode_metadata(read_json(folder, manifest, METADATA), manifest)
    numbers = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert len(metadata.state_dict_metadata) == 4 * len(SHAPES)
    stored = 0
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        header_bytes = int.from_bytes(content[:8], "little")
        stored += len(content) - 8 - header_bytes
        assert not [key for key in json.loads(content[8 : 8 + header_bytes]) if "lm_head" in key]
    assert stored == 4 * (3 * numbers + len(SHAPES))


PLACEMENTS = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [Shard(1), Shard(0)]),
    ((2, 2), [Replicate(), Shard(1)]),
]
WHOLE = {
    f"{list(shape)} {dtype}": torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)
    for shape in [(1, 1), (3, 2), (5, 7), (2, 9)]
    for dtype in (torch.float32, torch.bfloat16)
}


def reshard_placements(rank: int, world_size: int, root: Path) -> int:
    meshes = {shape: init_device_mesh("cpu", shape) for shape in ((4,), (2, 2))}

    def cut(tensor: torch.Tensor, variant: tuple) -> DTensor:
        return distribute_tensor(tensor, meshes[variant[0]], variant[1], src_data_rank=None)  # every rank has the whole

    pairs = 0
    for number, variant in enumerate(PLACEMENTS):
        shards = {f"model.{name}": shard_of(cut(tensor, variant)) for name, tensor in WHOLE.items()}
        folder = write_shards(root / str(number), 1, shards, encode_json({}), SavePolicy(1), group=None)
        for other in PLACEMENTS:
            targets = {name: cut(torch.zeros_like(tensor), other) for name, tensor in WHOLE.items()}
            load_checkpoint(folder, CheckpointState(targets, torch.optim.SGD([torch.zeros(1)], lr=1.0)))
            for name, target in targets.items():
                assert torch.equal(target.to_local(), cut(WHOLE[name], other).to_local()), (name, variant, other)
            pairs += 1
    return pairs


def test_every_placement_reads_every_other(tmp_path: Path) -> None:
    assert run_ranks(4, reshard_placements, tmp_path) == [len(PLACEMENTS) ** 2] * 4


def failing_saves(rank: int, world_size: int, root: Path) -> list[str]:
    import resource

    from hp_train.checkpoint import storage

    state = build("fsdp", rank, world_size, seed=0, steps=1)
    first = save_checkpoint(root, 1, state, SavePolicy(1))
    messages = []
    if rank == 1:  # this rank can write no file longer than a few bytes, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(root, 2, state, SavePolicy(1))
    messages.append(str(caught.value))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    assert find_checkpoint(root) == first and [path.name for path in root.glob("step_*")] == [first.name]

    real = storage.write_safetensors
    if rank == 1:
        storage.write_safetensors = lambda path, entries: 1 / 0
    with pytest.raises(RuntimeError, match=r"failed on rank 1: ZeroDivisionError") as caught:
        save_checkpoint(root, 2, state, SavePolicy(1))
    assert "in write_data" in str(caught.value), "the traceback of the rank that failed is missing"
    storage.write_safetensors = real
    dist.barrier()

    second = save_checkpoint(root, 2, state, SavePolicy(2))
    if rank == 0:
        damaged = bytearray((second / "optimizer-rank_00001.safetensors").read_bytes())
        damaged[-1] ^= 1
        (second / "optimizer-rank_00001.safetensors").write_bytes(damaged)
    dist.barrier()
    assert find_checkpoint(root) == first, "damage that one rank sees counts for all"
    seen = root if rank == 0 else root / "elsewhere"
    assert find_checkpoint(seen) is None, "what one rank cannot see counts for none"
    return messages


def test_one_ranks_failure_is_everyones_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    messages = run_ranks(2, failing_saves, tmp_path)
    assert messages[0] == messages[1]
    assert "step 2 was not written (rank 1: [Errno 27] File too large" in messages[0][0]
