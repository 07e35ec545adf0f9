"""What each lowering adds, keeps and refuses. That the results run is shown in test_verify.py."""

from __future__ import annotations

from collections import Counter

import pytest

from hp_train.errors import ScheduleError
from hp_train.schedule import (
    SCHEDULES,
    TRANSPORTS,
    Costs,
    MetaStep,
    MetaStepType,
    Schedule,
    build_schedule,
    lower,
    select_transport,
    simulate,
    verify,
)
from hp_train.schedule.lowering import (
    add_data_steps,
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
    add_p2p,
    add_swap,
    attach_fwd_boundary_p2p,
    coalesce_p2p,
    pair_overlap_b_f,
    pair_overlap_f_b,
)
from hp_train.schedule.steps import COMPUTE_TYPES, FSDP_TYPES, P2P_TYPES, SWAP_TYPES
from hp_train.schedule.text import parse_schedule

T = MetaStepType
every_schedule = pytest.mark.parametrize("name", SCHEDULES)


def _built(name: str, pp_size: int = 3, num_microbatches: int = 8) -> Schedule:
    return build_schedule(name, pp_size, num_microbatches, None)


def _kinds(schedule: Schedule) -> Counter[MetaStepType]:
    return Counter(step.type for order in schedule.orders for step in order)


def _leaves(schedule: Schedule) -> Counter[MetaStep]:
    """Every single step, whatever composite it stands in."""
    leaves: Counter[MetaStep] = Counter()
    for order in schedule.orders:
        for step in order:
            parts = step.computes or step.transfers or (step,)
            leaves.update(MetaStep(part.micro_index, part.type, part.stage_index) for part in parts)
            if step.computes:
                leaves.update(step.transfers)
    return leaves


@every_schedule
def test_each_edge_between_ranks_has_one_send_and_one_receive_and_edges_within_none(name: str) -> None:
    schedule = _built(name)
    added = _leaves(add_p2p(schedule)) - _leaves(schedule)
    edges = [
        (s, s + 1) for s in range(schedule.num_stages - 1) if schedule.rank_of_stage[s] != schedule.rank_of_stage[s + 1]
    ]
    expected = Counter()
    for micro in range(schedule.num_microbatches):
        for low, high in edges:
            expected[MetaStep(micro, T.FWD_SEND, low)] += 1
            expected[MetaStep(micro, T.FWD_RECV, high)] += 1
            expected[MetaStep(micro, T.BWD_SEND, high)] += 1
            expected[MetaStep(micro, T.BWD_RECV, low)] += 1
    assert added == expected


@every_schedule
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_transports_and_pairings_carry_the_same_steps(name: str, transport: str) -> None:
    plain = _leaves(lower(_built(name), "plain", data=True))
    for overlap in (None, "f_b", "b_f"):
        lowered = lower(_built(name), transport, overlap=overlap, data=True)
        assert _leaves(lowered) == plain
        singles = sum(count for kind, count in _kinds(lowered).items() if kind in P2P_TYPES)
        assert (singles == 0) == (transport in ("batch", "boundary"))


@every_schedule
def test_only_sends_and_receives_are_added_unasked(name: str) -> None:
    schedule = _built(name)
    assert set(_kinds(lower(schedule, "plain"))) - set(_kinds(schedule)) <= P2P_TYPES


def test_no_two_batches_stand_side_by_side() -> None:
    for order in coalesce_p2p(add_p2p(_built("zbv"))).orders:
        kinds = [step.type for step in order]
        assert (T.BATCH_SEND_RECV, T.BATCH_SEND_RECV) not in zip(kinds, kinds[1:], strict=False)


def test_boundary_hangs_what_follows_a_forward_on_it_and_what_overlaps_between_its_parts() -> None:
    lowered = attach_fwd_boundary_p2p(coalesce_p2p(add_p2p(pair_overlap_b_f(_built("1f1b", 4, 8)))))
    for order in lowered.orders:
        for step, following in zip(order, order[1:], strict=False):
            assert not (step.type is T.FWD and following.type is T.BATCH_SEND_RECV)
    overlaps = [step for order in lowered.orders for step in order if step.type is T.OVERLAP_B_F]
    sent_early = [
        step for step in overlaps
        if any(p.type is T.BWD_SEND and p.micro_index == step.sub_steps[0].micro_index for p in step.transfers)
    ]  # fmt: skip
    # Every paired backward but those of stage 0, which has nowhere to send, hands its gradient on before its forward.
    assert overlaps and len(sent_early) == sum(step.sub_steps[0].stage_index > 0 for step in overlaps)


@pytest.mark.parametrize(("pair", "kind"), [(pair_overlap_f_b, T.OVERLAP_F_B), (pair_overlap_b_f, T.OVERLAP_B_F)])
def test_1f1b_pairs_its_steady_state(pair, kind: MetaStepType) -> None:
    schedule = _built("1f1b", 4, 16)
    paired = pair(schedule)
    assert [s for order in paired.orders for step in order for s in step.computes] == [
        step for order in schedule.orders for step in order
    ]
    # The last rank's forward feeds its own backward, so F_B pairs on the other three ranks only.
    steady = sum(16 - (3 - rank) for rank in range(3 if kind is T.OVERLAP_F_B else 4))
    assert _kinds(paired)[kind] >= steady - 4
    simulate(paired, Costs(1, 1, 1))


@every_schedule
@pytest.mark.parametrize("max_active_stages", [2, 3])
def test_no_more_stages_are_unsharded_than_asked(name: str, max_active_stages: int) -> None:
    stages = 2 if SCHEDULES[name].fixed_stages else 4
    schedule = build_schedule(name, 2, 8, SCHEDULES[name].stages_per_rank if SCHEDULES[name].fixed_stages else stages)
    for order in add_fsdp_unshard_reshard(schedule, max_active_stages).orders:
        unsharded: set[int] = set()
        for step in order:
            if step.type is T.FSDP_UNSHARD:
                assert step.stage_index not in unsharded
                unsharded.add(step.stage_index)
            elif step.type is T.FSDP_RESHARD:
                unsharded.remove(step.stage_index)
            assert len(unsharded) <= max_active_stages
            assert {part.stage_index for part in step.computes} <= unsharded
        assert not unsharded


def test_stages_that_all_fit_are_unsharded_once() -> None:
    kinds = _kinds(lower(_built("interleaved_1f1b"), "plain", fsdp=2))
    assert kinds[T.FSDP_UNSHARD] == kinds[T.FSDP_RESHARD] == kinds[T.FSDP_REDUCE_GRAD] == 6


def test_the_next_stage_is_unsharded_while_the_current_one_runs() -> None:
    order = add_fsdp_unshard_reshard(build_schedule("interleaved_1f1b", 1, 2, 3), 2).orders[0]
    assert [str(step) for step in order[:6]] == ["0UNSHARD", "1UNSHARD", "0F0", "0RESHARD", "2UNSHARD", "1F0"]


def test_gradients_are_reduced_right_after_the_last_backward() -> None:
    for order in add_fsdp_reduce_grad(_built("zb_h1")).orders:
        assert [step.type for step in order[-2:]] == [T.BWD_WEIGHT, T.FSDP_REDUCE_GRAD]


def test_swap_frees_activations_that_wait_long_enough_and_no_others() -> None:
    schedule = _built("gpipe", 2, 8)
    swapped = add_swap(schedule, 4)
    proof = verify(lower(schedule, "plain", swap=4), "plain")
    assert proof.ok and max(proof.peak_activations) < 8
    for order in swapped.orders:
        computes = [step for step in order if step.computes]
        gap = {}
        for index, step in enumerate(computes):
            if step.type is T.FWD:
                gap[step.micro_index] = -index - 1
            else:
                gap[step.micro_index] += index
        launched = {step.micro_index for step in order if step.type is T.SWAP_LAUNCH_OFFLOAD}
        assert launched == {micro for micro, between in gap.items() if between >= 4}


def test_data_is_loaded_in_order_and_targets_follow() -> None:
    schedule = add_data_steps(_built("1f1b", 3, 5))
    first, last = schedule.orders[0], schedule.orders[2]
    assert [str(s) for s in first if s.type is T.DATA_LOAD] == [f"0DATA_LOAD{m}" for m in range(5)]
    assert [str(s) for s in first if s.type is T.DATA_SEND] == [f"0DATA_SEND{m}" for m in range(5)]
    assert [str(s) for s in last if s.type is T.DATA_RECV] == [f"2DATA_RECV{m}" for m in range(5)]
    assert T.DATA_SEND not in _kinds(add_data_steps(_built("zbv")))  # one rank holds first and last stage
    assert _leaves(add_data_steps(add_p2p(_built("1f1b")))) == _leaves(lower(_built("1f1b"), "plain", data=True))


OWN_P2P = "0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1\n1RECV_F0,1RECV_F1,1F0,1F1,1B0,1B1,1SEND_B0,1SEND_B1\n"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_persons_own_sends_and_receives_stay_where_they_are(transport: str) -> None:
    schedule = parse_schedule(OWN_P2P, "own")
    lowered = lower(schedule, transport, fsdp=1)
    assert _leaves(lowered) - _leaves(schedule) == Counter(
        {MetaStep(None, kind, stage): 1 for kind in FSDP_TYPES for stage in (0, 1)}
    )
    assert verify(lowered, transport).ok
    with pytest.raises(ScheduleError, match="place its data steps by hand"):
        lower(schedule, transport, data=True)


# Rank 0 waits for a gradient before it sends what the gradient is made of; as one batch the two still meet.
CROSSED = "0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
# The same with a step between the two, so that they can't become one batch.
CROSSED_APART = (
    "0UNSHARD,0F0,0RECV_B0,0UNSHARD,0SEND_F0,0B0,0REDUCE_GRAD\n1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD\n"
)


def test_auto_takes_the_first_transport_that_is_supported_and_proven() -> None:
    schedule = _built("zbv")
    assert select_transport(schedule, ("plain", "batch", "multi_stream"))[0] == "multi_stream"
    assert select_transport(schedule, ("plain", "batch"), fsdp=2) == ("batch", lower(schedule, "batch", fsdp=2))
    assert select_transport(parse_schedule(CROSSED, "x"), ("batch", "plain"))[0] == "batch"
    assert select_transport(parse_schedule(CROSSED_APART, "x"), ("multi_stream",))[0] == "multi_stream"
    with pytest.raises(
        ScheduleError, match="multi_stream: not supported by the backend; batch: deadlock.*; plain: deadlock"
    ):
        select_transport(parse_schedule(CROSSED_APART, "x"), ("plain", "batch"))


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda: lower(_built("1f1b"), "tcp"), "transport 'tcp' is unknown; use one of plain, batch"),
        (lambda: lower(_built("1f1b"), "auto"), "transport 'auto'"),
        (lambda: lower(_built("1f1b"), "plain", overlap="x"), "use one of f_b, b_f"),
        (lambda: lower(_built("1f1b"), "plain", swap=1), "min_gap=1"),
        (lambda: lower(_built("1f1b"), "plain", fsdp=0), "max_active_stages=0"),
        (lambda: lower(_built("dualpipe_v", 2, 8), "plain", fsdp=1), "uses 2 stages at once"),
        (lambda: add_p2p(add_p2p(_built("1f1b"))), "already"),
        (lambda: add_data_steps(add_data_steps(_built("1f1b"))), "already"),
        (lambda: add_swap(add_swap(_built("gpipe"), 2), 2), "already"),
        (lambda: pair_overlap_f_b(add_p2p(_built("1f1b"))), "before sends and receives"),
        (
            lambda: add_p2p(parse_schedule("0B0,0F0", "x")),
            "x: deadlock: rank 0 step 0 0B0 waits for rank 0 step 1 0F0, which stands behind rank 0 step 0 0B0$",
        ),
        (
            lambda: add_p2p(parse_schedule("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", "x")),
            "x: deadlock: rank 0 step 1 0B0 waits for rank 1 step 3 1B0, which stands behind rank 1 step 0 1F1, "
            "which waits for rank 0 step 2 0F1, which stands behind rank 0 step 1 0B0$",
        ),
        (
            lambda: add_p2p(parse_schedule("0F0,0B0,0F1,0B1\n1F0,1B0,1B1", "x")),
            "x: rank 1 step 2 1B1 needs the forward of stage 1, micro-batch 1, which no rank runs",
        ),
        (
            lambda: add_p2p(parse_schedule("0F0,0B0\n1F0,1B0,1I0,1W0", "x")),
            "x: rank 1 step 2 1I0 computes what rank 1 step 1 1B0 has computed",
        ),
        (
            lambda: _built("1f1b", 64, 10**6),
            "make up to 192,000,000 steps; a schedule is built and proven up to 10,000",
        ),
    ],
)
def test_what_does_not_fit_is_refused(act, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        act()


def test_the_kinds_of_step_are_all_accounted_for() -> None:
    composite = {T.BATCH_SEND_RECV, T.OVERLAP_F_B, T.OVERLAP_B_F}
    assert set(T) == COMPUTE_TYPES | P2P_TYPES | FSDP_TYPES | SWAP_TYPES | composite | {T.DATA_LOAD}
