"""Sources whose columns have types of their own (Parquet, IDX): checked against what is wished.

Comes in: Arrow arrays as the source has them. Goes out: summaries for the scan, or arrays in
the dtype that the dataset wants. What would lose something is a `Misfit` with its row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from beam_jobs.sources import InputSplit, SourceColumn, Wish
from beam_jobs.sources.csv_values import Misfit
from beam_jobs.sources.summary import BadRow, ColumnSummary, SplitScan, summarize_array
from tfpipe.schema import TEXT_DTYPES


class TypedSource:
    """Scans and reads for a source that yields its columns as Arrow arrays."""

    columns: tuple[SourceColumn, ...]

    def batches(self, split: InputSplit) -> Iterator[list[pa.Array]]:
        """Yields a split's columns batch by batch; a tensor column is a fixed-size list."""
        raise NotImplementedError

    def scan(self, split: InputSplit, wishes: Sequence[Wish]) -> SplitScan:
        """Summarizes a split's columns up to the first row that can't be taken; see `Source`."""
        scan = SplitScan(
            index=split.index, columns=[ColumnSummary(dtype=column.dtype) for column in self.columns]
        )
        for arrays in self.batches(split):
            self._add(scan, arrays, wishes)
            if scan.bad is not None:
                break
        return scan

    def read(self, split: InputSplit, wishes: Sequence[Wish]) -> Iterator[pa.RecordBatch]:
        """Yields a split's used columns in the dtypes wished; see `Source`."""
        used = [i for i, wish in enumerate(wishes) if wish.used]
        for arrays in self.batches(split):
            yield pa.RecordBatch.from_arrays(
                [fit(arrays[i], self.columns[i], wishes[i], position=i)[0] for i in used],
                names=[self.columns[i].name for i in used],
            )

    def _add(self, scan: SplitScan, arrays: Sequence[pa.Array], wishes: Sequence[Wish]) -> None:
        rows_before = scan.rows
        scan.rows += len(arrays[0])
        scan.source_rows = scan.rows
        for i, (array, column, wish) in enumerate(zip(arrays, self.columns, wishes, strict=True)):
            if wish.used:
                try:
                    _, narrowed = fit(array, column, wish, position=i)
                except Misfit as error:
                    scan.bad = BadRow(
                        row=rows_before + error.number + 1,
                        problem=f"column {column.name!r} must hold {error.expected}, got {error.found}",
                        remedy=error.remedy,
                    )
                    return
                if narrowed:
                    scan.narrowed[column.name] = scan.narrowed.get(column.name, 0) + narrowed
            scan.columns[i] = scan.columns[i].merge(summarize_array(_flat(array), column.dtype))


def fit(array: pa.Array, column: SourceColumn, wish: Wish, *, position: int) -> tuple[pa.Array, int]:
    """Brings an array to the dtype wished, without loss but for a float32 that was asked for.

    Args:
        array: of the column's own dtype.
        column: of the source.
        wish: its dtype and whether nulls are allowed.
        position: of the column, for the error.

    Returns:
        The array, and how many values a declared float32 or float16 shortened.

    Raises:
        Misfit: the first row that does not fit; rows count from 0 within the array.
    """
    if wish.required and array.null_count:
        row = pc.index(array.is_null(), True).as_py()
        raise Misfit(
            row, position, "a value in every row", "null",
            "Fill it in, or declare the feature nullable in --schema (a packed column can't be).",
        )  # fmt: skip
    target = wish.dtype or column.dtype
    if target == column.dtype:
        return array, 0
    if column.dtype in TEXT_DTYPES or target in TEXT_DTYPES:
        return _fit_text(array, column, target, position), 0
    flat = _flat(array)
    values = _numbers(flat)
    with np.errstate(all="ignore"):
        cast = values.astype("uint8" if target == "bool" else target)
        same = _equals(cast, values)
        if target == "bool":
            same &= values <= 1
    valid = _valid(flat)
    narrowed = np.zeros(len(values), bool)
    if values.dtype.kind == "f" and cast.dtype.kind == "f":
        # Shortened, as asked for; but not beyond what the dtype can hold.
        narrowed = ~same & valid & np.isfinite(cast)
        same |= narrowed
    wrong = ~same & valid
    if wrong.any():
        at = int(np.argmax(wrong))
        raise Misfit(
            at * len(array) // max(len(values), 1), position, target, repr(values[at].item()),
            "Declare a dtype that holds every value.",
        )  # fmt: skip
    result = pa.array(cast, mask=None if valid.all() else ~valid)
    if target == "bool":
        result = result.cast(pa.bool_())
    if pa.types.is_fixed_size_list(array.type):
        result = pa.FixedSizeListArray.from_arrays(result, array.type.list_size)
    return result, int(narrowed.sum())


def _fit_text(array: pa.Array, column: SourceColumn, target: str, position: int) -> pa.Array:
    if column.dtype == "string" and target == "bytes":
        return array.cast(pa.binary())
    if column.dtype == "bytes" and target == "string":
        for row, value in enumerate(array):
            try:
                if value.is_valid:
                    value.as_py().decode()
            except UnicodeDecodeError:
                raise Misfit(
                    row, position, "UTF-8 text", f"{value.as_py()[:20]!r}", 'Declare dtype "bytes".'
                ) from None
        return array.cast(pa.string())
    if target == "string" and not column.shape and column.dtype.startswith(("int", "uint")):
        return array.cast(pa.string())
    row = pc.index(array.is_valid(), True).as_py()
    raise Misfit(
        max(row, 0), position, target, f"a column of {column.dtype}", f'Declare dtype "{column.dtype}".'
    )


def _flat(array: pa.Array) -> pa.Array:
    if not pa.types.is_fixed_size_list(array.type):
        return array
    size = array.type.list_size
    return array.values.slice(array.offset * size, len(array) * size)


def _valid(array: pa.Array) -> np.ndarray:
    return array.is_valid().to_numpy(zero_copy_only=False)


def _numbers(array: pa.Array) -> np.ndarray:
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    return (array.fill_null(0) if array.null_count else array).to_numpy(zero_copy_only=False)


def _equals(cast: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Whether each value survived; a cast back that overflows counts as lost."""
    back = cast.astype(values.dtype)
    same = (back == values) | ((values != values) & (back != back))
    if values.dtype.kind in "iu" and cast.dtype.kind == "f":
        # 2**63 as a float casts back to the limit by saturation: compare among floats as well.
        same &= np.abs(cast.astype(np.float64)) < 2.0**63
    if values.dtype.kind in "iu" and cast.dtype.kind in "iu":
        same &= (cast < 0) == (values < 0)
    return same
