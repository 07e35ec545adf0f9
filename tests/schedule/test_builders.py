"""Built schedules against torch's own orders, the closed forms of the papers, and an independent simulator."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from hp_train.errors import ScheduleError
from hp_train.schedule import (
    SCHEDULES,
    Costs,
    MetaStepType,
    build_schedule,
    check_sizes,
    derive_stages_per_rank,
    lower,
    normalize_schedule_name,
    simulate,
)
from tests.schedule.reference import longest_paths

T = MetaStepType
_TORCH_CLASSES = {
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved_zb": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipe_v": torch_schedules.ScheduleDualPipeV,
}


def _stage_counts(name: str) -> tuple[int, ...]:
    return (SCHEDULES[name].stages_per_rank,) if SCHEDULES[name].fixed_stages else (1, 2, 3, 4)


def _torch_orders(name: str, pp_size: int, num_microbatches: int, stages: int) -> list[list[str]]:
    """What torch's schedule class computes, without the process group that its constructor wants."""
    cls = _TORCH_CLASSES[name]
    schedule = cls.__new__(cls)
    schedule.pp_group_size = pp_size
    schedule.n_local_stages = stages
    schedule._n_microbatches = num_microbatches
    schedule.num_stages = schedule._num_stages = pp_size * stages
    schedule.number_of_rounds = max(1, num_microbatches // pp_size)
    schedule.microbatches_per_round = num_microbatches // schedule.number_of_rounds
    rows = (schedule._calculate_single_rank_operations(rank) for rank in range(pp_size))
    return [[str(action) for action in row if action is not None] for row in rows]


@pytest.mark.parametrize("name", _TORCH_CLASSES)
def test_orders_are_those_of_torch(name: str) -> None:
    compared = 0
    for pp_size in (1, 2, 3, 4, 8):
        for num_microbatches in (1, 3, 4, 5, 8, 15, 16, 24):
            for stages in _stage_counts(name):
                uneven = name.startswith("interleaved") and num_microbatches % max(1, num_microbatches // pp_size)
                if uneven or check_sizes(name, pp_size, num_microbatches, stages):
                    continue
                ours = build_schedule(name, pp_size, num_microbatches, stages)
                assert [list(map(str, order)) for order in ours.orders] == _torch_orders(
                    name, pp_size, num_microbatches, stages
                )
                compared += 1
    assert compared >= 12


def _closed_form(name: str, p: int, v: int, f: int, i: int, w: int) -> float:
    """Bubble of each rank in units of chunk cost (rank cost = v times that)."""
    b = i + w
    return {
        "gpipe": (p - 1) * (f + b),
        "1f1b": (p - 1) * (f + b),
        "interleaved_1f1b": (p - 1) * (f + b),  # of chunks: already a v-th of the rank's
        "zb_h1": (p - 1) * (f + i - w),
        "interleaved_zb": (p - 1) * (f + i - w),
        "zbv": (p - 1) * (f + i - w),
        "dualpipe_v": (p - 1) * (f + b + b - 3 * w),
    }[name]


def _domain(name: str, p: int, m: int, f: int, i: int, w: int) -> str | None:
    """Where the closed form is "exact" or a "bound"; None where it says nothing."""
    if name == "interleaved_1f1b":
        return "exact" if m % p == 0 else None
    if name in ("gpipe", "1f1b"):
        return "exact" if m >= p else None
    if name == "interleaved_zb" and m % p:
        return None
    if name in ("zb_h1", "interleaved_zb"):
        return "exact" if m >= p and w <= min(f, i) else None
    # Fixed orders for F = I = W. Beyond these inequalities, found by simulation, ramps grow past the form: with
    # (F, I, W) = (5, 1, 1) and p = 4 to 26 against 15 for zbv, whatever m.
    if not w <= f <= i or m < 2 * p - (name == "zbv"):
        return None
    if name == "zbv":
        return None if i > f + w else "exact" if f == w else "bound"
    return "exact" if f == i == w else "bound"


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubbles_meet_the_closed_forms(name: str) -> None:
    checked = {"exact": 0, "bound": 0}
    for p in (2, 3, 4, 8, 16):
        for m in sorted({p, 2 * p - 1, 2 * p, 3 * p, 64 if p in (4, 16) else p}):
            for v in _stage_counts(name) if p < 16 else _stage_counts(name)[-1:]:
                if check_sizes(name, p, m, v):
                    continue
                schedule = build_schedule(name, p, m, v)
                for f, i, w in ((1, 1, 1), (2, 3, 2), (3, 4, 2), (1, 1, 3)):
                    domain = _domain(name, p, m, f, i, w)
                    if domain is None:
                        continue
                    bubbles = simulate(schedule, Costs(f, i, w, 0)).bubble_s
                    form = _closed_form(name, p, v, f, i, w)
                    case = (p, m, v, (f, i, w), bubbles, form)
                    assert max(bubbles) == form if domain == "exact" else max(bubbles) <= form, case
                    checked[domain] += 1
    assert checked["exact"] >= 8


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 2), (8, 16, 2), (4, 4, 2), (4, 8, 4), (3, 12, 3)])
def test_peaks_meet_the_closed_forms(p: int, m: int, v: int) -> None:
    def peaks(name: str, stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        timeline = simulate(build_schedule(name, p, m, stages), Costs(1, 1, 1))
        return timeline.peak_activations, timeline.peak_activations_until_weight

    ranks = range(p)
    assert peaks("gpipe", 1)[0] == (m,) * p
    assert peaks("1f1b", 1)[0] == tuple(min(m, p - s) for s in ranks)
    assert peaks("interleaved_1f1b", v)[0] == tuple(min(m * v, (v - 1) * p + 2 * (p - 1 - s) + 1) for s in ranks)
    assert peaks("zb_h1", 1) == (tuple(p - s for s in ranks), (p,) * p)
    assert peaks("interleaved_zb", 2)[0] == tuple(2 * p - s for s in ranks)
    assert peaks("interleaved_zb", 2)[1] == (2 * p,) * p
    if m >= 2 * p:
        assert peaks("zbv", 2)[1] == (2 * p,) * p
        assert peaks("dualpipe_v", 2)[0] == (2 * p + 1,) * p


def test_zbv_has_no_bubble_between_first_and_last_step() -> None:
    assert set(simulate(build_schedule("zbv", 4, 8, 2), Costs(1, 1, 1)).local_bubble_s) == {0}
    assert max(simulate(build_schedule("zbv", 4, 8, 2), Costs(2, 3, 2)).local_bubble_s) == 6  # 3 in units of a rank


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("costs", [(1, 1, 1, 0), (3, 4, 2, 1), (1, 1, 3, 2), "per stage"])
def test_every_span_is_that_of_an_independent_simulator(name: str, costs: tuple | str) -> None:
    for p, m in ((1, 2), (2, 5), (3, 7), (4, 9), (5, 10)):
        for v in _stage_counts(name)[:2]:
            if check_sizes(name, p, m, v):
                continue
            schedule = build_schedule(name, p, m, v)
            f, i, w, p2p = (
                costs if costs != "per stage" else (*([n + k % 3 for k in range(p * v)] for n in (1, 2, 1)), 0.5)
            )
            spread = [x if isinstance(x, list) else [x] * p * v for x in (f, i, w)]
            table = dict(zip((T.FWD, T.BWD_INPUT, T.BWD_WEIGHT), spread, strict=True))
            table[T.BWD] = [a + b for a, b in zip(spread[1], spread[2], strict=True)]
            for overlap in (None, "f_b", "b_f"):
                paired = _paired(schedule, overlap)
                timeline = simulate(paired, Costs(f, i, w, p2p))
                expected = longest_paths(paired, table, p2p)
                assert [[(span.start_s, span.end_s) for span in row] for row in timeline.spans] == expected


def _paired(schedule, overlap: str | None):
    from hp_train.schedule.lowering import pair_overlap_b_f, pair_overlap_f_b

    return {None: lambda s: s, "f_b": pair_overlap_f_b, "b_f": pair_overlap_b_f}[overlap](schedule)


def test_lowering_leaves_the_compute_times_as_they_were() -> None:
    schedule = build_schedule("zbv", 3, 6, 2)
    lowered = lower(schedule, "plain", fsdp=2, swap=2, data=True)
    timeline = simulate(lowered, Costs(2, 3, 2, 1))
    computes = tuple(tuple(span for span in row if span.step.computes) for row in timeline.spans)
    assert computes == simulate(schedule, Costs(2, 3, 2, 1)).spans


@pytest.mark.parametrize("name", SCHEDULES)
def test_names_are_forgiving_and_default_stages_build(name: str) -> None:
    for alias in (name, f" {name.upper()} ", name.replace("_", "-"), *SCHEDULES[name].torch_names):
        assert normalize_schedule_name(alias) == name
    schedule = build_schedule(name, 2, 4, None)
    assert schedule.num_stages == 2 * derive_stages_per_rank(name)


def test_placements() -> None:
    assert build_schedule("interleaved_1f1b", 3, 3, 2).rank_of_stage == (0, 1, 2, 0, 1, 2)
    assert build_schedule("zbv", 3, 3, 2).rank_of_stage == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("1f1b", 4, 3), "num_microbatches=3 is less than pp_size=4"),
        (("dualpipe_v", 4, 7, 2), "use at least 8"),
        (("zbv", 4, 8, 1), "stages_per_rank=1 does not fit schedule zbv, which runs with 2"),
        (("gpipe", 4, 8, 2), "use 1, or one of interleaved_1f1b, interleaved_zb"),
        (("gpipe", 0, 8), "pp_size=0 must be an integer of at least 1"),
        (("gpipe", 2, 2.0), "num_microbatches=2.0"),
        (("gpipe", True, 2), "pp_size=True"),
        (("interleavd_1f1b", 2, 2), "did you mean interleaved_1f1b"),
        (("LoopedBFS", 2, 2), "use one of gpipe, 1f1b"),
        ((None, 2, 2), "named by a string"),
    ],
)
def test_invalid_sizes_say_why_and_what_is_valid(arguments: tuple, says: str) -> None:
    with pytest.raises(ScheduleError, match=says.replace("(", r"\(")):
        build_schedule(*arguments)


@pytest.mark.parametrize(
    "costs",
    [
        Costs((1, 1), 1, 1), Costs(-1, 1, 1), Costs(1, 1, 1, -1), Costs(float("nan"), 1, 1), Costs(float("inf"), 1, 1),
        Costs(None, 1, 1), Costs("1234", 1, 1), Costs(1, 1, 1, "0"), Costs(1, (1, 1, None, 1), 1),
    ],
)  # fmt: skip
def test_costs_that_mean_nothing_are_refused(costs: Costs) -> None:
    with pytest.raises(ScheduleError, match="costs"):
        simulate(build_schedule("gpipe", 3, 3), costs)
