"""`hp-train doctor --slurm`: what this cluster offers, and a draft of a launcher option for it. No torch.

The draft is YAML for a file such as ./recipes/launcher/mycluster.yaml, chosen by launcher=mycluster. What the cluster
does not tell, an account above all, is left as a comment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hp_train.config.durations import clock_text
from hp_train.launch.slurm_tools import SlurmError, ask, field_of, missing_tools, seconds_of

_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition: what its nodes have and how long jobs may take."""

    name: str
    is_default: bool
    nodes: int
    cpus: int  # of one node, the fewest
    gpus: int  # of one node, the most; 0: none
    gpu_type: str  # empty where GPUs have no type
    max_time_s: int | None
    preempt_mode: str


def doctor() -> tuple[list[str], bool]:
    """Return the lines to print and whether all is well: partitions, limits, the draft."""
    missing = missing_tools()
    if missing is not None:
        return [missing], False
    try:
        nodes = ask("sinfo", "--noheader", "--format=%P|%D|%c|%G")
        config, partitions = ask("scontrol", "show", "config"), ask("scontrol", "show", "partition", "--oneliner")
    except SlurmError as error:
        return [str(error)], False
    found = read_partitions(nodes, partitions)
    if not found:
        return ["this cluster shows you no partition; ask its administrators which you may use"], False
    return [*describe_cluster(found, config), "", *draft(found, config)], True


def read_partitions(nodes: str, partitions: str) -> list[Partition]:
    """Read `sinfo --format=%P|%D|%c|%G` and `scontrol show partition --oneliner`."""
    limits = {field_of(line, "PartitionName"): line for line in partitions.splitlines() if line.strip()}
    groups: dict[str, list[list[str]]] = {}
    for line in nodes.splitlines():
        name, *rest = line.strip().split("|")
        groups.setdefault(name, []).append(rest)
    found = []
    for shown, rows in groups.items():
        name = shown.rstrip("*")
        line = limits.get(name, "")
        gpus = max((_gpus_of(row[2]) for row in rows), default=(0, ""))
        found.append(Partition(
            name=name,
            is_default=shown.endswith("*"),
            nodes=sum(int(row[0]) for row in rows),
            cpus=min(int(re.match(r"\d+", row[1])[0]) for row in rows),
            gpus=gpus[0],
            gpu_type=gpus[1],
            max_time_s=seconds_of(field_of(line, "MaxTime") or ""),
            preempt_mode=(field_of(line, "PreemptMode") or "OFF").upper(),
        ))  # fmt: skip
    return sorted(found, key=lambda partition: (-partition.gpus, not partition.is_default, partition.name))


def _gpus_of(gres: str) -> tuple[int, str]:
    """Read the GPUs of a node: `gpu:8`, `gpu:h100:8(S:0-1)`, several kinds with commas."""
    found = re.search(r"(?:^|,)gpu:(?:([A-Za-z][\w.-]*):)?(\d+)", gres)
    return (int(found[2]), found[1] or "") if found else (0, "")


def describe_cluster(partitions: Sequence[Partition], config: str) -> list[str]:
    """Return a line for the cluster and one for each partition."""
    settings = dict(re.findall(r"^(\w+)\s+= (.*?)\s*$", config, flags=re.MULTILINE))
    requeue = "may be queued again" if settings.get("JobRequeue", "1") != "0" else "are not queued again by default"
    lines = [
        f"SLURM {settings.get('SLURM_VERSION', 'of unknown version')}, cluster "
        f"{settings.get('ClusterName', 'unnamed')}: jobs {requeue}, KillWait {settings.get('KillWait', 'unknown')}"
    ]
    for partition in partitions:
        gpus = (
            f"{partition.gpus} {partition.gpu_type + ' ' if partition.gpu_type else ''}GPUs"
            if partition.gpus
            else "no GPUs"
        )
        limit = clock_text(partition.max_time_s) if partition.max_time_s else "no time limit"
        preempt = "" if partition.preempt_mode == "OFF" else f", preempted by {partition.preempt_mode}"
        name = f"{partition.name} (default)" if partition.is_default else partition.name
        lines.append(f"  {name}: {partition.nodes} nodes x {partition.cpus} cores, {gpus}, {limit}{preempt}")
    return lines


def draft(partitions: Sequence[Partition], config: str) -> list[str]:
    """Return the YAML of a launcher option for the partition with the most GPUs."""
    best = partitions[0]
    lines = [
        "# A launcher option for this cluster: save it as recipes/launcher/mycluster.yaml, say launcher=mycluster.",
        "name: slurm",
        f"partition: {best.name}",
        "# account: your_account",
    ]
    if best.gpus:
        lines += [f"nproc_per_node: {best.gpus}", f"gpu_request: {_request(best, config)}"]
    else:
        lines += ["gpu_request: none  # no GPUs here: recipes need trainer.device=cpu"]
    limit = min(best.max_time_s or _DAY_S, _DAY_S)
    lines.append(f'time: "{clock_text(limit)}"')
    return lines


def _request(partition: Partition, config: str) -> str:
    """Return how GPUs are asked for: --gpus-per-node needs select/cons_tres, --gres works everywhere."""
    form = "gpus_per_node" if re.search(r"^SelectType\s+= select/cons_tres", config, flags=re.MULTILINE) else "gres"
    return f"{form}:{partition.gpu_type}" if partition.gpu_type else form
