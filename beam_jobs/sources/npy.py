"""NumPy arrays, `.npz` and `.npy`: the first axis counts the records.

Each member of a `.npz` file is a feature, named as the member. So is each `.npy` file, named as the
file; those in one directory lie side by side. A number at the end of its name (`x-0.npy`, `x_1.npy`,
`x-00002-of-00010.npy`) makes it a piece of the feature: pieces of one number belong together,
and follow each other by number. What becomes of each dtype: see `npy_values`. Arrays side by side
must have as many records. Nothing is ever unpickled.

A split is a range of records; compressed arrays are read from their beginning, in one split.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from beam_jobs.sources import (
    SPLIT_BYTES,
    InputFile,
    InputSplit,
    SourceColumn,
    SourceOptions,
    Wishes,
    plan_records,
)
from beam_jobs.sources.bad_rows import BadRow
from beam_jobs.sources.npy_files import NpyArray, is_zip, read_npy, read_npz
from beam_jobs.sources.npy_records import RecordReader, check_sum, open_zip
from beam_jobs.sources.npy_values import described, to_arrow
from beam_jobs.sources.summary import SplitScan
from beam_jobs.sources.typed import Batch, TypedSource
from tfpipe.errors import RecordError, UsageError

BATCH_BYTES = 4 << 20
BATCH_ROWS = 1 << 15


@dataclass(frozen=True, kw_only=True)
class NpySource(TypedSource):
    """Groups of arrays, side by side in each; all groups have the same columns."""

    files: tuple[InputFile, ...]
    groups: tuple[tuple[NpyArray, ...], ...]
    columns: tuple[SourceColumn, ...]
    format: str = "npz"

    def plan(self) -> list[InputSplit]:
        """Plans the splits; see `Source`."""
        return plan_records(
            (group[0].num_records, _record_bytes(group), all(array.start >= 0 for array in group))
            for group in self.groups
        )

    def origin(self, split: InputSplit, row: int) -> str:
        """Names a record, the first is 1; see `Source`."""
        return f"{self._path(self.groups[split.file][0])}:{row}"

    def scan(self, split: InputSplit, wishes: Wishes, max_rejected: int = 0) -> SplitScan:
        """Summarizes a split; see `Source`. A zip's checksums are compared with its first split."""
        if split.start == 0:
            for array in self._used(split, wishes):
                if array.member and array.start >= 0:  # others are compared while they are read
                    check_sum(array, self._path(array))
        return TypedSource.scan(self, split, wishes, max_rejected)

    def batches(self, split: InputSplit, wishes: Wishes) -> Iterator[Batch]:
        """Yields a split batch by batch; see `TypedSource`."""
        group = self._used(split, wishes)
        # Of an array in Fortran's order every batch reads a bit of every page: better few batches.
        num_bytes = SPLIT_BYTES if any(array.header.fortran for array in group) else BATCH_BYTES
        work_bytes = sum(field.work_bytes for array in group for field in array.fields)
        step = max(1, min(BATCH_ROWS, num_bytes // max(1, work_bytes, _record_bytes(group))))
        with contextlib.ExitStack() as stack:
            archive = None
            if any(array.member and array.start < 0 for array in group):
                archive = stack.enter_context(open_zip(self._path(group[0])))
            readers = [
                stack.enter_context(RecordReader(array, self._path(array), split.start, archive))
                for array in group
            ]
            for start in range(split.start, split.stop, step):
                count = min(step, split.stop - start)
                done = start - split.start
                numbers = np.arange(done + 1, done + count + 1)
                columns: dict[str, Any] = {}
                bad: dict[int, BadRow] = {}
                for array, reader in zip(group, readers, strict=True):
                    values = reader.read(count)
                    for field in array.fields:
                        if wishes.of(field.column.name).used:
                            columns[field.column.name], rows = to_arrow(field, values, numbers)
                            bad = {row.row: row for row in rows} | bad
                batch = Batch(columns=columns, numbers=numbers, last=done + count).without(list(bad))
                batch.bad = [bad[row] for row in sorted(bad)]
                yield batch
            if split.stop == self.groups[split.file][0].num_records:
                for reader in readers:
                    reader.check_end()

    def _used(self, split: InputSplit, wishes: Wishes) -> list[NpyArray]:
        """The arrays of a split's group that the dataset wants something of."""
        return [
            array
            for array in self.groups[split.file]
            if any(wishes.of(field.column.name).used for field in array.fields)
        ]

    def _path(self, array: NpyArray) -> str:
        return self.files[array.file].path


def open_npz(files: Sequence[InputFile], options: SourceOptions) -> NpySource:
    """Opens `.npz` or `.npy` files.

    Args:
        files: non-empty files.
        options: not used.

    Returns:
        The source.

    Raises:
        UsageError: files of both sorts.
        RecordError: a file is damaged; values have no lossless form; arrays side by side differ in their
            number of records, or groups in their features; there is no record.
    """
    zipped = [is_zip(file) for file in files]
    if any(zipped) and not all(zipped):
        examples = [files[zipped.index(sort)].path for sort in (True, False)]
        raise UsageError(
            f"all input files must be .npz or all .npy, got {examples[0]} and {examples[1]}. Convert each sort apart."
        )
    if any(zipped):
        groups = [read_npz(index, file) for index, file in enumerate(files)]
    else:
        groups = _side_by_side([read_npy(index, file) for index, file in enumerate(files)], files)
    for group in groups:
        _check_records(group, files)
    columns = [_columns(group, files) for group in groups]
    for group, found in zip(groups, columns, strict=True):
        if sorted(found, key=_name) != sorted(columns[0], key=_name):
            raise RecordError(
                f"all files must give the same features, got {described(found)} ({_paths(group, files)}) beside "
                f"{described(columns[0])} ({_paths(groups[0], files)}). Convert them apart, or name what is missing."
            )
    if not any(group[0].num_records for group in groups):
        raise RecordError(f"the input must hold at least one record, got none ({_paths(groups[0], files)}).")
    return NpySource(files=tuple(files), groups=tuple(map(tuple, groups)), columns=columns[0])


def _side_by_side(arrays: Sequence[NpyArray], files: Sequence[InputFile]) -> list[list[NpyArray]]:
    """Groups the arrays of one directory and number, in the order of directories, then of numbers."""
    by_directory: dict[str, dict[int, list[NpyArray]]] = {}
    for array in arrays:
        numbered = by_directory.setdefault(os.path.dirname(os.path.abspath(files[array.file].path)), {})
        numbered.setdefault(array.number, []).append(array)
    return [group for numbered in by_directory.values() for _, group in sorted(numbered.items())]


def _check_records(group: Sequence[NpyArray], files: Sequence[InputFile]) -> None:
    """Makes sure that arrays side by side have as many records."""
    if len({array.num_records for array in group}) > 1:
        counts = ", ".join(
            f"{array.num_records} in {array.member or files[array.file].path}" for array in group
        )
        where = f" ({files[group[0].file].path})" if group[0].member else ""
        raise RecordError(
            f"arrays side by side must have as many records (the first axis), got {counts}{where}. "
            f"Save what belongs together with one length, or convert the others apart."
        )


def _columns(group: Sequence[NpyArray], files: Sequence[InputFile]) -> tuple[SourceColumn, ...]:
    """The columns of a group, each of a name of its own."""
    owner: dict[str, NpyArray] = {}
    for array in group:
        for field in array.fields:
            name = field.column.name
            if name in owner:
                raise RecordError(
                    f"every feature must have a name of its own, got {name!r} of {_paths([owner[name]], files)} and "
                    f"of {_paths([array], files)}. Rename one, or convert them apart."
                )
            owner[name] = array
    return tuple(field.column for array in group for field in array.fields)


def _record_bytes(group: Sequence[NpyArray]) -> int:
    return max(1, sum(array.record_bytes for array in group))


def _name(column: SourceColumn) -> str:
    return column.name


def _paths(group: Sequence[NpyArray], files: Sequence[InputFile]) -> str:
    """Where a group's arrays lie, the first few of them."""
    paths = list(
        dict.fromkeys(
            f"{files[array.file].path}: {array.member}" if array.member else files[array.file].path
            for array in group
        )
    )
    return ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")
