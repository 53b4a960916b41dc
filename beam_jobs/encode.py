"""Arrow record batch -> framed, serialized tf.train.Examples, without TensorFlow.

    batch of columns --lengths--> each row's size --order--> where each row goes
          --fill--> bytes, one column at a time --frame--> length, CRC32C, payload, CRC32C

Two passes over the columns: the first adds each entry's length to its row's, the second writes
it. Rows are filled in blocks that fit the cache, and may go to any order on the way, which is
how records get sorted by shard without being copied. Features are written in the order of
their names, so the bytes are deterministic; a null is an absent feature.

Source: tensorflow/core/example/example.proto; developers.google.com/protocol-buffers/docs/encoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from beam_jobs import encode_kernels as k
from beam_jobs.encode_kernels import FOOTER_BYTES, HEADER_BYTES
from tfpipe.schema import ITEMSIZE_BYTES, Feature, Schema

# Rows whose bytes are filled at a time: they stay in the second-level cache over all columns.
BLOCK_BYTES = 512 << 10
# Readers of protobufs refuse longer messages.
RECORD_MAX_BYTES = (1 << 31) - 1
_TAG_BYTES_LIST, _TAG_FLOAT_LIST, _TAG_INT64_LIST = 0x0A, 0x12, 0x1A
_LIST_TAGS = {"varints": _TAG_INT64_LIST, "floats": _TAG_FLOAT_LIST, "texts": _TAG_BYTES_LIST}
_NONE = np.empty(0, np.uint8)
_NO_OFFSETS = np.empty(0, np.int64)


class RecordTooLong(ValueError):
    """A record that no reader would take.

    Attributes:
        row: its number within the batch, from 0.
        num_bytes: that it has.
    """

    def __init__(self, row: int, num_bytes: int) -> None:
        super().__init__(row, num_bytes)
        self.row, self.num_bytes = row, num_bytes


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Framed records, one after the other.

    Attributes:
        data: uint8[], the bytes.
        offsets: int64[n + 1], where each record starts in it, in the order asked for.
    """

    data: np.ndarray
    offsets: np.ndarray


@dataclass(kw_only=True)
class _Column:
    """A column ready for the kernels.

    Attributes:
        kind: "fixed", "varint" or "text" for one value, "varints", "floats" or "texts" for a list.
        valid: uint8[n], or empty if there is no null.
        values: uint8[n * width], int64[n] or int64[] for varints, else uint8[]: floats, text.
        heads: uint8[]: the entry's constant bytes up to the payload (fixed), the same for each
            varint length one after the other (varint), or the key's part.
        head_ends: int64[]: where each of them ends.
        width: payload bytes of a fixed entry.
        offsets: int64[n + 1]: where each row starts in `values`, or in `text_offsets` for texts.
        text_offsets: int64[]: where each of the texts starts in `values`.
        items: int64[n]: bytes of each row's list message, for a list.
    """

    kind: str
    valid: np.ndarray
    values: np.ndarray
    heads: np.ndarray
    head_ends: np.ndarray = field(default_factory=lambda: _NO_OFFSETS)
    width: int = 0
    offsets: np.ndarray = field(default_factory=lambda: _NO_OFFSETS)
    text_offsets: np.ndarray = field(default_factory=lambda: _NO_OFFSETS)
    items: np.ndarray = field(default_factory=lambda: _NO_OFFSETS)

    def add_lengths(self, lengths: np.ndarray) -> None:
        """Adds each entry's length to its row's."""
        if self.kind == "fixed":
            k.add_fixed(lengths, self.valid, len(self.heads) + self.width)
        elif self.kind == "varint":
            k.add_varint(lengths, self.valid, self.values, self.head_ends)
        elif self.kind == "text":
            k.add_text(lengths, self.valid, self.offsets, len(self.heads))
        else:
            k.add_list(lengths, self.valid, self.items, len(self.heads))

    def fill(self, data: np.ndarray, at: np.ndarray, low: int, high: int) -> None:
        """Writes the entries of the rows [low, high) where `at` says, and moves `at` behind them."""
        if self.kind == "fixed":
            k.fill_fixed(data, at, self.valid, self.values, self.width, self.heads, low, high)
        elif self.kind == "varint":
            k.fill_varint(data, at, self.valid, self.values, self.heads, self.head_ends, low, high)
        elif self.kind == "text":
            k.fill_text(data, at, self.valid, self.values, self.offsets, self.heads, low, high)
        else:
            k.open_lists(data, at, self.valid, self.items, self.heads, _LIST_TAGS[self.kind], low, high)
            if self.kind == "varints":
                k.fill_varints(data, at, self.valid, self.values, self.offsets, low, high)
            elif self.kind == "floats":
                k.fill_floats(data, at, self.valid, self.values, self.offsets, low, high)
            else:
                k.fill_texts(data, at, self.valid, self.values, self.text_offsets, self.offsets, low, high)


def encode_batch(batch: pa.RecordBatch, schema: Schema, order: np.ndarray | None = None) -> Encoded:
    """Encodes a batch of records.

    Args:
        batch: one column a feature, in the dtype the schema names; a tensor is a list of its values,
            of a fixed size where its shape is.
        schema: of the examples.
        order: int64[n], the rows in the order in which they are to be written; default as they are.

    Returns:
        The framed records.

    Raises:
        RecordTooLong: a record is longer than a protobuf may be.
        ValueError: a column is missing or has another type than its feature.
    """
    rows = batch.num_rows
    columns = [_prepare(name, schema.features[name], batch) for name in sorted(schema.features)]
    lengths = np.zeros(rows, np.int64)
    for column in columns:
        column.add_lengths(lengths)
    features_lengths = lengths.copy()
    k.add_frame(lengths)
    if rows and (size := int(lengths.max()) - HEADER_BYTES - FOOTER_BYTES) > RECORD_MAX_BYTES:
        raise RecordTooLong(int(lengths.argmax()), size)
    if order is None:
        order = np.arange(rows, dtype=np.int64)
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(lengths[order], out=offsets[1:])
    data = np.empty(int(offsets[-1]), np.uint8)
    places = np.empty(rows, np.int64)
    places[order] = offsets[:-1]
    at = np.empty(rows, np.int64)
    step = max(16, BLOCK_BYTES * rows // max(len(data), 1))
    for low in range(0, rows, step):
        high = min(rows, low + step)
        k.open_frames(data, places, at, features_lengths, low, high)
        for column in columns:
            column.fill(data, at, low, high)
        k.close_frames(data, places, at, low, high)
    return Encoded(data=data, offsets=offsets)


def estimate_bytes(schema: Schema, payload_bytes: Mapping[str, float]) -> int:
    """Estimates a framed record's size.

    Args:
        schema: of the examples.
        payload_bytes: mean bytes of each feature whose size differs between records; 8 where unknown.

    Returns:
        Bytes; exact but for varints, text and nulls.
    """
    total = float(HEADER_BYTES + FOOTER_BYTES + 4)
    for name, feature in schema.features.items():
        payload = payload_bytes.get(name, 8.0) if feature.decoded_bytes is None else feature.decoded_bytes
        if feature.encoding == "int64_list":
            payload /= 2
        total += len(_head(name, 0x0A, int(payload))) + payload
    return int(total) + 1


def _prepare(name: str, feature: Feature, batch: pa.RecordBatch) -> _Column:
    try:
        array = batch.column(name)
    except KeyError:
        raise ValueError(f"a batch must have a column for every feature, got none for {name!r}.") from None
    valid = _NONE
    if array.null_count:
        valid = array.is_valid().cast(pa.uint8()).to_numpy(zero_copy_only=False)
    if feature.shape == () and feature.encoding == "bytes_list":
        offsets, values = text_buffers(array)
        return _Column(kind="text", valid=valid, values=values, offsets=offsets, heads=_key(name))
    if feature.shape == () and feature.encoding == "int64_list":
        heads = [_head(name, _TAG_INT64_LIST, length) for length in range(1, 11)]
        return _Column(
            kind="varint", valid=valid, values=_values(array, 0, len(array), feature, name).view(np.int64),
            heads=np.frombuffer(b"".join(heads), np.uint8), head_ends=np.cumsum([0, *map(len, heads)]),
        )  # fmt: skip
    fixed_bytes = feature.decoded_bytes
    if fixed_bytes is not None and feature.encoding in ("raw", "float_list"):
        values = _values(*_flat(array, feature, name)[:3], feature, name)
        tag = _TAG_FLOAT_LIST if feature.encoding == "float_list" else _TAG_BYTES_LIST
        if fixed_bytes or feature.encoding == "raw":
            head = np.frombuffer(_head(name, tag, fixed_bytes), np.uint8)
            return _Column(
                kind="fixed", valid=valid, values=values.view(np.uint8), heads=head, width=fixed_bytes
            )
    return _list_column(name, feature, array, valid)


def _list_column(name: str, feature: Feature, array: pa.Array, valid: np.ndarray) -> _Column:
    flat, start, count, offsets = _flat(array, feature, name)
    items = np.zeros(len(array), np.int64)
    column = _Column(kind="", valid=valid, values=_NONE, heads=_key(name), offsets=offsets, items=items)
    if feature.encoding == "bytes_list":
        column.kind = "texts"
        column.text_offsets, column.values = text_buffers(flat.slice(start, count))
        k.text_items(column.text_offsets, offsets, items)
        return column
    values = _values(flat, start, count, feature, name)
    if feature.encoding == "int64_list":
        column.kind, column.values = "varints", values.view(np.int64)
        k.varint_items(column.values, offsets, items)
        return column
    column.values, column.offsets = values.view(np.uint8), offsets * ITEMSIZE_BYTES[feature.dtype]
    if feature.encoding == "raw":  # one bytes value, as long as it takes
        column.kind = "text"
    else:
        column.kind = "floats"
        k.float_items(column.offsets, items)
    return column


def _flat(array: pa.Array, feature: Feature, name: str) -> tuple[pa.Array, int, int, np.ndarray]:
    """The values of all rows, where this array's begin in them and how many they are; where each row's do."""
    elements = feature.num_elements
    if elements is not None:
        size = array.type.list_size if pa.types.is_fixed_size_list(array.type) else 1
        if size != elements:
            raise ValueError(f"column {name!r} must hold {elements} values a row, got {size}.")
        flat = array.values if pa.types.is_fixed_size_list(array.type) else array
        offsets = np.arange(len(array) + 1, dtype=np.int64) * size
        return flat, array.offset * size if flat is not array else 0, len(array) * size, offsets
    if not pa.types.is_list(array.type):
        raise ValueError(f"column {name!r} must hold lists, got {array.type}.")
    ends = array.offsets.to_numpy().astype(np.int64)
    return array.values, int(ends[0]), int(ends[-1] - ends[0]), ends - ends[0]


def _values(flat: pa.Array, start: int, count: int, feature: Feature, name: str) -> np.ndarray:
    """Numbers as they lie in memory; nulls keep whatever lies beneath them, since the mask is looked at first."""
    dtype = np.dtype("uint8" if feature.dtype == "bool" else feature.dtype).newbyteorder("<")
    flat = flat.slice(start, count)
    if pa.types.is_boolean(flat.type):
        flat = flat.cast(pa.uint8())
    if flat.type != pa.from_numpy_dtype(dtype):
        raise ValueError(f"column {name!r} must hold {feature.dtype}, got {flat.type}.")
    buffer = flat.buffers()[1]
    if buffer is None:
        return np.zeros(0, dtype)
    first = flat.offset * dtype.itemsize
    return np.frombuffer(buffer, np.uint8)[first : first + count * dtype.itemsize].view(dtype)


def text_buffers(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Where each text of an array begins and ends (int64[n + 1]) in its bytes (uint8[])."""
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    if not large and not pa.types.is_string(array.type) and not pa.types.is_binary(array.type):
        raise ValueError(f"a text column must hold strings or bytes, got {array.type}.")
    _, offsets, data = array.buffers()
    width = np.int64 if large else np.int32
    view = np.frombuffer(offsets, width) if offsets is not None and offsets.size else np.zeros(1, width)
    view = view[array.offset : array.offset + len(array) + 1].astype(np.int64)
    return view, np.frombuffer(data, np.uint8) if data is not None and data.size else _NONE


def varint(value: int) -> bytes:
    """A number as protobuf writes it: 7 bits a byte, the lowest first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _key(name: str) -> np.ndarray:
    key = name.encode()
    return np.frombuffer(b"\x0a" + varint(len(key)) + key, np.uint8)


def _head(name: str, tag: int, payload_bytes: int) -> bytes:
    """A map entry's bytes up to the payload: entry, key, Feature, list, and the list's one value."""
    key = _key(name).tobytes()
    value = b"\x0a" + varint(payload_bytes)
    items = bytes([tag]) + varint(len(value) + payload_bytes) + value
    feature = b"\x12" + varint(len(items) + payload_bytes) + items
    entry = key + feature
    return b"\x0a" + varint(len(entry) + payload_bytes) + entry
