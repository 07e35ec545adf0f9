"""The form of a rule over several settings. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hp_train.config.schema import TrainerConfig


@dataclass(frozen=True, slots=True)
class Rule:
    """`check` yields one line for each fault; it is called only when every key in `reads` has a sound value."""

    reads: tuple[str, ...]
    check: Callable[[TrainerConfig], Iterable[str]]


def divisors_text(number: int, limit: int | None = None) -> str:
    """Return in words what divides `number`, at most to `limit`: `1, 2, 4 or 8`; long lists are cut in the middle."""
    limit = number if limit is None else min(limit, number)
    found = {small for small in range(1, min(limit, 100_000) + 1) if small * small <= number and number % small == 0}
    divisors = sorted(d for d in found | {number // small for small in found} if d <= limit)
    texts = [str(divisor) for divisor in divisors]
    if len(texts) > 10:
        texts = [*texts[:6], "...", *texts[-3:]]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
