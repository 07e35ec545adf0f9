"""Exchanges by which all ranks reach the same verdict before they act on it. Imports torch.

Saving and loading are collective: one rank that raises alone leaves the others waiting for it. So every step that can
fail on one rank ends with an exchange, after which all raise or none does. Without a process group, one process is all.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException


def is_distributed() -> bool:
    """Return whether there is a process group to exchange over."""
    return dist.is_available() and dist.is_initialized()


def rank_and_world(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in `group` and its size; (0, 1) without a process group."""
    return (dist.get_rank(group), dist.get_world_size(group)) if is_distributed() else (0, 1)


def gather_all(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's `value`, by rank, on every rank. Small values only: they travel as objects."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """Return the lowest failed rank and its exception out of what torch.distributed.checkpoint collected."""
    rank = min(error.failures)
    return rank, error.failures[rank][0]
