"""The V schedules, two stages a rank: rank r holds stage r on the way down and stage 2p - 1 - r on the way up.

No torch. A rank's order is a list of phases, each a short pattern repeated; patterns are written in the papers'
letters: F0, I0, W0, B0 on the first stage of the rank, F1, I1, W1, B1 on the second. Every kind of step takes the
micro-batches of its stage in order, so a pattern need not name them.
"""

from __future__ import annotations

from collections import Counter, deque

from hp_train.schedule.steps import MetaStep, MetaStepType

_T = MetaStepType
_KIND = {"F": _T.FWD, "I": _T.BWD_INPUT, "W": _T.BWD_WEIGHT, "B": _T.BWD}


class _RankOrder:
    """One rank's order as it grows; `add` takes the letters of a pattern."""

    def __init__(self, rank: int, p: int) -> None:
        self.stages = (rank, 2 * p - 1 - rank)
        self.steps: list[MetaStep] = []
        self._next_micro: Counter[tuple[str, int]] = Counter()
        self._owed_weights: deque[MetaStep] = deque()

    def add(self, pattern: str, times: int = 1) -> None:
        """Append the steps of `pattern`, e.g. "F0 I1 W1", `times` over; "w" is the weight gradient owed longest."""
        letters = pattern.split()
        for _ in range(times):
            for letter in letters:
                if letter == "w":
                    self.steps += [self._owed_weights.popleft()] if self._owed_weights else []
                else:
                    self.steps.append(self._step(letter))

    def add_overlap(self, forward: str, backward: str) -> None:
        """Append an OVERLAP_F_B of the two, e.g. "F0" and "B1"."""
        pair = (self._step(forward), self._step(backward))
        self.steps.append(MetaStep(None, _T.OVERLAP_F_B, None, pair))

    def count(self, letter: str) -> int:
        """How many steps of this kind and stage there are so far, e.g. of "F0"."""
        return self._next_micro[_counter_key(letter)]

    def _step(self, letter: str) -> MetaStep:
        key = _counter_key(letter)
        micro, stage = self._next_micro[key], self.stages[int(letter[1])]
        self._next_micro[key] += 1
        if letter[0] == "I":
            self._owed_weights.append(MetaStep(micro, _T.BWD_WEIGHT, stage))
        return MetaStep(micro, _KIND[letter[0]], stage)


def _counter_key(letter: str) -> tuple[str, int]:
    # A micro-batch runs back either whole or in halves: B and I draw from one count.
    return ("I" if letter[0] == "B" else letter[0]), int(letter[1])


def zbv_order(rank: int, p: int, m: int, v: int) -> list[MetaStep]:
    """ZB-V (arXiv:2401.10241, section 6), the handcrafted order for F = I = W.

    Its bubble is (p - 1)(F + I - W) / 2 of a rank's costs for F = W and I <= 2F, no more for W <= F <= I <= F + W, and
    can be more elsewhere, which `simulate` tells.

    With fewer than 2p - 1 micro-batches it is the order for 2p - 1 without those that do not exist; leaving out whole
    micro-batches leaves the dependencies of the others as they were.
    """
    order = _RankOrder(rank, p)
    num_micro = max(m, 2 * p - 1)
    order.add("F0", 2 * (p - rank) - 1)
    order.add("F1 F0", rank)
    order.add("F1 I1 W1", p - rank)
    while order.count("F1") < num_micro:
        if order.count("F0") < num_micro:
            order.add("F0")
        order.add("I0 W0 F1 I1 W1")
    order.add("I0 I1", rank)
    order.add("I0 W0", p - rank)
    order.add("W1", num_micro - order.count("W1"))
    order.add("W0", num_micro - order.count("W0"))
    return [step for step in order.steps if step.micro_index < m]


def dualpipe_v_order(rank: int, p: int, m: int, v: int) -> list[MetaStep]:
    """DualPipeV: the forward of one stage overlaps the backward of the other (arXiv:2412.19437; cut in half to a V).

    Needs m >= 2p. Weight gradients are put off only at the two ends, where they fill bubbles. Where forwards cost more
    than input gradients the bubble can pass the closed form for F = I = W; `simulate` tells.
    """
    behind = p - 1 - rank
    order = _RankOrder(rank, p)
    order.add("F0", 2 * behind)
    order.add("F0 F1", rank + 1)
    order.add("I1 w F1", behind)
    for turn in range(m - 2 * p + rank + 1):
        if turn == 0 and behind == 0:
            order.add("F0 B1")  # the tip of the V has just made this backward's input: nothing to gain by pairing
        else:
            order.add_overlap("F0", "B1")
        order.add_overlap("F1", "B0")
    for _ in range(behind):
        order.add("B1")
        order.add_overlap("F1", "B0")
    # From the middle of the drain on, input gradients go first and the weight gradients they leave fill the gaps.
    # Odd and even ranks switch half a turn apart, so that neighbours meet.
    num_turns = rank + 1
    num_whole = 2 * (num_turns // 2) + (rank + 1) % 2
    for index in range(2 * num_turns):
        order.add(f"{'B' if index < num_whole else 'I'}{1 - index % 2}")
    order.add("w I0", behind)
    order.add("w", num_turns)
    return order.steps
