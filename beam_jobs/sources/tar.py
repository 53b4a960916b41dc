"""Tar archives in WebDataset's layout: a record is what consecutive members of one key hold.

Beside `key` each extension is a feature, null where a record lacks it; what becomes of each is told
in `tar_records`. Directories are left out, and members that are hidden or begin with `__`. Links,
devices and sparse files are refused by name, and so is a key that returns later in the archive.

A plain archive is split between records, by its headers alone; one that is compressed is one split.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa

from beam_jobs.sources import (
    SPLIT_BYTES,
    InputFile,
    InputSplit,
    SourceColumn,
    SourceOptions,
    Wish,
    Wishes,
    printable,
)
from beam_jobs.sources.bad_rows import BadRow, Fault
from beam_jobs.sources.compressed import open_bytes
from beam_jobs.sources.fit import SPELLED, dtype_of, list_offsets
from beam_jobs.sources.jsonl import Mixed, json_array
from beam_jobs.sources.npy_values import NpyField, feature_dtype, to_arrow
from beam_jobs.sources.summary import ColumnSummary, summarize_array
from beam_jobs.sources.tar_members import TarReader
from beam_jobs.sources.tar_records import is_wanted, records, values
from beam_jobs.sources.typed import Batch, TypedSource
from tfpipe.errors import RecordError
from tfpipe.schema import TEXT_DTYPES

BATCH_BYTES = 4 << 20
BATCH_ROWS = 1 << 13


@dataclass(frozen=True, kw_only=True)
class TarSource(TypedSource):
    """Archives in WebDataset's layout; their columns are the features of all records.

    Attributes:
        bounds: of each file, where its splits begin and the last one ends; (0, -1) if it is compressed.
        num_hidden: members of plain archives that are left out.
    """

    files: tuple[InputFile, ...]
    bounds: tuple[tuple[int, ...], ...]
    num_hidden: int
    columns: tuple[SourceColumn, ...] | None = None
    format: str = "webdataset"

    def plan(self) -> list[InputSplit]:
        """Plans the splits; see `Source`."""
        splits: list[InputSplit] = []
        for index, bounds in enumerate(self.bounds):
            for start, stop in itertools.pairwise(bounds):
                splits.append(InputSplit(index=len(splits), file=index, start=start, stop=stop))
        return splits

    def origin(self, split: InputSplit, row: int) -> str:
        """Names a record by its number, the first is 1; see `Source`."""
        return f"{self.files[split.file].path}:{row}"

    def notices(self) -> list[str]:
        """What was left out; see `FileSource`."""
        if not self.num_hidden:
            return []
        return [f"left out, since hidden or begun with __: {self.num_hidden} members of archives"]

    def batches(self, split: InputSplit, wishes: Wishes) -> Iterator[Batch]:
        """Yields a split batch by batch; see `TypedSource`."""
        path = self.files[split.file].path
        rows: list[_Row] = []
        bad: list[BadRow] = []
        keys = _Keys(path)
        number = num_bytes = 0
        with open_bytes(path) as stream:
            if split.start:
                stream.seek(split.start)
            size = self.files[split.file].num_bytes if split.stop >= 0 else -1
            reader = TarReader(stream, path, split.start, size)
            for record in records(reader, split.stop, lambda feature: is_wanted(feature, wishes)):
                number += 1
                if split.stop < 0:  # of a plain archive all keys are known
                    keys.add(record.key)
                origin = f"{path}:{printable(record.key)}"
                try:
                    if record.fault is not None:
                        raise record.fault
                    rows.append(_Row(number=number, origin=origin, values=values(record, wishes)))
                except Fault as fault:
                    bad.append(BadRow(row=number, problem=fault.problem, remedy=fault.remedy, raw=record.raw, origin=origin))  # fmt: skip
                num_bytes += record.num_bytes
                if len(rows) + len(bad) >= BATCH_ROWS or num_bytes >= BATCH_BYTES:
                    yield from _batches(rows, bad, wishes, number)
                    rows, bad, num_bytes = [], [], 0
        yield from _batches(rows, bad, wishes, number)
        keys.check()

    def summarize(self, column: SourceColumn, values: pa.Array) -> ColumnSummary:
        """Summarizes single values; each has a dtype of its own, but for those of JSON; see `TypedSource`."""
        in_json = "json" in column.name.split(".")[:-1]
        if values.type == SPELLED or (in_json and values.type in (pa.string(), pa.bool_())):
            return TypedSource.summarize(self, column, values)
        return dataclasses.replace(summarize_array(values, dtype_of(values.type)), exact=True)


def open_tar(files: Sequence[InputFile], options: SourceOptions) -> TarSource:
    """Opens archives in WebDataset's layout, and reads the headers of those that are not compressed.

    Args:
        files: non-empty files.
        options: not used.

    Returns:
        The source.

    Raises:
        RecordError: an archive is damaged or has a key in two places; there is no record.
    """
    found = [((0, -1), 0) if file.compression else _bounds(file) for file in files]
    if not any(bounds for bounds, _ in found):
        names = ", ".join(file.path for file in files[:3])
        raise RecordError(f"the input must hold at least one record, got none ({names}).")
    return TarSource(
        files=tuple(files),
        bounds=tuple(bounds for bounds, _ in found),
        num_hidden=sum(hidden for _, hidden in found),
    )


def _bounds(file: InputFile) -> tuple[tuple[int, ...], int]:
    """Where a plain archive's splits begin and the last one ends, if it has a record; its hidden members."""
    starts: list[int] = []
    keys = _Keys(file.path)
    with open(file.path, "rb") as stream:
        reader = TarReader(stream, file.path, num_bytes=file.num_bytes)
        for record in records(reader, -1, lambda feature: False):
            keys.add(record.key)
            if not starts or record.start - starts[-1] >= SPLIT_BYTES:
                starts.append(record.start)
    keys.check()
    return ((*starts, reader.end) if starts else ()), reader.num_hidden


class _Keys:
    """The keys of an archive's records, 8 bytes each, to find one that returns."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._hashes = array("Q")

    def add(self, key: str) -> None:
        """Adds a record's."""
        self._hashes.append(_hash(key))

    def check(self) -> None:
        """Makes sure that none returns.

        Raises:
            RecordError: one does.
        """
        hashes, counts = np.unique(np.array(self._hashes, np.uint64), return_counts=True)
        if not (doubled := set(hashes[counts > 1].tolist())):
            return
        first: dict[str, int] = {}
        with open_bytes(self._path) as stream:  # once more, for the names: two may share a hash
            for record in records(TarReader(stream, self._path), -1, lambda feature: False):
                if (
                    _hash(record.key) in doubled
                    and first.setdefault(record.key, record.start) != record.start
                ):
                    raise RecordError(
                        f"the members of a record must follow each other, got {printable(record.key)!r} at byte "
                        f"{first[record.key]} and again at byte {record.start} ({self._path}). Pack the archive "
                        f"again, sorted by name (tar --sort=name), or rename the second."
                    )


def _hash(key: str) -> int:
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


@dataclass(kw_only=True, slots=True)
class _Row:
    """A record's values by column."""

    number: int
    origin: str
    values: dict[str, Any]


def _batches(rows: Sequence[_Row], bad: Sequence[BadRow], wishes: Wishes, last: int) -> Iterator[Batch]:
    """Yields rows as batches; as one, unless their values differ too much for one array."""
    numbers = np.array([row.number for row in rows], np.int64)
    columns: dict[str, pa.Array] = {}
    found = {row.row: row for row in bad}
    try:
        for name in dict.fromkeys(name for row in rows for name in row.values):
            wish = wishes.of(name)
            if wish.used:
                columns[name], wrong = _array(name, [row.values.get(name) for row in rows], numbers, wish)
                found = {row.row: row for row in wrong} | found
    except Mixed as error:
        if len(rows) == 1:
            problem = f"column {name!r} must hold {error.args[0]}"
            remedy = "Correct the value; or declare a schema without the column (--schema)."
            row = BadRow(row=rows[0].number, problem=problem, remedy=remedy, origin=rows[0].origin)
            yield from _batches([], [*bad, row], wishes, last)
        else:
            half = len(rows) // 2
            yield from _batches(rows[:half], bad, wishes, last)
            yield from _batches(rows[half:], [], wishes, last)
        return
    origins = [row.origin for row in rows]
    batch = Batch(columns=columns, numbers=numbers, last=last, origin=origins.__getitem__)
    batch = batch.without(list(found))
    by_number = dict(zip(numbers.tolist(), origins, strict=True))
    batch.bad = [
        row if row.origin else dataclasses.replace(row, origin=by_number[row.row])
        for _, row in sorted(found.items())
    ]
    yield batch


def _array(name: str, column: list[Any], numbers: np.ndarray, wish: Wish) -> tuple[pa.Array, list[BadRow]]:
    """One column's values as an array, and the rows of it that hold what their dtype does not allow.

    Raises:
        Mixed: the values have no one type.
    """
    kinds = {kind for value in column if value is not None for kind in [_kind_of(value)]}
    if len(kinds) > 1:
        raise Mixed("values of one type")
    (kind,) = kinds or {object}  # nothing but nulls of JSON
    if kind is np.ndarray:
        return _tensors(name, column, numbers)
    if kind is bytes:
        return pa.array(column, pa.binary()), []
    if kind is int:
        return pa.array(column, pa.int64()), []
    return json_array(column, wish.dtype in TEXT_DTYPES), []


def _kind_of(value: Any) -> type:
    """The type of what is no JSON, else `object`."""
    if type(value) is int or isinstance(value, bytes):
        return type(value)
    return np.ndarray if isinstance(value, np.ndarray) else object


def _tensors(
    name: str, column: Sequence[np.ndarray | None], numbers: np.ndarray
) -> tuple[pa.Array, list[BadRow]]:
    """Arrays of one column as lists of their values; one of no dimension is a single value."""
    present = [
        (value, number) for value, number in zip(column, numbers.tolist(), strict=True) if value is not None
    ]
    dtypes = {feature_dtype(value.dtype, single=not value.ndim)[0] for value, _ in present}
    if len(dtypes) > 1 or len({value.ndim for value, _ in present}) > 1:
        raise Mixed("arrays of one dtype and number of dimensions")
    field = NpyField(path=(), column=SourceColumn(name=name, dtype=dtypes.pop()), num_values=1, work_bytes=0)
    parts, bad = zip(
        *(to_arrow(field, value.reshape(-1), np.full(value.size, number)) for value, number in present),
        strict=True,
    )
    shapes = [None if value is None else value.shape for value in column]
    return _lists(pa.concat_arrays(parts), shapes), [row for rows in bad for row in rows]


def _lists(values: pa.Array, shapes: Sequence[tuple[int, ...] | None]) -> pa.Array:
    """Lays values that follow each other out as lists of these shapes, of one number of dimensions."""
    present = [shape for shape in shapes if shape is not None]
    if not present[0]:
        places = iter(range(len(values)))
        return values.take(
            pa.array([None if shape is None else next(places) for shape in shapes], pa.int64())
        )
    for level in range(len(present[0]) - 1, 0, -1):
        sizes = {shape[level] for shape in present}
        if len(sizes) == 1:
            values = pa.FixedSizeListArray.from_arrays(values, sizes.pop())
        else:
            lengths = [np.full(math.prod(shape[:level]), shape[level]) for shape in present]
            values = pa.ListArray.from_arrays(list_offsets(np.concatenate(lengths)), values)
    lengths = np.array([0 if shape is None else shape[0] for shape in shapes])
    mask = pa.array([shape is None for shape in shapes]) if None in shapes else None
    return pa.ListArray.from_arrays(list_offsets(lengths), values, mask=mask)
