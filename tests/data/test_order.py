"""The order of samples is a permutation in every epoch, and a function of seed and sample index alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_train.data.order import MAX_SEQUENCES, hash_words, sequence_indices

SEEDS = st.integers(0, 2**64 - 1)


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, epoch=st.integers(0, 10**6), n=st.integers(1, 3000))
def test_every_epoch_visits_every_sequence_once(seed: int, epoch: int, n: int) -> None:
    visited = sequence_indices(seed, np.arange(epoch * n, (epoch + 1) * n), n)
    assert np.array_equal(np.sort(visited), np.arange(n))


@settings(max_examples=40, deadline=None)
@given(
    seed=SEEDS, n=st.integers(1, MAX_SEQUENCES), samples=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20)
)
def test_a_sample_means_the_same_in_any_company(seed: int, n: int, samples: list[int]) -> None:
    together = sequence_indices(seed, samples, n)
    assert together.tolist() == [int(sequence_indices(seed, [sample], n)[0]) for sample in samples]
    assert 0 <= together.min() and together.max() < n


def test_large_corpora_are_permuted_without_collision() -> None:
    n = 10**12 + 39
    visited = sequence_indices(3, np.arange(200_000), n)
    assert len(np.unique(visited)) == 200_000
    # Uniform over [0, n): the mean of 200,000 draws lies within 5 standard errors of the middle.
    assert abs(visited.mean() / n - 0.5) < 5 / np.sqrt(12 * 200_000)


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    n = 5000
    orders = np.stack([sequence_indices(seed, np.arange(2 * n), n).reshape(2, n) for seed in range(10)]).reshape(20, n)
    correlation = np.corrcoef(orders) - np.eye(20)
    # Independent orders: a correlation has standard deviation 1 / sqrt(n); 5 of them leave room for 190 pairs.
    assert np.abs(correlation).max() < 5 / np.sqrt(n)
    # Neighbours stay neighbours about as often as in a random order (2 of n pairs), not more.
    neighbours = (np.abs(np.diff(orders, axis=1)) == 1).sum(axis=1)
    assert neighbours.max() <= 12


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_order_of_a_few_sequences_occurs_about_equally_often(n: int) -> None:
    num_epochs, num_orders = 12_000, {2: 2, 3: 6, 4: 24}[n]
    orders = sequence_indices(1, np.arange(num_epochs * n), n).reshape(num_epochs, n)
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == num_orders
    # Counts of 500 and more: a fair draw stays within 5 standard deviations, 23%; the network may add a little bias.
    assert np.abs(counts * num_orders / num_epochs - 1).max() < 0.3


def test_the_hash_depends_on_every_word_and_on_their_order() -> None:
    hashes = {
        int(hash_words(*words)[0]) for words in [(1, 2), (2, 1), (1, 2, 0), (1,), (2,), (0, 1, 2), (1 + 2**63, 2)]
    }
    assert len(hashes) == 7
