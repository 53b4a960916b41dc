"""Where records go: a seeded bijection, cut into balanced parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_jobs import shuffle

SIZES = st.integers(1, 2**50) | st.sampled_from([1, 2, 3, 4, 5, 2**20, 2**20 + 1, 2**32 - 1, 2**32, 2**62])


@given(num_records=SIZES, seed=st.integers(-(2**70), 2**70), data=st.data())
def test_the_inverse_undoes_the_permutation_at_any_size(num_records, seed, data):
    indices = np.array(data.draw(st.lists(st.integers(0, num_records - 1), max_size=20)), np.int64)
    places = shuffle.permute(indices, num_records=num_records, seed=seed)
    assert places.dtype == np.int64
    assert ((places >= 0) & (places < num_records)).all()
    np.testing.assert_array_equal(shuffle.unpermute(places, num_records=num_records, seed=seed), indices)


@given(num_records=st.integers(1, 2000), seed=st.integers(0, 2**64 - 1), cut=st.integers(0, 2000))
def test_a_place_depends_on_nothing_but_index_size_and_seed(num_records, seed, cut):
    whole = shuffle.permute(np.arange(num_records), num_records=num_records, seed=seed)
    cut = min(cut, num_records)
    parts = [
        shuffle.permute(np.arange(low, high), num_records=num_records, seed=seed)
        for low, high in ((0, cut), (cut, num_records))
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_a_seed_means_the_same_order_in_every_release():
    assert shuffle.permute(np.arange(10), num_records=10, seed=0).tolist() == [4, 6, 9, 2, 1, 8, 5, 3, 0, 7]
    assert shuffle.permute(np.array([0, 999_999]), num_records=1_000_000, seed=7).tolist() == [47423, 658759]


def test_seeds_give_unrelated_orders_that_leave_few_records_in_place():
    orders = [shuffle.permute(np.arange(10_000), num_records=10_000, seed=seed) for seed in range(20)]
    for i, order in enumerate(orders):
        # Fixed points of a random permutation are Poisson(1); neighbours are apart by N / 3 on average.
        assert (order == np.arange(10_000)).sum() < 12
        assert 3000 < np.abs(np.diff(order)).mean() < 3700
        assert all((order == other).sum() < 12 for other in orders[:i])


@pytest.mark.parametrize("outside", [-1, 10])
def test_an_index_outside_is_refused(outside):
    for function in (shuffle.permute, shuffle.unpermute):
        with pytest.raises(ValueError, match=r"\[0, 10\)"):
            function(np.array([0, outside]), num_records=10, seed=0)


@given(num_items=st.integers(0, 10**12), num_parts=st.integers(1, 300))
def test_parts_cover_everything_and_differ_by_one_at_most(num_items, num_parts):
    edges = shuffle.bounds(num_items, num_parts)
    sizes = np.diff(edges)
    assert edges[0] == 0 and edges[-1] == num_items and len(sizes) == num_parts
    assert sizes.max() - sizes.min() <= 1


@given(num_records=st.integers(0, 10**9), weights=st.lists(st.integers(1, 1000), min_size=1, max_size=6))
def test_splits_add_up_and_keep_their_fractions_to_within_a_record(num_records, weights):
    fractions = [weight / sum(weights) for weight in weights]
    sizes = shuffle.split_sizes(num_records, fractions)
    assert sum(sizes) == num_records and min(sizes) >= 0
    for size, fraction in zip(sizes, fractions, strict=True):
        assert abs(size - num_records * fraction) <= 1 + 1e-6


def test_fractions_and_parts_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"0\.5"):
        shuffle.split_sizes(10, [0.25, 0.25])
    with pytest.raises(ValueError, match="at least 1, got 0"):
        shuffle.bounds(10, 0)
