"""Which schedules there are: names, what they need, what sizes they take.

No torch, and nothing slow: configuration is checked against this on every start of the command. The orders themselves
are built in `builders.py`, by the same names. What plugins add is kept by `hp_train.registry`; it is valid by its own
name, and the sizes it takes are its builder's to say.
"""

from __future__ import annotations

from typing import NamedTuple

from hp_train import registry
from hp_train.errors import ScheduleError


class ScheduleInfo(NamedTuple):
    """What is known of a schedule before it is built.

    torch_names: names that other tools use for it, accepted too.
    stages_per_rank: the default, for `pp.stages_per_rank=null`.
    fixed_stages: whether no other number of stages per rank works.
    placement: "loop" (stage s on rank s mod pp_size) or "v" (down the ranks and back up).
    splits_backward: whether it runs BWD_INPUT and BWD_WEIGHT apart.
    summary: one line for a person.
    source: the paper that describes it.
    """

    torch_names: tuple[str, ...]
    stages_per_rank: int
    fixed_stages: bool
    placement: str
    splits_backward: bool
    summary: str
    source: str


SCHEDULES: dict[str, ScheduleInfo] = {
    "gpipe": ScheduleInfo(
        ("GPipe",), 1, True, "loop", False,
        "all forwards, then all backwards; holds every micro-batch", "arXiv:1811.06965",
    ),
    "1f1b": ScheduleInfo(
        ("1F1B",), 1, True, "loop", False,
        "one forward, one backward; the bubble of gpipe, at most pp_size micro-batches held", "arXiv:2104.04473",
    ),
    "interleaved_1f1b": ScheduleInfo(
        ("Interleaved1F1B",), 2, False, "loop", False,
        "1f1b over several stages a rank; bubble divided by stages_per_rank", "arXiv:2104.04473",
    ),
    "zb_h1": ScheduleInfo(
        ("ZB1P", "ZBH1"), 1, True, "loop", True,
        "1f1b with weight gradients filling the bubble, to about a third", "arXiv:2401.10241",
    ),
    "interleaved_zb": ScheduleInfo(
        ("InterleavedZeroBubble",), 2, False, "loop", True,
        "zb_h1 over several stages a rank; bubble divided by stages_per_rank", "arXiv:2401.10241",
    ),
    "zbv": ScheduleInfo(
        ("ZBVZeroBubble",), 2, True, "v", True,
        "two stages a rank in a V; no bubble but the ramps when F = I = W, memory of 1f1b", "arXiv:2401.10241",
    ),
    "dualpipe_v": ScheduleInfo(
        ("DualPipeV",), 2, True, "v", True,
        "two stages a rank in a V; forward of one overlaps backward of the other", "arXiv:2412.19437",
    ),
}  # fmt: skip
"""Every schedule that `build_schedule` knows, by the name that `pp.schedule` takes."""


def _folded(name: str) -> str:
    return "".join(char for char in name.lower() if char not in "_- \t\n")


_NAME_OF_FOLDED = {_folded(alias): name for name, info in SCHEDULES.items() for alias in (name, *info.torch_names)}


def normalize_schedule_name(name: str) -> str:
    """The registry's name for `name`; case, blanks, dashes and underscores do not matter.

    Names of torch's pipelining are accepted too. Raises ScheduleError that names the nearest and all valid names.
    """
    if not isinstance(name, str):
        raise ScheduleError(f"a schedule is named by a string, not {name!r}; use one of {', '.join(schedule_names())}")
    folded, names = _folded(name), _names_by_folded()
    if folded not in names:
        import difflib  # only a mistake pays for it

        close = difflib.get_close_matches(folded, names, n=1)
        hint = f"did you mean {names[close[0]]}? " if close else ""
        raise ScheduleError(f"no schedule is named {name!r}; {hint}use one of {', '.join(schedule_names())}")
    return names[folded]


def schedule_names() -> tuple[str, ...]:
    """The names that `pp.schedule` takes: those built in, then those that plugins have added."""
    return (*SCHEDULES, *(component.name for component in registry.components("pp_schedule")))


def is_built_in(name: str) -> bool:
    """Whether `name` is one spelling of a schedule of ours."""
    return _folded(name) in _NAME_OF_FOLDED


def _names_by_folded() -> dict[str, str]:
    added = {_folded(component.name): component.name for component in registry.components("pp_schedule")}
    return {**added, **_NAME_OF_FOLDED}


def derive_stages_per_rank(name: str) -> int:
    """Stages per rank that schedule `name` runs with when nobody says."""
    name = normalize_schedule_name(name)
    added = registry.find("pp_schedule", name)
    return SCHEDULES[name].stages_per_rank if added is None else added.stages_per_rank


MAX_STEPS = 10_000_000
"""Compute steps of a schedule beyond which building it would take minutes and gigabytes."""


def check_sizes(name: str, pp_size: int, num_microbatches: int, stages_per_rank: int) -> list[str]:
    """What is wrong with these sizes for a built-in schedule, one message a fault; empty when it can be built."""
    name = normalize_schedule_name(name)
    info = SCHEDULES[name]
    sizes = {"pp_size": pp_size, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
    faults = [
        f"{key}={value!r} must be an integer of at least 1"
        for key, value in sizes.items()
        if type(value) is not int or value < 1
    ]
    if faults:
        return faults
    num_steps = 3 * pp_size * stages_per_rank * num_microbatches  # forward and both halves of backward, at most
    if num_steps > MAX_STEPS:
        return [
            f"pp_size={pp_size} x stages_per_rank={stages_per_rank} x num_microbatches={num_microbatches} make up to "
            f"{num_steps:,} steps; a schedule is built and proven up to {MAX_STEPS:,}"
        ]
    if info.fixed_stages and stages_per_rank != info.stages_per_rank:
        others = [other for other, their in SCHEDULES.items() if not their.fixed_stages]
        faults.append(
            f"stages_per_rank={stages_per_rank} does not fit schedule {name}, which runs with {info.stages_per_rank}; "
            f"use {info.stages_per_rank}, or one of {', '.join(others)}"
        )
    if name == "1f1b" and num_microbatches < pp_size:
        faults.append(
            f"num_microbatches={num_microbatches} is less than pp_size={pp_size}: 1f1b alternates only once every "
            f"stage has a micro-batch; use at least {pp_size} micro-batches, or schedule gpipe"
        )
    if name == "dualpipe_v" and num_microbatches < 2 * pp_size:
        faults.append(
            f"num_microbatches={num_microbatches} is less than 2 * pp_size={2 * pp_size}: dualpipe_v fills both halves "
            f"of the V before it overlaps; use at least {2 * pp_size} micro-batches, or schedule zbv"
        )
    return faults


def rank_of_stages(name: str, pp_size: int, stages_per_rank: int) -> tuple[int, ...]:
    """Per stage the rank that holds it, by the placement of the built-in schedule `name`."""
    down = list(range(pp_size))
    rows = [down if row % 2 == 0 else down[::-1] for row in range(stages_per_rank)]
    if SCHEDULES[normalize_schedule_name(name)].placement == "loop":
        rows = [down] * stages_per_rank
    return tuple(rank for row in rows for rank in row)
