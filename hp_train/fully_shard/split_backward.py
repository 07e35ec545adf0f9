"""Tells a backward that computes input gradients alone, leaving the weights' to a later one.

Imports torch and this package's hooks and state. Pipelines with split backward run `torch.autograd.grad` for the
inputs first. A unit must then stay full: the later backward still needs its parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hp_train.fully_shard.hooks import accumulates_into
from hp_train.fully_shard.state import HSDPState


@dataclass(frozen=True, slots=True)
class _Before:
    """How things stood when a backward that does not reach the unit's parameters came to the unit."""

    was_full: bool
    grad_marks: list[tuple[int, int] | None]


class SplitBackward:
    """Watches one unit through a backward: `enter` when it arrives, `leave` when it has passed."""

    def __init__(self, state: HSDPState) -> None:
        self._state = state
        self._before: _Before | None = None
        with torch.inference_mode(False):
            self.probe = torch.zeros((), device=state.dp_mesh.device, requires_grad=True)

    def enter(self, *, was_full: bool, marked: bool) -> None:
        """Remember the gradients as they are if this backward leaves the unit's parameters to a later one.

        Parameters that it does not reach may also be unused on this rank, while others wait for the reduction. The
        `probe`, a leaf among the inputs of the mark at the unit's inputs, tells: a backward that asks for input
        gradients alone leaves it out, a whole one does not. Without a mark (`marked`) no input requires a gradient
        that could be asked for alone. `was_full`: the unit was full before, so its full parameters can have been
        asked for.
        """
        params = [param.unsharded for param in self._state.trainable if param.unsharded is not None]
        left_out = bool(params) and marked and not any(accumulates_into(leaf) for leaf in (self.probe, *params))
        self._before = _Before(was_full, self._state.grad_marks()) if left_out else None

    def leave(self, *, pipelined: bool) -> bool:
        """Whether the weight gradients are still to come.

        They are if no parameter was in the backward's graph and no gradient came (under reentrant checkpointing they
        come from a backward inside the backward). The later backward's caller must hold the very Parameters that
        forward used. torch's pipeline runtime (`pipelined`: it turns gradient sync and the end of the step off) asks
        the module for them while the unit is sharded: it would get the wrong ones and silently no gradients, so that
        raises RuntimeError.
        """
        before, self._before = self._before, None
        if before is None or before.grad_marks != self._state.grad_marks():
            return False
        if pipelined and not before.was_full:
            raise RuntimeError(
                f"unit {self._state.fqn or 'root'}: input gradients are computed apart from weight gradients, but the "
                "unit was resharded after forward, so the caller cannot hold its full parameters; call "
                "module.unshard(recurse=True, hold=True) before, or use reshard_after_forward=False"
            )
        return True
