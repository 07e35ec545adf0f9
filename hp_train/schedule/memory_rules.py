"""Rules of the proof for what is in memory: parameters unsharded when used, swapped activations back in time.

No torch. Both concern one rank at a time, so they hold whatever the other ranks do.
"""

from __future__ import annotations

from hp_train.schedule.events import Dissection, Event, Findings, slot_text
from hp_train.schedule.steps import COMPUTE_TYPES, FSDP_TYPES, SWAP_TYPES, MetaStepType

_T = MetaStepType
_SWAP_ORDER = (_T.SWAP_LAUNCH_OFFLOAD, _T.SWAP_WAIT_OFFLOAD, _T.SWAP_LAUNCH_LOAD, _T.SWAP_WAIT_LOAD)


def check_parameters(parts: Dissection, findings: Findings) -> None:
    """If any FSDP step exists: parameters are unsharded at each use, gradients reduced once after the last one.

    A schedule starts with all parameters sharded. Between uses they may be resharded and unsharded at will.
    """
    if parts.kinds.isdisjoint(FSDP_TYPES):
        return
    last_use: dict[int, Event] = {}
    for row in parts.rows:
        unsharded: set[int] = set()
        for event in row:
            kind, stage = event.step.meta_type, event.step.stage_index
            if kind is _T.FSDP_UNSHARD:
                unsharded.add(stage)
            elif kind is _T.FSDP_RESHARD:
                unsharded.discard(stage)
            elif kind in COMPUTE_TYPES:
                if stage not in unsharded:
                    findings.add(f"{event}: the parameters of stage {stage} are sharded there")
                if kind in (_T.BWD, _T.BWD_WEIGHT):
                    last_use[stage] = event
    for stage, rank in enumerate(parts.schedule.rank_of_stage):
        reduction = parts.where.get((_T.FSDP_REDUCE_GRAD, stage, None))
        if reduction is None:
            findings.add(f"rank {rank} never runs {stage}REDUCE_GRAD")
        elif stage in last_use and last_use[stage].index > reduction.index:
            findings.add(f"{reduction} comes before {last_use[stage].step} at step {last_use[stage].position}, whose "
                         "gradient it would miss")  # fmt: skip


def check_swaps(parts: Dissection, findings: Findings) -> None:
    """A swapped activation leaves after its forward and is back, all four steps done in order, before its backward."""
    if parts.kinds.isdisjoint(SWAP_TYPES):
        return
    where = parts.where
    swapped = dict.fromkeys((stage, micro) for kind, stage, micro in where if kind in SWAP_TYPES)
    for stage, micro in swapped:
        chain: list[Event] = []
        backward = where.get((_T.BWD, stage, micro)) or where.get((_T.BWD_INPUT, stage, micro))
        for kind in (_T.FWD, *_SWAP_ORDER):
            event = where.get((kind, stage, micro))
            if event is not None:
                chain.append(event)
            elif kind is not _T.FWD:
                missing = slot_text((kind, stage, micro))
                rank = parts.schedule.rank_of_stage[stage]
                findings.add(f"rank {rank} swaps stage {stage} micro-batch {micro} but never runs {missing}")
        if backward is not None:
            chain.append(backward)
        for earlier, later in zip(chain, chain[1:], strict=False):
            if earlier.index > later.index:
                findings.add(
                    f"{later} comes before {earlier.step} at step {earlier.position}, which must be done by then"
                )
