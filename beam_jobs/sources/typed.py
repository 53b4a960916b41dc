"""Sources whose values have types of their own (Parquet, JSONL, IDX ...): checked against what is wished.

Comes in: batches of Arrow arrays as the source has them. Goes out: summaries for the scan, or
arrays in the dtype and shape that the dataset wants. What would lose something is a `Misfit`
with its row, and its row is left out where the user allowed that.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from beam_jobs.sources import FileSource, InputSplit, SourceColumn, Wishes
from beam_jobs.sources.bad_rows import RAW_CHARACTERS, BadRow, BadRows, Misfit, accept
from beam_jobs.sources.csv_values import summarize_spelled
from beam_jobs.sources.fit import SPELLED, arrow_type, dtype_of, fit, flatten, is_list, list_lengths
from beam_jobs.sources.summary import ColumnSummary, SplitScan, summarize_array


@dataclass(kw_only=True)
class Batch:
    """Rows that a source read together.

    Attributes:
        columns: by name, of equal lengths; single values, or lists of them, of any depth.
        numbers: int64[n], each row's number within its split, the first is 1.
        last: the highest number so far, of rows that are no records, too.
        bad: rows that could not be read, in addition to these.
        origin: (row within the batch) -> where it is, if its number does not tell.
        texts: the rows as they are written, for sources of text.
        notes: what was done to each row, for the scan to count.
        kinds: by column, the kind of its lists and the place of one, for `ColumnSummary`.
    """

    columns: dict[str, pa.Array]
    numbers: np.ndarray
    last: int
    bad: list[BadRow] = field(default_factory=list)
    origin: Callable[[int], str] | None = None
    texts: Sequence[str] | None = None
    notes: Sequence[tuple[str, ...]] | None = None
    kinds: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.numbers)

    def take(self, kept: np.ndarray) -> Batch:
        """Some of its rows (int64[]), in order."""
        origin = self.origin
        return Batch(
            columns={name: array.take(pa.array(kept)) for name, array in self.columns.items()},
            numbers=self.numbers[kept],
            last=self.last,
            origin=None if origin is None else lambda row: origin(int(kept[row])),
            texts=None if self.texts is None else [self.texts[row] for row in kept],
            notes=None if self.notes is None else [self.notes[row] for row in kept],
            kinds=self.kinds,
        )

    def halves(self) -> tuple[Batch, Batch]:
        """The first and the second half of its rows."""
        first, second = np.array_split(np.arange(self.rows), 2)
        return self.take(first), self.take(second)

    def without(self, numbers: Sequence[int]) -> Batch:
        """The batch without the rows of those numbers."""
        return self.take(np.flatnonzero(~np.isin(self.numbers, numbers))) if len(numbers) else self

    def raw(self, row: int) -> str:
        """A row as it is written, or its values as JSON, shortened."""
        if self.texts is not None:
            return self.texts[row][:RAW_CHARACTERS]
        values = {name: _shown(array[row].as_py()) for name, array in self.columns.items()}
        return json.dumps(values, ensure_ascii=False, default=repr)[:RAW_CHARACTERS]


class TypedSource(FileSource):
    """Scans and reads for a source that yields its columns as Arrow arrays."""

    columns: tuple[SourceColumn, ...] | None

    def batches(self, split: InputSplit, wishes: Wishes) -> Iterator[Batch]:
        """Yields a split batch by batch; columns that are not wished for may be left out."""
        raise NotImplementedError

    def checked_batches(self, split: InputSplit, wishes: Wishes) -> Iterator[Batch]:
        """Yields the same for the scan, which may look closer at what is only copied later."""
        return self.batches(split, wishes)

    def summarize(self, column: SourceColumn, values: pa.Array) -> ColumnSummary:
        """Summarizes single values of a column, nulls among them."""
        if values.type == SPELLED:
            return summarize_spelled(values)
        summary = summarize_array(values, dtype_of(values.type) or column.dtype)
        if not column.dtype:  # JSON: what the column holds, not how it came, tells its dtype
            summary.dtype, summary.quoted = "", True
        return summary

    def scan(self, split: InputSplit, wishes: Wishes, max_rejected: int = 0) -> SplitScan:
        """Summarizes a split's columns up to the first row too many that can't be taken; see `Source`."""
        scan = SplitScan(index=split.index)
        known = {column.name: column for column in self.columns or ()}
        for name, column in known.items():
            scan.columns[name] = ColumnSummary(dtype=column.dtype, shape=column.shape)

        def take(batch: Batch) -> None:
            self._add(scan, known, batch, wishes)

        with BadRows(scan, max_rejected) as bad:
            for batch in self.checked_batches(split, wishes):
                scan.source_rows = batch.last
                accept(batch, take, lambda part, misfit: bad.add(_bad_row(part, misfit)))
                for row in batch.bad:
                    bad.add(row)
        return scan

    def read(
        self, split: InputSplit, wishes: Wishes, rejected: Sequence[int] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Yields a split's used columns as wished; see `Source`."""
        used = {name: wish for name, wish in wishes.columns.items() if wish.used}
        for whole in self.batches(split, wishes):
            batch = whole.without(rejected)
            if batch.rows:
                arrays = [_fitted(batch, name, wishes)[0] for name in used]
                yield pa.RecordBatch.from_arrays(arrays, names=list(used))

    def _add(self, scan: SplitScan, known: dict[str, SourceColumn], batch: Batch, wishes: Wishes) -> None:
        """Adds a batch's rows to the scan, or leaves it as it is.

        Raises:
            Misfit: a row that does not fit.
        """
        names = [name for name in _names(batch, known, wishes) if wishes.of(name).used]
        narrowed = {name: _fitted(batch, name, wishes)[1] for name in names}
        for name in names:
            if narrowed[name]:
                scan.narrowed[name] = scan.narrowed.get(name, 0) + narrowed[name]
            before = scan.columns.get(name)
            if before is None:  # the rows before had none
                before = ColumnSummary.absent(scan.rows)
            scan.columns[name] = before.merge(self._summarize(batch, name, known))
        for name in scan.columns.keys() - set(names):
            scan.columns[name] = scan.columns[name].merge(ColumnSummary.absent(batch.rows))
        scan.rows += batch.rows
        for note in itertools.chain.from_iterable(batch.notes or ()):
            scan.counts[note] = scan.counts.get(note, 0) + 1

    def _summarize(self, batch: Batch, name: str, known: dict[str, SourceColumn]) -> ColumnSummary:
        array = batch.columns.get(name)
        if array is None or array.null_count == len(array):
            return ColumnSummary.absent(batch.rows)
        column = known.get(name) or SourceColumn(name=name, shape=None)
        if not is_list(array.type):
            summary = self.summarize(column, array)
            summary.shape = () if column.shape is None else column.shape
            return summary
        sizes = list_lengths(array)[pc.is_valid(array).to_numpy(zero_copy_only=False)]
        flat, inner = flatten(array)
        summary = self.summarize(column, flat.flatten())
        summary.counts += ColumnSummary.absent(array.null_count).counts
        summary.shape = column.shape
        if column.shape is None:
            first = int(sizes[0]) if sizes.min() == sizes.max() else None
            summary.shape = (first, *(inner or ()))
        return summary


def _names(batch: Batch, known: dict[str, SourceColumn], wishes: Wishes) -> list[str]:
    """The columns of a batch and those it should have had, in the source's order as far as it has one."""
    return list(dict.fromkeys([*known, *batch.columns, *wishes.columns]))


def _bad_row(batch: Batch, misfit: Misfit) -> BadRow:
    """Describes the one row of a batch."""
    return BadRow(
        row=int(batch.numbers[0]),
        problem=f"column {misfit.column!r} must hold {misfit.expected}, got {misfit.found}",
        remedy=misfit.remedy,
        raw=batch.raw(0),
        origin=batch.origin(0) if batch.origin else "",
    )


def _fitted(batch: Batch, name: str, wishes: Wishes) -> tuple[pa.Array, int]:
    wish = wishes.of(name)
    array = batch.columns.get(name)
    if array is None:
        array = pa.nulls(batch.rows, arrow_type(wish.dtype, wish.shape))
    try:
        return fit(array, wish)
    except Misfit as misfit:
        misfit.column = name
        raise


def _shown(value: object) -> object:
    """A value as a reject keeps it: long bytes and lists shortened before they become text."""
    return value[:RAW_CHARACTERS] if isinstance(value, (bytes, str, list)) else value
