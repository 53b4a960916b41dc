"""Compiled loops of the encoder: entry lengths, entry bytes, frames with CRC32C.

`valid` is uint8[n] with 1 where there is a value, or empty if there is one everywhere. `at[row]`
is where the row's next byte goes.
"""

from __future__ import annotations

import numpy as np

from beam_jobs.kernels import kernel

HEADER_BYTES, FOOTER_BYTES = 12, 4


def _crc_tables() -> np.ndarray:
    """Eight tables for CRC32C by slicing: 8 bytes a step (Kounavis and Berry, 2005)."""
    tables = np.zeros((8, 256), np.uint32)
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        tables[0, byte] = crc
    for i in range(1, 8):
        tables[i] = (tables[i - 1] >> np.uint32(8)) ^ tables[0][tables[i - 1] & np.uint32(0xFF)]
    return tables


TABLES = _crc_tables()


@kernel
def masked_crc(data, start, stop):
    """The masked CRC32C of data[start:stop], as uint32 in a uint64."""
    crc = np.uint32(0xFFFFFFFF)
    at = start
    while at + 8 <= stop:
        low = crc ^ (
            np.uint32(data[at])
            | np.uint32(data[at + 1]) << np.uint32(8)
            | np.uint32(data[at + 2]) << np.uint32(16)
            | np.uint32(data[at + 3]) << np.uint32(24)
        )
        crc = np.uint32(
            TABLES[7, low & np.uint32(0xFF)]
            ^ TABLES[6, (low >> np.uint32(8)) & np.uint32(0xFF)]
            ^ TABLES[5, (low >> np.uint32(16)) & np.uint32(0xFF)]
            ^ TABLES[4, low >> np.uint32(24)]
            ^ TABLES[3, data[at + 4]]
            ^ TABLES[2, data[at + 5]]
            ^ TABLES[1, data[at + 6]]
            ^ TABLES[0, data[at + 7]]
        )
        at += 8
    while at < stop:
        crc = np.uint32(TABLES[0, (crc ^ np.uint32(data[at])) & np.uint32(0xFF)] ^ (crc >> np.uint32(8)))
        at += 1
    crc = np.uint32(~crc)
    rotated = np.uint64((crc >> np.uint32(15)) | (crc << np.uint32(17))) & np.uint64(0xFFFFFFFF)
    return (rotated + np.uint64(0xA282EAD8)) & np.uint64(0xFFFFFFFF)


@kernel
def _varint_size(value):
    size = 1
    value = np.uint64(value)
    while value >= np.uint64(128):
        value >>= np.uint64(7)
        size += 1
    return size


@kernel
def _put_varint(data, at, value):
    value = np.uint64(value)
    while value >= np.uint64(128):
        data[at] = np.uint8(value & np.uint64(127)) | np.uint8(128)
        value >>= np.uint64(7)
        at += 1
    data[at] = np.uint8(value)
    return at + 1


@kernel
def _put_little(data, at, value, size):
    value = np.uint64(value)
    for i in range(size):
        data[at + i] = np.uint8((value >> np.uint64(8 * i)) & np.uint64(0xFF))


@kernel
def add_fixed(lengths, valid, entry_bytes):
    """Adds a constant entry length to each row that has a value."""
    for row in range(len(lengths)):
        if len(valid) == 0 or valid[row]:
            lengths[row] += entry_bytes


@kernel
def add_varint(lengths, valid, values, head_ends):
    """Adds the length of an entry with one varint."""
    for row in range(len(lengths)):
        if len(valid) == 0 or valid[row]:
            size = _varint_size(values[row])
            lengths[row] += size + head_ends[size] - head_ends[size - 1]


@kernel
def _text_sizes(size, key_bytes):
    """Sizes inside an entry with one text: list, Feature, entry."""
    items = 1 + _varint_size(size) + size
    feature = 1 + _varint_size(items) + items
    entry = key_bytes + 1 + _varint_size(feature) + feature
    return items, feature, entry


@kernel
def add_text(lengths, valid, offsets, key_bytes):
    """Adds the length of an entry with one text."""
    for row in range(len(lengths)):
        if len(valid) == 0 or valid[row]:
            _, _, entry = _text_sizes(offsets[row + 1] - offsets[row], key_bytes)
            lengths[row] += 1 + _varint_size(entry) + entry


@kernel
def _list_sizes(items, key_bytes):
    """Sizes inside an entry whose list message has that many bytes: Feature, entry."""
    feature = 1 + _varint_size(items) + items
    return feature, key_bytes + 1 + _varint_size(feature) + feature


@kernel
def varint_items(values, offsets, items):
    """Adds up the bytes of each row's varints, as the packed field of an Int64List."""
    for row in range(len(items)):
        size = 0
        for i in range(offsets[row], offsets[row + 1]):
            size += _varint_size(values[i])
        items[row] = 1 + _varint_size(size) + size if size else 0


@kernel
def float_items(offsets, items):
    """The bytes of each row's floats, as the packed field of a FloatList; offsets count bytes."""
    for row in range(len(items)):
        size = offsets[row + 1] - offsets[row]
        items[row] = 1 + _varint_size(size) + size if size else 0


@kernel
def text_items(text_offsets, offsets, items):
    """Adds up the bytes of each row's texts, as the repeated field of a BytesList."""
    for row in range(len(items)):
        size = 0
        for i in range(offsets[row], offsets[row + 1]):
            length = text_offsets[i + 1] - text_offsets[i]
            size += 1 + _varint_size(length) + length
        items[row] = size


@kernel
def add_list(lengths, valid, items, key_bytes):
    """Adds the length of an entry with a list message of that many bytes."""
    for row in range(len(lengths)):
        if len(valid) == 0 or valid[row]:
            _, entry = _list_sizes(items[row], key_bytes)
            lengths[row] += 1 + _varint_size(entry) + entry


@kernel
def add_frame(lengths):
    """Turns the lengths of the features into those of framed examples."""
    for row in range(len(lengths)):
        lengths[row] += 1 + _varint_size(lengths[row]) + HEADER_BYTES + FOOTER_BYTES


@kernel
def open_frames(data, places, at, features_lengths, low, high):
    """Writes each row's frame header and the example's own header; sets `at` behind them."""
    for row in range(low, high):
        length = features_lengths[row]
        place = places[row]
        _put_little(data, place, 1 + _varint_size(length) + length, 8)
        _put_little(data, place + 8, masked_crc(data, place, place + 8), 4)
        data[place + HEADER_BYTES] = 0x0A
        at[row] = _put_varint(data, place + HEADER_BYTES + 1, length)


@kernel
def fill_fixed(data, at, valid, values, width, head, low, high):
    """Writes entries whose payload has a constant width."""
    head_bytes = len(head)
    for row in range(low, high):
        if len(valid) == 0 or valid[row]:
            to = at[row]
            for i in range(head_bytes):
                data[to + i] = head[i]
            to += head_bytes
            source = row * width
            for i in range(width):
                data[to + i] = values[source + i]
            at[row] = to + width


@kernel
def fill_varint(data, at, valid, values, heads, head_ends, low, high):
    """Writes entries with one varint."""
    for row in range(low, high):
        if len(valid) == 0 or valid[row]:
            to = at[row]
            size = _varint_size(values[row])
            for i in range(head_ends[size - 1], head_ends[size]):
                data[to] = heads[i]
                to += 1
            at[row] = _put_varint(data, to, values[row])


@kernel
def fill_text(data, at, valid, values, offsets, key, low, high):
    """Writes entries with one text."""
    key_bytes = len(key)
    for row in range(low, high):
        if len(valid) == 0 or valid[row]:
            size = offsets[row + 1] - offsets[row]
            items, feature, entry = _text_sizes(size, key_bytes)
            to = at[row]
            data[to] = 0x0A
            to = _put_varint(data, to + 1, entry)
            for i in range(key_bytes):
                data[to + i] = key[i]
            to += key_bytes
            data[to] = 0x12
            to = _put_varint(data, to + 1, feature)
            data[to] = 0x0A
            to = _put_varint(data, to + 1, items)
            data[to] = 0x0A
            to = _put_varint(data, to + 1, size)
            source = offsets[row]
            for i in range(size):
                data[to + i] = values[source + i]
            at[row] = to + size


@kernel
def open_lists(data, at, valid, items, key, tag, low, high):
    """Writes entries up to the content of their list message."""
    key_bytes = len(key)
    for row in range(low, high):
        if len(valid) == 0 or valid[row]:
            feature, entry = _list_sizes(items[row], key_bytes)
            to = at[row]
            data[to] = 0x0A
            to = _put_varint(data, to + 1, entry)
            for i in range(key_bytes):
                data[to + i] = key[i]
            to += key_bytes
            data[to] = 0x12
            to = _put_varint(data, to + 1, feature)
            data[to] = tag
            at[row] = _put_varint(data, to + 1, items[row])


@kernel
def fill_varints(data, at, valid, values, offsets, low, high):
    """Writes the varints of each row's list, packed."""
    for row in range(low, high):
        if (len(valid) == 0 or valid[row]) and offsets[row] < offsets[row + 1]:
            size = 0
            for i in range(offsets[row], offsets[row + 1]):
                size += _varint_size(values[i])
            data[at[row]] = 0x0A
            to = _put_varint(data, at[row] + 1, size)
            for i in range(offsets[row], offsets[row + 1]):
                to = _put_varint(data, to, values[i])
            at[row] = to


@kernel
def fill_floats(data, at, valid, values, offsets, low, high):
    """Writes the floats of each row's list, packed; `values` and offsets are bytes."""
    for row in range(low, high):
        size = offsets[row + 1] - offsets[row]
        if (len(valid) == 0 or valid[row]) and size:
            data[at[row]] = 0x0A
            to = _put_varint(data, at[row] + 1, size)
            source = offsets[row]
            for i in range(size):
                data[to + i] = values[source + i]
            at[row] = to + size


@kernel
def fill_texts(data, at, valid, values, text_offsets, offsets, low, high):
    """Writes the texts of each row's list, one after the other."""
    for row in range(low, high):
        if len(valid) == 0 or valid[row]:
            to = at[row]
            for i in range(offsets[row], offsets[row + 1]):
                source = text_offsets[i]
                size = text_offsets[i + 1] - source
                data[to] = 0x0A
                to = _put_varint(data, to + 1, size)
                for k in range(size):
                    data[to + k] = values[source + k]
                to += size
            at[row] = to


@kernel
def close_frames(data, places, at, low, high):
    """Writes each row's checksum behind its payload."""
    for row in range(low, high):
        _put_little(data, at[row], masked_crc(data, places[row] + HEADER_BYTES, at[row]), 4)


@kernel
def check_frames(data, size, found):
    """Walks over framed records and checks every checksum.

    Args:
        data: uint8[>= size].
        size: bytes that hold data.
        found: int64[1], added to: whole records.

    Returns:
        (position after the last whole record, whether all was well so far).
    """
    at = 0
    while at + HEADER_BYTES <= size:
        length = np.int64(0)
        for i in range(8):
            length |= np.int64(data[at + i]) << np.int64(8 * i)
        crc = np.uint64(0)
        for i in range(4):
            crc |= np.uint64(data[at + 8 + i]) << np.uint64(8 * i)
        if length < 0 or masked_crc(data, at, at + 8) != crc:
            return at, False
        stop = at + HEADER_BYTES + length
        if length > size or stop + FOOTER_BYTES > size:
            break
        crc = np.uint64(0)
        for i in range(4):
            crc |= np.uint64(data[stop + i]) << np.uint64(8 * i)
        if masked_crc(data, at + HEADER_BYTES, stop) != crc:
            return at, False
        found[0] += 1
        at = stop + FOOTER_BYTES
    return at, True


@kernel
def place_records(data, offsets, slots, out, out_offsets):
    """Copies records to their places.

    Args:
        data: uint8[], records one after the other.
        offsets: int64[n + 1], where each starts.
        slots: int64[n], which place each has.
        out: uint8[], receives the records.
        out_offsets: int64[], where each place starts in `out`.
    """
    for i in range(len(slots)):
        to = out_offsets[slots[i]] - offsets[i]
        for k in range(offsets[i], offsets[i + 1]):
            out[to + k] = data[k]
