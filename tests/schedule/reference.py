"""Independent models that the schedule package is held against. Slow, small, and sharing no code with it.

`longest_paths` times a schedule by relaxing start times until nothing changes. `Machine` runs a lowered schedule
like a cluster would: values are tokens, channels match sends and receives by arrival alone, and every compute step
looks at the tokens that it is given. What ends with every gradient made once, from the right tokens, was harmless.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace

from hp_train.schedule import MetaStep, MetaStepType, Schedule

T = MetaStepType
COMPUTE = {T.FWD, T.BWD, T.BWD_INPUT, T.BWD_WEIGHT}


def parts_of(step: MetaStep) -> tuple[MetaStep, ...]:
    if step.type in COMPUTE:
        return (step,)
    return step.sub_steps if step.type in (T.OVERLAP_F_B, T.OVERLAP_B_F) else ()


def longest_paths(schedule: Schedule, cost: dict[MetaStepType, list], p2p: float) -> list[list[tuple]]:
    """(start, end) of every step of every rank, by repeated relaxation over all steps."""
    ends = [[None] * len(order) for order in schedule.orders]
    starts = [[0] * len(order) for order in schedule.orders]
    home = {}
    for rank, order in enumerate(schedule.orders):
        for index, step in enumerate(order):
            for part in parts_of(step):
                kind = "G" if part.type in (T.BWD, T.BWD_INPUT) else part.type.value
                home[kind, part.stage_index, part.micro_index] = (rank, index)
            duration = sum(cost[part.type][part.stage_index] for part in parts_of(step))
            ends[rank][index] = duration
    durations = [list(row) for row in ends]
    changed = True
    while changed:
        changed = False
        for rank, order in enumerate(schedule.orders):
            for index, step in enumerate(order):
                start = ends[rank][index - 1] if index else 0
                for part in parts_of(step):
                    stage, micro = part.stage_index, part.micro_index
                    wants = []
                    if part.type is T.FWD:
                        wants = [("F", stage - 1, micro)]
                    elif part.type in (T.BWD, T.BWD_INPUT):
                        wants = [("G", stage + 1, micro), ("F", stage, micro)]
                    for want in wants:
                        if want in home:
                            other, at = home[want]
                            start = max(start, ends[other][at] + (p2p if other != rank else 0))
                if start > starts[rank][index] or ends[rank][index] < start + durations[rank][index]:
                    starts[rank][index] = start
                    ends[rank][index] = start + durations[rank][index]
                    changed = True
    return [list(zip(a, b, strict=True)) for a, b in zip(starts, ends, strict=True)]


class Harm(Exception):
    """The machine met something that training can't survive."""


class Machine:
    """Ranks that run a lowered schedule under a transport, stepping in a random interleaving."""

    def __init__(self, schedule: Schedule, transport: str, seed: int = 0) -> None:
        self.schedule, self.transport = schedule, transport
        self.random = random.Random(seed)
        self.programs = [deque(self._program(order)) for order in schedule.orders]
        self.slots: list[dict] = [
            {} for _ in schedule.orders
        ]  # what each rank holds, by the name it is looked up under
        self.saved: list[dict] = [{} for _ in schedule.orders]  # activation -> "live", "leaving", "out", "coming"
        self.done = Counter()
        self.channels: dict[tuple[int, int], tuple[deque, deque]] = {}
        self.pending: list[set] = [set() for _ in schedule.orders]  # posted operations that the rank's stop waits for
        self.open_tickets: set[int] = set()  # ends of transfers that have not met their other end
        self.serial = 0
        self.unsharded: list[set] = [set() for _ in schedule.orders]
        self.reduced: Counter = Counter()
        kinds = {
            leaf.type
            for order in schedule.orders
            for step in order
            for leaf in (step, *(step.sub_steps or ()), *(step.boundary_p2p or ()))
        }
        self.has_fsdp = bool(kinds & {T.FSDP_UNSHARD, T.FSDP_RESHARD, T.FSDP_REDUCE_GRAD})
        self.has_data = bool(kinds & {T.DATA_LOAD, T.DATA_SEND, T.DATA_RECV})
        self.last_rank = schedule.rank_of_stage[-1]

    def _program(self, order: tuple[MetaStep, ...]):
        """Instructions: ("do", step), ("post", (steps...)) without waiting, or ("meet", (steps...)) with."""
        for step in order:
            parts, p2p = parts_of(step), step.boundary_p2p or ()
            if parts:
                yield ("do", replace(parts[0], boundary_p2p=None))
                yield from self._exchange(p2p)
                for part in parts[1:]:
                    yield ("do", part)
            elif step.type is T.BATCH_SEND_RECV:
                yield from self._exchange(step.sub_steps)
            elif "SEND" in step.type.name or "RECV" in step.type.name:
                yield from self._exchange((step,))
            else:
                yield ("do", step)

    def _exchange(self, steps):
        if not steps:
            return
        if self.transport == "multi_stream":
            yield ("post", tuple(steps))
        elif self.transport == "plain":
            for step in steps:
                yield ("meet", (step,))
        else:
            yield ("meet", tuple(steps))

    def harm(self) -> str | None:
        """Run to the end; None if training would have been right, else what went wrong first."""
        try:
            self._run()
            self._check_end()
        except Harm as harm:
            return str(harm)
        return None

    def _run(self) -> None:
        ranks = list(range(len(self.programs)))
        while any(self.programs):
            self.random.shuffle(ranks)
            if not [rank for rank in ranks if self._step(rank)]:
                raise Harm("deadlock")

    def _step(self, rank: int) -> bool:
        if not self.programs[rank]:
            return False
        what, payload = self.programs[rank][0]
        if what == "do":
            if not self._do(rank, payload):
                return False
        elif what == "post":
            for step in payload:
                self._post(rank, step)
        else:
            if not self.pending[rank]:
                self.pending[rank] = {self._post(rank, step) for step in payload}
                return True
            if self.pending[rank] & self.open_tickets:
                return False
            self.pending[rank] = set()
        self.programs[rank].popleft()
        return True

    def _post(self, rank: int, step: MetaStep) -> int:
        """Put one end of a transfer into its channel; the two oldest ends of a channel meet."""
        self.serial += 1
        ticket = self.serial
        peer = self._peer(step)
        if peer is None or peer == rank:
            raise Harm(f"{step} has no peer")
        is_send = "SEND" in step.type.name
        channel = (rank, peer) if is_send else (peer, rank)
        sends, receives = self.channels.setdefault(channel, (deque(), deque()))
        if is_send:
            name = (
                ("T", step.micro_index)
                if step.type is T.DATA_SEND
                else ("F" if step.type is T.FWD_SEND else "G", step.stage_index, step.micro_index)
            )
            if name not in self.slots[rank]:
                raise Harm(f"{step} has nothing to send")
            sends.append((ticket, self.slots[rank][name]))
        else:
            receives.append((ticket, step))
        self.open_tickets.add(ticket)
        while sends and receives:
            sent, token = sends.popleft()
            received, receive = receives.popleft()
            self.slots[channel[1]][self._arrival(receive)] = token
            self.open_tickets -= {sent, received}
        return ticket

    def _peer(self, step: MetaStep) -> int | None:
        stage = {T.FWD_SEND: 1, T.FWD_RECV: -1, T.BWD_SEND: -1, T.BWD_RECV: 1}.get(step.type)
        if stage is None:
            if step.stage_index != (0 if step.type is T.DATA_SEND else self.schedule.num_stages - 1):
                return None
            return self.last_rank if step.type is T.DATA_SEND else self.schedule.rank_of_stage[0]
        neighbour = step.stage_index + stage
        return self.schedule.rank_of_stage[neighbour] if 0 <= neighbour < self.schedule.num_stages else None

    @staticmethod
    def _arrival(step: MetaStep):
        if step.type is T.DATA_RECV:
            return ("T", step.micro_index)
        if step.type is T.FWD_RECV:
            return ("F", step.stage_index - 1, step.micro_index)
        return ("G", step.stage_index + 1, step.micro_index)

    def _do(self, rank: int, step: MetaStep) -> bool:
        kind, stage, micro = step.type, step.stage_index, step.micro_index
        if kind in COMPUTE or kind is T.FSDP_REDUCE_GRAD:
            if not (stage < self.schedule.num_stages and self.schedule.rank_of_stage[stage] == rank):
                raise Harm(f"{step} is not of rank {rank}")
        if kind in COMPUTE:
            return self._compute(rank, step)
        if kind is T.DATA_LOAD:
            self.done[step] += 1
            if stage != 0 or rank != self.schedule.rank_of_stage[0] or micro >= self.schedule.num_microbatches:
                raise Harm(f"{step} loads the wrong thing")
            self.slots[rank]["D", micro] = self.slots[rank]["T", micro] = ("T", micro)
        elif kind is T.FSDP_UNSHARD:
            if self.schedule.rank_of_stage[stage] != rank:
                raise Harm(f"{step} is not of rank {rank}")
            self.unsharded[rank].add(stage)
        elif kind is T.FSDP_RESHARD:
            if self.schedule.rank_of_stage[stage] != rank:
                raise Harm(f"{step} is not of rank {rank}")
            self.unsharded[rank].discard(stage)
        elif kind is T.FSDP_REDUCE_GRAD:
            self.reduced[stage] += 1
        else:
            self._swap(rank, kind, (stage, micro))
        return True

    def _swap(self, rank: int, kind: MetaStepType, slot: tuple[int, int]) -> None:
        before, after = {
            T.SWAP_LAUNCH_OFFLOAD: ("live", "leaving"),
            T.SWAP_WAIT_OFFLOAD: ("leaving", "out"),
            T.SWAP_LAUNCH_LOAD: ("out", "coming"),
            T.SWAP_WAIT_LOAD: ("coming", "back"),
        }[kind]
        if self.saved[rank].get(slot) != before:
            raise Harm(f"{kind.name} of {slot}, which is {self.saved[rank].get(slot)}")
        self.saved[rank][slot] = after

    def _take(self, rank: int, name, want) -> bool:
        """Whether the token under `name` is there; a wrong token is harm."""
        if name not in self.slots[rank]:
            if self.transport != "multi_stream":
                raise Harm(f"rank {rank} lacks {name}")
            return False
        if self.slots[rank][name] != want:
            raise Harm(f"rank {rank} takes {self.slots[rank][name]} for {want}")
        return True

    def _compute(self, rank: int, step: MetaStep) -> bool:
        kind, stage, micro = step.type, step.stage_index, step.micro_index
        last = self.schedule.num_stages - 1
        slot = (stage, micro)
        if micro >= self.schedule.num_microbatches:
            raise Harm(f"{step} is out of range")
        if kind is T.FWD:
            if stage > 0 and not self._take(rank, ("F", stage - 1, micro), ("F", stage - 1, micro)):
                return False
            if self.has_data and stage == 0:
                if ("D", micro) not in self.slots[rank]:
                    raise Harm(f"{step} has no data")
            if self.has_data and stage == last and not self._take(rank, ("T", micro), ("T", micro)):
                return False
        elif kind is not T.BWD_WEIGHT:
            if stage < last and not self._take(rank, ("G", stage + 1, micro), ("G", stage + 1, micro)):
                return False
        if self.has_fsdp:
            if stage not in self.unsharded[rank]:
                raise Harm(f"{step} runs on sharded parameters")
            if self.reduced[stage] and kind is not T.FWD:
                raise Harm(f"{step} comes after the reduction")
        self.done[step] += 1
        if kind is T.FWD:
            self.slots[rank]["F", stage, micro] = ("F", stage, micro)
            self.saved[rank][slot] = "live"
        elif kind is T.BWD_WEIGHT:
            if ("I", *slot) not in self.slots[rank]:
                raise Harm(f"{step} before its input half")
        else:
            if self.saved[rank].pop(slot, None) not in ("live", "back"):
                raise Harm(f"{step} has no activation")
            self.slots[rank]["G", stage, micro] = ("G", stage, micro)
            if kind is T.BWD_INPUT:
                self.slots[rank]["I", stage, micro] = True
        return True

    def _check_end(self) -> None:
        if self.open_tickets:
            raise Harm("a send or receive never meets its other end")
        for stage in range(self.schedule.num_stages):
            for micro in range(self.schedule.num_microbatches):
                counts = [self.done[MetaStep(micro, kind, stage)] for kind in (T.FWD, T.BWD, T.BWD_INPUT, T.BWD_WEIGHT)]
                if counts not in ([1, 1, 0, 0], [1, 0, 1, 1]):
                    raise Harm(f"stage {stage} micro-batch {micro} ran {counts}")
            if self.has_fsdp and self.reduced[stage] != 1:
                raise Harm(f"stage {stage} reduced {self.reduced[stage]} times")
        if any(count != 1 for count in self.done.values()):
            raise Harm("something ran twice")
        if any(state != "back" for saved in self.saved for state in saved.values()):
            raise Harm("an activation is left over")
