"""`--split-by`: records of one key stay in one split, so that nothing of the test data was trained on.

    InputSplit --CountKeys(Plan)--> (index, [records of each split] | Failure) --all of them--FinishPlan--> Plan | Failure

A key's split follows from its hash and the seed alone, so more data of the same keys goes the same
way. How many records a split gets is known only when every key was read, hence a pass between the
two: it reads that one column.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import apache_beam as beam
import numpy as np
import pyarrow as pa

from beam_jobs.hashing import hash_array
from beam_jobs.outcome import ALL, Failure, guarded, has_failed, load, save
from beam_jobs.plan import Plan, Request, cut_shards
from beam_jobs.scan import PLAN
from beam_jobs.shuffle import permute
from beam_jobs.sources import InputSplit, Source, Wishes
from tfpipe.errors import UsageError


class CountKeys(beam.DoFn):
    """Counts an input split's records by the split that their key belongs to.

    Args:
        request: what the user asked for.
        source: to read.
        staging: the run's own directory.
    """

    def __init__(self, request: Request, source: Source, staging: str) -> None:
        self.request, self.source, self.staging = request, source, staging

    @guarded(lambda split, failure: (ALL, (split.index, failure)))
    def process(
        self, split: InputSplit, plan: Plan | Failure
    ) -> Iterator[tuple[int, tuple[int, list[int] | Failure]]]:
        """InputSplit -> (ALL, (its index, records of each split))."""
        if isinstance(plan, Failure):
            yield ALL, (split.index, plan)
            return
        if has_failed(self.staging):
            return
        name = f"keys-{split.index}.json"  # there if a run that is resumed got so far
        counts = load(self.staging, name)
        if counts is None:
            column = plan.layout.columns[plan.split_by][0]
            wishes = Wishes(columns={column: plan.wishes.of(column)}, others=plan.wishes.others)
            total = np.zeros(len(self.request.splits), np.int64)
            for batch in self.source.read(split, wishes, plan.rejected.get(split.index, ())):
                members = members_of(batch.column(column), self.request)
                total += np.bincount(members, minlength=len(total))
            counts = total.tolist()
            save(self.staging, name, counts)
        yield ALL, (split.index, counts)


class FinishPlan(beam.DoFn):
    """Makes the plan with the sizes that the splits have by their keys.

    Args:
        request: what the user asked for.
        staging: the run's own directory; the plan is left there for the driver.
    """

    def __init__(self, request: Request, staging: str) -> None:
        self.request, self.staging = request, staging

    @guarded(lambda _, failure: failure)
    def process(
        self, counts: tuple[int, Iterable[tuple[int, list[int] | Failure]]], plan: Plan | Failure
    ) -> Iterator[Plan | Failure]:
        """(ALL, all counts, in any order) -> Plan | Failure."""
        if isinstance(plan, Plan):
            ordered = [found for _, found in sorted(counts[1], key=lambda item: item[0])]
            failed = next((found for found in ordered if isinstance(found, Failure)), None)
            plan = failed or finish_plan(self.request, plan, ordered)
        if isinstance(plan, Plan):
            save(self.staging, PLAN, plan.summary().to_json())
        yield plan


def members_of(keys: pa.Array, request: Request) -> np.ndarray:
    """The split of each key: int64[n], numbers in the order of the request's splits."""
    ends = np.cumsum([fraction for _, fraction in request.splits])
    shares = hash_array(keys, request.seed).astype(np.float64) / 2.0**64
    return np.searchsorted(ends[:-1], shares, side="right")


def finish_plan(request: Request, plan: Plan, counts: Sequence[Sequence[int]]) -> Plan:
    """Gives the plan the sizes of its splits.

    Args:
        request: what the user asked for.
        plan: as if records were split one by one.
        counts: of each input split, its records of each split.

    Returns:
        The plan.

    Raises:
        UsageError: a split would get no record.
    """
    ranks = np.concatenate((np.zeros((1, len(request.splits)), np.int64), np.cumsum(counts, axis=0)))
    sizes = ranks[-1].tolist()
    for (name, fraction), size in zip(request.splits, sizes, strict=True):
        if not size:
            raise UsageError(
                f"every split must get at least one record, got none for {name}={fraction:g}: no value of "
                f"{request.split_by!r} falls into it. Give it a larger fraction, or choose another --seed."
            )
    edges = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    shards, fewer = cut_shards(request, edges, plan.record_bytes)
    shares = ", ".join(
        f"{name} {size / plan.num_records:.1%}" for (name, _), size in zip(request.splits, sizes, strict=True)
    )
    notices = (
        *plan.notices,
        *fewer,
        f"splits by {request.split_by}, which keeps equal values together: {shares}",
    )
    return dataclasses.replace(plan, split_edges=edges, ranks=ranks, shards=shards, notices=notices)


class Placer:
    """Where the records of an input split go, batch after batch.

    Args:
        request: what the user asked for.
        plan: finished.
        split: the input split's index.
    """

    def __init__(self, request: Request, plan: Plan, split: int) -> None:
        self.request, self.plan, self.split = request, plan, split
        self.done = 0
        self.ranks = None if plan.ranks is None else plan.ranks[split].copy()

    def place(self, features: pa.RecordBatch) -> np.ndarray:
        """The places of the next records (int64[n])."""
        first, self.done = self.done, self.done + features.num_rows
        if not self.plan.split_by:
            return self.plan.places(self.split, first, features.num_rows)
        assert self.ranks is not None
        members = members_of(features.column(self.plan.split_by), self.request)
        places = np.empty(len(members), np.int64)
        for k, size in enumerate(np.diff(self.plan.split_edges).tolist()):
            mine = members == k
            count = int(mine.sum())
            ranks = self.ranks[k] + np.arange(count, dtype=np.int64)
            if self.plan.shuffle:
                ranks = permute(ranks, num_records=size, seed=self.plan.seed)
            places[mine] = self.plan.split_edges[k] + ranks
            self.ranks[k] += count
        return places
