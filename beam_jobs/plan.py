"""From what was asked and what the scan found to what will be written (pure).

Comes in: a `Request` and one `SplitScan` an input split. Goes out: a `Plan`: the schema, which
source columns make which feature, how many records each split and shard gets. The same input
and options give the same plan, whoever did the scanning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from beam_jobs.encode import estimate_bytes
from beam_jobs.layout import Layout, Pack, build_layout, feature_summaries, resolve_columns
from beam_jobs.shuffle import bounds, permute, split_sizes
from beam_jobs.sources import InputSplit, Source, SourceColumn, Wishes
from beam_jobs.sources.summary import ColumnSummary, SplitScan
from beam_jobs.tfds import describe_features
from tfpipe.errors import RecordError, UsageError
from tfpipe.schema import ITEMSIZE_BYTES, TEXT_DTYPES, Schema

MIN_SHARDS = 24
SHARD_BYTES = 128 << 20
# Framed records that a shard's writer holds at a time, twice (as read, and in order).
BUCKET_BYTES = 64 << 20
# Rejected rows are kept with their text until they are written.
MOST_REJECTED = 100_000


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for; travels to the workers.

    Attributes:
        packs: columns that become tensors.
        declared: the schema of the final features, or None to infer it.
        splits: names and fractions, in order.
        split_by: a feature whose equal values stay in one split; "" for none.
        num_shards: of each split; None for by size.
        shard_bytes: framed bytes of a shard before compression, where `num_shards` is None.
        shuffle: whether records are permuted; else they keep the source's order.
        seed: of the permutation.
        compression: "GZIP", "ZLIB", "" or "auto".
        level: of the compression.
        tfds_metadata: whether TFDS is to read the dataset, too.
        max_rejected: rows that may be left out.
        max_rejected_fraction: of all rows, in place of a number.
    """

    packs: tuple[Pack, ...] = ()
    declared: Schema | None = None
    splits: tuple[tuple[str, float], ...] = (("train", 1.0),)
    split_by: str = ""
    num_shards: int | None = None
    shard_bytes: int | None = None
    shuffle: bool = True
    seed: int = 0
    compression: str = "auto"
    level: int = 1
    tfds_metadata: bool = False
    max_rejected: int = 0
    max_rejected_fraction: float | None = None

    @property
    def scan_limit(self) -> int:
        """How many rows an input split's scan may leave out before it gives up."""
        return self.max_rejected if self.max_rejected_fraction is None else MOST_REJECTED


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Reject:
    """A row that is left out.

    Attributes:
        split: the input split's index.
        row: its number within it, the first is 1.
        origin: file and row.
        reason: what must hold and what was found.
        raw: the row's text or values, shortened.
    """

    split: int
    row: int
    origin: str
    reason: str
    raw: str


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """What the command line needs to know of a plan; travels as JSON.

    Attributes:
        schema: of the examples.
        statistics: the manifest's.
        compression: "GZIP", "ZLIB" or "".
        num_records: of all splits.
        num_rejected: rows left out.
        shard_splits: the split of each shard.
        notices: sentences that the user should read.
        counts: records by what the source did to them.
    """

    schema: Schema
    statistics: dict[str, Any]
    compression: str
    num_records: int
    num_rejected: int
    shard_splits: tuple[str, ...]
    notices: tuple[str, ...]
    counts: dict[str, int]

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
            num_rejected=obj["num_rejected"],
            shard_splits=tuple(obj["shard_splits"]),
            notices=tuple(obj["notices"]),
            counts=obj["counts"],
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be written.

    Attributes:
        schema: of the examples.
        layout: the source columns of each feature, and their dtypes.
        wishes: what to read of the source.
        statistics: the manifest's.
        compression: "GZIP", "ZLIB" or "".
        level: of the compression.
        first_index: int64[input splits + 1], global index of each split's first record.
        shuffle: whether places are permuted.
        seed: of the permutation.
        split_edges: int64[splits + 1], the places where splits start.
        ranks: int64[input splits, splits], for an unshuffled dataset of several splits:
            records of each split before each input split.
        record_bytes: of a framed record, estimated.
        split_by: the feature whose equal values stay in one split; "" for none. See `keys`.
        shards: of all splits.
        rejected: rows left out: their numbers (int64[]), by the index of their input split.
        notices: sentences that the user should read.
        counts: records by what the source did to them.
    """

    schema: Schema
    layout: Layout
    wishes: Wishes
    statistics: dict[str, Any]
    compression: str
    level: int
    first_index: np.ndarray
    shuffle: bool
    seed: int
    split_edges: np.ndarray
    ranks: np.ndarray | None
    record_bytes: int
    split_by: str
    shards: tuple[ShardPlan, ...]
    rejected: Mapping[int, np.ndarray] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)

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
            num_rejected=sum(map(len, self.rejected.values())),
            shard_splits=tuple(shard.split for shard in self.shards),
            notices=self.notices,
            counts=dict(self.counts),
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
    request: Request, source: Source, splits: Sequence[InputSplit], scans: Sequence[SplitScan]
) -> tuple[dict[str, ColumnSummary], list[Reject]]:
    """Merges the scans of all splits in their order.

    Args:
        request: how many rows may be left out.
        source: that was scanned.
        splits: as planned.
        scans: one a split, in the same order.

    Returns:
        One summary a column, in the order of their appearance, and the rows that are left out.

    Raises:
        RecordError: the first row of the input that can't be taken, if all must be; more of them than
            allowed; or no records at all.
        SchemaError: splits hold lists of different kinds in one feature.
    """
    merged: dict[str, ColumnSummary] = {}
    rejects: list[Reject] = []
    rows_before: dict[int, int] = {}
    records = 0
    for split, scan in zip(splits, scans, strict=True):
        before = rows_before.get(split.file, 0)
        for bad in scan.bad:
            origin = bad.origin or source.origin(split, before + bad.row)
            if bad.fatal or not request.scan_limit:
                raise RecordError(f"{bad.problem} ({origin}). {bad.remedy}")
            rejects.append(
                Reject(split=split.index, row=bad.row, origin=origin, reason=bad.problem, raw=bad.raw)
            )
            if len(rejects) > request.scan_limit:
                raise _too_many(request, rejects, None)
        rows_before[split.file] = before + scan.source_rows
        for name in (merged | scan.columns) if scan.rows else ():
            earlier = merged.get(name) or ColumnSummary.absent(records)
            merged[name] = earlier.merge(scan.columns.get(name) or ColumnSummary.absent(scan.rows))
        records += scan.rows
    if request.max_rejected_fraction is not None:
        total = records + len(rejects)
        if len(rejects) > request.max_rejected_fraction * total:
            raise _too_many(request, rejects, total)
    if not records:
        names = ", ".join(file.path for file in source.files[:3])
        raise RecordError(f"the input must hold at least one record, got none ({names}).")
    return {name: summary.settled() for name, summary in merged.items()}, rejects


def _too_many(request: Request, rejects: Sequence[Reject], total: int | None) -> RecordError:
    allowed = f"{request.scan_limit}"
    if request.max_rejected_fraction is not None and total is not None:
        allowed = f"{request.max_rejected_fraction:.6%}".rstrip("%").rstrip("0").rstrip(".") + f"% of {total}"
    last = rejects[-1]
    return RecordError(
        f"at most {allowed} rows may be rejected, got {len(rejects)}{'' if total else ' before the end'}, the last: "
        f"{last.reason} ({last.origin}). Correct the input, or allow more (--max-rejected)."
    )


def make_plan(
    request: Request, source: Source, splits: Sequence[InputSplit], scans: Sequence[SplitScan]
) -> tuple[Plan, list[Reject]]:
    """Decides all that pass 2 needs to know.

    Args:
        request: what the user asked for.
        source: what was scanned.
        splits: as planned.
        scans: one a split, in the same order.

    Returns:
        The plan, whose compression is still "auto" if that was asked for, and the rows left out.

    Raises:
        RecordError: a row that can't be taken, or none.
        SchemaError: the declared schema and the source disagree.
        UsageError: a split would get no record.
    """
    scanned, rejects = merge_scans(request, source, splits, scans)
    if request.declared is None:
        columns = resolve_columns(source.columns, scanned)
    else:  # shapes were checked value by value
        columns = list(source.columns or (SourceColumn(name=name, shape=None) for name in scanned))
    layout, notices = build_layout(request.packs, request.declared, columns, scanned)
    counts = Counter[str]()
    for scan in scans:
        counts.update(scan.counts)
    notices += source.notices()
    notices += [f"{source.format}: {count} {what}" for what, count in sorted(counts.items())]
    summaries = feature_summaries(layout.columns, scanned)
    statistics = _statistics(layout, columns, summaries)
    for name, names in layout.columns.items():
        if count := sum(scan.narrowed.get(column, 0) for scan in scans for column in names):
            statistics[name]["narrowed"] = count
            notices.append(
                f"{name}: {count} values lost digits in the declared {layout.schema.features[name].dtype}"
            )
    if request.tfds_metadata:
        describe_features(layout.schema)  # what TFDS can't read is told before the work
    if request.split_by:
        _check_key(request.split_by, layout.schema, statistics)
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
    record_bytes = estimate_bytes(layout.schema, _payload_bytes(layout, summaries, num_records))
    shards, fewer = cut_shards(request, edges, record_bytes)
    rejected: dict[int, list[int]] = {}
    for reject in rejects:
        rejected.setdefault(reject.split, []).append(reject.row)
    plan = Plan(
        schema=layout.schema,
        layout=layout,
        wishes=layout.wishes(),
        statistics=statistics,
        compression=request.compression,
        level=request.level,
        first_index=first_index,
        shuffle=request.shuffle,
        seed=request.seed,
        split_edges=edges,
        ranks=ranks,
        record_bytes=record_bytes,
        split_by=request.split_by,
        shards=shards,
        rejected={split: np.array(rows, np.int64) for split, rows in rejected.items()},
        notices=(*notices, *fewer),
        counts=dict(sorted(counts.items())),
    )
    return plan, rejects


def _check_key(key: str, schema: Schema, statistics: Mapping[str, Any]) -> None:
    feature = schema.features.get(key)
    if feature is None or feature.shape != ():
        scalars = ", ".join(name for name, found in schema.features.items() if found.shape == ())
        what = "no feature" if feature is None else "a tensor"
        raise UsageError(
            f"--split-by must name a feature of single values, got {key!r}, {what}; there are {scalars}."
        )
    if nulls := statistics[key]["nulls"]:
        raise RecordError(
            f"every record must have a key to be split by, got {nulls} without {key!r}. Fill it in, or leave "
            f"these records out."
        )


def cut_shards(
    request: Request, edges: np.ndarray, record_bytes: int
) -> tuple[tuple[ShardPlan, ...], tuple[str, ...]]:
    """Cuts splits into shards.

    Args:
        request: how many, or how large.
        edges: int64[splits + 1], the places where splits start.
        record_bytes: of a framed record, estimated.

    Returns:
        The shards of all splits, and sentences that the user should read.
    """
    shards: list[ShardPlan] = []
    notices = []
    sizes = np.diff(edges).tolist()
    for k, (name, _) in enumerate(request.splits):
        count = num_shards(request, sizes[k], record_bytes)
        if request.num_shards is not None and count < request.num_shards:
            notices.append(f"split {name}: {count} shards instead of {request.num_shards}, one a record")
        cuts = bounds(sizes[k], count) + edges[k]
        for i in range(count):
            size = int(cuts[i + 1] - cuts[i])
            parts = max(1, -(-size * record_bytes // BUCKET_BYTES))
            part_edges = bounds(size, min(parts, size)) + cuts[i]
            shards.append(ShardPlan(split=name, index=i, num_shards=count, edges=tuple(part_edges.tolist())))
    return tuple(shards), tuple(notices)


def _statistics(
    layout: Layout, columns: Sequence[SourceColumn], summaries: Mapping[str, ColumnSummary]
) -> dict[str, dict[str, Any]]:
    """The manifest's statistics, one object a feature."""
    units = {column.name: column.unit for column in columns}
    result = {}
    for name, names in layout.columns.items():
        result[name] = summaries[name].statistics(layout.schema.features[name].dtype)
        if unit := units[names[0]]:
            result[name]["unit"] = unit
    return result


def _payload_bytes(
    layout: Layout, summaries: Mapping[str, ColumnSummary], num_records: int
) -> dict[str, float]:
    """Mean bytes a record of each feature whose size differs between records."""
    result = {}
    for name, feature in layout.schema.features.items():
        if feature.decoded_bytes is None:
            values = summaries[name].rows - summaries[name].nulls("bytes")
            mean = summaries[name].mean_text_bytes
            size = mean if feature.dtype in TEXT_DTYPES else ITEMSIZE_BYTES[feature.dtype]
            result[name] = size * values / num_records
    return result


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
