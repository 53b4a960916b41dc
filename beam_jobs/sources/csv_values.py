"""CSV fields -> column summaries and Arrow arrays.

`ColumnReader` goes through batches of tokenized rows, column by column. What a compiled loop
can't do, correct rounding of numbers with many digits, goes through Arrow's parser.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from beam_jobs.sources import Wish
from beam_jobs.sources import csv_columns as c
from beam_jobs.sources import csv_kernels as k
from beam_jobs.sources.bad_rows import RAW_CHARACTERS, Misfit
from beam_jobs.sources.summary import ColumnSummary
from tfpipe.schema import TEXT_DTYPES

_SHOWN = 60
_NOT_NUMBERS = 1 << k.EMPTY | 1 << k.NA | 1 << k.TEXT | 1 << k.BIG
_FOREVER = np.iinfo(np.int64)


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Rows of a block of bytes, as `csv_kernels.tokenize` found them.

    Attributes:
        buf: uint8[], the block.
        starts: int32[columns, >= rows].
        ends: int32[columns, >= rows], with flags.
        numbers: int64[>= rows], each row's number in its file (split).
        rows: how many.
        first_byte: where they start in the block.
        last_byte: where they end.
    """

    buf: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    numbers: np.ndarray
    rows: int
    first_byte: int
    last_byte: int

    def text(self, column: int, row: int) -> bytes:
        """A field's bytes, quotes undone."""
        end = int(self.ends[column, row])
        field = self.buf[self.starts[column, row] : end >> 2].tobytes()
        return field.replace(b'""', b'"') if end & k.ESCAPED else field

    def take(self, kept: np.ndarray) -> TokenBatch:
        """Some of its rows (int64[]), in order."""
        return dataclasses.replace(
            self, starts=self.starts[:, kept], ends=self.ends[:, kept], numbers=self.numbers[kept],
            rows=len(kept),
        )  # fmt: skip

    def halves(self) -> tuple[TokenBatch, TokenBatch]:
        """The first and the second half of its rows."""
        first, second = np.array_split(np.arange(self.rows), 2)
        return self.take(first), self.take(second)

    def without(self, numbers: Sequence[int]) -> TokenBatch:
        """The batch without the rows of those numbers."""
        if not len(numbers):
            return self
        return self.take(np.flatnonzero(~np.isin(self.numbers[: self.rows], numbers)))

    def raw(self, row: int) -> str:
        """A row's text as it was written, shortened."""
        first, last = int(self.starts[0, row]), int(self.ends[-1, row])
        first -= int(self.ends[0, row]) & k.QUOTED
        text = self.buf[first : (last >> 2) + (last & k.QUOTED)][: 4 * RAW_CHARACTERS]
        return text.tobytes().decode(errors="replace")[:RAW_CHARACTERS]

    def is_utf8(self) -> bool:
        content = self.buf[self.first_byte : self.last_byte].tobytes()
        if content.isascii():
            return True
        try:
            content.decode()
        except UnicodeDecodeError:
            return False
        return True


class ColumnReader:
    """Summarizes or reads batches, as wished.

    Args:
        names: of the columns.
        wishes: one a column.

    Attributes:
        summaries: one a column, of all batches scanned.
        rows: of all batches scanned.
        narrowed: per column, values that a float32 or float16 that was asked for shortened.
    """

    def __init__(self, names: Sequence[str], wishes: Sequence[Wish]) -> None:
        self.names, self.wishes = names, wishes
        self.summaries = [ColumnSummary() for _ in wishes]
        self.narrowed = [0] * len(wishes)
        self.rows = 0

    def scan(self, batch: TokenBatch) -> None:
        """Adds a batch to the summaries, or leaves them as they are.

        Raises:
            Misfit: a field that does not fit.
        """
        before = copy.deepcopy(self.summaries), list(self.narrowed)
        try:
            self._scan(batch)
        except Misfit:
            self.summaries, self.narrowed = before
            raise
        self.rows += batch.rows

    def _scan(self, batch: TokenBatch) -> None:
        utf8 = batch.is_utf8()
        for column, wish in enumerate(self.wishes):
            if not wish.used:
                continue
            self._summarize(batch, column)
            if wish.numeric:
                row = c.first_of_kinds(
                    batch.buf, batch.starts[column], batch.ends[column], batch.rows, _NOT_NUMBERS
                )
                if row >= 0:
                    raise self._misfit(batch, column, row, "numbers, since it is packed")
            if wish.dtype:
                lossy = self.summaries[column].counts[c.LOSSY32]
                self._read_column(batch, column)
                if wish.dtype == "float32":
                    self.narrowed[column] = int(lossy)
            if not utf8 and wish.dtype != "bytes":
                self._check_utf8(batch, column)

    def read(self, batch: TokenBatch) -> list[pa.Array]:
        """The used columns' values, in the dtypes wished.

        Raises:
            Misfit: a field that does not fit; never after a scan with the same wishes.
        """
        return [self._read_column(batch, i) for i, wish in enumerate(self.wishes) if wish.used]

    def _summarize(self, batch: TokenBatch, column: int) -> None:
        summary = self.summaries[column]
        extremes = np.array([summary.lowest, summary.highest], np.int64)
        limits = np.array([summary.low, summary.high])
        hard = np.empty(batch.rows, np.int32)
        starts, ends = batch.starts[column], batch.ends[column]
        with np.errstate(over="ignore"):
            count = c.scan_column(batch.buf, starts, ends, batch.rows, summary.counts, extremes, limits, hard)
            # Once a column holds text, the digits of its numbers don't matter.
            if count and not summary.counts[k.TEXT]:
                values = self._hard_values(batch, column, hard[:count])
                c.scan_hard(batch.buf, starts, ends, hard[:count], values, summary.counts, limits)
        summary.lowest, summary.highest = int(extremes[0]), int(extremes[1])
        summary.low, summary.high = (float(value) for value in limits)

    def _hard_values(self, batch: TokenBatch, column: int, rows: np.ndarray) -> np.ndarray:
        text, _ = _texts(batch, column, rows, pa.string())
        return pc.cast(
            pc.utf8_trim_whitespace(pc.replace_substring_regex(text, r"^(\s*)\+", r"\1")), pa.float64()
        ).to_numpy()

    def _read_column(self, batch: TokenBatch, column: int) -> pa.Array:
        wish = self.wishes[column]
        dtype, rows = wish.dtype, batch.rows
        starts, ends = batch.starts[column], batch.ends[column]
        if dtype in ("string", "bytes"):
            kind = pa.string() if dtype == "string" else pa.binary()
            array, valid = _texts(batch, column, np.arange(rows, dtype=np.int32), kind)
            self._check_required(batch, column, valid, array.null_count)
            return array
        valid = np.empty(rows, np.uint8)
        if dtype == "bool":
            values = np.empty(rows, np.uint8)
            bad, nulls = c.read_bools(batch.buf, starts, ends, rows, values, valid)
        elif dtype.startswith("float"):
            values = np.empty(rows, np.float64)
            hard = np.empty(rows, np.int32)
            bad, nulls, num_hard = c.read_floats(batch.buf, starts, ends, rows, values, valid, hard)
            if num_hard:
                values[hard[:num_hard]] = self._hard_values(batch, column, hard[:num_hard])
            if bad < 0:
                values, bad = self._narrow(values, valid, dtype, hard[:num_hard], column)
        else:
            values = np.empty(rows, np.int64)
            unsigned = dtype == "uint64"
            bad, nulls = c.read_integers(batch.buf, starts, ends, rows, values, valid, unsigned)
            if not unsigned and dtype != "int64" and bad < 0:
                limits = np.iinfo(dtype)
                outside = (values < limits.min) | (values > limits.max)
                bad = int(outside.argmax()) if outside.any() else -1
        if bad >= 0:
            raise self._misfit(batch, column, int(bad), dtype)
        self._check_required(batch, column, valid, nulls)
        if dtype == "uint64":
            values = values.view(np.uint64)
        elif dtype != "bool":
            values = values.astype(dtype, copy=False)
        return to_array(values, valid if nulls else None)

    def _narrow(
        self, values: np.ndarray, valid: np.ndarray, dtype: str, hard: np.ndarray, column: int
    ) -> tuple[np.ndarray, int]:
        """The values as the dtype holds them; the first row whose digits are beyond its range, or -1."""
        with np.errstate(over="ignore"):
            narrow = values.astype(dtype, copy=False)
        if dtype == "float16":
            self.narrowed[column] += int(((narrow != values) & ~np.isnan(values) & (valid == 1)).sum())
        beyond = np.isinf(narrow)
        if not beyond.any():
            return narrow, -1
        written = np.isinf(values)
        written[hard] = False  # an infinity that was written as one is never hard
        beyond &= ~written
        return narrow, int(beyond.argmax()) if beyond.any() else -1

    def _check_required(self, batch: TokenBatch, column: int, valid: np.ndarray, nulls: int) -> None:
        if nulls and self.wishes[column].required:
            raise self._misfit(batch, column, int(valid.argmin()), "a value in every row")

    def _check_utf8(self, batch: TokenBatch, column: int) -> None:
        for row in range(batch.rows):
            try:
                batch.text(column, row).decode()
            except UnicodeDecodeError:
                raise self._misfit(batch, column, row, "UTF-8 text") from None

    def _misfit(self, batch: TokenBatch, column: int, row: int, expected: str) -> Misfit:
        field = batch.text(column, row)
        found = repr(field.decode(errors="backslashreplace"))
        if len(found) > _SHOWN:
            found = found[:_SHOWN] + "..."
        remedy = "Correct the value, or declare another dtype for it (--schema)."
        if expected == "UTF-8 text":
            remedy = 'Convert the file to UTF-8 (iconv -t UTF-8), or declare dtype "bytes" (--schema).'
        elif expected == "a value in every row":
            found = f"an empty one ({found})"
            remedy = 'Fill it in, or declare "nullable": true (--schema).'
        elif expected.startswith("numbers"):
            remedy = "Fill it in, or leave the column out of --pack."
        return Misfit(int(batch.numbers[row]), self.names[column], expected, found, remedy)


def summarize_spelled(array: pa.Array) -> ColumnSummary:
    """Summarizes numbers that are still as they are written (large_string; nulls allowed)."""
    reader = ColumnReader([""], [Wish()])
    reader.scan(_tokens(array))
    (summary,) = reader.summaries
    summary.quoted = True
    # No text: numbers of more digits than any integer has.
    summary.counts[k.BIG] += summary.counts[k.TEXT]
    summary.counts[k.TEXT] = 0
    return summary


def read_spelled(array: pa.Array, wish: Wish) -> tuple[pa.Array, int]:
    """Reads numbers that are still as they are written.

    Args:
        array: large_string; nulls allowed.
        wish: the dtype of the result, and whether each must be a number that a float holds.

    Returns:
        The values, as they are if no dtype is wished; and how many a float16 or float32 shortened.

    Raises:
        Misfit: the first that does not fit, by its place in the array.
    """
    if wish.dtype in TEXT_DTYPES and not wish.numeric:
        return array.cast(pa.string() if wish.dtype == "string" else pa.binary()), 0
    if not wish.dtype and not wish.numeric:
        return array, 0
    reader = ColumnReader([""], [Wish(dtype=wish.dtype, numeric=wish.numeric)])
    reader.scan(batch := _tokens(array))
    narrowed = reader.narrowed[0]
    return (reader.read(batch)[0] if wish.dtype else array), narrowed


def _tokens(array: pa.Array) -> TokenBatch:
    """An array of large_string as one column of fields; nulls are empty fields."""
    filled = array.fill_null("").cast(pa.string())
    _, offsets, data = filled.buffers()
    ends = np.frombuffer(offsets, np.int32)[filled.offset : filled.offset + len(array) + 1]
    return TokenBatch(
        buf=np.frombuffer(data or b"", np.uint8),
        starts=ends[None, :-1],
        ends=(ends[None, 1:] << 2).astype(np.int32),
        numbers=np.arange(len(array)),
        rows=len(array),
        first_byte=0,
        last_byte=0,
    )


def to_array(values: np.ndarray, valid: np.ndarray | None) -> pa.Array:
    """Wraps values as Arrow without copying them; `valid` is 1 where there is a value."""
    bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [bitmap, pa.py_buffer(values)]
    )


def _texts(
    batch: TokenBatch, column: int, rows: np.ndarray, kind: pa.DataType
) -> tuple[pa.Array, np.ndarray]:
    offsets = np.empty(len(rows) + 1, np.int32)
    valid = np.empty(len(rows), np.uint8)
    starts, ends = batch.starts[column], batch.ends[column]
    nulls = c.text_offsets(batch.buf, starts, ends, rows, offsets, valid)
    data = np.empty(int(offsets[-1]), np.uint8)
    c.text_data(batch.buf, starts, ends, rows, data)
    bitmap = pa.py_buffer(np.packbits(valid, bitorder="little")) if nulls else None
    buffers = [bitmap, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, len(rows), buffers), valid
