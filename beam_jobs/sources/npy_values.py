"""What becomes of NumPy's dtypes, without loss: a source's columns, and its values as Arrow arrays.

    bool                                   bool
    int8 .. int64, uint8 .. uint32         int64 as a single value, a tensor of its own type
    uint64, float16, float32, float64      as they are
    S                                      bytes
    U                                      string
    datetime64[unit], timedelta64[unit]    int64, the unit named in the statistics; NaT: no value
    a structured type                      its fields, those of fields in it as `outer.inner`

Objects, which would have to be unpickled, complex numbers, void and long double are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from beam_jobs.sources import SourceColumn
from beam_jobs.sources.bad_rows import RAW_CHARACTERS, BadRow
from tfpipe.errors import RecordError

# One value of a text beside its characters, while it is a Python object.
_TEXT_BYTES = 64
# A record that Arrow's arrays and protobufs can hold.
RECORD_MAX_BYTES = (1 << 31) - 1
# Of NumPy before 2.0.
MAX_DIMENSIONS = 32
_FLOATS = ("float16", "float32", "float64")
_UNITS = {"Y": "year", "M": "month", "W": "week", "D": "day", "h": "hour", "m": "minute"}
_REFUSED = {
    "O": "objects, which only unpickling could read", "c": "complex numbers", "V": "void",
    "f": "floats longer than float64", "m": "time without a unit", "M": "time without a unit",
}  # fmt: skip
_REMEDIES = {
    "O": "Save it with a dtype of numbers or text (array.astype)",
    "c": "Save its real and imaginary part as two arrays (array.real, array.imag)",
    "V": "Save it with its true dtype (array.view)",
    "f": "Save it as float64, if that is exact enough (array.astype)",
    "m": "Save it with its unit (array.astype)",
    "M": "Save it with its unit (array.astype)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NpyField:
    """What one column takes of an array.

    Attributes:
        path: names of the structured fields that lead to it; () for the array itself.
        column: as the dataset has it.
        num_values: of one record.
        work_bytes: of memory for one record, about.
    """

    path: tuple[str, ...]
    column: SourceColumn
    num_values: int
    work_bytes: int


def fields_of(
    dtype: np.dtype, shape: tuple[int, ...], name: str, where: str, path: tuple[str, ...] = ()
) -> Iterator[NpyField]:
    """Yields the columns of an array.

    Args:
        dtype: of the array.
        shape: of one record.
        name: of the column, where the dtype is not structured.
        where: the array, for errors.
        path: of structured fields so far.

    Raises:
        RecordError: a dtype that has no form without loss, or a record without a value.
    """
    if dtype.subdtype is not None:
        dtype, inner = dtype.subdtype
        shape = (*shape, *inner)
    if dtype.names is not None:
        for field in dtype.names:
            inner_path = (*path, field)
            yield from fields_of(dtype[field], shape, ".".join(inner_path), where, inner_path)
        return
    if len(shape) >= MAX_DIMENSIONS:
        raise RecordError(
            f"an array must have at most {MAX_DIMENSIONS} dimensions, got {1 + len(shape)} in {name!r} ({where}). "
            f"Save it with fewer (array.reshape)."
        )
    num_values = math.prod(shape)
    becomes, unit = feature_dtype(dtype, single=not shape)
    if not becomes:
        raise RecordError(
            f"an array must hold values that have a form without loss in an example, got {refused(dtype)} "
            f"in {name!r} ({where}). {_REMEDIES.get(dtype.kind, 'Save it with a dtype of numbers or text')}, or leave it out."
        )
    if not num_values or not dtype.itemsize:
        raise RecordError(
            f"a record must hold at least one value, got shape {list(shape)} of dtype {dtype} in {name!r} "
            f"({where}). Leave the array out."
        )
    if num_values * dtype.itemsize > RECORD_MAX_BYTES:
        raise RecordError(
            f"a record must have at most {RECORD_MAX_BYTES} bytes, got shape {list(shape)} of dtype {dtype} in "
            f"{name!r} ({where}). Save the array with its records along the first axis, or in smaller ones."
        )
    text_bytes = _TEXT_BYTES if dtype.kind in "SU" else 0
    yield NpyField(
        path=path,
        column=SourceColumn(name=name, dtype=becomes, shape=shape, unit=unit),
        num_values=num_values,
        work_bytes=num_values * (dtype.itemsize + text_bytes),
    )


def feature_dtype(dtype: np.dtype, single: bool) -> tuple[str, str]:
    """The feature dtype of a dtype that has no fields.

    Args:
        dtype: of an array, in any byte order.
        single: whether a record has a single value of it.

    Returns:
        The feature dtype, "" for none, and the unit of a time.
    """
    kind = dtype.kind
    if kind == "b":
        return "bool", ""
    if kind in "iu":
        native = dtype.newbyteorder("=").name
        return ("int64" if single and native != "uint64" else native), ""
    if kind == "f":
        native = dtype.newbyteorder("=").name
        return (native if native in _FLOATS else ""), ""
    if kind in "SU":
        return {"S": "bytes", "U": "string"}[kind], ""
    if kind in "mM":
        unit, count = np.datetime_data(dtype)
        if unit == "generic":
            return "", ""
        named = _UNITS.get(unit, unit)
        return "int64", named if count == 1 else f"{count} {named}"
    return "", ""


def refused(dtype: np.dtype) -> str:
    """What a dtype is that has no feature dtype."""
    return f"{_REFUSED.get(dtype.kind, 'values of another kind')} (dtype {dtype})"


def to_arrow(field: NpyField, values: np.ndarray, numbers: np.ndarray) -> tuple[pa.Array, list[BadRow]]:
    """Brings records of an array to Arrow.

    Args:
        field: the column to make.
        values: [n, ...] of the array's own dtype, in any byte order.
        numbers: int64[n], each record's number within its split.

    Returns:
        An array of n rows, single values or lists of a fixed size, and the rows of it that hold what
        their dtype does not allow; what stands in their place means nothing.
    """
    for name in field.path:
        values = values[name]
    flat = np.ascontiguousarray(values).reshape(-1)
    bad: list[BadRow] = []
    mask = None
    if flat.dtype.kind == "U":
        codes = flat.astype(flat.dtype.newbyteorder("=")).view(np.uint32).reshape(len(flat), -1)
        wrong = (codes > 0x10FFFF) | ((codes >= 0xD800) & (codes < 0xE000))
        if wrong.any():
            bad = _bad_rows(field, wrong.any(axis=1), numbers, lambda at: _text_fault(codes[at], wrong[at]))
            codes[wrong] = 0xFFFD
        array = pa.array(codes.view(f"U{codes.shape[1]}").reshape(-1).tolist(), pa.string())
    elif flat.dtype.kind == "S":
        # Not from the NumPy array: Arrow would take a zero byte for the end of a value.
        array = pa.array(flat.tolist(), pa.binary())
    else:
        if flat.dtype.kind == "b" and (wrong := flat.view(np.uint8) > 1).any():
            stored = flat.view(np.uint8)
            bad = _bad_rows(field, wrong, numbers, lambda at: ("bytes 0 or 1", str(stored[at]), ""))
        if flat.dtype.kind in "mM":
            mask = np.isnat(flat)
            flat = flat.view(flat.dtype.str[0] + "i8")
        array = pa.array(
            flat.astype(field.column.dtype), mask=mask if mask is not None and mask.any() else None
        )
    if not field.column.shape:
        return array, bad
    return pa.FixedSizeListArray.from_arrays(array, field.num_values), bad


def _bad_rows(
    field: NpyField, wrong: np.ndarray, numbers: np.ndarray, fault: Callable[[int], tuple[str, str, str]]
) -> list[BadRow]:
    """One bad row a record; `fault` tells what must hold, what was found and the raw value."""
    bad = {}
    for at in np.flatnonzero(wrong).tolist():
        row = int(numbers[at // field.num_values])
        if row not in bad:
            expected, found, raw = fault(at)
            bad[row] = BadRow(
                row=row,
                problem=f"column {field.column.name!r} must hold {expected}, got {found}",
                remedy="Correct the value, or save the array with its true dtype.",
                raw=raw,
            )
    return list(bad.values())


def _text_fault(codes: np.ndarray, wrong: np.ndarray) -> tuple[str, str, str]:
    at = int(wrong.argmax())
    shown = "".join("\ufffd" if w else chr(c) for c, w in zip(codes.tolist(), wrong.tolist(), strict=True))
    what = "half of a surrogate pair" if codes[at] <= 0x10FFFF else "no character"
    raw = shown.rstrip("\0")[:RAW_CHARACTERS]
    return "Unicode text", f"0x{codes[at]:x}, which is {what}, at character {at + 1}", raw


def described(columns: Sequence[SourceColumn]) -> str:
    """The columns in words, for errors."""
    return ", ".join(
        f"{c.name} ({c.dtype} {list(c.shape or ())}{' ' + c.unit if c.unit else ''})" for c in columns
    )
