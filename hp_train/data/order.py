"""The order of samples: which sequence of the corpus a global sample index means.

Pure; imports numpy only, never torch. Every epoch visits every sequence once, in an order that is a pure function of
(seed, epoch, number of sequences): a keyed permutation computed entry by entry, so nothing is shuffled, stored or
replayed. To resume a run, or to move it to another mesh, the count of samples seen is all that is needed.

The permutation is a generalised Feistel network on Z_a x Z_b with a*b just above n, and cycle-walking for the few
values that fall outside n (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). The round
function is the splitmix64 finaliser (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA
2014): well mixed, which is what a data order needs, and no cryptography.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 8  # with 6, some orders of a handful of sequences come several times too often
MAX_SEQUENCES = 2**62

_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit integers, one to one: a flipped input bit flips each output bit half of the time."""
    mixed = values + _GOLDEN_RATIO
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def hash_words(*words: int | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash several 64-bit words (broadcast against each other) to one; integers are taken modulo 2**64."""
    state = np.zeros(1, dtype=np.uint64)
    for word in words:
        word = np.array([word & (2**64 - 1)], dtype=np.uint64) if isinstance(word, int) else word
        state = mix64(state ^ mix64(word))
    return state


def sequence_indices(seed: int, samples: Sequence[int] | NDArray[np.integer], num_sequences: int) -> NDArray[np.int64]:
    """For each global sample index the sequence it means, in [0, num_sequences): same shape as `samples`, int64.

    Sample s lies in epoch s // num_sequences; within an epoch no sequence comes twice.
    """
    assert 1 <= num_sequences <= MAX_SEQUENCES, f"no order over {num_sequences} sequences"
    samples = np.asarray(samples, dtype=np.uint64)
    epochs, places = np.divmod(samples, np.uint64(num_sequences))
    return _permute(places, hash_words(seed, epochs), num_sequences).astype(np.int64)


def _permute(places: NDArray[np.uint64], keys: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
    """The permutation of [0, n) chosen by each place's key. Values that leave [0, n) walk on until they are back in."""
    a = math.isqrt(n - 1) + 1  # ceil(sqrt(n))
    b = -(-n // a)
    values = _feistel(places, keys, a, b)
    while (outside := values >= np.uint64(n)).any():
        values[outside] = _feistel(values[outside], keys[outside], a, b)
    return values


def _feistel(values: NDArray[np.uint64], keys: NDArray[np.uint64], a: int, b: int) -> NDArray[np.uint64]:
    """A keyed permutation of [0, a*b): left in [0, a) and right in [0, b) are shifted by each other's hash."""
    left_size, right_size = np.uint64(a), np.uint64(b)
    left, right = np.divmod(values, right_size)
    for number in range(0, NUM_ROUNDS, 2):
        left = (left + hash_words(keys, number, right) % left_size) % left_size
        right = (right + hash_words(keys, number + 1, left) % right_size) % right_size
    return left * right_size + right
