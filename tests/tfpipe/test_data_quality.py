"""Each warning comes where it should, and only there."""

import pytest

from tests.helpers import write_dataset
from tfpipe.data_quality import data_warnings
from tfpipe.schema import Feature, Schema


def warnings(tmp_path, statistics, **feature):
    schema = Schema(features={"label": Feature(dtype=feature.pop("dtype", "int64"), **feature)})
    manifest = write_dataset(tmp_path, schema, [{"label": 0}] * 100)
    object.__setattr__(manifest, "statistics", {"label": statistics})
    return data_warnings(manifest)


@pytest.mark.parametrize(
    ("statistics", "said"),
    [
        ({"nulls": 100}, "every value is missing"),
        ({"nulls": 3}, "3 of 100 records have no label"),
        ({"nulls": 0, "nan": 2}, "2 values are NaN"),
        ({"nulls": 0, "infinite": 2}, "2 values are infinite"),
        ({"nulls": 0, "distinct": 1}, "the same value"),
        ({"nulls": 0, "distinct": 2, "counts": {"0": 91, "1": 9}}, "91 records of 0, 9 of 1"),
    ],
)
def test_what_spoils_training_is_told(tmp_path, statistics, said):
    (found,) = warnings(tmp_path, statistics)
    assert found.startswith("label: ") and said in found


@pytest.mark.parametrize(
    "statistics",
    [{}, None, {"nulls": 0}, {"nulls": 0, "distinct": 2, "counts": {"0": 90, "1": 10}}],
)
def test_what_is_well_is_not(tmp_path, statistics):
    assert warnings(tmp_path, statistics) == []


def test_classes_are_named_and_missing_ones_too(tmp_path):
    found = warnings(
        tmp_path, {"nulls": 0, "distinct": 2, "counts": {"0": 98, "2": 2}}, labels=("cat", "cow", "dog")
    )
    assert found[0] == "label: no record is of class cow"
    assert "98 records of cat, 2 of dog" in found[1]
