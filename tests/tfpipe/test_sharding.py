import doctest

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tfpipe import sharding
from tfpipe.errors import UsageError
from tfpipe.sharding import plan_epoch, share, split_global_batch

modes = st.sampled_from(["per_worker", "file"])
counts_lists = st.lists(st.integers(0, 500), min_size=1, max_size=40)
workers_numbers = st.integers(1, 9)


def shares_or_skip(counts, num_workers, mode):
    try:
        return share(counts=counts, num_workers=num_workers, sharding=mode)
    except UsageError:
        assume(False)


@given(counts_lists, workers_numbers, modes)
def test_every_shard_goes_to_exactly_one_worker(counts, num_workers, mode):
    shares = shares_or_skip(counts, num_workers, mode)
    assert len(shares) == num_workers
    assert sorted(index for indices in shares for index in indices) == list(range(len(counts)))
    assert all(list(indices) == sorted(indices) for indices in shares)
    assert all(sum(counts[i] for i in indices) for indices in shares)


@given(counts_lists, workers_numbers)
def test_per_worker_shares_differ_by_at_most_the_largest_shard(counts, num_workers):
    shares = shares_or_skip(counts, num_workers, "per_worker")
    loads = [sum(counts[index] for index in indices) for indices in shares]
    assert max(loads) - min(loads) <= max(counts)


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 1000))
def test_equal_shards_in_a_multiple_of_the_workers_are_shared_out_evenly(num_workers, times, records):
    counts = [records] * (num_workers * times)
    for mode in ("per_worker", "file"):
        plan = plan_epoch(counts=counts, num_workers=num_workers, per_worker_batch_size=7, sharding=mode)
        assert set(plan.worker_records) == {records * times}


@given(counts_lists, workers_numbers, st.integers(1, 64), st.booleans(), modes)
def test_an_epoch_accounts_for_every_record(counts, num_workers, batch, drop, mode):
    shares_or_skip(counts, num_workers, mode)
    try:
        plan = plan_epoch(
            counts=counts,
            num_workers=num_workers,
            per_worker_batch_size=batch,
            drop_remainder=drop,
            sharding=mode,
        )
    except UsageError as error:
        assert drop and "at least one full batch" in str(error)
        return
    assert plan.global_batch_size == batch * num_workers
    if drop:
        taken = plan.steps_per_epoch * plan.global_batch_size
        assert taken + plan.dropped_records == sum(counts)
        assert all(plan.steps_per_epoch * batch <= records for records in plan.worker_records)
    else:
        assert plan.dropped_records == 0
        assert (plan.steps_per_epoch - 1) * batch < max(plan.worker_records) <= plan.steps_per_epoch * batch
        assert sum(plan.step_records()) == sum(counts)


@pytest.mark.parametrize("mode", ["per_worker", "file"])
def test_a_worker_without_records_is_refused_with_a_number_to_convert_to(mode):
    with pytest.raises(
        UsageError, match=r"got 3 shards for 4 workers \(worker 3 has none\).*--num-shards 16"
    ):
        share(counts=[1, 1, 1], num_workers=4, sharding=mode)
    with pytest.raises(UsageError, match="worker 1 has none"):
        share(counts=[5, 0, 0], num_workers=2, sharding=mode)
    with pytest.raises(UsageError, match="num_workers must be >= 1, got 0"):
        share(counts=[5], num_workers=0, sharding=mode)


def test_no_full_batch():
    with pytest.raises(UsageError, match=r"per_worker_batch_size 4 for 3 records.*drop_remainder=False"):
        plan_epoch(counts=[3, 3, 4], num_workers=3, per_worker_batch_size=4, drop_remainder=True)


def test_global_batches_divide_or_name_those_that_do():
    assert split_global_batch(12, 3) == 4
    with pytest.raises(UsageError, match=r"positive multiple of the 2 workers, got 7\. Use 6 or 8"):
        split_global_batch(7, 2)
    with pytest.raises(UsageError, match=r"got 0\. Use 2\."):
        split_global_batch(0, 2)


def test_the_examples_in_the_docstring():
    assert doctest.testmod(sharding).failed == 0
