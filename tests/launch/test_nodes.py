"""What the launchers of a job tell each other, over a real store; each launcher is a thread here."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hp_train.launch import nodes
from hp_train.launch.attempt_end import AttemptRecord
from hp_train.launch.failures import DeadWorker
from hp_train.launch.hang import Frame, Standing
from hp_train.launch.nodes import NodeGroup, NodesError
from hp_train.topology import MeshSizes
from hp_train.training.progress import Note, Phase


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _meet(num_nodes: int) -> list[NodeGroup]:
    port = _port()
    with ThreadPoolExecutor(num_nodes) as pool:
        return list(pool.map(lambda rank: NodeGroup(rank, num_nodes, "127.0.0.1", port), range(num_nodes)))


def _record(run_dir: Path) -> AttemptRecord:
    return AttemptRecord(run_dir, 3, MeshSizes(dp_shard=6), started_at=time.time())


def test_followers_hear_rounds_flags_and_the_end() -> None:
    leader, *followers = _meet(3)
    assert leader.leads and not followers[0].leads and len(leader.names) == 3
    heard: list[int] = []
    waiting = threading.Thread(target=lambda: heard.append(followers[1].hear_round(0)))
    waiting.start()
    leader.tell_round(0, 7)
    waiting.join()
    assert heard == [7] and followers[0].hear_round(0) == 7
    assert not leader.flag_is_up(7)
    followers[0].raise_flag(7)
    until = time.monotonic() + 10  # a set is on its way to the store when it returns
    while not (leader.flag_is_up(7) and followers[1].flag_is_up(7)):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not leader.flag_is_up(8)
    leader.tell_round(1, 0)
    assert followers[0].hear_round(1) == 0


def test_workers_are_ranked_by_node_and_meet_on_the_first() -> None:
    groups = _meet(3)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda group: group.rendezvous(1).next_rendezvous(), groups))
    assert [(info.rank, info.world_size) for info in found] == [(0, 3), (1, 3), (2, 3)]
    meetings = {(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in found}
    assert len(meetings) == 1 and next(iter(meetings))[0] == "127.0.0.1"


def test_the_leader_takes_what_followers_saw_and_notes_a_lost_node(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(nodes, "_REPORT_S", 0.5)
    leader, follower, _ = _meet(3)
    told = _record(tmp_path)
    told.dead.append(DeadWorker(2, -9, 5))
    told.notes[2] = Note(4, Phase.DATA, 1.5)
    told.standings.append(Standing(3, 4, "data", 2.0, (Frame("a.py", 1, "f"),), "0F3"))
    told.stood_still_s = 9.0
    follower.report(told)
    heard = _record(tmp_path)
    leader.take_reports(heard)
    assert (heard.dead, heard.notes, heard.standings) == (told.dead, told.notes, told.standings)
    assert heard.stood_still_s == 9.0
    assert heard.lost_node == leader.names[2]


def test_a_node_that_does_not_come_is_an_error_within_the_time() -> None:
    with pytest.raises(NodesError, match=r"node 0 of 2 .* did not meet the others at 127.0.0.1:\d+ within 1 s"):
        NodeGroup(0, 2, "127.0.0.1", _port(), meet_s=1)
