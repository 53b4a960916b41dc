"""Statistics: exact where they say so, the same however they are cut and merged."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_jobs import statistics
from beam_jobs.statistics import DatasetStatistics
from tests.beam_jobs.test_round_trip import run
from tfpipe.schema import Feature, Schema

KINDS = {
    "i": (Feature(dtype="int64", nullable=True), pa.int64(), st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3)),
    "u": (Feature(dtype="uint8"), pa.uint8(), st.integers(0, 255)),
    "big": (Feature(dtype="uint64"), pa.uint64(), st.integers(0, 2**64 - 1)),
    "f": (Feature(dtype="float64", nullable=True), pa.float64(), st.floats(-1e9, 1e9) | st.sampled_from([math.nan, math.inf, -0.0])),
    "h": (Feature(dtype="float16"), pa.float16(), st.integers(0, 9).map(np.float16)),
    "flag": (Feature(dtype="bool", nullable=True), pa.bool_(), st.booleans()),
    "s": (Feature(dtype="string", nullable=True), pa.string(), st.text(max_size=9)),
    "b": (Feature(dtype="bytes"), pa.binary(), st.binary(max_size=20)),
    "tags": (Feature(dtype="int64", shape=(None,), nullable=True), pa.list_(pa.int64()), st.lists(st.integers(0, 9), max_size=3)),
    "image": (Feature(dtype="uint8", shape=(2, 2)), pa.list_(pa.uint8(), 4), st.lists(st.integers(0, 255), min_size=4, max_size=4)),
}  # fmt: skip
SCHEMA = Schema(features={name: kind[0] for name, kind in KINDS.items()})
ROW = st.fixed_dictionaries(
    {name: st.none() | values if feature.nullable else values for name, (feature, _, values) in KINDS.items()}
)


def batch(rows):
    return pa.RecordBatch.from_arrays(
        [pa.array([row[name] for row in rows], kind) for name, (_, kind, _) in KINDS.items()],
        names=list(KINDS),
    )


def counted(rows, cut=None):
    result = DatasetStatistics(SCHEMA)
    for part in (rows[:cut], rows[cut:]) if cut is not None else (rows,):
        other = DatasetStatistics(SCHEMA)
        if part:
            other.add(batch(part))
        # As between processes: through JSON.
        result.merge(DatasetStatistics(SCHEMA).load(json.loads(json.dumps(other.to_json()))))
    return result.describe()


def plain(rows, name):
    """The same in the plainest way."""
    feature = SCHEMA.features[name]
    values = [row[name] for row in rows if row[name] is not None]
    expected = {"nulls": len(rows) - len(values)}
    flat = [v for value in values for v in value] if feature.shape else values
    if feature.dtype in ("string", "bytes"):
        sizes = [len(v.encode() if isinstance(v, str) else v) for v in flat]
        if sizes:
            expected |= {"min_bytes": min(sizes), "max_bytes": max(sizes), "mean_bytes": np.mean(sizes)}
    elif finite := [v for v in flat if math.isfinite(v)]:
        numbers = np.array(finite, np.float64)
        expected |= {"min": min(finite), "max": max(finite), "mean": numbers.mean(), "std": numbers.std()}
    if feature.shape == (None,) and values:
        sizes = [len(value) for value in values]
        expected |= {"min_length": min(sizes), "max_length": max(sizes), "mean_length": np.mean(sizes)}
    if nan := sum(isinstance(v, float) and math.isnan(v) for v in flat):
        expected["nan"] = nan
    if infinite := sum(isinstance(v, float) and math.isinf(v) for v in flat):
        expected["infinite"] = infinite
    if feature.shape == ():
        expected["distinct"] = len({v for v in values if v == v})
    if feature.shape == () and not feature.dtype.startswith("float") and feature.dtype != "bytes" and values:
        keys = [str(v).lower() if isinstance(v, bool) else str(v) for v in values]
        expected["counts"] = {key: keys.count(key) for key in keys}
    return expected


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=40), data=st.data())
def test_they_are_what_the_values_are_however_they_are_cut(rows, data):
    cut = data.draw(st.integers(0, len(rows)))
    for found in (counted(rows), counted(rows, cut)):
        for name, statistic in found.items():
            expected = plain(rows, name)
            scale = max(abs(float(expected.get("min", 0))), abs(float(expected.get("max", 0))))
            for key in ("mean", "std", "mean_bytes", "mean_length"):
                if key in expected:
                    assert statistic.pop(key) == pytest.approx(expected.pop(key), rel=1e-9, abs=1e-9 * scale)
            assert statistic == expected, name
    json.dumps(found, allow_nan=False)


def test_many_small_numbers_are_counted_by_value():
    rows = np.random.default_rng(0).integers(3, 250, (500, 4), np.uint8)
    found = counted(
        [{name: None for name in KINDS} | {"u": 7, "big": 1, "h": 1, "b": b"", "image": r} for r in rows]
    )
    assert found["image"]["min"] == rows.min() and found["image"]["max"] == rows.max()
    assert found["image"]["mean"] == pytest.approx(rows.mean())
    assert found["image"]["std"] == pytest.approx(rows.std())
    assert found["u"] == {
        "nulls": 0,
        "min": 7,
        "max": 7,
        "mean": 7.0,
        "std": 0.0,
        "distinct": 1,
        "counts": {"7": 500},
    }


@pytest.mark.parametrize("kind", ["int64", "string", "float64"])
@pytest.mark.parametrize("distinct", [400, 50_000])
def test_the_estimate_of_distinct_values_holds_its_error(kind, distinct):
    schema = Schema(features={"x": Feature(dtype=kind)})
    merged = DatasetStatistics(schema)
    for start in range(0, 2 * distinct, 1000):
        numbers = np.arange(start, start + 1000) % distinct
        values = {"int64": numbers, "float64": numbers / 3, "string": [f"user-{n}" for n in numbers]}[kind]
        part = DatasetStatistics(schema)
        part.add(pa.RecordBatch.from_arrays([pa.array(values)], names=["x"]))
        merged.merge(part)
    found = merged.describe()["x"]
    if distinct < statistics.SKETCH_MAX:
        assert found["distinct"] == distinct
    else:
        assert "distinct" not in found
        # Four standard errors: the hashes are fixed, so this holds or it doesn't.
        assert found["distinct_estimate"] == pytest.approx(distinct, rel=4 / math.sqrt(statistics.SKETCH_MAX))
    assert "counts" not in found


def test_what_no_float_can_hold_is_left_out_of_the_manifest():
    schema = Schema(features={"x": Feature(dtype="float64")})
    found = DatasetStatistics(schema)
    found.add(pa.RecordBatch.from_arrays([pa.array([1.7e308, -1.7e308, 1.7e308])], names=["x"]))
    described = found.describe()["x"]
    assert "std" not in described and math.isfinite(described.pop("mean", 0.0))
    assert described == {"nulls": 0, "min": -1.7e308, "max": 1.7e308, "distinct": 2}


def test_the_manifest_has_them_and_the_end_warns_of_them(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("beam_jobs.sources.csv.SPLIT_BYTES", 300)
    rows = [f"{i},{1 if i % 20 else 0},5,{'nan' if i == 3 else i / 4}" for i in range(200)]
    (tmp_path / "a.csv").write_text("id,label,const,x\n" + "\n".join(rows) + "\n")
    manifest = run(tmp_path, inputs=[tmp_path / "a.csv"])
    assert manifest.statistics["label"] == {
        "nulls": 0, "min": 0, "max": 1, "mean": pytest.approx(0.95), "std": pytest.approx(math.sqrt(0.95 * 0.05)),
        "distinct": 2, "counts": {"1": 190, "0": 10},
    }  # fmt: skip
    assert manifest.statistics["x"]["nan"] == 1 and manifest.statistics["id"]["distinct"] == 200
    out = capfd.readouterr().out
    assert "warning: label: classes are uneven: 190 records of 1, 10 of 0" in out
    assert "warning: const: every record has the same value" in out
    assert "warning: x: 1 values are NaN" in out
    assert out.splitlines()[-1].startswith("wrote 200 records")
