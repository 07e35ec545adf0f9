"""From compute-only orders to everything that a rank must do, and which transport to do it with.

No torch. One function a concern, each taking a schedule and returning one; `lower` composes them in the order in which
they build on each other: pair, place data and transfers, batch, then what stays within a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from hp_train.errors import ScheduleError
from hp_train.schedule.p2p import add_data_steps, add_p2p, attach_fwd_boundary_p2p, coalesce_p2p
from hp_train.schedule.pairing import pair_overlap_b_f, pair_overlap_f_b
from hp_train.schedule.residency import add_fsdp_reduce_grad, add_fsdp_unshard_reshard, add_swap
from hp_train.schedule.steps import FSDP_TYPES, P2P_TYPES, MetaStepType, Schedule
from hp_train.schedule.verify import check_transport, verify

__all__ = [
    "AUTO_TRANSPORTS",
    "add_data_steps",
    "add_fsdp_reduce_grad",
    "add_fsdp_unshard_reshard",
    "add_p2p",
    "add_swap",
    "attach_fwd_boundary_p2p",
    "coalesce_p2p",
    "lower",
    "pair_overlap_b_f",
    "pair_overlap_f_b",
    "select_transport",
]

AUTO_TRANSPORTS = ("multi_stream", "batch", "plain")
"""What `auto` tries, in this order."""
_PAIRINGS = {"f_b": pair_overlap_f_b, "b_f": pair_overlap_b_f}


def lower(
    schedule: Schedule,
    transport: str,
    *,
    fsdp: int | None = None,
    swap: int | None = None,
    overlap: str | None = None,
    data: bool | None = None,
) -> Schedule:
    """All steps that running `schedule` over `transport` takes. Sends and receives are always added, the rest if asked.

    fsdp: add FSDP_UNSHARD, FSDP_RESHARD and FSDP_REDUCE_GRAD with at most this many stages of a rank unsharded.
    swap: swap out activations with at least this many compute steps between forward and backward.
    overlap: "f_b" or "b_f", pair neighbouring forwards and backwards that way.
    data: add DATA_LOAD, DATA_SEND and DATA_RECV.
    Sends and receives, or FSDP steps, that a person's schedule brings along are kept as they are.
    Raises ScheduleError for an unknown transport or an option that does not fit the schedule.
    """
    check_transport(transport)
    if overlap is not None:
        if overlap not in _PAIRINGS:
            raise ScheduleError(f"overlap={overlap!r} is unknown; use one of {', '.join(_PAIRINGS)}")
        schedule = _PAIRINGS[overlap](schedule)
    if data:
        schedule = add_data_steps(schedule)
    if not schedule.has_any(P2P_TYPES - {MetaStepType.DATA_SEND, MetaStepType.DATA_RECV}):
        schedule = add_p2p(schedule)
    if transport == "batch":
        schedule = coalesce_p2p(schedule)
    elif transport == "boundary":
        schedule = attach_fwd_boundary_p2p(schedule)
    if fsdp is not None and not schedule.has_any(FSDP_TYPES):
        schedule = add_fsdp_reduce_grad(add_fsdp_unshard_reshard(schedule, fsdp))
    if swap is not None:
        schedule = add_swap(schedule, swap)
    return schedule


def select_transport(schedule: Schedule, supported: Sequence[str], **options: object) -> tuple[str, Schedule]:
    """The transport that `auto` stands for, and the schedule lowered for it.

    It is the first of AUTO_TRANSPORTS that the backend supports and under which the schedule is proven.

    supported: transports that the backend can do. options: as for `lower`.
    Raises ScheduleError with the reason for each if there is none.
    """
    reasons = []
    for transport in AUTO_TRANSPORTS:
        if transport not in supported:
            reasons.append(f"{transport}: not supported by the backend")
            continue
        lowered = lower(schedule, transport, **options)
        proof = verify(lowered, transport)
        if proof.ok:
            return transport, lowered
        reasons.append(f"{transport}: {proof.violations[0]}")
    raise ScheduleError(f"{schedule.name}: no transport can run it: {'; '.join(reasons)}")
