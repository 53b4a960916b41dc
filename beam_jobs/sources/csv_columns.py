"""Compiled loops over one CSV column: what its fields are, and their values.

Comes in: a block of bytes and where the column's fields lie in it (from `csv_kernels.tokenize`).
Goes out: counts for the scan, or values and a validity mask for one dtype. A kernel that finds
a field that does not fit returns its row, or -1.
"""

from __future__ import annotations

import numpy as np

from beam_jobs.kernels import kernel
from beam_jobs.sources.csv_kernels import (
    BIG,
    BOOL,
    EMPTY,
    ESCAPED,
    FLOAT,
    INT,
    MANTISSA_MAX,
    NA,
    NAN,
    QUOTE,
    QUOTED,
    parse_field,
    to_float,
)

# Places in the counts that `scan_column` fills, after one place a kind.
INFINITE, LOSSY32, INEXACT64, TEXT_BYTES, TEXT_MAX = 8, 9, 10, 11, 12
NUM_COUNTS = 13


@kernel
def _narrows(value, mantissa, exponent):
    """Whether float32 loses a digit of the number mantissa * 10**exponent, whose float64 is `value`."""
    error = abs(np.float64(np.float32(value)) - value)
    if error == 0.0 or np.isinf(value):
        return False
    ten = np.uint64(10)
    while mantissa >= ten and mantissa % ten == np.uint64(0):
        mantissa //= ten
        exponent += 1
    return not error < 0.49 * 10.0**exponent


@kernel
def scan_column(buf, starts, ends, rows, counts, extremes, limits, hard_rows):
    """Counts what a column's fields are.

    Args:
        starts, ends: int32[rows] as `tokenize` wrote them.
        counts: int64[NUM_COUNTS], added to.
        extremes: int64[2], lowest and highest integer.
        limits: float64[2], lowest and highest of the finite numbers.
        hard_rows: int32[rows], receives the rows whose float64 this kernel can't tell.

    Returns:
        The number of hard rows; they are counted as FLOAT and nowhere else.
    """
    num_hard = 0
    for row in range(rows):
        kind, negative, mantissa, exponent, hard = parse_field(buf, starts[row], ends[row])
        counts[kind] += 1
        length = np.int64((ends[row] >> 2) - starts[row])
        counts[TEXT_BYTES] += length
        counts[TEXT_MAX] = max(counts[TEXT_MAX], length)
        if kind == INT or kind == BOOL:
            whole = -np.int64(mantissa) if negative else np.int64(mantissa)
            extremes[0] = min(extremes[0], whole)
            extremes[1] = max(extremes[1], whole)
            value = np.float64(whole)
            if mantissa > np.uint64(1 << 24):
                # The lowest set bit tells how many bits the number needs.
                bits = mantissa // (mantissa & (~mantissa + np.uint64(1)))
                if bits > np.uint64(1 << 24):
                    counts[LOSSY32] += 1
                if bits > np.uint64(MANTISSA_MAX):
                    counts[INEXACT64] += 1
        elif kind == FLOAT:
            value, told = to_float(negative, mantissa, exponent, hard)
            if not told:
                hard_rows[num_hard] = row
                num_hard += 1
                continue
            if np.isinf(value):
                counts[INFINITE] += 1
                continue
            if _narrows(value, mantissa, exponent):
                counts[LOSSY32] += 1
        else:
            continue
        limits[0] = min(limits[0], value)
        limits[1] = max(limits[1], value)
    return num_hard


@kernel
def scan_hard(buf, starts, ends, hard_rows, values, counts, limits):
    """Adds the hard rows, whose float64 came from elsewhere, to what `scan_column` counted."""
    for i in range(len(hard_rows)):
        row = hard_rows[i]
        _, _, mantissa, exponent, _ = parse_field(buf, starts[row], ends[row])
        value = values[i]
        if np.isinf(value):  # too large for any float: the digits are lost whatever the dtype
            counts[INEXACT64] += 1
            continue
        if _narrows(value, mantissa, exponent):
            counts[LOSSY32] += 1
        limits[0] = min(limits[0], value)
        limits[1] = max(limits[1], value)


@kernel
def read_integers(buf, starts, ends, rows, values, valid, unsigned):
    """Reads fields as int64, or as the bits of uint64.

    Args:
        values: int64[rows], receives the values.
        valid: uint8[rows], receives 1 where there is one.
        unsigned: whether the values are uint64 in disguise.

    Returns:
        (first row that does not fit or -1, number of nulls).
    """
    nulls = 0
    for row in range(rows):
        kind, negative, mantissa, exponent, hard = parse_field(buf, starts[row], ends[row])
        values[row] = 0
        valid[row] = 1
        if kind == INT or kind == BOOL:
            if unsigned and negative:
                return row, nulls
            values[row] = -np.int64(mantissa) if negative else np.int64(mantissa)
        elif kind == EMPTY or kind == NA or kind == NAN:
            valid[row] = 0
            nulls += 1
        elif kind == BIG and unsigned:
            values[row] = np.int64(mantissa)
        elif kind == FLOAT:  # a whole number written as one, like 5.0
            value, told = to_float(negative, mantissa, exponent, hard)
            if not told or np.isinf(value) or abs(value) > MANTISSA_MAX or value != np.floor(value):
                return row, nulls
            if unsigned and value < 0:
                return row, nulls
            values[row] = np.int64(value)
        else:
            return row, nulls
    return -1, nulls


@kernel
def read_floats(buf, starts, ends, rows, values, valid, hard_rows):
    """Reads fields as float64.

    Args:
        values: float64[rows], receives the values.
        valid: uint8[rows], receives 1 where there is one.
        hard_rows: int32[rows], receives the rows whose value must come from elsewhere.

    Returns:
        (first row that does not fit or -1, number of nulls, number of hard rows).
    """
    nulls = 0
    num_hard = 0
    for row in range(rows):
        kind, negative, mantissa, exponent, hard = parse_field(buf, starts[row], ends[row])
        values[row] = 0.0
        valid[row] = 1
        if kind == FLOAT or kind == INT or kind == BOOL or kind == BIG:
            value, told = to_float(negative, mantissa, exponent, hard)
            if told:
                values[row] = value
            else:
                hard_rows[num_hard] = row
                num_hard += 1
        elif kind == NAN:
            values[row] = np.nan
        elif kind == EMPTY or kind == NA:
            valid[row] = 0
            nulls += 1
        else:
            return row, nulls, num_hard
    return -1, nulls, num_hard


@kernel
def read_bools(buf, starts, ends, rows, values, valid):
    """Reads fields as bool (true, false, 1, 0); returns as `read_integers` does."""
    nulls = 0
    for row in range(rows):
        kind, negative, mantissa, _, _ = parse_field(buf, starts[row], ends[row])
        values[row] = 0
        valid[row] = 1
        if kind == EMPTY or kind == NA or kind == NAN:
            valid[row] = 0
            nulls += 1
        elif (kind == BOOL or kind == INT) and not negative and mantissa <= np.uint64(1):
            values[row] = mantissa
        else:
            return row, nulls
    return -1, nulls


@kernel
def text_offsets(buf, starts, ends, rows, offsets, valid):
    """Measures fields as text.

    Args:
        rows: int32[], which rows.
        offsets: int32[len(rows) + 1], receives where each text starts in the data to come.
        valid: uint8[len(rows)], receives 1 unless the field is empty and not quoted.

    Returns:
        The number of nulls.
    """
    nulls = 0
    at = 0
    for i in range(len(rows)):
        row = rows[i]
        start, end, flags = starts[row], ends[row] >> 2, ends[row] & 3
        offsets[i] = at
        valid[i] = 1
        if start == end and not flags & QUOTED:
            valid[i] = 0
            nulls += 1
        at += end - start
        if flags & ESCAPED:
            k = start
            while k < end:
                if buf[k] == QUOTE:
                    at -= 1
                    k += 1
                k += 1
    offsets[len(rows)] = at
    return nulls


@kernel
def text_data(buf, starts, ends, rows, data):
    """Copies fields as text, one after the other, quotes undone."""
    at = 0
    for i in range(len(rows)):
        row = rows[i]
        end, flags = ends[row] >> 2, ends[row] & 3
        k = starts[row]
        while k < end:
            data[at] = buf[k]
            at += 1
            k += 2 if flags & ESCAPED and buf[k] == QUOTE else 1


@kernel
def first_of_kinds(buf, starts, ends, rows, kinds):
    """The first row whose field is of one of the kinds (a bit each), or -1."""
    for row in range(rows):
        if (kinds >> parse_field(buf, starts[row], ends[row])[0]) & 1:
            return row
    return -1
