"""The collective that this process is in, from torch's flight recorder. Imports torch only if it is loaded already.

torch notes the latest collectives of every process group, with a number that counts them (`TORCH_FR_BUFFER_SIZE`, see
torch.distributed's documentation of the flight recorder). Ranks that stand at different numbers of one group are how a
hang begins.
"""

from __future__ import annotations

import json
import sys

LATEST = "latest "  # before a collective that may have ended already
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of NCCL, and of the other backends


def collective_in_flight() -> str:
    """Return e.g. `gloo:all_reduce, number 12 of default_pg`, the oldest under way; empty when nothing is recorded.

    Backends that do not note the end of a collective are asked for their latest.
    """
    recorder = sys.modules.get("torch._C._distributed_c10d")
    for name in _DUMPS:
        dump = getattr(recorder, name, None)
        if dump is None:
            continue
        entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
        active = [entry for entry in entries if not entry.get("retired")]
        if active:
            return _describe(active[0])  # what comes after it waits for it
        if entries:
            return f"{LATEST}{_describe(entries[-1])}"
    return ""


def _describe(entry: dict) -> str:
    group = entry.get("process_group", ["", "?"])[-1]
    number = entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
    return f"{entry.get('profiling_name', 'a collective')}, number {number} of {group}"
