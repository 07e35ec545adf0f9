"""Is a run worth starting again after a failure? Told from how its attempts ended. No torch.

The launcher asks after each failed attempt, and the script of a scheduler's job before it queues the next incarnation:
both go by the outcomes in the run directory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from hp_train.launch.outcome import Cause, Outcome

# What differs from attempt to attempt: addresses, times, how many collectives there were since the start.
_MOVING_PARTS = re.compile(r"0x[0-9a-f]+|\b\d+(\.\d+)? s\b|\bnumber \d+")
_SAYS_NOTHING = (Cause.COMMUNICATION, Cause.LOST_NODE)  # their messages are alike whatever the reason


def why_not_again(outcomes: Sequence[Outcome]) -> str | None:
    """Return why the run should not be started again by itself, or None. `outcomes` are of its attempts, in order.

    Not after causes that another attempt cannot mend; not when the last two attempts failed the same way at the same
    step; not when neither of the last two brought a newer checkpoint.
    """
    if not outcomes:
        return None
    last = outcomes[-1]
    if last.gave_up:
        return f"attempt {last.attempt} came no further than the one before"
    if not last.may_restart:
        return f"an attempt that ends as {last.cause} is not started again"
    if len(outcomes) < 2:
        return None
    before = outcomes[-2]
    if last.cause not in _SAYS_NOTHING and _signature(last) == _signature(before) and not last.cause.is_saved:
        return f"attempts {before.attempt} and {last.attempt} failed the same way at step {last.step}"
    if not (_brought_a_checkpoint(before) or _brought_a_checkpoint(last)):
        return f"attempts {before.attempt} and {last.attempt} ended without a newer checkpoint than they began with"
    return None


def _brought_a_checkpoint(outcome: Outcome) -> bool:
    return 0 < outcome.first_step <= outcome.committed_step


def _signature(outcome: Outcome) -> tuple[Cause, int, str]:
    return outcome.cause, outcome.step, _MOVING_PARTS.sub("", outcome.message)


def nodes_to_exclude(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the nodes on which attempts failed twice or more, worst first: the next attempt does without them."""
    failures = Counter(outcome.node for outcome in outcomes if outcome.node and not outcome.cause.is_saved)
    return tuple(node for node, times in failures.most_common() if times >= 2)
