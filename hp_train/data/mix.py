"""Several sources in one stream of samples. Imports numpy and siblings, never torch.

Which source a sample comes from, and which of that source's samples it is, is a function of the global sample index
alone: the same on every mesh, in every order of asking, and after a resume. Sources are split off one after the other.
The first, with share p of what is left, takes sample i where floor(i p + 1/2) grows, as in Bresenham's line (1965): its
count of samples before any i is never off by more than 1/2 from its share, and is known without going through them.
The rest is counted anew and split in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from hp_train.data.source import Batch, TokenSource

_ONE = 1 << 32  # shares are fractions of this: integers, so that every machine rounds alike


class MixedSource:
    """Samples of several sources by weight. `num_sequences` is how many take every source to its end at least once."""

    def __init__(self, sources: Mapping[str, TokenSource], weights: Mapping[str, float]) -> None:
        assert sources.keys() == weights.keys() and all(weight > 0 for weight in weights.values())
        self._sources = tuple(sources.values())
        self._shares = _shares_of_what_is_left(tuple(weights.values()))
        total = sum(weights.values())
        self.num_sequences = max(
            ceil((source.num_sequences + 1) * total / weights[name]) for name, source in sources.items()
        )

    def place(self, sample: int) -> tuple[int, int]:
        """Return the number of the source that global sample `sample` comes from, and its index in that source."""
        for number, share in enumerate(self._shares):
            before, after = _count(sample, share), _count(sample + 1, share)
            if after > before:
                return number, before
            sample -= before
        return len(self._shares), sample

    def batch(self, samples: Sequence[int]) -> Batch:
        """See `TokenSource`."""
        places = [self.place(int(sample)) for sample in samples]
        rows_of: dict[int, list[int]] = {}
        for row, (number, _) in enumerate(places):
            rows_of.setdefault(number, []).append(row)
        parts = {
            number: self._sources[number].batch([places[row][1] for row in rows]) for number, rows in rows_of.items()
        }
        return Batch(
            **{
                name: _gather({number: getattr(part, name) for number, part in parts.items()}, rows_of)
                for name in ("tokens", "targets", "positions", "document_ids")
            }
        )


def _shares_of_what_is_left(weights: Sequence[float]) -> list[int]:
    """Return, for each source but the last, its share of what the sources before it leave, in units of 1 / _ONE."""
    left = [sum(weights[number:]) for number in range(len(weights))]
    return [
        min(max(round(weight / rest * _ONE), 1), _ONE - 1) for weight, rest in zip(weights[:-1], left[:-1], strict=True)
    ]


def _count(sample: int, share: int) -> int:
    """Return how many of the samples before `sample` a source with `share` takes."""
    return (sample * share + _ONE // 2) // _ONE


def _gather(
    parts: Mapping[int, NDArray[np.int64] | None], rows_of: Mapping[int, Sequence[int]]
) -> NDArray[np.int64] | None:
    """Return the rows of `parts` in the order of the batch; None where the sources have none."""
    if any(part is None for part in parts.values()):
        assert all(part is None for part in parts.values()), "sources that treat document boundaries differently"
        return None
    num_rows = sum(map(len, rows_of.values()))
    whole = np.empty((num_rows, next(iter(parts.values())).shape[1]), dtype=np.int64)
    for number, rows in rows_of.items():
        whole[rows] = parts[number]
    return whole
