"""Serialized tf.train.Examples -> Arrow arrays, a column at a time.

    payloads --parse--> Parsed: where each feature's lists lie --column--> an Arrow array, and its faults

Records in protobuf's plain form are read by compiled loops. Any other goes through the strict
parser and, if that takes it, is brought into plain form first; so there is one way to a value.
Numbers are copied bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from beam_jobs.encode import RECORD_MAX_BYTES, varint
from beam_jobs.sources import example_kernels as k
from beam_jobs.sources.fit import list_offsets
from tfpipe.errors import RecordError
from tfpipe.examples import Values, parse_example
from tfpipe.schema import ITEMSIZE_BYTES

KINDS = ("", "bytes_list", "float_list", "int64_list")
_TAGS = {"bytes_list": 0x0A, "float_list": 0x12, "int64_list": 0x1A}
# Room at first: a feature for so many bytes, and names.
_FEATURE_BYTES, _NAMES = 12, 1 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How the lists of a feature are to be read.

    Attributes:
        raw: the dtype of a tensor whose bytes are the one value of a bytes_list; "" for values as they are.
        shape: of a record's values; None where all records tell, and an empty list still is one.
        text: whether bytes are to be text where they can be.
    """

    raw: str = ""
    shape: tuple[int | None, ...] | None = None
    text: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """Where the features of some records lie.

    Attributes:
        data: uint8[], the records.
        rows: how many they are.
        features: by name, one line (`example_kernels.COLUMNS`) a record that has a list of it, ascending.
        faults: what is wrong with each record that is no Example, by its number among them.
    """

    data: np.ndarray
    rows: int
    features: Mapping[str, np.ndarray]
    faults: Mapping[int, str]


def parse(payloads: Sequence[bytes]) -> Parsed:
    """Finds the features of serialized records.

    Args:
        payloads: of at most 2 GiB together, or only one.

    Returns:
        What was found. As in protobuf, the last of several features of one name counts.
    """
    faults = {
        row: f"a record must have at most {RECORD_MAX_BYTES} bytes to be read as a tf.train.Example, got {len(p)}"
        for row, p in enumerate(payloads)
        if len(p) > RECORD_MAX_BYTES
    }
    plain = (
        [b"" if row in faults else payload for row, payload in enumerate(payloads)] if faults else payloads
    )
    data, lines, names, unusual = _find(plain)
    texts = _decode(data, names)
    if None in texts:
        nameless = [index for index, text in enumerate(texts) if text is None]
        unusual[lines[np.isin(lines[:, k.NAME], nameless), k.ROW]] = 1
    if unusual.any():
        plain = list(plain)
        for row in np.flatnonzero(unusual).tolist():
            try:
                plain[row] = _in_plain_form(plain[row])
            except RecordError as error:
                plain[row], faults[row] = b"", str(error).partition(" (the record)")[0]
        data, lines, names, _ = _find(plain)
        texts = _decode(data, names)
    features = {}
    key = lines[:, k.NAME] if len(names) > 1 << 16 else lines[:, k.NAME].astype(np.uint16)  # sorts faster
    order = np.argsort(key, kind="stable")
    for of_name in np.split(order, np.flatnonzero(np.diff(lines[order, k.NAME])) + 1) if len(order) else ():
        found = lines[of_name].astype(np.int64)
        rows = found[:, k.ROW]
        last = np.append(rows[1:] != rows[:-1], True)
        found = found[last & (found[:, k.KIND] != k.NONE)]
        if len(found):
            features[str(texts[lines[of_name[0], k.NAME]])] = found
    return Parsed(data=data, rows=len(payloads), features=dict(sorted(features.items())), faults=faults)


def column(parsed: Parsed, name: str, form: Form) -> tuple[pa.Array, dict[int, tuple[str, str]]]:
    """Reads the values of one feature, whose lists are of one kind.

    Args:
        parsed: the records.
        name: of the feature, which one of them has.
        form: of its values.

    Returns:
        One value or list a record, null where there is none; and by record what must hold and what was
        found, where a list does not have the form: what the array holds there means nothing.
    """
    lines = parsed.features[name]
    good, faults = _check(lines, form)
    lines = lines[good]
    values = _values(parsed.data, lines, form)
    lengths = np.zeros(parsed.rows, np.int64)
    counts = lines[:, k.COUNT]
    lengths[lines[:, k.ROW]] = lines[:, k.SIZE] // ITEMSIZE_BYTES[form.raw] if form.raw else counts
    valid = np.zeros(parsed.rows, bool)
    # An empty list is a value only where lengths differ; of a raw tensor it holds no tensor.
    empty_too = not form.raw and (form.shape is None or None in form.shape)
    valid[lines[:, k.ROW]] = empty_too | (counts > 0)
    if form.raw == "bool" and (values.to_numpy() > 1).any():
        wrong = np.unique(
            np.searchsorted(np.cumsum(lengths), np.flatnonzero(values.to_numpy() > 1), side="right")
        )
        faults |= {row: ("bytes of 0 and 1 (bool)", "others") for row in wrong.tolist()}
    if form.raw == "bool":
        values = pa.array(values.to_numpy() != 0)
    if form.shape == ():
        places = pa.array(np.cumsum(lengths) - lengths, mask=~valid)
        return values if valid.all() else values.take(places), faults
    return pa.ListArray.from_arrays(
        list_offsets(lengths), values, mask=None if valid.all() else pa.array(~valid)
    ), faults


def _check(lines: np.ndarray, form: Form) -> tuple[np.ndarray, dict[int, tuple[str, str]]]:
    """Which lists have the form (bool[n]), and by record what is wrong with the others."""
    counts, sizes = lines[:, k.COUNT], lines[:, k.SIZE]
    shape = "[" + ", ".join("null" if size is None else str(size) for size in form.shape or ()) + "]"
    inner = math.prod(size or 0 for size in (form.shape or ())[1:])
    whole = math.prod(size or 0 for size in form.shape or ())
    variable = form.shape is not None and None in form.shape

    def fits(found: np.ndarray, item: int) -> np.ndarray:
        return found % max(inner * item, 1) == 0 if variable else found == whole * item

    expected = f"{'a multiple of ' if variable else ''}{{}} {{}} ({{}}shape {shape})"
    number = inner if variable else whole
    if form.raw:
        item = ITEMSIZE_BYTES[form.raw]
        is_raw = lines[:, k.KIND] == k.BYTES
        good = is_raw & ((counts == 0) | ((counts == 1) & fits(sizes, item)))
        must = expected.format(number * item, "bytes", f"{form.raw}, ")
        found = [
            KINDS[line[k.KIND]] if line[k.KIND] != k.BYTES
            else f"{line[k.SIZE]} bytes" if line[k.COUNT] == 1 else f"{line[k.COUNT]} values of bytes"
            for line in lines[~good].tolist()
        ]  # fmt: skip
    elif form.shape is None:
        return np.ones(len(lines), bool), {}
    else:
        good = (counts == 0) | fits(counts, 1)
        must = "a single value" if form.shape == () else expected.format(number, "values", "")
        found = [f"{count} values" for count in counts[~good].tolist()]
    rows = lines[~good, k.ROW].tolist()
    return good, {row: (must, got) for row, got in zip(rows, found, strict=True)}


def _values(data: np.ndarray, lines: np.ndarray, form: Form) -> pa.Array:
    """The values of all lists, one behind the other; those of a raw tensor as they will be but for bool."""
    kind = lines[0, k.KIND] if len(lines) else k.BYTES
    starts, stops = np.ascontiguousarray(lines[:, k.START]), np.ascontiguousarray(lines[:, k.STOP])
    if kind == k.INTS:
        ints = np.empty(int(lines[:, k.COUNT].sum()), np.int64)
        k.copy_ints(data, starts, stops, ints)
        return pa.array(ints)
    out = np.empty(int(lines[:, k.SIZE].sum()), np.uint8)
    if kind == k.FLOATS:
        k.copy_ranges(data, starts, stops, out)
        return pa.array(out.view("<f4"))
    ends = np.zeros(int(lines[:, k.COUNT].sum()) + 1, np.int64)
    k.copy_texts(data, starts, stops, out, ends[1:])
    if form.raw:
        return pa.array(out.view(np.dtype("uint8" if form.raw == "bool" else form.raw).newbyteorder("<")))
    offsets = pa.py_buffer(ends.astype(np.int32))
    values = pa.Array.from_buffers(pa.binary(), len(ends) - 1, [None, offsets, pa.py_buffer(out)])
    try:
        return values.cast(pa.string()) if form.text else values
    except pa.ArrowInvalid:  # other than UTF-8
        return values


def _find(payloads: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The records joined, a line a feature, where each name is, and which records have no plain form."""
    data = np.frombuffer(b"".join(payloads), np.uint8)
    offsets = np.zeros(len(payloads) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, payloads), np.int64, len(payloads)), out=offsets[1:])
    unusual = np.zeros(len(payloads), np.uint8)
    features, names = len(data) // _FEATURE_BYTES + 1, _NAMES
    while True:
        table, places = np.empty((features, k.COLUMNS), np.int32), np.empty((names, 2), np.int64)
        used, found = k.find_features(data, offsets, table, places, np.full(4 * names, -1, np.int64), unusual)
        if used >= 0:
            return data, table[:used], places[:found], unusual
        features, names = 4 * features, 4 * names


def _decode(data: np.ndarray, names: np.ndarray) -> list[str | None]:
    """The names as text, None where one is none."""
    texts: list[str | None] = []
    for start, stop in names.tolist():
        try:
            texts.append(data[start:stop].tobytes().decode())
        except UnicodeDecodeError:
            texts.append(None)
    return texts


def _in_plain_form(payload: bytes) -> bytes:
    """The same Example as protobuf would write it.

    Raises:
        RecordError: it is none, or holds more than one does.
    """
    example = parse_example(payload)
    if example.other_fields:
        raise RecordError(
            "a record must be a serialized tf.train.Example, got fields other than its features, as a "
            "tf.train.SequenceExample has"
        )
    entries = b"".join(
        _message(0x0A, _message(0x0A, name.encode()) + _message(0x12, _feature(values)))
        for name, values in example.features.items()
    )
    return _message(0x0A, entries)


def _feature(values: Values) -> bytes:
    if not values.kind:
        return b""
    if values.kind == "bytes_list":
        items = b"".join(_message(0x0A, chunk) for chunk in values.chunks)
    else:
        items = _message(0x0A, b"".join(values.chunks)) if values.count else b""
    return _message(_TAGS[values.kind], items)


def _message(tag: int, content: bytes) -> bytes:
    return bytes([tag]) + varint(len(content)) + content
