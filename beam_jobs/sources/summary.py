"""What the scan knows of a column: mergeable counts, and the dtype that follows from them.

The lattice is bool < int64 < float < string. A split's summary is made by the source that
read it; summaries merge in split order, so the result never depends on who read what.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from beam_jobs.sources.bad_rows import BadRow
from beam_jobs.sources.csv_columns import INEXACT64, INFINITE, LOSSY32, NUM_COUNTS, TEXT_BYTES, TEXT_MAX
from beam_jobs.sources.csv_kernels import BIG, BOOL, EMPTY, FLOAT, INT, NA, NAN, TEXT
from tfpipe.errors import SchemaError

INTEGER_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
# What a column of values of several dtypes has for a dtype where they may not join: no feature can take it.
MIXED_DTYPE = "mixed"
_INT64 = np.iinfo(np.int64)


def _no_counts() -> np.ndarray:
    return np.zeros(NUM_COUNTS, np.int64)


@dataclass(kw_only=True)
class ColumnSummary:
    """Counts of one column.

    A column of lists is counted by the values in them; EMPTY counts the rows without a list.

    Attributes:
        counts: by kind of field and more, as `csv_columns.scan_column` fills them.
        dtype: of the source where it has types of its own; "" for text.
        lowest: the lowest integer; an int that is higher than `highest` if there is none.
        highest: the highest integer.
        low: the lowest finite number.
        high: the highest finite number.
        shape: of the values so far, None for a dimension that differs; None before the first value.
        quoted: whether the source tells text from numbers (JSON), so that a column can't hold both.
        exact: whether each value has a dtype of its own, so that a column can't hold two of them.
        kind: how the values lie in a tf.train.Example (an encoding), which must be one throughout; else "".
        first: the place of the first record that has such a list.
        empty_lists: rows with an empty list, which EMPTY counts too: only if lengths differ are they values.
    """

    counts: np.ndarray = field(default_factory=_no_counts)
    dtype: str = ""
    lowest: int = _INT64.max
    highest: int = _INT64.min
    low: float = math.inf
    high: float = -math.inf
    shape: tuple[int | None, ...] | None = None
    quoted: bool = False
    exact: bool = False
    kind: str = ""
    first: str = ""
    empty_lists: int = 0

    def merge(self, other: ColumnSummary) -> ColumnSummary:
        """The summary of both, this one's rows first.

        Raises:
            SchemaError: they are of different kinds.
        """
        if self.kind and other.kind and self.kind != other.kind:
            raise kinds_differ((self.kind, self.first), (other.kind, other.first))
        dtype, exact = self.dtype, self.exact or other.exact
        if dtype != other.dtype:
            dtype = MIXED_DTYPE if exact and dtype and other.dtype else join_dtypes(dtype, other.dtype)
        return ColumnSummary(
            counts=np.concatenate((
                self.counts[:TEXT_MAX] + other.counts[:TEXT_MAX],
                np.maximum(self.counts[TEXT_MAX:], other.counts[TEXT_MAX:]),
            )),
            dtype=dtype,
            lowest=min(self.lowest, other.lowest),
            highest=max(self.highest, other.highest),
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            shape=join_shapes(self.shape, other.shape),
            quoted=self.quoted or other.quoted,
            exact=exact,
            kind=self.kind or other.kind,
            first=self.first or other.first,
            empty_lists=self.empty_lists + other.empty_lists,
        )  # fmt: skip

    def settled(self) -> ColumnSummary:
        """The summary of all records: now it is known whether the lists of an Example have one length."""
        if not self.kind:
            return self
        shape = (None,) if self.shape is None else () if self.shape == (1,) else self.shape
        counts = self.counts.copy()
        counts[EMPTY] -= self.empty_lists if None in shape else 0
        return dataclasses.replace(self, counts=counts, shape=shape, first="", empty_lists=0)

    @classmethod
    def from_json(cls, obj: dict[str, Any]) -> ColumnSummary:
        """What its attributes are as plain values."""
        shape = obj["shape"]
        counts = np.array(obj["counts"], np.int64)
        return cls(**obj | {"counts": counts, "shape": None if shape is None else tuple(shape)})

    @classmethod
    def absent(cls, rows: int) -> ColumnSummary:
        """Of a column that these rows do not have."""
        summary = cls()
        summary.counts[EMPTY] = rows
        return summary

    @property
    def inferred_dtype(self) -> str:
        """The dtype that loses nothing of any value."""
        if self.dtype:
            return self.dtype
        counts = self.counts
        if counts[TEXT] or counts[BIG]:
            return "string"
        # Text says NaN also for "there is none"; a source with types of its own means the float.
        if counts[FLOAT] == 0 and not (self.quoted and counts[NAN]):
            if counts[INT]:
                return "int64"
            if counts[BOOL]:
                return "bool"
            return "float32" if counts[NAN] else "string"
        if counts[INEXACT64]:  # integers that no float holds, beside fractions
            return "string"
        return "float64" if counts[LOSSY32] else "float32"

    @property
    def narrowest_integer(self) -> str:
        """The narrowest of uint8, int16, int32, int64 that holds every integer."""
        for dtype in ("uint8", "int16", "int32"):
            if np.iinfo(dtype).min <= self.lowest and self.highest <= np.iinfo(dtype).max:
                return dtype
        return "int64"

    def nulls(self, dtype: str) -> int:
        """How many values are absent if the column is read as `dtype`."""
        counts = self.counts
        if self.dtype or dtype in ("string", "bytes"):
            return int(counts[EMPTY])
        nulls = int(counts[EMPTY] + counts[NA])
        # NaN is a value among floats; among integers it can only mean that there is none.
        return nulls if dtype.startswith("float") else nulls + int(counts[NAN])

    def statistics(self, dtype: str) -> dict[str, Any]:
        """What is known before the records are written: nulls, min and max of finite numbers."""
        nulls = self.nulls(dtype)
        result: dict[str, Any] = {"nulls": nulls}
        if dtype in ("string", "bytes"):
            return result
        number = int if dtype in INTEGER_DTYPES or dtype == "bool" else float
        if self.low <= self.high:
            whole = number is int and self.lowest <= self.highest
            result["min"] = number(self.lowest) if whole else number(self.low)
            result["max"] = number(self.highest) if whole else number(self.high)
        return result

    @property
    def mean_text_bytes(self) -> float:
        """Bytes of a text, on the average over those there are."""
        present = self.rows - int(self.counts[EMPTY])
        return float(self.counts[TEXT_BYTES] / present) if present else 0.0

    @property
    def rows(self) -> int:
        """Values there are, and rows without one."""
        return int(self.counts[:INFINITE].sum())


def kinds_differ(one: tuple[str, str], other: tuple[str, str]) -> SchemaError:
    """The error of a feature of two kinds, each with the place of a record that has it."""
    return SchemaError(
        f"a feature must be of one kind in all records, got {one[0]} ({one[1]}) and {other[0]} ({other[1]}). "
        f"Write the records again, or leave the feature out (--schema)."
    )


def join_dtypes(a: str, b: str) -> str:
    """The narrowest dtype that holds every value of both (for sources with types of their own).

    Args:
        a: a dtype, or "" for none yet.
        b: likewise.

    Returns:
        The joined dtype; "string" where only text holds both.
    """
    if not a or not b or a == b:
        return a or b
    if "bytes" in (a, b):
        return "bytes"
    if "string" in (a, b):
        return "string"
    if {a, b} == {"int64", "uint64"}:
        return "string"
    order = ("bool", "int64", "uint64", "float32", "float64")
    low, high = sorted((a, b), key=order.index)
    if low in ("int64", "uint64") and high == "float32":
        return "float64"
    return high


# What a column of single values beside lists has for a shape: no feature can take it.
MIXED: tuple[int | None, ...] = (-1,)


def join_shapes(
    a: tuple[int | None, ...] | None, b: tuple[int | None, ...] | None
) -> tuple[int | None, ...] | None:
    """The shape of values of either shape; `MIXED` where they differ in their number of dimensions."""
    if a is None or b is None or a == b:
        return b if a is None else a
    if MIXED in (a, b) or not a or not b:
        return MIXED
    if 0 in (a[0], b[0]):  # an empty list has no elements to tell their shape
        return (None, *max(a[1:], b[1:], key=len))
    if len(a) != len(b):
        return MIXED
    return tuple(size if size == other else None for size, other in zip(a, b, strict=True))


def summarize_array(array: pa.Array, dtype: str) -> ColumnSummary:
    """Summarizes a typed array.

    Args:
        array: numbers, bools, text or bytes; nulls allowed.
        dtype: the feature dtype that the column has in its source.

    Returns:
        Its summary.
    """
    summary = ColumnSummary(dtype=dtype)
    counts = summary.counts
    counts[EMPTY] = array.null_count
    present = len(array) - array.null_count
    if dtype in ("string", "bytes"):
        counts[TEXT] = present
        if present:
            lengths = pc.binary_length(array)
            counts[TEXT_BYTES] = pc.sum(lengths).as_py()
            counts[TEXT_MAX] = pc.max(lengths).as_py()
        return summary
    if dtype == "bool":
        array = array.cast(pa.uint8())
        counts[BOOL] = present
    values = array.drop_null().to_numpy(zero_copy_only=False) if array.null_count else _numpy(array)
    if values.dtype.kind == "f":
        counts[FLOAT] = present
        finite = np.isfinite(values)
        if not finite.all():
            counts[NAN] = int(np.isnan(values).sum())
            counts[FLOAT] -= counts[NAN]
            counts[INFINITE] = present - int(finite.sum()) - counts[NAN]
            values = values[finite]
    else:
        if dtype != "bool":
            counts[INT] = present
        if len(values):
            summary.lowest, summary.highest = int(values.min()), int(values.max())
    if len(values):
        summary.low, summary.high = float(values.min()), float(values.max())
        if values.dtype == np.float64:
            with np.errstate(over="ignore"):
                counts[LOSSY32] = int((values.astype(np.float32) != values).sum())
    return summary


def _numpy(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)


@dataclass(kw_only=True)
class SplitScan:
    """What the scan found in one input split.

    Attributes:
        index: the split's.
        rows: records.
        source_rows: rows of the source, records and others (header, blank lines).
        columns: one summary a column, in the order of appearance.
        bad: rows that can't be taken, ascending; one more than allowed if the rest was not looked at.
        narrowed: per feature, values that a declared dtype shortened.
        counts: records by what the source did to them, in words that follow a number.
    """

    index: int
    rows: int = 0
    source_rows: int = 0
    columns: dict[str, ColumnSummary] = field(default_factory=dict)
    bad: list[BadRow] = field(default_factory=list)
    narrowed: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a file."""
        columns = {
            name: vars(summary) | {"counts": summary.counts.tolist()}
            for name, summary in self.columns.items()
        }
        return vars(self) | {"columns": columns, "bad": [dataclasses.asdict(bad) for bad in self.bad]}

    @classmethod
    def from_json(cls, obj: dict[str, Any]) -> SplitScan:
        """What `to_json` gave."""
        return cls(**obj | {
            "columns": {name: ColumnSummary.from_json(summary) for name, summary in obj["columns"].items()},
            "bad": [BadRow(**bad) for bad in obj["bad"]],
        })  # fmt: skip
