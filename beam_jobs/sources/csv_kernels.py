"""Compiled loops over the bytes of CSV: row boundaries, fields, numbers, text.

A block of bytes goes in; `tokenize` gives where each field starts and ends, and one kernel a
column then turns fields into values. Nothing here knows files or Arrow.

Quoting is RFC 4180's: a field that starts with a quote ends at the next single one, two of
them stand for one, and delimiters and line ends in between belong to the field. A quote
inside a field that does not start with one is an ordinary character. A row ends with LF,
CRLF or CR. Blank lines are no rows.

A field is stored as `starts[column, row]` and `ends[column, row]`, the end shifted left by
two bits to make room for `QUOTED` and `ESCAPED`.
"""

from __future__ import annotations

import numpy as np

from beam_jobs.kernels import kernel

QUOTE, LF, CR, SPACE, TAB = 34, 10, 13, 32, 9
QUOTED, ESCAPED = 1, 2
# What `tokenize` stopped at.
OK, RAGGED, AFTER_QUOTE, UNTERMINATED = 0, 1, 2, 3
# What a field is. EMPTY is null in every column, NA (also blank and "") in all but text columns.
EMPTY, NA, BOOL, INT, FLOAT, NAN, BIG, TEXT = 0, 1, 2, 3, 4, 5, 6, 7
NUM_KINDS = 8
# States of the boundary planner.
FIELD_START, PLAIN, INSIDE, MAYBE_END = 0, 1, 2, 3

POWERS = 10.0 ** np.arange(23)
POWERS_MAX = 22
MANTISSA_MAX = 1 << 53
INT64_MAX = (1 << 63) - 1


@kernel
def row_starts(buf, size, delimiter, state, base, step, target, out):
    """Finds, for each target offset, the first row that starts at or after it.

    Args:
        buf: uint8[>= size], a chunk of the file.
        state: of the planner before the chunk.
        base: the chunk's offset in the file.
        step: distance of the targets.
        target: the next one.
        out: int64[], receives the row starts.

    Returns:
        (number of starts found, state after the chunk, next target).
    """
    found = 0
    for i in range(size):
        c = buf[i]
        if state == INSIDE:
            if c == QUOTE:
                state = MAYBE_END
        elif c == LF:
            state = FIELD_START
            if base + i + 1 >= target:
                out[found] = base + i + 1
                found += 1
                target = base + i + 1 + step
        elif c == CR or c == delimiter:
            state = FIELD_START
        elif c == QUOTE and (state == FIELD_START or state == MAYBE_END):
            state = INSIDE
        else:
            state = PLAIN
    return found, state, target


@kernel
def tokenize(buf, pos, size, final, delimiter, starts, ends, numbers, lines, info):
    """Splits rows into fields until the block or the room for rows is used up.

    Args:
        buf: uint8[>= size].
        pos: where to start; a row starts there.
        size: bytes of buf that hold data.
        final: whether the data ends there, so that the last row needs no line end.
        starts: int32[columns, rows], receives the fields' starts.
        ends: int32[columns, rows], receives their ends and flags.
        numbers: int64[rows], receives each row's number, blank lines counted.
        lines: int64[rows], receives the line each row starts on.
        info: int64[4]; in and out: next row number, next line; out, where it stopped at a row that
            is none: its fields, and how far it was read.

    Returns:
        (rows, position after the last whole row, what stopped it).
    """
    num_columns, max_rows = starts.shape
    number, line = info[0], info[1]
    row = 0
    code = OK
    while row < max_rows and pos < size:
        c = buf[pos]
        if c == LF or c == CR:
            if c == CR and pos + 1 >= size and not final:
                break
            pos += 2 if c == CR and pos + 1 < size and buf[pos + 1] == LF else 1
            number += 1
            line += 1
            continue
        at = pos
        column = 0
        new_lines = 1
        whole = False
        while True:
            flags = 0
            if at < size and buf[at] == QUOTE:
                flags = QUOTED
                at += 1
                start = at
                closed = False
                while at < size:
                    c = buf[at]
                    if c == QUOTE:
                        if at + 1 < size and buf[at + 1] == QUOTE:
                            flags = QUOTED | ESCAPED
                            at += 2
                            continue
                        if at + 1 < size or final:
                            closed = True
                        break
                    if c == LF or (c == CR and not (at + 1 < size and buf[at + 1] == LF)):
                        new_lines += 1
                    at += 1
                if not closed:
                    if final:
                        code = UNTERMINATED
                    break
                end = at
                at += 1
                if at < size and buf[at] != delimiter and buf[at] != LF and buf[at] != CR:
                    code = AFTER_QUOTE
                    break
            else:
                start = at
                while at < size:
                    c = buf[at]
                    if c == delimiter or c == LF or c == CR:
                        break
                    at += 1
                end = at
            if at >= size and not final:
                break
            if column < num_columns:
                starts[column, row] = start
                ends[column, row] = (end << 2) | flags
            column += 1
            if at < size and buf[at] == delimiter:
                at += 1
                continue
            if at < size and buf[at] == CR:
                if at + 1 >= size and not final:
                    break
                if at + 1 < size and buf[at + 1] == LF:
                    at += 1
            at += 1
            whole = True
            break
        if code == OK and not whole:
            break
        numbers[row] = number
        lines[row] = line
        if code == OK and column != num_columns:
            code = RAGGED
            info[2] = column
        if code != OK:
            info[3] = min(at, size)
            break
        row += 1
        number += 1
        line += new_lines
        pos = min(at, size)
    info[0], info[1] = number, line
    return row, pos, code


@kernel
def _is_word(buf, start, end, word):
    """Whether the bytes are that lower-case word, in any case."""
    if end - start != len(word):
        return False
    for i in range(len(word)):
        c = buf[start + i]
        if 65 <= c <= 90:
            c += 32
        if c != word[i]:
            return False
    return True


_WORDS = tuple(
    np.frombuffer(word, np.uint8)
    for word in (
        b"true",
        b"false",
        b"nan",
        b"inf",
        b"infinity",
        b"na",
        b"n/a",
        b"#n/a",
        b"null",
        b"none",
        b"<na>",
    )
)
TRUE_, FALSE_, NAN_, INF_, INFINITY_, NA_, N_A_, HASH_NA_, NULL_, NONE_, ANGLE_NA_ = _WORDS


@kernel
def parse_field(buf, start, packed_end):
    """Tells what a field is.

    Returns:
        (kind, negative, mantissa uint64, exponent, hard): a number is mantissa * 10**exponent;
        a hard one has digits that the mantissa left out. A bool has mantissa 0 or 1, an
        infinity is a FLOAT with exponent 9999, and a BIG one fits uint64 but not int64.
    """
    end = packed_end >> 2
    zero = np.uint64(0)
    if start == end:
        return (NA if packed_end & QUOTED else EMPTY), False, zero, 0, False
    while start < end and (buf[start] == SPACE or buf[start] == TAB):
        start += 1
    while end > start and (buf[end - 1] == SPACE or buf[end - 1] == TAB):
        end -= 1
    if start == end:
        return NA, False, zero, 0, False
    at = start
    c = buf[at]
    negative = c == 45
    plus = c == 43
    if negative or plus:
        at += 1
    if at < end and (48 <= buf[at] <= 57 or buf[at] == 46):
        mantissa = zero
        exponent = 0
        significant = 0
        hard = False
        first_digit = at
        digits = 0
        while at < end and 48 <= buf[at] <= 57:
            d = buf[at] - 48
            if significant > 0 or d > 0:
                if significant < 19:
                    mantissa = mantissa * np.uint64(10) + np.uint64(d)
                else:
                    hard = True
                    exponent += 1
                significant += 1
            digits += 1
            at += 1
        integer_digits = digits
        if integer_digits > 1 and buf[first_digit] == 48:
            return TEXT, False, zero, 0, False
        is_float = False
        if at < end and buf[at] == 46:
            is_float = True
            at += 1
            while at < end and 48 <= buf[at] <= 57:
                d = buf[at] - 48
                if significant > 0 or d > 0:
                    if significant < 19:
                        mantissa = mantissa * np.uint64(10) + np.uint64(d)
                        exponent -= 1
                    else:
                        hard = True
                    significant += 1
                else:
                    exponent -= 1
                digits += 1
                at += 1
        if digits > 0 and at < end and (buf[at] == 101 or buf[at] == 69):
            at += 1
            exponent_negative = False
            if at < end and (buf[at] == 45 or buf[at] == 43):
                exponent_negative = buf[at] == 45
                at += 1
            if at >= end:
                return TEXT, False, zero, 0, False
            is_float = True
            value = 0
            while at < end and 48 <= buf[at] <= 57:
                if value < 100000:
                    value = value * 10 + (buf[at] - 48)
                at += 1
            exponent += -value if exponent_negative else value
        if at < end or digits == 0:
            return TEXT, False, zero, 0, False
        if is_float:
            return FLOAT, negative, mantissa, exponent, hard
        if plus:  # a code like +4930, which an integer would shorten
            return TEXT, False, zero, 0, False
        if negative and mantissa == zero:
            return FLOAT, True, zero, 0, False
        if significant <= 18:
            return INT, negative, mantissa, 0, False
        # 19 digits fit the mantissa; a twentieth was left out and is put back where it fits uint64.
        if significant == 19:
            if mantissa <= np.uint64(INT64_MAX) or (negative and mantissa == np.uint64(1) << np.uint64(63)):
                return INT, negative, mantissa, 0, False
            return (TEXT if negative else BIG), negative, mantissa, 0, False
        if significant == 20 and not negative:
            last = np.uint64(buf[end - 1] - 48)
            limit = np.uint64(1844674407370955161)
            if mantissa < limit or (mantissa == limit and last <= np.uint64(5)):
                return BIG, False, mantissa * np.uint64(10) + last, 0, False
        return TEXT, False, zero, 0, False
    if _is_word(buf, at, end, NAN_):
        return NAN, False, zero, 0, False
    if _is_word(buf, at, end, INF_) or _is_word(buf, at, end, INFINITY_):
        return FLOAT, negative, zero, 9999, False
    if at > start:
        return TEXT, False, zero, 0, False
    if _is_word(buf, at, end, TRUE_):
        return BOOL, False, np.uint64(1), 0, False
    if _is_word(buf, at, end, FALSE_):
        return BOOL, False, zero, 0, False
    if (
        _is_word(buf, at, end, NA_)
        or _is_word(buf, at, end, NULL_)
        or _is_word(buf, at, end, NONE_)
        or _is_word(buf, at, end, N_A_)
        or _is_word(buf, at, end, HASH_NA_)
        or _is_word(buf, at, end, ANGLE_NA_)
    ):
        return NA, False, zero, 0, False
    return TEXT, False, zero, 0, False


@kernel
def to_float(negative, mantissa, exponent, hard):
    """The correctly rounded float64 of a parsed number, where two exact operands allow it.

    Returns:
        (value, whether it could be told).
    """
    sign = -1.0 if negative else 1.0
    if exponent == 9999 and mantissa == np.uint64(0):
        return sign * np.inf, True
    if mantissa == np.uint64(0) and not hard:
        return sign * 0.0, True
    if hard or mantissa > np.uint64(MANTISSA_MAX) or exponent > POWERS_MAX or exponent < -POWERS_MAX:
        return 0.0, False
    if exponent < 0:
        return sign * (np.float64(mantissa) / POWERS[-exponent]), True
    return sign * (np.float64(mantissa) * POWERS[exponent]), True
