"""From what was asked and what the scan found to what will be written (pure).

Comes in: a `Request` and one `SplitScan` an input split. Goes out: a `Plan`: the schema, which
source columns make which feature, how many records each split and shard gets. The same input
and options give the same plan, whoever did the scanning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from beam_jobs.encode import estimate_bytes
from beam_jobs.layout import Layout, Pack, build_layout
from beam_jobs.shuffle import bounds, permute, split_sizes
from beam_jobs.sources import InputSplit, Source, Wish
from beam_jobs.sources.summary import ColumnSummary, SplitScan
from tfpipe.errors import RecordError, UsageError
from tfpipe.schema import Schema

MIN_SHARDS = 24
SHARD_BYTES = 128 << 20
# Framed records that a shard's writer holds at a time, twice (as read, and in order).
BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for; travels to the workers.

    Attributes:
        packs: columns that become tensors.
        declared: the schema of the final features, or None to infer it.
        splits: names and fractions, in order.
        num_shards: of each split; None for by size.
        shard_bytes: framed bytes of a shard before compression, where `num_shards` is None.
        shuffle: whether records are permuted; else they keep the source's order.
        seed: of the permutation.
        compression: "GZIP", "ZLIB", "" or "auto".
        level: of the compression.
    """

    packs: tuple[Pack, ...] = ()
    declared: Schema | None = None
    splits: tuple[tuple[str, float], ...] = (("train", 1.0),)
    num_shards: int | None = None
    shard_bytes: int | None = None
    shuffle: bool = True
    seed: int = 0
    compression: str = "auto"
    level: int = 1


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """One shard: the places [start, stop) that it holds, cut at `edges` into parts that fit memory."""

    split: str
    index: int
    num_shards: int
    edges: tuple[int, ...]

    @property
    def start(self) -> int:
        return self.edges[0]

    @property
    def stop(self) -> int:
        return self.edges[-1]


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """What the command line needs to know of a plan; travels as JSON.

    Attributes:
        schema: of the examples.
        statistics: the manifest's.
        compression: "GZIP", "ZLIB" or "".
        num_records: of all splits.
        shard_splits: the split of each shard.
        notices: sentences that the user should read.
    """

    schema: Schema
    statistics: dict[str, Any]
    compression: str
    num_records: int
    shard_splits: tuple[str, ...]
    notices: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"schema": self.schema.to_json()}

    @classmethod
    def from_json(cls, obj: dict[str, Any]) -> PlanSummary:
        """What `to_json` gave."""
        return cls(
            schema=Schema.from_json(obj["schema"], where="plan"),
            statistics=obj["statistics"],
            compression=obj["compression"],
            num_records=obj["num_records"],
            shard_splits=tuple(obj["shard_splits"]),
            notices=tuple(obj["notices"]),
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be written.

    Attributes:
        schema: of the examples.
        layout: the source columns of each feature, and their dtypes.
        wishes: what to read, one a source column.
        statistics: the manifest's.
        compression: "GZIP", "ZLIB" or "".
        level: of the compression.
        first_index: int64[input splits + 1], global index of each split's first record.
        shuffle: whether places are permuted.
        seed: of the permutation.
        split_edges: int64[splits + 1], the places where splits start.
        ranks: int64[input splits, splits], for an unshuffled dataset of several splits:
            records of each split before each input split.
        shards: of all splits.
        notices: sentences that the user should read.
    """

    schema: Schema
    layout: Layout
    wishes: tuple[Wish, ...]
    statistics: dict[str, Any]
    compression: str
    level: int
    first_index: np.ndarray
    shuffle: bool
    seed: int
    split_edges: np.ndarray
    ranks: np.ndarray | None
    shards: tuple[ShardPlan, ...]
    notices: tuple[str, ...] = field(default=())

    @property
    def num_records(self) -> int:
        return int(self.first_index[-1])

    def summary(self) -> PlanSummary:
        """What the command line needs to know."""
        return PlanSummary(
            schema=self.schema,
            statistics=self.statistics,
            compression=self.compression,
            num_records=self.num_records,
            shard_splits=tuple(shard.split for shard in self.shards),
            notices=self.notices,
        )

    def places(self, split: int, first: int, count: int) -> np.ndarray:
        """Where records of an input split go.

        Args:
            split: the input split's index.
            first: the first record's number within it.
            count: how many.

        Returns:
            int64[count], places in [0, num_records).
        """
        start = int(self.first_index[split])
        indices = np.arange(start + first, start + first + count, dtype=np.int64)
        if not self.shuffle and self.ranks is None:
            return indices
        if self.shuffle:
            return permute(indices, num_records=self.num_records, seed=self.seed)
        # Which split a record belongs to follows the permutation, its place in it the source's order.
        indices = np.arange(start, start + first + count, dtype=np.int64)
        members = _members(indices, self.num_records, self.seed, self.split_edges)
        places = np.empty(len(indices), np.int64)
        for k, edge in enumerate(self.split_edges[:-1]):
            mine = members == k
            places[mine] = edge + self.ranks[split, k] + np.arange(int(mine.sum()))
        return places[first:]


def merge_scans(
    source: Source, splits: Sequence[InputSplit], scans: Sequence[SplitScan]
) -> list[ColumnSummary]:
    """Merges the scans of all splits in their order.

    Args:
        source: that was scanned.
        splits: as planned.
        scans: one a split, in the same order.

    Returns:
        One summary a column.

    Raises:
        RecordError: the first row of the input that can't be taken; or no records at all.
    """
    rows_before: dict[int, int] = {}
    for split, scan in zip(splits, scans, strict=True):
        if scan.bad is not None:
            origin = source.origin(split, rows_before.get(split.file, 0) + scan.bad.row)
            raise RecordError(f"{scan.bad.problem} ({origin}). {scan.bad.remedy}")
        rows_before[split.file] = rows_before.get(split.file, 0) + scan.source_rows
    if not sum(scan.rows for scan in scans):
        names = ", ".join(file.path for file in source.files[:3])
        raise RecordError(f"the input must hold at least one record, got none ({names}).")
    merged = [ColumnSummary() for _ in source.columns]
    for scan in scans:
        if scan.columns:
            merged = [a.merge(b) for a, b in zip(merged, scan.columns, strict=True)]
    return merged


def make_plan(
    request: Request, source: Source, splits: Sequence[InputSplit], scans: Sequence[SplitScan]
) -> Plan:
    """Decides all that pass 2 needs to know.

    Args:
        request: what the user asked for.
        source: what was scanned.
        splits: as planned.
        scans: one a split, in the same order.

    Returns:
        The plan; its compression is still "auto" if that was asked for.

    Raises:
        RecordError: a row that can't be taken, or none.
        SchemaError: the declared schema and the source disagree.
        UsageError: a split would get no record.
    """
    summaries = merge_scans(source, splits, scans)
    layout, notices = build_layout(request.packs, request.declared, source.columns, summaries)
    narrowed: dict[str, int] = {}
    for scan in scans:
        for name, count in scan.narrowed.items():
            narrowed[name] = narrowed.get(name, 0) + count
    statistics = layout.statistics(source.columns, summaries)
    for name, columns in layout.columns.items():
        if count := sum(narrowed.get(column, 0) for column in columns):
            statistics[name]["narrowed"] = count
            notices.append(
                f"{name}: {count} values lost digits in the declared {layout.schema.features[name].dtype}"
            )
    first_index = np.concatenate(([0], np.cumsum([scan.rows for scan in scans]))).astype(np.int64)
    num_records = int(first_index[-1])
    names = [name for name, _ in request.splits]
    sizes = split_sizes(num_records, [fraction for _, fraction in request.splits])
    for (name, fraction), size in zip(request.splits, sizes, strict=True):
        if not size:
            raise UsageError(
                f"every split must get at least one record, got none for {name}={fraction:g} of {num_records}. "
                f"Give it a larger fraction."
            )
    edges = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    ranks = None
    if not request.shuffle and len(sizes) > 1:
        ranks = _ranks(first_index, num_records, request.seed, edges)
    text_bytes = {
        name: statistics[name]["mean_bytes"] for name in statistics if "mean_bytes" in statistics[name]
    }
    record_bytes = estimate_bytes(layout.schema, text_bytes)
    shards: list[ShardPlan] = []
    for k, name in enumerate(names):
        count = num_shards(request, sizes[k], record_bytes)
        if request.num_shards is not None and count < request.num_shards:
            notices.append(f"split {name}: {count} shards instead of {request.num_shards}, one a record")
        cuts = bounds(sizes[k], count) + edges[k]
        for i in range(count):
            size = int(cuts[i + 1] - cuts[i])
            parts = max(1, -(-size * record_bytes // BUCKET_BYTES))
            part_edges = bounds(size, min(parts, size)) + cuts[i]
            shards.append(ShardPlan(split=name, index=i, num_shards=count, edges=tuple(part_edges.tolist())))
    return Plan(
        schema=layout.schema,
        layout=layout,
        wishes=tuple(layout.wishes(source.columns)),
        statistics=statistics,
        compression=request.compression,
        level=request.level,
        first_index=first_index,
        shuffle=request.shuffle,
        seed=request.seed,
        split_edges=edges,
        ranks=ranks,
        shards=tuple(shards),
        notices=tuple(notices),
    )


def num_shards(request: Request, num_records: int, record_bytes: int) -> int:
    """How many shards a split gets: as asked, or by size; never more than records."""
    wanted = request.num_shards
    if wanted is None:
        total = num_records * record_bytes
        if request.shard_bytes is None:
            wanted = max(MIN_SHARDS, -(-total // SHARD_BYTES))
        else:
            wanted = max(1, -(-total // request.shard_bytes))
    return min(wanted, num_records)


def _members(indices: np.ndarray, num_records: int, seed: int, edges: np.ndarray) -> np.ndarray:
    places = permute(indices, num_records=num_records, seed=seed)
    return np.searchsorted(edges, places, side="right") - 1


def _ranks(first_index: np.ndarray, num_records: int, seed: int, edges: np.ndarray) -> np.ndarray:
    counts = np.zeros((len(first_index), len(edges) - 1), np.int64)
    for i in range(len(first_index) - 1):
        for low in range(int(first_index[i]), int(first_index[i + 1]), 1 << 20):
            indices = np.arange(low, min(low + (1 << 20), int(first_index[i + 1])), dtype=np.int64)
            members = _members(indices, num_records, seed, edges)
            counts[i + 1] += np.bincount(members, minlength=len(edges) - 1)
    return np.cumsum(counts, axis=0)
