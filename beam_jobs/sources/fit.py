"""Brings an Arrow array to the dtype and shape that the dataset wants, without loss, or says where it can't.

A list leaves as an Arrow list of single values, lists in it laid out flat. It has a fixed size
where the dataset's shape is fixed.
"""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from beam_jobs.sources import Wish
from beam_jobs.sources.bad_rows import Misfit
from beam_jobs.sources.csv_values import read_spelled
from tfpipe.schema import TEXT_DTYPES

_SHOWN = 60
# The type of numbers that are still as they are written; no other array of text has it.
SPELLED = pa.large_string()
_ARROW = {
    "bool": pa.bool_(), "string": pa.string(), "bytes": pa.binary(), "float16": pa.float16(),
    "float32": pa.float32(), "float64": pa.float64(),
    **{f"{sign}int{bits}": getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip
_DTYPES = {kind: dtype for dtype, kind in _ARROW.items()} | {
    SPELLED: "", pa.large_binary(): "bytes",
}  # fmt: skip


def dtype_of(kind: pa.DataType) -> str:
    """The feature dtype of an Arrow type of single values, or of the values in its lists; "" for nulls."""
    while is_list(kind):
        kind = kind.value_type
    return _DTYPES.get(kind, "")


def arrow_type(dtype: str, shape: tuple[int | None, ...] | None) -> pa.DataType:
    """The Arrow type of a column of that dtype and shape; null where the dtype is open."""
    if not dtype:
        return pa.null()
    kind = _ARROW[dtype]
    if not shape:
        return kind
    return pa.list_(kind) if None in shape else pa.list_(kind, math.prod(size or 0 for size in shape))


def is_list(kind: pa.DataType) -> bool:
    """Whether it is a list of any sort."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def list_lengths(array: pa.Array) -> np.ndarray:
    """Values in each row's list, 0 for null (int64[n])."""
    lengths = pc.list_value_length(array)
    result: np.ndarray = pc.cast(lengths.fill_null(0), pa.int64()).to_numpy(zero_copy_only=False)
    return result


def flatten(array: pa.Array) -> tuple[pa.Array, tuple[int, ...] | None]:
    """Lays out lists of lists as lists of single values.

    Args:
        array: of lists, of any depth.

    Returns:
        An array of lists of single values, and the shape of each element of the outer lists: () for
        single values, None if there are lists in them but none to tell their size.

    Raises:
        Misfit: lists beside each other differ in length, or one is null.
    """
    inner: list[int] = []
    while is_list(array.type.value_type):
        elements, lengths = array.flatten(), list_lengths(array)
        sizes = list_lengths(elements)
        wrong = (sizes != sizes[:1]) | pc.is_null(elements).to_numpy(zero_copy_only=False)
        if wrong.any():
            row = int(np.searchsorted(np.cumsum(lengths), int(wrong.argmax()), side="right"))
            raise _misfit(array, row, "lists of one length in a list", "Make them as long as each other.")
        size = int(sizes[0]) if len(sizes) else 0
        inner.append(size)
        mask = pc.is_null(array) if array.null_count else None
        array = pa.ListArray.from_arrays(list_offsets(lengths * size), elements.flatten(), mask=mask)
        if not size:
            return _flat_type(array), None
    return array, tuple(inner)


def _flat_type(array: pa.Array) -> pa.Array:
    """An array of nothing but empty lists, with single values for its type."""
    kind = array.type.value_type
    while is_list(kind):
        kind = kind.value_type
    return array.cast(pa.list_(kind)) if kind == array.type.value_type else pa.ListArray.from_arrays(
        list_offsets(np.zeros(len(array), np.int64)), pa.nulls(0, kind),
        mask=pc.is_null(array) if array.null_count else None,
    )  # fmt: skip


def list_offsets(lengths: np.ndarray) -> pa.Array:
    """Where each list starts, and where the last one ends, from their lengths: int32[n + 1]."""
    return pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))


def fit(array: pa.Array, wish: Wish) -> tuple[pa.Array, int]:
    """Brings an array to the dtype and shape wished, without loss but for a float32 that was asked for.

    Args:
        array: of single values or of lists of them, of any depth.
        wish: dtype and shape, and whether nulls are allowed.

    Returns:
        The array, and how many values a declared float32 or float16 shortened.

    Raises:
        Misfit: the first row that does not fit; rows count from 0 within the array.
    """
    if wish.required and array.null_count:
        row = pc.index(pc.is_null(array), True).as_py()
        raise Misfit(
            row, "", "a value in every row", "null",
            "Fill it in, or declare the feature nullable in --schema (a packed column can't be).",
        )  # fmt: skip
    if array.null_count == len(array):
        shape = ((None,) if is_list(array.type) else ()) if wish.shape is None else wish.shape
        return pa.nulls(len(array), arrow_type(wish.dtype or dtype_of(array.type), shape)), 0
    if not is_list(array.type):
        if wish.shape:
            raise _misfit(array, 0, f"a list of shape {_written(wish.shape)}", "Correct the value.")
        return _fit_values(array, wish)
    if wish.shape == ():
        raise _misfit(array, 0, "a single value", "Correct the value.")
    nested, (array, inner) = array, flatten(array)
    flat, lengths = array.flatten(), list_lengths(array)
    ends = np.cumsum(lengths)
    try:
        if flat.null_count:
            at = pc.index(pc.is_null(flat), True).as_py()
            raise Misfit(at, "", "a value in every place of a list", "null", "Fill it in.")
        values, narrowed = _fit_values(flat, wish)
    except Misfit as misfit:  # tells the value's place among all: which row is it in?
        misfit.number = int(np.searchsorted(ends, misfit.number, side="right"))
        raise
    if wish.shape is None:
        return array, narrowed
    if inner and wish.shape[1:] != inner:
        raise _misfit(
            nested, 0, f"lists of shape {_written(wish.shape)}", "Declare the shape that they have."
        )
    return _reshape(array, values, lengths, wish.shape), narrowed


def _reshape(
    array: pa.Array, values: pa.Array, lengths: np.ndarray, shape: tuple[int | None, ...]
) -> pa.Array:
    """Wraps the flat values as lists of the shape wished: of a fixed size, or not."""
    valid = pc.is_valid(array).to_numpy(zero_copy_only=False)
    mask = None if valid.all() else pa.array(~valid)
    if None in shape:
        wrong = valid & (lengths % max(math.prod(size or 1 for size in shape[1:]), 1) != 0)
        if wrong.any():
            raise _misfit(array, int(wrong.argmax()), f"a list of shape {_written(shape)}", "Correct it.")
        return pa.ListArray.from_arrays(list_offsets(lengths), values, mask=mask)
    size = math.prod(size or 0 for size in shape)
    wrong = valid & (lengths != size)
    if wrong.any():
        raise _misfit(
            array, int(wrong.argmax()), f"{size} values (shape {_written(shape)})",
            "Correct the list, or declare a shape with null for what differs.",
        )  # fmt: skip
    if mask is not None:  # what lies beneath a null does not matter, but must be there
        if not len(values):
            return pa.nulls(len(array), pa.list_(values.type, size))
        starts = np.cumsum(lengths) - lengths
        places = np.where(valid, starts, 0)[:, None] + np.arange(size)
        values = values.take(pa.array(places.reshape(-1)))
    return pa.FixedSizeListArray.from_arrays(values, size, mask=mask)


def _fit_values(array: pa.Array, wish: Wish) -> tuple[pa.Array, int]:
    """Brings single values to the dtype wished."""
    if wish.dtype and array.null_count == len(
        array
    ):  # lists without a value, which have no dtype to differ in
        return pa.nulls(len(array), arrow_type(wish.dtype, ())), 0
    if array.type == SPELLED:
        return read_spelled(array, wish)
    source = dtype_of(array.type)
    target = wish.dtype or source
    if wish.numeric and source in TEXT_DTYPES:
        raise _misfit(array, _first_value(array), "numbers, since it is packed", "Leave it out of --pack.")
    if target == source:
        return array, 0
    if source in TEXT_DTYPES or target in TEXT_DTYPES:
        return _fit_text(array, source, target), 0
    values = _numbers(array)
    with np.errstate(all="ignore"):
        cast = values.astype("uint8" if target == "bool" else target)
        same = _equals(cast, values)
        if target == "bool":
            same &= values <= 1
    valid = pc.is_valid(array).to_numpy(zero_copy_only=False)
    narrowed = np.zeros(len(values), bool)
    if values.dtype.kind == "f" and cast.dtype.kind == "f":
        # Shortened, as asked for; but not beyond what the dtype can hold.
        narrowed = ~same & valid & np.isfinite(cast)
        same |= narrowed
    wrong = ~same & valid
    if wrong.any():
        at = int(np.argmax(wrong))
        raise Misfit(at, "", target, repr(values[at].item()), "Declare a dtype that holds every value.")
    result = pa.array(cast, mask=None if valid.all() else ~valid)
    return result.cast(pa.bool_()) if target == "bool" else result, int(narrowed.sum())


def _fit_text(array: pa.Array, source: str, target: str) -> pa.Array:
    if source == "string" and target == "bytes":
        return array.cast(pa.binary())
    if source == "bytes" and target == "string":
        for row, value in enumerate(array):
            try:
                if value.is_valid:
                    value.as_py().decode()
            except UnicodeDecodeError:
                raise _misfit(array, row, "UTF-8 text", 'Declare dtype "bytes".') from None
        return array.cast(pa.string())
    if target == "string" and source.startswith(("int", "uint")):
        return array.cast(pa.string())
    raise _misfit(array, _first_value(array), target, f'Correct the value, or declare dtype "{source}".')


def _first_value(array: pa.Array) -> int:
    return max(int(pc.index(pc.is_valid(array), True).as_py()), 0)


def _misfit(array: pa.Array, row: int, expected: str, remedy: str) -> Misfit:
    if not array[row].is_valid:
        row = _first_value(array)
    found = repr(array[row].as_py())
    return Misfit(row, "", expected, found if len(found) <= _SHOWN else found[:_SHOWN] + "...", remedy)


def _written(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("null" if size is None else str(size) for size in shape) + "]"


def _numbers(array: pa.Array) -> np.ndarray:
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    result: np.ndarray = (array.fill_null(0) if array.null_count else array).to_numpy(zero_copy_only=False)
    return result


def _equals(cast: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Whether each value survived; a cast back that overflows counts as lost."""
    back = cast.astype(values.dtype)
    same: np.ndarray = (back == values) | ((values != values) & (back != back))
    if values.dtype.kind in "iu" and cast.dtype.kind == "f":
        # 2**63 as a float casts back to the limit by saturation: compare among floats as well.
        same &= np.abs(cast.astype(np.float64)) < 2.0**63
    if values.dtype.kind in "iu" and cast.dtype.kind in "iu":
        same &= (cast < 0) == (values < 0)
    return same
