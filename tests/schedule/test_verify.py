"""The proof against an independent machine that runs schedules: no false alarm, no miss."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hp_train.errors import ScheduleError
from hp_train.schedule import (
    SCHEDULES,
    TRANSPORTS,
    Costs,
    MetaStep,
    MetaStepType,
    Schedule,
    build_schedule,
    derive_stages_per_rank,
    lower,
    simulate,
    verify,
)
from hp_train.schedule.text import format_schedule, parse_schedule
from tests.schedule.reference import Machine

T = MetaStepType


@st.composite
def lowered_schedules(draw: st.DrawFn, max_pp: int = 6, max_micro: int = 14) -> tuple[Schedule, str]:
    """Anything that `build_schedule` and `lower` produce, and its transport."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    info = SCHEDULES[name]
    pp_size = draw(st.integers(1, max_pp))
    stages = derive_stages_per_rank(name) if info.fixed_stages else draw(st.integers(1, 3))
    least = {"1f1b": pp_size, "dualpipe_v": 2 * pp_size}.get(name, 1)
    num_microbatches = draw(st.integers(least, max(least, max_micro)))
    transport = draw(st.sampled_from(TRANSPORTS))
    fsdp = draw(st.sampled_from([None, 2, 3] if name == "dualpipe_v" else [None, 1, 2, 3]))
    overlap = draw(st.sampled_from([None, "f_b", "b_f"])) if fsdp != 1 or stages == 1 else None
    options = {
        "fsdp": fsdp,
        "overlap": overlap,
        "swap": draw(st.sampled_from([None, 2, 5])),
        "data": draw(st.booleans()),
    }
    return lower(build_schedule(name, pp_size, num_microbatches, stages), transport, **options), transport


@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(lowered_schedules())
def test_whatever_is_built_and_lowered_is_proven_and_runs(case: tuple[Schedule, str]) -> None:
    schedule, transport = case
    proof = verify(schedule, transport)
    assert proof.ok, proof.violations
    assert Machine(schedule, transport).harm() is None, format_schedule(schedule)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(lowered_schedules(max_pp=4, max_micro=8), st.integers(0, 2**32))
def test_a_mutation_is_caught_exactly_if_the_machine_is_harmed(case: tuple[Schedule, str], seed: int) -> None:
    schedule, transport = case
    source = random.Random(seed)
    for mutate in MUTATIONS * 2:
        mutant = mutate(schedule, source)
        if mutant is None:
            continue
        proof = verify(mutant, transport)
        harm = Machine(mutant, transport, seed).harm()
        assert proof.ok == (harm is None), (
            f"{mutate.__name__} under {transport}: {harm=} {proof.violations=}\n{format_schedule(mutant)}"
        )


def _pick(schedule: Schedule, source: random.Random) -> tuple[list[list[MetaStep]], int, int]:
    orders = [list(order) for order in schedule.orders]
    rank = source.choice([rank for rank, order in enumerate(orders) if order])
    return orders, rank, source.randrange(len(orders[rank]))


def drop(schedule: Schedule, source: random.Random) -> Schedule:
    orders, rank, at = _pick(schedule, source)
    del orders[rank][at]
    return schedule.with_orders(orders)


def duplicate(schedule: Schedule, source: random.Random) -> Schedule:
    orders, rank, at = _pick(schedule, source)
    orders[rank].insert(source.randrange(len(orders[rank]) + 1), orders[rank][at])
    return schedule.with_orders(orders)


def swap_order(schedule: Schedule, source: random.Random) -> Schedule:
    orders, rank, at = _pick(schedule, source)
    other = min(len(orders[rank]) - 1, at + source.choice([1, 1, 2, 5]))
    orders[rank][at], orders[rank][other] = orders[rank][other], orders[rank][at]
    return schedule.with_orders(orders)


def move(schedule: Schedule, source: random.Random) -> Schedule:
    """Delays loads, moves reshards, hurries receives."""
    orders, rank, at = _pick(schedule, source)
    step = orders[rank].pop(at)
    orders[rank].insert(source.randrange(len(orders[rank]) + 1), step)
    return schedule.with_orders(orders)


def retarget(schedule: Schedule, source: random.Random) -> Schedule | None:
    orders, rank, at = _pick(schedule, source)
    step = orders[rank][at]
    if step.stage_index is None:
        return None
    if step.micro_index is not None and source.random() < 0.5:
        changed = replace(step, micro_index=source.randrange(schedule.num_microbatches + 1))
    else:
        changed = replace(step, stage_index=source.randrange(schedule.num_stages))
    orders[rank][at] = changed
    return schedule.with_orders(orders)


def move_to_other_rank(schedule: Schedule, source: random.Random) -> Schedule:
    orders, rank, at = _pick(schedule, source)
    step = orders[rank].pop(at)
    other = source.randrange(len(orders))
    orders[other].insert(source.randrange(len(orders[other]) + 1), step)
    return schedule.with_orders(orders)


def reverse_channel(schedule: Schedule, source: random.Random) -> Schedule | None:
    """One end of a channel takes two of its tensors in the other order."""
    orders, rank, at = _pick(schedule, source)
    kind = source.choice([T.FWD_SEND, T.FWD_RECV, T.BWD_SEND, T.BWD_RECV, T.DATA_RECV])
    places = [index for index, step in enumerate(orders[rank]) if step.type is kind]
    if len(places) < 2:
        return None
    first, second = source.sample(places, 2)
    orders[rank][first], orders[rank][second] = orders[rank][second], orders[rank][first]
    return schedule.with_orders(orders)


def split_batch(schedule: Schedule, source: random.Random) -> Schedule | None:
    """One batch becomes two: what could meet in any order now can't."""
    orders, rank, at = _pick(schedule, source)
    batches = [i for i, step in enumerate(orders[rank]) if step.type is T.BATCH_SEND_RECV and len(step.sub_steps) > 1]
    if not batches:
        return None
    at = source.choice(batches)
    members = list(orders[rank][at].sub_steps)
    source.shuffle(members)
    cut = source.randrange(1, len(members))
    orders[rank][at : at + 1] = [
        MetaStep(None, T.BATCH_SEND_RECV, None, tuple(p)) for p in (members[:cut], members[cut:])
    ]
    return schedule.with_orders(orders)


MUTATIONS = [drop, duplicate, swap_order, move, retarget, move_to_other_rank, reverse_channel, split_batch]


DEADLOCK = "0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


@pytest.mark.parametrize("transport", ["plain", "batch", "boundary"])
def test_a_deadlock_prints_its_cycle(transport: str) -> None:
    (violation,) = verify(parse_schedule(DEADLOCK, "x"), transport).violations
    assert violation == (
        "deadlock: rank 0 step 1 0RECV_B0 waits for rank 1 step 3 1SEND_B0, which stands behind "
        "rank 1 step 0 1RECV_F0, which waits for rank 0 step 2 0SEND_F0, which stands behind rank 0 step 1 0RECV_B0"
    )


def test_queues_beside_the_compute_survive_what_blocks_a_rank() -> None:
    assert verify(parse_schedule(DEADLOCK, "x"), "multi_stream").ok


def test_one_batch_meets_in_any_order_where_single_steps_deadlock() -> None:
    crossed = "0F0,0F1,(0RECV_B0;0SEND_F1)BATCH_SEND_RECV,0B0,0RECV_B1,0B1\n".replace("0F1,", "0SEND_F0,0F1,")
    other = "1RECV_F0,1F0,1B0,(1RECV_F1;1SEND_B0)BATCH_SEND_RECV,1F1,1B1,1SEND_B1\n"
    schedule = parse_schedule(crossed + other, "x")
    assert verify(schedule, "batch").ok
    assert "deadlock" in verify(schedule, "plain").violations[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0", "rank 1 step 0 1F0 comes before 1RECV_F0 at step 1"),
        ("0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "rank 0 step 0 0SEND_F0 comes before 0F0 at step 1"),
        ("0F0,0B0\n1F0,1B0", "rank 0 step 1 0B0: its input 0RECV_B0 is never received"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1I0,1SEND_B0", "rank 1 never runs 1W0"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0", "rank 0 step 2 0RECV_B0: rank 1 never sends it"),
        ("0F0,0I0,0B0,0W0", "rank 0 step 2 0B0: rank 0 step 1 0I0 runs the same backward again"),
        ("0UNSHARD,0F0,0RESHARD,0B0,0REDUCE_GRAD", "rank 0 step 3 0B0: the parameters of stage 0 are sharded there"),
        ("0UNSHARD,0F0,0REDUCE_GRAD,0B0", "rank 0 step 2 0REDUCE_GRAD comes before 0B0 at step 3"),
        ("0UNSHARD,0F0,0B0", "rank 0 never runs 0REDUCE_GRAD"),
        ("0F0,0SWAP_LAUNCH_OFFLOAD0,0SWAP_WAIT_OFFLOAD0,0B0", "but never runs 0SWAP_LAUNCH_LOAD0"),
        ("0F0,0F1,0B1,0B0,1SEND_F0\n1F0,1F1,1B0,1B1", "rank 0 step 4 1SEND_F0: stage 1 lives on rank 1"),
    ],
)  # fmt: skip
def test_a_violation_names_rank_position_and_step(text: str, says: str) -> None:
    violations = verify(parse_schedule(text, "x"), "plain").violations
    assert any(says in violation for violation in violations), violations


@pytest.mark.parametrize(
    "broken",
    [
        Schedule(((),), 0, (), 1),
        Schedule(((),), 2, (0,), 1),
        Schedule((build_schedule("gpipe", 1, 1).orders[0], ()), 1, (0,), 1),
        Schedule(((),), 1, (3,), 1),
        Schedule((("0F0",),), 1, (0,), 1),
        Schedule(((MetaStep(5, T.FWD, 7),),), 1, (0,), 1),
    ],
)
def test_what_is_no_schedule_is_refused_not_a_crash(broken: Schedule) -> None:
    assert not verify(broken, "plain").ok


def test_a_bound_on_activations_is_enforced() -> None:
    schedule = lower(build_schedule("gpipe", 2, 5), "plain")
    assert verify(schedule, "plain", max_activations=5).ok
    assert verify(schedule, "plain", max_activations=4).violations[0].startswith("rank 0 holds up to 5 activations")


def test_wholly_wrong_schedules_do_not_talk_for_ever() -> None:
    assert len(verify(build_schedule("1f1b", 8, 64), "plain").violations) < 100


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_1f1b_needs_as_many_receive_buffers_as_micro_batches_in_flight(transport: str) -> None:
    pp_size, num_microbatches = 4, 16
    proof = verify(lower(build_schedule("1f1b", pp_size, num_microbatches), transport), transport)
    # Rank s has pp_size - s micro-batches in flight, and one tensor more arrives while it works.
    for stage, buffers in enumerate(proof.stage_buffers):
        assert buffers.fwd <= (pp_size - stage + 1 if stage else 0)
        assert buffers.bwd <= (2 if stage < pp_size - 1 else 0)
        assert max(buffers.fwd, buffers.bwd) <= proof.recv_buffers[stage] <= buffers.fwd + buffers.bwd
    assert proof.peak_activations == (4, 3, 2, 1)


@pytest.mark.parametrize("bound", ["2", -1, 1.5, True])
def test_a_bound_on_activations_that_is_none_is_refused(bound: object) -> None:
    with pytest.raises(ScheduleError, match="max_activations=.* must be an integer of at least 0"):
        verify(lower(build_schedule("gpipe", 2, 2), "plain"), "plain", max_activations=bound)


def _seconds(num_microbatches: int) -> tuple[float, float, int]:
    """CPU time to build and simulate, and to verify the lowered form, of 1f1b on 64 ranks; and its number of steps.

    The better of two runs each: what shares the cores' caches makes a single one up to twice as slow.
    """

    def build() -> Schedule:
        schedule = build_schedule("1f1b", 64, num_microbatches)
        simulate(schedule, Costs(1, 1, 1))
        return schedule

    lowered = lower(build(), "plain")
    assert verify(lowered, "plain").ok
    steps = sum(map(len, lowered.orders))
    return _best_seconds(build), _best_seconds(lambda: verify(lowered, "plain")), steps


def _best_seconds(function: Callable[[], object]) -> float:
    seconds = []
    for _ in range(2):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return min(seconds)


def test_time_is_bounded_and_grows_linearly() -> None:
    build_small, verify_small, steps_small = _seconds(128)
    build_large, verify_large, steps_large = _seconds(512)
    assert build_large < 3 and verify_large < 6, (build_large, verify_large)
    # Quadratic growth would make it 16 times; twice the ratio of steps leaves room for a busy machine.
    ratio = steps_large / steps_small
    assert verify_large / verify_small < 2 * ratio, (verify_small, verify_large)
