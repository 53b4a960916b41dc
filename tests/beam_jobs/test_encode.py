"""Encoded batches are, byte for byte, what protobuf writes; frames are what TensorFlow reads."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_jobs import encode
from tests.helpers import serialize
from tfpipe.schema import Feature, Schema
from tfpipe.tfrecord import ShardReader, frame

tf = pytest.importorskip("tensorflow")

NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")  # fmt: skip


def deterministic(schema, record):
    example = tf.train.Example.FromString(serialize(schema, record))
    return frame(example.SerializeToString(deterministic=True))


def encoded_records(encoded):
    edges = encoded.offsets.tolist()
    return [encoded.data[a:b].tobytes() for a, b in itertools.pairwise(edges)]


def column_values(dtype, count):
    if dtype == "bool":
        return (np.arange(count) % 3 == 0).tolist()
    kind = np.dtype(dtype)
    if kind.kind == "f":
        special = [0.0, -0.0, 1.5, float("nan"), float("inf"), -float("inf"), float(np.finfo(kind).max)]
    else:
        limits = np.iinfo(kind)
        special = [limits.min, limits.max, 0, 1, 127, limits.max // 2]
    return (special * (count // len(special) + 1))[:count]


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_number_dtype_as_scalar_and_tensor_with_nulls(dtype, shape):
    rows, size = 24, int(np.prod(shape))
    schema = Schema(features={"x": Feature(dtype=dtype, shape=shape, nullable=True)})
    flat = column_values(dtype, rows * size)
    arrow = pa.bool_() if dtype == "bool" else pa.from_numpy_dtype(dtype)
    flat = np.array(flat, "bool" if dtype == "bool" else dtype)
    groups = [flat[i * size : (i + 1) * size] for i in range(rows)]
    absent = [i % 5 == 2 for i in range(rows)]
    if shape:
        values = pa.FixedSizeListArray.from_arrays(
            pa.array(flat, arrow), size, mask=pa.array(absent)
        )  # fmt: skip
    else:
        values = pa.array(
            [None if gone else group[0] for gone, group in zip(absent, groups, strict=True)], arrow
        )
    # A slice that begins inside a byte of the bitmap and ends before the end.
    batch = pa.RecordBatch.from_arrays([values], names=["x"]).slice(3, 18)
    order = np.random.default_rng(0).permutation(18)
    expected = [
        deterministic(schema, {} if absent[row + 3] else {"x": groups[row + 3].reshape(shape)})
        for row in order
    ]
    assert encoded_records(encode.encode_batch(batch, schema, order)) == expected


def test_lengths_around_every_size_of_a_varint():
    # Text, and with it each enclosing message, crosses 1, 2 and 3 bytes of length.
    sizes = [0, 1, *range(100, 132), *range(16_340, 16_390), 2_097_100, 2_097_152, 2_097_160]
    name = "ключ" * 20  # a key of more than 127 bytes
    schema = Schema(features={name: Feature(dtype="string"), "b": Feature(dtype="bytes")})
    texts = ["ü" * (size // 2) + "x" * (size % 2) for size in sizes]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(texts), pa.array([text.encode() for text in reversed(texts)])], names=[name, "b"]
    )
    found = encoded_records(encode.encode_batch(batch, schema))
    for text, other, record in zip(texts, reversed(texts), found, strict=True):
        assert record == deterministic(schema, {name: text, "b": other})


@pytest.mark.parametrize("elements", [*range(100, 130), 16_368, 16_384, 2_097_152])
def test_tensors_around_every_size_of_a_varint(elements):
    schema = Schema(features={"x": Feature(dtype="uint8", shape=(elements,))})
    values = np.arange(2 * elements).astype(np.uint8)
    batch = pa.RecordBatch.from_arrays(
        [pa.FixedSizeListArray.from_arrays(pa.array(values), elements)], names=["x"]
    )
    expected = [deterministic(schema, {"x": half}) for half in values.reshape(2, elements)]
    assert encoded_records(encode.encode_batch(batch, schema)) == expected


def test_many_rows_cross_the_blocks_and_are_valid_frames(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "BLOCK_BYTES", 4096)
    rng = np.random.default_rng(1)
    rows = 3000
    schema = Schema(features={"n": Feature(dtype="int64", nullable=True), "t": Feature(dtype="string"), "f": Feature(dtype="float32")})  # fmt: skip
    numbers = [None if i % 7 == 0 else int(v) for i, v in enumerate(rng.integers(-(2**62), 2**62, rows))]
    texts = ["z" * int(size) for size in rng.integers(0, 300, rows)]
    floats = rng.standard_normal(rows).astype(np.float32)
    batch = pa.RecordBatch.from_arrays(
        [pa.array(floats), pa.array(numbers, pa.int64()), pa.array(texts)], names=["f", "n", "t"]
    )
    order = rng.permutation(rows)
    path = tmp_path / "shard"
    path.write_bytes(encode.encode_batch(batch, schema, order).data.tobytes())
    payloads = [bytes(payload) for payload in ShardReader(path, "")]
    assert payloads == [record.numpy() for record in tf.data.TFRecordDataset(str(path))]
    for row, payload in zip(order.tolist(), payloads, strict=True):
        record = {"n": numbers[row], "t": texts[row], "f": floats[row]}
        assert frame(payload) == deterministic(schema, record)


LISTS = {
    "i": Feature(dtype="int64", shape=(None,), nullable=True),
    "f": Feature(dtype="float32", shape=(None,), nullable=True),
    "b": Feature(dtype="bytes", shape=(None,), nullable=True),
    "u": Feature(dtype="uint16", shape=(None,), nullable=True),
    "q": Feature(dtype="bool", shape=(None, 2), nullable=True),
    "s": Feature(dtype="string", shape=(2,), nullable=True),
    "k": Feature(dtype="int64", shape=(3,), encoding="int64_list", nullable=True),
}  # fmt: skip
VALUES = {
    "i": st.integers(-(2**63), 2**63 - 1),
    "f": st.floats(width=32),
    "b": st.binary(max_size=150),
    "u": st.integers(0, 2**16 - 1),
    "q": st.booleans(),
    "s": st.text(max_size=100),
    "k": st.integers(-5, 300),
}


@st.composite
def list_rows(draw):
    rows = []
    for _ in range(draw(st.integers(1, 12))):
        row = {}
        for name, feature in LISTS.items():
            size = feature.num_elements
            if size is None:
                size = draw(st.integers(0, 40)) * (feature.shape[1] if feature.shape[1:] else 1)
            row[name] = draw(st.none() | st.lists(VALUES[name], min_size=size, max_size=size))
        rows.append(row)
    return rows


@settings(max_examples=80, deadline=None)
@given(rows=list_rows(), cut=st.integers(0, 11))
def test_lists_are_what_protobuf_writes_empty_ones_and_nulls_among_them(rows, cut):
    schema = Schema(features=LISTS)
    arrays = []
    for name, feature in LISTS.items():
        kind = {"string": pa.string(), "bytes": pa.binary(), "bool": pa.bool_()}.get(feature.dtype)
        kind = kind or pa.from_numpy_dtype(feature.dtype)
        kind = pa.list_(kind, feature.num_elements or -1)
        arrays.append(pa.array([row[name] for row in rows], kind))
    cut = min(cut, len(rows) - 1)
    batch = pa.RecordBatch.from_arrays(arrays, names=list(LISTS)).slice(cut)
    expected = []
    for row in rows[cut:]:
        example = tf.train.Example.FromString(serialize(schema, row))
        for name, value in row.items():  # an empty list is a list nevertheless
            if value == [] and name in "ifb":
                getattr(example.features.feature[name], LISTS[name].encoding).SetInParent()
        expected.append(frame(example.SerializeToString(deterministic=True)))
    assert encoded_records(encode.encode_batch(batch, schema)) == expected


def test_a_record_that_no_reader_takes_is_refused(monkeypatch):
    monkeypatch.setattr(encode, "RECORD_MAX_BYTES", 100)
    batch = pa.RecordBatch.from_arrays([pa.array(["x" * 50, "y" * 90])], names=["t"])
    schema = Schema(features={"t": Feature(dtype="string")})
    with pytest.raises(encode.RecordTooLong) as caught:
        encode.encode_batch(batch, schema)
    assert caught.value.row == 1
    assert caught.value.num_bytes == len(serialize(schema, {"t": "y" * 90}))


def test_no_rows_give_no_bytes():
    schema = Schema(features={"x": Feature(dtype="int64"), "t": Feature(dtype="string")})
    batch = pa.RecordBatch.from_arrays(
        [pa.array([], pa.int64()), pa.array([], pa.string())], names=["x", "t"]
    )
    encoded = encode.encode_batch(batch, schema)
    assert len(encoded.data) == 0 and encoded.offsets.tolist() == [0]


@pytest.mark.parametrize(
    "feature, array, said",
    [
        (Feature(dtype="int64"), pa.array([1.0]), "'x' must hold int64, got double"),
        (Feature(dtype="uint8", shape=(2,)), pa.array([[1, 2, 3]], pa.list_(pa.uint8(), 3)), "2 values a row, got 3"),
        (Feature(dtype="string"), pa.array([1]), "strings or bytes, got int64"),
    ],
)  # fmt: skip
def test_a_column_of_another_type_is_refused(feature, array, said):
    batch = pa.RecordBatch.from_arrays([array], names=["x"])
    with pytest.raises(ValueError, match=said):
        encode.encode_batch(batch, Schema(features={"x": feature}))
    with pytest.raises(ValueError, match="none for 'y'"):
        encode.encode_batch(batch, Schema(features={"y": feature}))
