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

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from beam_jobs.encode_kernels import (
    FOOTER_BYTES,
    HEADER_BYTES,
    add_fixed,
    add_frame,
    add_text,
    add_varint,
    close_frames,
    fill_fixed,
    fill_text,
    fill_varint,
    open_frames,
)
from tfpipe.schema import Feature, Schema

# Rows whose bytes are filled at a time: they stay in the second-level cache over all columns.
BLOCK_BYTES = 512 << 10
_TAG_BYTES_LIST, _TAG_FLOAT_LIST, _TAG_INT64_LIST = 0x0A, 0x12, 0x1A
_NONE = np.empty(0, np.uint8)


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
        kind: "fixed", "varint" or "text".
        valid: uint8[n], or empty if there is no null.
        values: uint8[n * width], int64[n], or uint8[] text.
        offsets: int64[n + 1] of the text.
        heads: uint8[]: the entry's constant bytes up to the payload (fixed), the same for each
            varint length one after the other (varint), or the key's part (text).
        head_ends: int64[]: where each of them ends.
        width: payload bytes of a fixed entry.
    """

    kind: str
    valid: np.ndarray
    values: np.ndarray
    offsets: np.ndarray
    heads: np.ndarray
    head_ends: np.ndarray
    width: int


def encode_batch(batch: pa.RecordBatch, schema: Schema, order: np.ndarray | None = None) -> Encoded:
    """Encodes a batch of records.

    Args:
        batch: one column a feature, in the dtype the schema names; a tensor is a fixed-size list.
        schema: of the examples.
        order: int64[n], the rows in the order in which they are to be written; default as they are.

    Returns:
        The framed records.

    Raises:
        ValueError: a column is missing or has another type than its feature.
    """
    rows = batch.num_rows
    columns = [_prepare(name, schema.features[name], batch) for name in sorted(schema.features)]
    lengths = np.zeros(rows, np.int64)
    for column in columns:
        if column.kind == "fixed":
            add_fixed(lengths, column.valid, len(column.heads) + column.width)
        elif column.kind == "varint":
            add_varint(lengths, column.valid, column.values, column.head_ends)
        else:
            add_text(lengths, column.valid, column.offsets, len(column.heads))
    features_lengths = lengths.copy()
    add_frame(lengths)
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
        open_frames(data, places, at, features_lengths, low, high)
        for column in columns:
            if column.kind == "fixed":
                fill_fixed(data, at, column.valid, column.values, column.width, column.heads, low, high)
            elif column.kind == "varint":
                fill_varint(data, at, column.valid, column.values, column.heads, column.head_ends, low, high)
            else:
                fill_text(data, at, column.valid, column.values, column.offsets, column.heads, low, high)
        close_frames(data, places, at, low, high)
    return Encoded(data=data, offsets=offsets)


def estimate_bytes(schema: Schema, text_bytes: dict[str, float]) -> int:
    """Estimates a framed record's size.

    Args:
        schema: of the examples.
        text_bytes: mean length of each text feature; 8 where unknown.

    Returns:
        Bytes; exact but for varints, text and nulls.
    """
    total = float(HEADER_BYTES + FOOTER_BYTES + 4)
    for name, feature in schema.features.items():
        payload = text_bytes.get(name, 8.0) if feature.decoded_bytes is None else feature.decoded_bytes
        if feature.encoding == "int64_list":
            payload = 4.0
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
    no_offsets = np.empty(0, np.int64)
    if feature.encoding == "bytes_list":
        offsets, values = _text_buffers(array)
        head = _key(name)
        return _Column(
            kind="text", valid=valid, values=values, offsets=offsets, heads=head,
            head_ends=no_offsets, width=0,
        )  # fmt: skip
    values = _fixed_values(array, feature, name)
    if feature.encoding == "int64_list" and feature.shape == ():
        heads = [_head(name, _TAG_INT64_LIST, length) for length in range(1, 11)]
        ends = np.cumsum([0, *map(len, heads)]).astype(np.int64)
        return _Column(
            kind="varint", valid=valid, values=values.view(np.int64), offsets=no_offsets,
            heads=np.frombuffer(b"".join(heads), np.uint8), head_ends=ends, width=0,
        )  # fmt: skip
    if feature.encoding == "int64_list":
        raise ValueError(f"a tensor must travel raw, got encoding int64_list for {name!r}.")
    width = feature.decoded_bytes or 0
    tag = _TAG_FLOAT_LIST if feature.encoding == "float_list" else _TAG_BYTES_LIST
    return _Column(
        kind="fixed", valid=valid, values=values.view(np.uint8), offsets=no_offsets,
        heads=np.frombuffer(_head(name, tag, width), np.uint8), head_ends=no_offsets, width=width,
    )  # fmt: skip


def _fixed_values(array: pa.Array, feature: Feature, name: str) -> np.ndarray:
    elements = feature.num_elements
    dtype = np.dtype("uint8" if feature.dtype == "bool" else feature.dtype).newbyteorder("<")
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        flat = array.values.slice(array.offset * size, len(array) * size)
    else:
        size, flat = 1, array
    if pa.types.is_boolean(flat.type):
        flat = flat.cast(pa.uint8())
    if size != elements or flat.type != pa.from_numpy_dtype(dtype):
        raise ValueError(
            f"column {name!r} must hold {elements} {feature.dtype} a row, got {size} {flat.type}."
        )
    # Nulls keep whatever lies beneath them: the kernels look at the mask first.
    start = flat.offset * dtype.itemsize
    buffer = flat.buffers()[1]
    if buffer is None:
        return np.zeros(0, dtype)
    view = np.frombuffer(buffer, np.uint8)[start : start + len(flat) * dtype.itemsize]
    return view.view(dtype)


def _text_buffers(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    if not large and not pa.types.is_string(array.type) and not pa.types.is_binary(array.type):
        raise ValueError(f"a text column must hold strings or bytes, got {array.type}.")
    _, offsets, data = array.buffers()
    width = np.int64 if large else np.int32
    view = np.frombuffer(offsets, width) if offsets is not None else np.zeros(1, width)
    view = view[array.offset : array.offset + len(array) + 1].astype(np.int64)
    return view, np.frombuffer(data, np.uint8) if data is not None and data.size else _NONE


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _key(name: str) -> np.ndarray:
    key = name.encode()
    return np.frombuffer(b"\x0a" + _varint(len(key)) + key, np.uint8)


def _head(name: str, tag: int, payload_bytes: int) -> bytes:
    """A map entry's bytes up to the payload: entry, key, Feature, list, and the list's one value."""
    key = _key(name).tobytes()
    value = b"\x0a" + _varint(payload_bytes)
    items = bytes([tag]) + _varint(len(value) + payload_bytes) + value
    feature = b"\x12" + _varint(len(items) + payload_bytes) + items
    entry = key + feature
    return b"\x0a" + _varint(len(entry) + payload_bytes) + entry
