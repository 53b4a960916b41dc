"""Compiled loops of the TFRecord source: where records end, where features lie in them, their values.

`data` is uint8[] throughout. A record in plain form is what protobuf itself writes: nothing but
features, of each the name and then the list, numbers packed in one piece. Any other is left to
the strict parser (`tfpipe.examples`).

Source: tensorflow/core/example/{example,feature}.proto; protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import numpy as np

from beam_jobs.encode_kernels import FOOTER_BYTES, HEADER_BYTES, masked_crc
from beam_jobs.kernels import kernel

# What is known of a feature of a record: the columns of `find_features`' table.
ROW, NAME, KIND, START, STOP, COUNT, SIZE = range(7)
COLUMNS = 7
# The kinds of its list.
NONE, BYTES, FLOATS, INTS = range(4)
_NO_FIELD = -1


@kernel
def walk_frames(data, start, num_bytes):
    """Goes from record to record, looking at their headers only.

    Args:
        data: a plain TFRecord file.
        start: where a record begins.
        num_bytes: to go at least.

    Returns:
        (position behind the last record, records, whether the header behind was read and is damaged).
    """
    at, records = start, 0
    while at - start < num_bytes and at < len(data):
        if at + HEADER_BYTES > len(data):
            return at, records, True
        length = np.int64(0)
        for i in range(8):
            length |= np.int64(data[at + i]) << np.int64(8 * i)
        crc = np.uint64(0)
        for i in range(4):
            crc |= np.uint64(data[at + 8 + i]) << np.uint64(8 * i)
        if length < 0 or masked_crc(data, at, at + 8) != crc:
            return at, records, True
        if length > len(data) - at - HEADER_BYTES - FOOTER_BYTES:
            return at, records, True
        at += HEADER_BYTES + length + FOOTER_BYTES
        records += 1
    return at, records, False


@kernel
def _field(data, at, stop, tag):
    """Where the bytes of the field at `at` start and stop; (-1, -1) if it has another tag or no plain form."""
    if at + 1 >= stop or data[at] != tag:
        return _NO_FIELD, _NO_FIELD
    at += 1
    size = np.int64(0)
    for place in range(5):
        if at >= stop:
            return _NO_FIELD, _NO_FIELD
        byte = np.int64(data[at])
        at += 1
        size |= (byte & 0x7F) << np.int64(7 * place)
        if byte < 0x80:
            return (at, at + size) if size <= stop - at else (_NO_FIELD, _NO_FIELD)
    return _NO_FIELD, _NO_FIELD


@kernel
def _count_varints(data, start, stop):
    """How many numbers there are; -1 if one does not end or is too long."""
    count = length = 0
    for at in range(start, stop):
        length += 1
        if data[at] < 0x80:
            count += 1
            length = 0
        elif length == 10:
            return -1
    return count if length == 0 else -1


@kernel
def _find_list(data, at, stop, entry):
    """Fills in kind, place, count and size of the Feature in data[at:stop]; whether it is in plain form."""
    entry[KIND], entry[START], entry[STOP], entry[COUNT], entry[SIZE] = NONE, at, at, 0, 0
    if at == stop:
        return True
    tag = data[at]
    if tag != 0x0A and tag != 0x12 and tag != 0x1A:
        return False
    start, end = _field(data, at, stop, tag)
    if end != stop:
        return False
    entry[KIND] = (tag >> 3) & 3
    entry[START], entry[STOP] = start, stop
    if entry[KIND] == BYTES:
        at = start
        while at < stop:
            low, high = _field(data, at, stop, 0x0A)
            if low < 0:
                return False
            entry[COUNT] += 1
            entry[SIZE] += high - low
            at = high
        return True
    if start == stop:
        return True
    low, high = _field(data, start, stop, 0x0A)
    if high != stop:
        return False
    entry[START], entry[SIZE] = low, high - low
    if entry[KIND] == FLOATS:
        entry[COUNT] = entry[SIZE] // 4
        return entry[SIZE] % 4 == 0
    entry[COUNT] = _count_varints(data, low, high)
    return entry[COUNT] >= 0


@kernel
def _name_index(data, start, stop, names, num_names, slots):
    """The index of a name among those met so far, or the next one: `slots` is a hash table of them."""
    key = np.uint64(0xCBF29CE484222325)  # FNV-1a
    for at in range(start, stop):
        key = (key ^ np.uint64(data[at])) * np.uint64(0x100000001B3)
    slot = np.int64((key ^ (key >> np.uint64(32))) & np.uint64(len(slots) - 1))
    while slots[slot] >= 0:
        index = slots[slot]
        first = names[index, 0]
        if names[index, 1] - first == stop - start:
            same = True
            for i in range(stop - start):
                if data[first + i] != data[start + i]:
                    same = False
                    break
            if same:
                return index
        slot = (slot + 1) & (len(slots) - 1)
    slots[slot] = num_names
    return num_names


@kernel
def find_features(data, offsets, table, names, slots, unusual):
    """Finds every feature of every record.

    Args:
        data: records, one after the other.
        offsets: int64[n + 1], where each starts.
        table: int32[m, COLUMNS], receives a line a feature, in order.
        names: int64[k, 2], receives where each name starts and stops where it is first met.
        slots: int64[4 * k or so, a power of two], all -1.
        unusual: uint8[n], receives 1 for each record that is not in plain form; none of its features are found.

    Returns:
        (features, names); or (-1, -1) if there is no room for them.
    """
    used = num_names = 0
    for row in range(len(offsets) - 1):
        at, stop = offsets[row], offsets[row + 1]
        unusual[row] = 0
        if at == stop:
            continue
        at, end = _field(data, at, stop, 0x0A)
        plain = end == stop
        begin = used
        while plain and at < stop:
            if used == len(table) or num_names == len(names):
                return -1, -1
            entry, entry_stop = _field(data, at, stop, 0x0A)
            name, name_stop = _field(data, entry, entry_stop, 0x0A) if entry >= 0 else (entry, entry)
            value, value_stop = _field(data, name_stop, entry_stop, 0x12) if name >= 0 else (name, name)
            plain = value >= 0 and value_stop == entry_stop
            if plain:
                line = table[used]
                plain = _find_list(data, value, value_stop, line)
                index = _name_index(data, name, name_stop, names, num_names, slots)
                if index == num_names:
                    names[index, 0], names[index, 1] = name, name_stop
                    num_names += 1
                line[ROW], line[NAME] = row, index
                used += 1
            at = entry_stop
        if not plain:
            unusual[row] = 1
            used = begin
    return used, num_names


@kernel
def copy_ranges(data, starts, stops, out):
    """Copies data[start:stop] of each range to `out`, one behind the other."""
    to = 0
    for i in range(len(starts)):
        for at in range(starts[i], stops[i]):
            out[to] = data[at]
            to += 1


@kernel
def copy_ints(data, starts, stops, out):
    """Decodes the packed varints of each range to `out` (int64[])."""
    to = 0
    for i in range(len(starts)):
        value, shift = np.uint64(0), np.uint64(0)
        for at in range(starts[i], stops[i]):
            value |= np.uint64(data[at] & 0x7F) << shift
            shift += np.uint64(7)
            if data[at] < 0x80:
                out[to] = np.int64(value)
                to += 1
                value, shift = np.uint64(0), np.uint64(0)


@kernel
def copy_texts(data, starts, stops, out, ends):
    """Copies the values of each range, a list of bytes, to `out`, and tells where each ends in it."""
    to = text = 0
    for i in range(len(starts)):
        at = starts[i]
        while at < stops[i]:
            at, stop = _field(data, at, stops[i], 0x0A)
            for k in range(at, stop):
                out[to] = data[k]
                to += 1
            at = stop
            ends[text] = to
            text += 1
