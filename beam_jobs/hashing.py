"""A hash of each value of a column, the same in every process and release: for keys and for counting.

Equal values of one column have equal hashes; 0.0 and -0.0 are equal, and NaNs are.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (the finalizer
of SplitMix64).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from beam_jobs.encode import text_buffers
from beam_jobs.kernels import kernel

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


@kernel
def _mix(x):
    """Every bit of the result depends on every bit of x (uint64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@kernel
def _hash_numbers(bits, out):
    for i in range(len(bits)):
        out[i] = _mix(bits[i] + np.uint64(0x9E3779B97F4A7C15))


@kernel
def _hash_texts(data, offsets, out):
    for i in range(len(out)):
        at, end = offsets[i], offsets[i + 1]
        value = _mix(np.uint64(end - at) + np.uint64(0x9E3779B97F4A7C15))
        while at < end:
            word = np.uint64(0)
            stop = min(at + 8, end)
            while at < stop:
                word = (word << np.uint64(8)) | np.uint64(data[at])
                at += 1
            value = _mix(value ^ word) + np.uint64(0x9E3779B97F4A7C15)
        out[i] = value


def hash_array(array: pa.Array, seed: int = 0) -> np.ndarray:
    """Hashes every value.

    Args:
        array: numbers, bools, text or bytes, without nulls.
        seed: another one gives other hashes.

    Returns:
        uint64[n].

    Raises:
        ValueError: a value is null.
    """
    if array.null_count:
        raise ValueError(f"every value must be there to be hashed, got {array.null_count} nulls.")
    out = np.empty(len(array), np.uint64)
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        offsets, data = text_buffers(array)
        _hash_texts(data, offsets, out)
    else:
        if pa.types.is_boolean(kind):
            array = array.cast(pa.uint8())
        values = array.to_numpy(zero_copy_only=False)
        if values.dtype.kind == "f":
            values = values.astype(np.float64) + 0.0  # no -0.0
            values[np.isnan(values)] = np.nan
        elif values.dtype != np.uint64:
            values = values.astype(np.int64)
        _hash_numbers(np.ascontiguousarray(values).view(np.uint64), out)
    if seed:
        with np.errstate(over="ignore"):
            _hash_numbers(out ^ (np.uint64(seed & (2**64 - 1)) * _GAMMA), out)
    return out
