"""Reads serialized tf.train.Examples without TensorFlow.

    >>> parse_example(payload).features["label"].decode()
    [3]

The parser is strict: what protobuf refuses it refuses, and groups as well, which TensorFlow's
own batch parser can't read. Lists stay encoded until somebody asks for their values.

Source: tensorflow/core/example/{example,feature}.proto; protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from tfpipe.errors import RecordError

# The field of a Feature that holds its list -> the list's name.
_KINDS = {0x0A: "bytes_list", 0x12: "float_list", 0x1A: "int64_list"}
# A list's values are its field 1, one by one, or packed as one field of bytes.
_SINGLE = {"bytes_list": 0x0A, "float_list": 0x0D, "int64_list": 0x08}
_FIELD_1, _FIELD_2 = 0x0A, 0x12  # tags of fields that hold bytes
_CONTINUED = bytes(range(0x80, 0x100))  # bytes of a varint that are not its last
_LONG_VARINT = re.compile(rb"[\x80-\xff]{10}")


class Place(NamedTuple):
    """Where a record lies."""

    file: str
    record: int

    def __str__(self) -> str:
        return f"{self.file}: record {self.record}"


class Values:
    """One feature of one record, as it lies in the bytes.

    Attributes:
        kind: "bytes_list", "float_list" or "int64_list"; "" if the feature names none.
        count: values in the list.
        chunks: the values in order: one chunk a value of bytes; else any number of packed ones.
    """

    __slots__ = ("chunks", "count", "kind")

    def __init__(self) -> None:
        self.kind = ""
        self.count = 0
        self.chunks: list[bytes] = []

    def decode(self) -> list[Any]:
        """The values as Python's bytes, floats or ints."""
        if self.kind == "bytes_list":
            return list(self.chunks)
        return decode_numbers(self.kind, b"".join(self.chunks)).tolist()


class Example(NamedTuple):
    """A parsed record.

    Attributes:
        features: by name.
        other_fields: whether it holds more than an Example's features (a SequenceExample does).
    """

    features: dict[str, Values]
    other_fields: bool


def parse_example(payload: bytes, where: object = "the record") -> Example:
    """Parses one serialized tf.train.Example.

    Args:
        payload: the bytes.
        where: named in the error.

    Returns:
        Its features. As in protobuf, the last of several of one name counts, the last kind of
        several in one feature, and unknown fields are skipped.

    Raises:
        RecordError: the bytes are no Example; names the byte.
    """
    features: dict[str, Values] = {}
    other_fields = False
    try:
        for tag, start, stop in _fields(payload, 0, len(payload)):
            if tag != _FIELD_1:
                other_fields = True
                continue
            for entry_tag, entry_start, entry_stop in _fields(payload, start, stop):
                if entry_tag == _FIELD_1:
                    name, values = _entry(payload, entry_start, entry_stop)
                    features[name] = values
    except _Malformed as error:
        raise RecordError(
            f"a record must be a serialized tf.train.Example, got {error} ({where}). "
            f"Write it again, or keep its file apart: other messages can't be read."
        ) from None
    return Example(features, other_fields)


class _Malformed(Exception):
    """What is wrong, at which byte."""


def _fields(data: bytes, position: int, end: int) -> list[tuple[int, int, int]]:
    """The fields of the message in data[position:end]: tag, and where the value starts and stops."""
    found = []
    start = position
    try:
        while position < end:
            start = position
            tag = data[position]
            position += 1
            if tag >= 0x80:
                tag, position = _varint(data, start)
            wire = tag & 7
            if wire == 2:
                size = data[position]
                position += 1
                if size >= 0x80:
                    size, position = _varint(data, position - 1)
                value, position = position, position + size
            elif wire == 0:
                value = position
                while data[position] >= 0x80:
                    position += 1
                position += 1
                if position - value > 10:
                    raise _Malformed(f"a number of more than 10 bytes at byte {value}")
            elif wire == 5:
                value, position = position, position + 4
            elif wire == 1:
                value, position = position, position + 8
            else:
                raise _Malformed(f"wire type {wire} at byte {start}")
            if tag < 8:
                raise _Malformed(f"field number 0 at byte {start}")
            if position > end:
                raise IndexError
            found.append((tag, value, position))
    except IndexError:
        raise _Malformed(f"a field that ends after its message, at byte {start}") from None
    return found


def _varint(data: bytes, start: int) -> tuple[int, int]:
    """A tag or a size, which have at most 32 bits, and where it stops."""
    value = 0
    for place in range(5):
        byte = data[start + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            if value >> 32:
                break
            return value, start + place + 1
    raise _Malformed(f"a tag or size of more than 32 bits at byte {start}")


def _entry(data: bytes, begin: int, end: int) -> tuple[str, Values]:
    name, values = "", Values()
    for tag, start, stop in _fields(data, begin, end):
        if tag == _FIELD_1:
            try:
                name = data[start:stop].decode()
            except UnicodeDecodeError:
                raise _Malformed(f"a feature's name that is not UTF-8 at byte {start}") from None
        elif tag == _FIELD_2:
            for kind_tag, kind_start, kind_stop in _fields(data, start, stop):
                if kind_tag in _KINDS:
                    _add_list(values, _KINDS[kind_tag], data, kind_start, kind_stop)
    return name, values


def _add_list(values: Values, kind: str, data: bytes, begin: int, end: int) -> None:
    if values.kind != kind:
        values.kind, values.count, values.chunks = kind, 0, []
    single = _SINGLE[kind]
    for tag, start, stop in _fields(data, begin, end):
        if tag == single:
            values.count += 1
            values.chunks.append(data[start:stop])
        elif tag == _FIELD_1:
            chunk = data[start:stop]
            values.count += _count_packed(kind, chunk, start)
            values.chunks.append(chunk)


def _count_packed(kind: str, chunk: bytes, start: int) -> int:
    if kind == "float_list":
        if len(chunk) % 4:
            raise _Malformed(f"{len(chunk)} bytes of packed floats at byte {start}")
        return len(chunk) // 4
    if chunk.isascii():  # every number has one byte
        return len(chunk)
    if chunk[-1] >= 0x80 or _LONG_VARINT.search(chunk):
        raise _Malformed(f"packed integers of which one does not end, at byte {start}")
    return len(chunk.translate(None, _CONTINUED))


def decode_numbers(kind: str, data: bytes | bytearray) -> np.ndarray:
    """Decodes packed numbers that `parse_example` found whole.

    Args:
        kind: "float_list" or "int64_list".
        data: the chunks of any number of records, joined.

    Returns:
        float32[] or int64[].
    """
    if kind == "float_list":
        return np.frombuffer(data, "<f4")
    encoded = np.frombuffer(data, np.uint8)
    if data.isascii():
        return encoded.astype(np.int64)
    ends = np.flatnonzero(encoded < 0x80)
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    values = np.zeros(len(ends), np.uint64)
    for place in range(int(lengths.max())):
        longer = np.flatnonzero(lengths > place)
        part = (encoded[starts[longer] + place] & 0x7F).astype(np.uint64)
        values[longer] |= part << np.uint64(7 * place)
    return values.view(np.int64)
