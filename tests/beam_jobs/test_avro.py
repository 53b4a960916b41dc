"""Avro: every type, splits by blocks, damaged files."""

from __future__ import annotations

import datetime
import decimal
import gzip
import io

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_jobs import convert
from beam_jobs.sources import SourceOptions, avro
from beam_jobs.sources.find import open_source
from tests.beam_jobs.test_round_trip import IN_MEMORY, in_order, records, run
from tfpipe.errors import RecordError

TYPES = {
    "n": "long",
    "i": ["null", "int"],
    "flag": "boolean",
    "f": "float",
    "d": "double",
    "s": ["null", "string"],
    "b": "bytes",
    "fixed": {"type": "fixed", "name": "F", "size": 2},
    "color": {"type": "enum", "name": "Color", "symbols": ["red", "blue"]},
    "again": "Color",
    "day": {"type": "int", "logicalType": "date"},
    "time": {"type": "long", "logicalType": "time-micros"},
    "at": {"type": "long", "logicalType": "timestamp-micros"},
    "price": {"type": "bytes", "logicalType": "decimal", "precision": 40, "scale": 2},
    "ragged": {"type": "array", "items": "int"},
    "matrix": ["null", {"type": "array", "items": {"type": "array", "items": "double"}}],
    "prices": {
        "type": "array",
        "items": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 1},
    },
    "inner": ["null", {"type": "record", "name": "I", "fields": [{"name": "x", "type": ["null", "long"]}]}],
}
SCHEMA = {"type": "record", "name": "R", "fields": [{"name": n, "type": t} for n, t in TYPES.items()]}
ROWS = [
    {
        "n": i, "i": i if i % 3 else None, "flag": i % 2 == 0, "f": i / 2, "d": 0.1 * i, "s": "ü" * (i % 4) if i % 5 else None,
        "b": bytes([i, 255]), "fixed": b"\0\1", "color": "red", "again": "blue",
        "day": datetime.date(1, 1, 1), "time": datetime.time(1, 2, 3, 4),
        "at": datetime.datetime(2024, 1, 1, microsecond=i, tzinfo=datetime.timezone.utc),
        "price": decimal.Decimal("-12345678901234567890123456789012345.67"), "ragged": [i] * (i % 3),
        "matrix": [[1.5, i], [2.0, 3.0]] if i % 4 else None, "prices": [decimal.Decimal("0.5")],
        "inner": {"x": i} if i % 2 else None,
    }
    for i in range(40)
]  # fmt: skip


def expected(row):
    at = int((row["at"] - datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)).total_seconds())
    result = row | {
        "day": -719162, "time": 3723000004, "at": at * 10**6 + row["at"].microsecond,
        "price": "-12345678901234567890123456789012345.67", "prices": ["0.5"],
        "inner.x": row["inner"] and row["inner"]["x"], "inner": None,
    }  # fmt: skip
    return {name: value for name, value in result.items() if value is not None}


def write(path, rows=ROWS, schema=SCHEMA, compress=bytes, **options):
    out = io.BytesIO()
    fastavro.writer(out, fastavro.parse_schema(schema), rows, **options)
    path.write_bytes(compress(out.getvalue()))
    return path


@pytest.mark.parametrize("codec", ["null", "deflate", "snappy"])
@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gz"])
def test_every_type(tmp_path, codec, compress, monkeypatch):
    monkeypatch.setattr(avro, "SPLIT_BYTES", 1000)
    write(tmp_path / "a.avro", codec=codec, sync_interval=500, compress=compress)
    manifest = run(tmp_path, inputs=[tmp_path / "a.avro"])
    found = manifest.schema.features
    assert {n: (f.dtype, f.shape) for n, f in found.items() if f.shape} == {
        "ragged": ("int32", (None,)), "matrix": ("float64", (2, 2)), "prices": ("string", (1,)),
    }  # fmt: skip
    assert [n for n, f in found.items() if f.nullable] == ["i", "s", "matrix", "inner.x"]
    assert {n: s["unit"] for n, s in manifest.statistics.items() if "unit" in s} == {
        "day": "day",
        "time": "us",
        "at": "us",
    }
    assert in_order(records(manifest), "n") == [expected(row) for row in ROWS]


@pytest.mark.parametrize("kind, said", [
    ({"type": "map", "values": "long"}, ["map"]),
    (["null", "long", "string"], ["a union of several types"]),
    ({"type": "array", "items": {"type": "map", "values": "long"}}, ["map"]),
])  # fmt: skip
def test_a_type_without_a_form_is_refused_by_name(tmp_path, capfd, kind, said):
    inner = {"type": "record", "name": "I", "fields": [{"name": "x", "type": kind}]}
    write(tmp_path / "a.avro", [], {"type": "record", "name": "R", "fields": [{"name": "o", "type": inner}]})
    assert convert.main(["--input", str(tmp_path), "--output", str(tmp_path / "out"), *IN_MEMORY]) == 1
    err = capfd.readouterr().err
    assert all(word in err for word in [*said, "'o.x'", "a.avro"]), err


def test_a_type_within_itself_is_refused(tmp_path, capfd):
    fields = [{"name": "next", "type": ["null", "R"]}, {"name": "x", "type": "long"}]
    write(tmp_path / "a.avro", [], {"type": "record", "name": "R", "fields": fields})
    assert convert.main(["--input", str(tmp_path), "--output", str(tmp_path / "out"), *IN_MEMORY]) == 1
    assert "next" in capfd.readouterr().err


def test_files_of_other_fields_are_refused(tmp_path, capfd):
    for name, kind in (("a", "long"), ("b", "string")):
        fields = [{"name": "x", "type": kind}]
        write(tmp_path / f"{name}.avro", [], {"type": "record", "name": "R", "fields": fields})
    assert convert.main(["--input", str(tmp_path), "--output", str(tmp_path / "out"), *IN_MEMORY]) == 1
    assert "b.avro" in capfd.readouterr().err


CONTENT = write.__globals__["io"].BytesIO()
fastavro.writer(CONTENT, fastavro.parse_schema(SCHEMA), ROWS, codec="deflate", sync_interval=500)


@settings(max_examples=150, deadline=None)
@given(cut=st.integers(1, len(CONTENT.getvalue()) - 1))
def test_a_truncated_file_is_never_taken_for_a_shorter_one(tmp_path_factory, cut):
    """Unless the cut lies between two blocks, where nothing tells."""
    path = tmp_path_factory.mktemp("cut") / "a.avro"
    path.write_bytes(CONTENT.getvalue()[:cut])
    try:
        source, _ = open_source([str(path)], SourceOptions(format="avro"))
        splits = source.plan()
        assert sum(source.scan(split, avro.Wishes()).rows for split in splits) < len(ROWS)
    except RecordError as error:
        assert "a.avro" in str(error)
    else:
        assert CONTENT.getvalue()[cut - 16 : cut] == CONTENT.getvalue()[-16:]  # the mark behind each block
