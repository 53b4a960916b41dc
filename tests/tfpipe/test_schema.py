import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfpipe.errors import SchemaError
from tfpipe.schema import DTYPES, ITEMSIZE_BYTES, Feature, Schema

dimensions = st.one_of(st.none(), st.integers(0, 1000))
features = st.builds(
    Feature,
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(dimensions, max_size=4).map(tuple),
    nullable=st.booleans(),
) | st.builds(Feature, dtype=st.just("int64"), labels=st.lists(st.text()).map(tuple))
schemas = st.builds(
    Schema, features=st.dictionaries(st.text(min_size=1, max_size=8), features, min_size=1, max_size=6)
)


@given(schemas)
def test_json_round_trip(schema):
    text = json.dumps(schema.to_json())
    assert Schema.from_json(json.loads(text), where="x") == schema
    assert Schema.from_json(json.loads(text), where="x").digest == schema.digest


@given(schemas)
def test_the_digest_ignores_column_order(schema):
    reverse = Schema(features=dict(reversed(schema.features.items())))
    assert reverse.digest == schema.digest


def test_the_digest_sees_every_attribute():
    variants = [
        Feature(dtype="int64"),
        Feature(dtype="float32"),
        Feature(dtype="int64", shape=(2,)),
        Feature(dtype="int64", encoding="raw"),
        Feature(dtype="int64", nullable=True),
        Feature(dtype="int64", labels=("a",)),
    ]
    assert len({Schema(features={"x": f}).digest for f in variants}) == len(variants)


@pytest.mark.parametrize("dtype", ITEMSIZE_BYTES)
def test_default_encodings_lose_nothing(dtype):
    assert Feature(dtype=dtype, shape=(2, 2)).encoding == "raw"
    scalar = {"int64": "int64_list", "float32": "float_list"}.get(dtype, "raw")
    assert Feature(dtype=dtype).encoding == scalar
    assert Feature(dtype=dtype, shape=(3, 5)).decoded_bytes == 15 * ITEMSIZE_BYTES[dtype]


def test_sizes_are_unknown_where_they_differ():
    fixed, text = Feature(dtype="uint8", shape=(4,)), Feature(dtype="string")
    assert Schema(features={"a": fixed}).decoded_bytes == 4
    assert Schema(features={"a": fixed, "b": text}).decoded_bytes is None
    assert Feature(dtype="int64", shape=(None, 2)).num_elements is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int128"}, "dtype must be one of bool, .*got 'int128'"),
        ({"dtype": "int64", "shape": (-1,)}, r"non-negative integers or null, got \[-1\]"),
        ({"dtype": "float64", "encoding": "float_list"}, "got 'float_list'. Leave it out to get 'raw'"),
        ({"dtype": "string", "encoding": "raw"}, "got 'raw'. Leave it out to get 'bytes_list'"),
        ({"dtype": "float32", "labels": ("a",)}, "int64 feature, got dtype float32"),
    ],
)
def test_impossible_features(arguments, message):
    with pytest.raises(SchemaError, match=message):
        Feature(**arguments)


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        ([], r"must have the form .*got \[\] \(s.json\)"),
        ({"features": {}}, "at least one feature, got none"),
        ({"features": {"": {"dtype": "int64"}}}, "non-empty string, got ''"),
        ({"features": {"x": {}}}, r"\"dtype\", got {} \(s.json: feature 'x'\)"),
        ({"features": {"x": {"dtype": "int64", "shap": []}}}, "got shap .s.json: feature 'x'"),
        ({"features": {"x": {"dtype": "int64", "shape": 3}}}, "shape must be a list, got 3"),
        ({"features": {"x": {"dtype": "int64", "nullable": 1}}}, "true or false, got 1"),
        ({"features": {"x": {"dtype": "int64", "labels": [1]}}}, r"list of strings, got \[1\]"),
        ({"features": {"x": {"dtype": "int"}}}, r"got 'int'.*\(s.json: feature 'x'\)"),
    ],
)
def test_malformed_json_names_file_and_feature(obj, message):
    with pytest.raises(SchemaError, match=message):
        Schema.from_json(obj, where="s.json")
