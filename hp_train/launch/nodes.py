"""The launchers of one job, one on each node, and what they tell each other. Imports torch.

They meet at a store that the first node's launcher holds. It leads: it owns the run directory, numbers the attempts and
judges their ends. The others follow: they run their share of an attempt, tell how it ended, and wait for the next. A
node whose workers fail raises a flag that all look at, so that no node waits for peers that are gone. rank = number of
the node x processes per node + local rank, on every attempt: torch's own rendezvous gives no such promise.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from hp_train.errors import HpTrainError
from hp_train.launch.attempt_end import AttemptRecord
from hp_train.launch.failures import DeadWorker
from hp_train.launch.hang import Frame, Standing
from hp_train.training.progress import Note, Phase

_MEET_S = 600.0  # for the launchers of all nodes to come up
_DECIDE_S = 86_400.0 * 365  # followers wait while the leader judges, which may wait for its own node for as long
_REPORT_S = 30.0  # for the other nodes to end their workers after the first has


class NodesError(HpTrainError):
    """The launchers of a job did not find each other, or lost one."""


class NodeGroup:
    """This launcher's place among those of its job."""

    def __init__(self, node_rank: int, num_nodes: int, host: str, port: int, *, meet_s: float = _MEET_S) -> None:
        """Meet the others at `host:port`, where the launcher with `node_rank` 0 listens. Raises NodesError."""
        self.node_rank = node_rank
        self.num_nodes = num_nodes
        self.host = host
        try:
            self._store: Store = TCPStore(
                host, port, num_nodes, is_master=node_rank == 0, timeout=timedelta(seconds=meet_s), multi_tenant=True
            )
        except (DistError, RuntimeError, OSError) as error:
            first = str(error).splitlines()[0]
            raise NodesError(
                f"node {node_rank} of {num_nodes} ({socket.gethostname()}) did not meet the others at {host}:{port} "
                f"within {meet_s:.0f} s: {first}"
            ) from error
        self.names = self._exchange_names()

    @property
    def leads(self) -> bool:
        """Say whether this is the first node's launcher."""
        return self.node_rank == 0

    def _exchange_names(self) -> tuple[str, ...]:
        self._store.set(f"name/{self.node_rank}", socket.gethostname())
        return tuple(self._store.get(f"name/{rank}").decode() for rank in range(self.num_nodes))

    def tell_round(self, number: int, attempt: int) -> None:
        """As the leader, say which attempt comes in round `number`; 0: none, all is over."""
        self._store.set(f"round/{number}", str(attempt))

    def hear_round(self, number: int) -> int:
        """As a follower, wait for the leader's word on round `number`. Raises NodesError when the leader is gone."""
        try:
            self._store.wait([f"round/{number}"], timedelta(seconds=_DECIDE_S))
            return int(self._store.get(f"round/{number}"))
        except (DistError, RuntimeError) as error:
            raise NodesError(f"the launcher on {self.names[0]} is gone") from error

    def raise_flag(self, attempt: int) -> None:
        """Tell all nodes that `attempt` has failed."""
        self._store.set(f"failed/{attempt}", "1")

    def flag_is_up(self, attempt: int) -> bool:
        """Say whether some node has told that `attempt` failed. A leader that is gone counts as one."""
        try:
            return self._store.check([f"failed/{attempt}"])
        except (DistError, RuntimeError):
            return True

    def report(self, record: AttemptRecord) -> None:
        """As a follower, tell the leader what was seen of this node's share of an attempt."""
        self._store.set(f"end/{record.attempt}/{self.node_rank}", json.dumps(_encode(record)))

    def take_reports(self, record: AttemptRecord) -> None:
        """As the leader, add what the followers saw; a node that says nothing in time is noted as lost."""
        wait_s = _REPORT_S
        for rank in range(1, self.num_nodes):
            key = f"end/{record.attempt}/{rank}"
            try:
                self._store.wait([key], timedelta(seconds=wait_s))
            except (DistError, RuntimeError):
                wait_s = 0.1  # the others have had their time as well
                record.lost_node = record.lost_node or self.names[rank]
                continue
            _add(record, json.loads(self._store.get(key)))

    def leave(self) -> None:
        """As a follower, tell that this node needs the store no more; as the leader, wait for all to have done so."""
        if not self.leads:
            self._store.set(f"left/{self.node_rank}", "1")
            return
        for rank in range(1, self.num_nodes):
            try:
                self._store.wait([f"left/{rank}"], timedelta(seconds=5))
            except (DistError, RuntimeError):
                return

    def rendezvous(self, attempt: int) -> RendezvousHandler:
        """Return what gives the workers of `attempt` their ranks and the place where they meet."""
        return _Rendezvous(PrefixStore(f"attempt_{attempt}", self._store), self.node_rank, self.num_nodes, self.host)


class _Rendezvous(RendezvousHandler):
    """Ranks by the number of the node; the workers' own store is on the first node, on a port that is free there."""

    def __init__(self, store: Store, node_rank: int, num_nodes: int, host: str) -> None:
        self._store, self._node_rank, self._num_nodes, self._host = store, node_rank, num_nodes, host

    def get_backend(self) -> str:
        return "hp-train"

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        meeting = RendezvousStoreInfo.build(self._node_rank, self._store, local_addr=self._host)
        return RendezvousInfo(self._store, self._node_rank, self._num_nodes, meeting)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to close: the launcher's store outlives every attempt."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "hp-train"

    def shutdown(self) -> bool:
        return True


def _encode(record: AttemptRecord) -> dict[str, Any]:
    return {
        "dead": [asdict(worker) for worker in record.dead],
        "notes": {rank: asdict(note) for rank, note in record.notes.items() if note is not None},
        "standings": [asdict(standing) for standing in record.standings],
        "stood_still_s": record.stood_still_s,
    }


def _add(record: AttemptRecord, told: dict[str, Any]) -> None:
    record.dead.extend(DeadWorker(**worker) for worker in told["dead"])
    for rank, note in told["notes"].items():
        record.notes[int(rank)] = Note(**{**note, "phase": Phase(note["phase"])})
    for standing in told["standings"]:
        frames = tuple(Frame(**frame) for frame in standing["frames"])
        record.standings.append(Standing(**{**standing, "frames": frames}))
    record.stood_still_s = max(record.stood_still_s, told["stood_still_s"])
