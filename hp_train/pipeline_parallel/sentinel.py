"""Beside the pipeline: a board that all its ranks see, where the first failure is posted and hangs are explained.

Imports torch's key-value store and a sibling. A rank that fails posts its cause and destroys its pipeline groups; that
wakes the ranks waiting for it, which find the cause here instead of a closed connection, and do the same in turn. A
thread looks at the board twice a second, so that a rank in the middle of other work stops at its next step, and tells
where its rank stands when somebody asks.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from hp_train.errors import ConfigError, HpTrainError
from hp_train.pipeline_parallel.transport import NOT_STARTED

_POLL_S = 0.5
_PATIENCE_S = 3.0


class PipelineError(HpTrainError):
    """Another rank of the pipeline failed; the message is that rank's cause."""


class PipelineHang(HpTrainError):
    """A transfer did not end in time; the message says where each rank stands."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank is: its step, and the transfer that it waits for, if any. Ranks are pipeline ranks."""

    pp_rank: int
    global_rank: int
    position: int
    step: str
    transport: str
    edge: str = ""
    micro_index: int = -1
    peer_pp_rank: int = -1

    def __str__(self) -> str:
        text = f"pipeline rank {self.pp_rank} (process {self.global_rank}) stands on step {self.position} {self.step}"
        if self.peer_pp_rank < 0:
            return f"{text}, not waiting for a peer"
        doing = "waiting for" if self.micro_index != NOT_STARTED else "starting a transfer with"
        what = f"micro-batch {self.micro_index}" if self.micro_index >= 0 else "the header"
        what = f", {what}" if self.micro_index != NOT_STARTED else ""
        return f"{text}, {doing} rank {self.peer_pp_rank} over {self.transport}: {self.edge}{what}"


class Sentinel:
    """The board of one pipeline, as one of its ranks sees it.

    standing: says where this rank is. on_failure: called by the watching thread when some rank has failed.
    """

    def __init__(
        self,
        global_ranks: Sequence[int],
        pp_rank: int,
        standing: Callable[[], Standing],
        on_failure: Callable[[], None],
    ) -> None:
        self.failure: dict | None = None
        self._on_failure = on_failure
        self._pp_rank, self._size, self._standing = pp_rank, len(global_ranks), standing
        store = dist.distributed_c10d._get_default_store()
        # A connection of its own: a thread that waits on the shared one would hold up new_group() in the main thread.
        self.store = dist.PrefixStore(f"pipeline_{'_'.join(map(str, global_ranks))}_{_next_number()}", store.clone())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pipeline-sentinel", daemon=True)
        self._thread.start()

    def compare(self, digest: str) -> None:
        """Raise ConfigError unless every rank of the pipeline shows the same digest."""
        self.store.set(f"digest_{self._pp_rank}", digest)
        keys = [f"digest_{rank}" for rank in range(self._size)]
        self.store.wait(keys)
        digests = [self.store.get(key).decode() for key in keys]
        if len(set(digests)) > 1:
            shown = ", ".join(f"rank {rank} {each[:12]}" for rank, each in enumerate(digests))
            raise ConfigError(
                f"pipeline ranks run different schedules or transports: {shown}; start all from one config"
            )

    def post(self, kind: str, cause: str) -> None:
        """Post a failure; the first one stays."""
        entry = json.dumps({"kind": kind, "cause": cause, "pp_rank": self._pp_rank})
        self.failure = json.loads(self.store.compare_set("failure", "", entry))

    def look(self, patience_s: float = 0.0) -> dict | None:
        """The first failure, if one is posted within `patience_s` seconds: kind, cause and pp_rank."""
        deadline = time.monotonic() + patience_s
        while self.failure is None:
            if self.store.check(["failure"]):
                self.failure = json.loads(self.store.get("failure"))
            elif time.monotonic() >= deadline:
                break
            else:
                time.sleep(0.02)
        return self.failure

    def tell_standing(self) -> None:
        """Write on the board where this rank stands."""
        self.store.set(f"standing_{self._pp_rank}", json.dumps(asdict(self._standing())))

    def explain_hang(self) -> str:
        """Where every rank stands, and which two disagree. Waits a little for those that have not said so yet."""
        keys = [f"standing_{rank}" for rank in range(self._size)]
        deadline = time.monotonic() + _PATIENCE_S
        while not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)
        standings = [Standing(**json.loads(self.store.get(key))) if self.store.check([key]) else None for key in keys]
        lines = [str(each) if each else f"pipeline rank {rank} says nothing" for rank, each in enumerate(standings)]
        return "\n".join([*lines, _disagreement(standings)])

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_S):
            try:
                found = self.store.check(["failure"])
                if found:
                    self.failure = self.failure or json.loads(self.store.get("failure"))
                    self.tell_standing()
                    self._on_failure()
                    return
            except (RuntimeError, dist.DistError):
                return  # the store's host is gone, and the job with it: the main thread sees that for itself


def _disagreement(standings: Sequence[Standing | None]) -> str:
    """Follow who waits for whom to the rank that does not wait, or round the cycle: the last link is the broken one."""
    waiting = [each for each in standings if each is not None and each.peer_pp_rank >= 0]
    if not waiting:
        return "no rank waits for a peer: the time went into computing"
    current, seen = waiting[0], set()
    while True:
        seen.add(current.pp_rank)
        peer = standings[current.peer_pp_rank]
        if peer is None or peer.peer_pp_rank < 0 or peer.pp_rank in seen:
            place = f"stands on step {peer.position} {peer.step}" if peer else "says nothing"
            return (
                f"ranks {current.pp_rank} and {current.peer_pp_rank} disagree: rank {current.pp_rank} waits on step "
                f"{current.position} {current.step}, rank {current.peer_pp_rank} {place}"
            )
        current = peer


_numbers = iter(range(1 << 62))


def _next_number() -> int:
    """Pipelines are made in the same order on all their ranks, so the counters agree."""
    return next(_numbers)
