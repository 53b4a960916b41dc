import pytest
import tensorflow as tf
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from tfpipe.errors import RecordError
from tfpipe.examples import parse_example

INT64 = st.integers(-(2**63), 2**63 - 1)
LISTS = st.one_of(
    st.lists(st.binary(max_size=200)).map(lambda v: tf.train.Feature(bytes_list=tf.train.BytesList(value=v))),
    st.lists(INT64).map(lambda v: tf.train.Feature(int64_list=tf.train.Int64List(value=v))),
    st.lists(st.floats(width=32, allow_nan=False)).map(
        lambda v: tf.train.Feature(float_list=tf.train.FloatList(value=v))
    ),
)


@given(st.dictionaries(st.text(max_size=9), LISTS, max_size=5))
@settings(deadline=None)
def test_what_protobuf_writes_is_read_back(features):
    payload = tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
    found = parse_example(payload).features
    assert found.keys() == features.keys()
    for name, feature in features.items():
        kind = feature.WhichOneof("kind")
        assert found[name].kind == kind
        assert found[name].decode() == list(getattr(feature, kind).value)
        assert found[name].count == len(getattr(feature, kind).value)


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_damaged_bytes_are_refused_where_protobuf_refuses(data):
    feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[1, 300, -1]))
    payload = bytearray(
        tf.train.Example(features=tf.train.Features(feature={"ab": feature})).SerializeToString()
    )
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] = data.draw(st.integers(0, 255))
    try:
        theirs = tf.train.Example.FromString(bytes(payload))
    except DecodeError:
        with pytest.raises(RecordError):
            parse_example(bytes(payload), "here")
        return
    try:
        ours = parse_example(bytes(payload), "here").features
    except RecordError:
        return  # stricter: groups, which TensorFlow's parser can't read
    for name, found in theirs.features.feature.items():
        kind = found.WhichOneof("kind")
        assert ours[name].kind == (kind or "")
        if kind:
            assert ours[name].decode() == list(getattr(found, kind).value)


def test_numbers_may_be_unpacked():
    # int64_list { value: 5 value: 300 }, each its own field, as other writers encode it
    inner = bytes.fromhex("080508ac02")
    feature = b"\x1a" + bytes([len(inner)]) + inner
    entry = b"\x0a\x01a\x12" + bytes([len(feature)]) + feature
    features = b"\x0a" + bytes([len(entry)]) + entry
    assert parse_example(b"\x0a" + bytes([len(features)]) + features).features["a"].decode() == [5, 300]
