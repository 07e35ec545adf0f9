"""One step of a pipeline schedule (`MetaStep`) and the schedule itself, as plain values.

Ground floor, no torch: imports only the error types. Building, lowering, proving, drawing and the runtime all speak
in these values. A step names a stage and a micro-batch; composite steps (overlapped pairs, batches of point-to-point
steps) carry the steps that they are made of. Constructing an impossible step is an error; a `Schedule` on the other
hand holds any orders at all, so that `verify` can be shown broken ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from hp_train.errors import ScheduleError


class MetaStepType(Enum):
    """The kinds of step; the value is the kind's name in text, torch's own where torch has the kind."""

    DATA_LOAD = "DATA_LOAD"
    DATA_SEND = "DATA_SEND"
    DATA_RECV = "DATA_RECV"
    FWD = "F"
    BWD = "B"
    BWD_INPUT = "I"
    BWD_WEIGHT = "W"
    FWD_RECV = "RECV_F"
    FWD_SEND = "SEND_F"
    BWD_RECV = "RECV_B"
    BWD_SEND = "SEND_B"
    BATCH_SEND_RECV = "BATCH_SEND_RECV"
    OVERLAP_F_B = "OVERLAP_F_B"
    OVERLAP_B_F = "OVERLAP_B_F"
    FSDP_UNSHARD = "UNSHARD"
    FSDP_RESHARD = "RESHARD"
    FSDP_REDUCE_GRAD = "REDUCE_GRAD"
    SWAP_LAUNCH_OFFLOAD = "SWAP_LAUNCH_OFFLOAD"
    SWAP_WAIT_OFFLOAD = "SWAP_WAIT_OFFLOAD"
    SWAP_LAUNCH_LOAD = "SWAP_LAUNCH_LOAD"
    SWAP_WAIT_LOAD = "SWAP_WAIT_LOAD"

    # Members are singletons, so identity hashes them; Enum's own hash runs in Python and schedules are large.
    __hash__ = object.__hash__


_T = MetaStepType

MAX_INDEX = 10**9 - 1
"""Highest stage or micro-batch that a step can name; its text takes nine digits."""

BACKWARD_TYPES = frozenset({_T.BWD, _T.BWD_INPUT})
"""Kinds that turn the gradient of a stage's output into that of its input."""
COMPUTE_TYPES = frozenset({_T.FWD, _T.BWD, _T.BWD_INPUT, _T.BWD_WEIGHT})
OVERLAP_TYPES = frozenset({_T.OVERLAP_F_B, _T.OVERLAP_B_F})
SEND_TYPES = frozenset({_T.FWD_SEND, _T.BWD_SEND, _T.DATA_SEND})
RECV_TYPES = frozenset({_T.FWD_RECV, _T.BWD_RECV, _T.DATA_RECV})
P2P_TYPES = SEND_TYPES | RECV_TYPES
FSDP_TYPES = frozenset({_T.FSDP_UNSHARD, _T.FSDP_RESHARD, _T.FSDP_REDUCE_GRAD})
SWAP_TYPES = frozenset({_T.SWAP_LAUNCH_OFFLOAD, _T.SWAP_WAIT_OFFLOAD, _T.SWAP_LAUNCH_LOAD, _T.SWAP_WAIT_LOAD})
DATA_TYPES = frozenset({_T.DATA_LOAD, _T.DATA_SEND, _T.DATA_RECV})
COMPOSITE_TYPES = OVERLAP_TYPES | {_T.BATCH_SEND_RECV}
_BOUNDARY_CARRIERS = OVERLAP_TYPES | {_T.FWD}


@dataclass(frozen=True, slots=True)
class MetaStep:
    """One step of one rank's order. Immutable, hashable, equal by value over all fields.

    micro_index: the micro-batch, 0-based; None for FSDP_* steps and composites.
    meta_type: the kind, read as `.type`.
    stage_index: the stage that the step belongs to; the receiving stage of a receive, the sending one of a send;
        None for composites.
    sub_steps: what a composite is made of: `(fwd, bwd)` for OVERLAP_F_B, `(bwd, fwd)` for OVERLAP_B_F, the sends and
        receives of a BATCH_SEND_RECV. None otherwise.
    boundary_p2p: sends and receives issued as one batch at the step's boundary: after a FWD, between the two parts of
        an OVERLAP step. None if there are none.

    Raises ScheduleError for a combination that means nothing.
    """

    micro_index: int | None
    meta_type: MetaStepType
    stage_index: int | None
    sub_steps: tuple[MetaStep, ...] | None = None
    boundary_p2p: tuple[MetaStep, ...] | None = None

    def __post_init__(self) -> None:
        kind = self.meta_type
        if not isinstance(kind, MetaStepType):
            raise ScheduleError(f"meta_type={kind!r} is no MetaStepType")
        if kind in COMPOSITE_TYPES:
            self._check_composite()
        else:
            if self.sub_steps is not None:
                raise ScheduleError(f"{kind.name} is a single step and takes no sub_steps")
            _check_index(kind, "stage_index", self.stage_index)
            if kind in FSDP_TYPES:
                if self.micro_index is not None:
                    raise ScheduleError(f"{kind.name} belongs to a stage, not to micro-batch {self.micro_index!r}")
            else:
                _check_index(kind, "micro_index", self.micro_index)
        if self.boundary_p2p is not None:
            if kind not in _BOUNDARY_CARRIERS:
                raise ScheduleError(f"{kind.name} has no boundary to hang sends and receives on")
            object.__setattr__(self, "boundary_p2p", _checked_p2p(kind, self.boundary_p2p))

    def _check_composite(self) -> None:
        kind, subs = self.meta_type, self.sub_steps
        if self.micro_index is not None or self.stage_index is not None:
            raise ScheduleError(f"{kind.name} carries its indices in sub_steps, its own are None")
        if kind is _T.BATCH_SEND_RECV:
            object.__setattr__(self, "sub_steps", _checked_p2p(kind, subs))
            return
        object.__setattr__(self, "sub_steps", _as_steps(kind, subs))
        parts = self.sub_steps if kind is _T.OVERLAP_F_B else self.sub_steps[::-1]
        if len(parts) != 2 or parts[0].type is not _T.FWD or parts[1].type not in BACKWARD_TYPES:
            order = "a forward, then a backward" if kind is _T.OVERLAP_F_B else "a backward, then a forward"
            raise ScheduleError(f"{kind.name} takes {order}, not ({';'.join(map(str, self.sub_steps))})")
        if any(part.boundary_p2p for part in parts):
            raise ScheduleError(f"{kind.name} holds boundary_p2p itself, its parts hold none")
        if (parts[0].stage_index, parts[0].micro_index) == (parts[1].stage_index, parts[1].micro_index):
            raise ScheduleError(f"{kind.name} can't overlap {parts[0]} with {parts[1]}: one needs the other")

    @property
    def type(self) -> MetaStepType:
        return self.meta_type

    @property
    def computes(self) -> tuple[MetaStep, ...]:
        """The forward and backward steps in this step, in the order in which they run; empty for other kinds."""
        if self.meta_type in COMPUTE_TYPES:
            return (self,)
        return self.sub_steps if self.meta_type in OVERLAP_TYPES else ()

    @property
    def transfers(self) -> tuple[MetaStep, ...]:
        """The sends and receives in this step: itself, those of a batch, or those on its boundary."""
        if self.meta_type in P2P_TYPES:
            return (self,)
        if self.meta_type is _T.BATCH_SEND_RECV:
            return self.sub_steps
        return self.boundary_p2p or ()

    def __str__(self) -> str:
        if self.sub_steps is not None:
            text = f"({';'.join(map(str, self.sub_steps))}){self.meta_type.value}"
        else:
            text = f"{self.stage_index}{self.meta_type.value}{'' if self.micro_index is None else self.micro_index}"
        if self.boundary_p2p:
            text += f"+({';'.join(map(str, self.boundary_p2p))})"
        return text

    @classmethod
    def from_str(cls, text: str) -> MetaStep:
        """The step that `text` names; `MetaStep.from_str(str(step)) == step`. Raises ScheduleError if it names none."""
        from hp_train.schedule.text import parse_step  # text.py builds on this module

        return parse_step(text)


def _check_index(kind: MetaStepType, name: str, value: object) -> None:
    if type(value) is not int or not 0 <= value <= MAX_INDEX:
        raise ScheduleError(f"{kind.name} needs {name} to be an integer from 0 to {MAX_INDEX}, not {value!r}")


def _as_steps(kind: MetaStepType, steps: object) -> tuple[MetaStep, ...]:
    if not isinstance(steps, (tuple, list)) or not steps or not all(isinstance(step, MetaStep) for step in steps):
        raise ScheduleError(f"{kind.name} takes a tuple of steps, not {steps!r}")
    return tuple(steps)


def _checked_p2p(kind: MetaStepType, steps: object) -> tuple[MetaStep, ...]:
    checked = _as_steps(kind, steps)
    for step in checked:
        if step.type not in P2P_TYPES:
            raise ScheduleError(f"{kind.name} holds sends and receives, not {step}")
    if len(set(checked)) != len(checked):
        raise ScheduleError(f"{kind.name} holds a step twice: {';'.join(map(str, checked))}")
    return checked


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every pipeline rank does in one optimizer step. A value: lowering returns a new one.

    orders: per rank, its steps in program order. Nothing is checked here, see `verify`.
    num_stages: stages of the whole pipeline, numbered along the model.
    rank_of_stage: per stage, the pipeline rank that holds it.
    num_microbatches: micro-batches in one optimizer step.
    name: where it came from, for messages; not part of equality.
    """

    orders: tuple[tuple[MetaStep, ...], ...]
    num_stages: int
    rank_of_stage: tuple[int, ...]
    num_microbatches: int
    name: str = "custom"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return (self.orders, self.num_stages, self.rank_of_stage, self.num_microbatches)

    @property
    def pp_size(self) -> int:
        return len(self.orders)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Stages that pipeline rank `rank` holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank)

    def with_orders(self, orders: Iterator[list[MetaStep]] | list[list[MetaStep]]) -> Schedule:
        """The same pipeline doing `orders` instead."""
        return replace(self, orders=tuple(tuple(order) for order in orders))

    def has_any(self, kinds: frozenset[MetaStepType]) -> bool:
        """Whether any rank has a step of these kinds, at top level, in a batch or on a boundary."""
        return any(
            step.meta_type in kinds or any(sub.meta_type in kinds for sub in step.transfers)
            for order in self.orders
            for step in order
        )
