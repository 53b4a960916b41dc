"""One table in every format: the same values, through protobuf and through tf.data. And fuzzed input: no traceback."""

from __future__ import annotations

import csv
import json
import math
import random
import shutil
import struct
from pathlib import Path

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tfpipe
from beam_jobs import convert
from tests.beam_jobs.test_round_trip import records
from tfpipe.manifest import Manifest

FEATURES = {
    "id": {"dtype": "int64"},
    "i": {"dtype": "int64", "nullable": True},
    "f": {"dtype": "float64", "nullable": True},
    "g": {"dtype": "float32", "nullable": True},
    "flag": {"dtype": "bool", "nullable": True},
    "s": {"dtype": "string", "nullable": True},
    "ragged": {"dtype": "int64", "shape": [None], "nullable": True},
    "pair": {"dtype": "float64", "shape": [2], "nullable": True},
}
LISTS = ("ragged", "pair")
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=8) | st.sampled_from([
    "", " ", "NA", "null", "007", "1e5", "true", "ä\n\"b\",c\r\n", "\ufeff", "𝄞" * 3, "x" * 70_000, "'", "\\N", "a\tb",
])  # fmt: skip
ROW = st.fixed_dictionaries({
    "i": st.none() | INT64 | st.sampled_from([0, 2**53 + 1, -(2**63)]),
    "f": st.none() | st.floats() | st.sampled_from([-0.0, 5e-324, 1.7e308, 0.1]),
    "g": st.none() | st.floats(width=32),
    "flag": st.none() | st.booleans(),
    "s": st.none() | TEXT,
    "ragged": st.none() | st.lists(INT64, max_size=3),
    "pair": st.none() | st.tuples(st.floats(), st.floats()).map(list),
})  # fmt: skip
ARROW = pa.schema([
    ("id", pa.int64()), ("i", pa.int64()), ("f", pa.float64()), ("g", pa.float32()), ("flag", pa.bool_()),
    ("s", pa.string()), ("ragged", pa.list_(pa.int64())), ("pair", pa.list_(pa.float64())),
])  # fmt: skip
AVRO = {"type": "record", "name": "R", "fields": [
    {"name": "id", "type": "long"}, {"name": "i", "type": ["null", "long"]}, {"name": "f", "type": ["null", "double"]},
    {"name": "g", "type": ["null", "float"]}, {"name": "flag", "type": ["null", "boolean"]},
    {"name": "s", "type": ["null", "string"]},
    {"name": "ragged", "type": ["null", {"type": "array", "items": "long"}]},
    {"name": "pair", "type": ["null", {"type": "array", "items": "double"}]},
]}  # fmt: skip


def write_csv(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        names = [name for name in FEATURES if name not in LISTS]
        writer.writerow(names)
        for row in rows:
            cells = [row[name] for name in names]
            # repr: every digit; csv would write the same.
            writer.writerow([repr(cell) if isinstance(cell, float) else cell for cell in cells])


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows, ARROW), path, row_group_size=7)


def write_avro(path, rows):
    with path.open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(AVRO), rows, sync_interval=500)


WRITERS = {"csv": write_csv, "jsonl": write_jsonl, "parquet": write_parquet, "avro": write_avro}


def comparable(row):
    """NaN equals itself, -0.0 differs from 0.0; a list of no elements is the null that it can't be told from."""
    result = {}
    for name, value in row.items():
        if value is None or value == []:
            continue
        if name in ("f", "g", "pair"):
            kind = "<f" if name == "g" else "<d"
            values = value if isinstance(value, list) else [value]
            value = [b"nan" if math.isnan(v) else struct.pack(kind, v) for v in values]
        result[name] = value
    return result


def through_tf_data(manifest, names):
    """The same from batches."""
    found = []
    for batch in tfpipe.make_dataset(manifest, tfpipe.PipelineConfig(per_worker_batch_size=5)):
        count = int(batch["id"].shape[0])
        for i in range(count):
            row = {}
            for name in names:
                if f"{name}_present" in batch and not bool(batch[f"{name}_present"][i]):
                    continue
                value = batch[name][i].numpy()
                row[name] = value.decode() if isinstance(value, bytes) else value.tolist()
            found.append(row)
    return found


def check(directory: Path, rows):
    rows = [{"id": number, **row} for number, row in enumerate(rows)]
    for kind, write in WRITERS.items():
        names = [name for name in FEATURES if kind != "csv" or name not in LISTS]
        source, out = directory / f"a.{kind}", directory / kind
        write(source, rows)
        schema = directory / "schema.json"
        schema.write_text(json.dumps({"features": {name: FEATURES[name] for name in names}}))
        code = convert.main(["--input", str(source), "--output", str(out), "--schema", str(schema), "--num-shards", "3",
                             "--direct_running_mode", "in_memory"])  # fmt: skip
        assert code == 0
        manifest = Manifest.load(out)
        assert manifest.verify() == []
        expected = [comparable({name: row[name] for name in names}) for row in rows]
        if kind == "csv":  # an empty field is what CSV has for a null
            expected = [{n: v for n, v in row.items() if v != ""} for row in expected]
        for found in (records(manifest), through_tf_data(manifest, names)):
            assert [comparable(row) for row in sorted(found, key=lambda row: row["id"])] == expected
        shutil.rmtree(out)


def table(rows):
    return st.lists(ROW, min_size=1, max_size=rows)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr("beam_jobs.sources.csv.SPLIT_BYTES", 300)
    monkeypatch.setattr("beam_jobs.sources.text.SPLIT_BYTES", 300)
    monkeypatch.setattr("beam_jobs.sources.avro.SPLIT_BYTES", 300)
    return tmp_path


ONE = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(ONE, max_examples=20)


@ONE
@given(rows=table(20))
def test_every_format_gives_the_values_of_the_table(directory, rows):
    check(directory, rows)


@pytest.mark.slow
@MANY
@given(rows=table(60))
def test_every_format_gives_the_values_of_many_tables(directory, rows):
    check(directory, rows)


# Fuzz -------------------------------------------------------------------------------------------


def call(source, out, *options):
    return convert.main(
        ["--input", str(source), "--output", str(out), "--direct_running_mode", "in_memory", *options]
    )


@pytest.mark.slow
@settings(ONE, max_examples=25)
@given(
    data=st.lists(
        st.sampled_from(
            [
                b"a",
                b"1",
                b",",
                b'"',
                b"\n",
                b"\r",
                b"\r\n",
                b"\xff",
                b"\0",
                b"\xef\xbb\xbf",
                b" ",
                b'""',
                b";",
                "ü".encode(),
                b"1e999",
                b"-0",
                b"nan",
            ]
        ),
        min_size=1,
        max_size=40,
    )
)
def test_a_fuzzed_csv_gives_its_rows_or_a_message(tmp_path, capfd, data):
    (tmp_path / "a.csv").write_bytes(b"".join(data))
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    code = call(tmp_path / "a.csv", out)
    err = capfd.readouterr().err
    assert "Traceback" not in err and "worker failed with" not in err
    if code:
        assert code in (1, 2) and "must" in err and "a.csv" in err
        return
    text = (tmp_path / "a.csv").read_bytes().decode("utf-8-sig")
    rows = [row for row in csv.reader(text.splitlines(keepends=True), strict=True) if row]
    assert len(records(Manifest.load(out))) == len(rows) - 1


def mutations(data, count, seed):
    """Whole files with a few bytes flipped, cut out or put in."""
    chance = random.Random(seed)
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(changed))
            kind = chance.randrange(3)
            if kind == 0:
                changed[at] ^= 1 << chance.randrange(8)
            elif kind == 1:
                del changed[at : at + chance.randint(1, 9)]
            else:
                changed[at:at] = chance.randbytes(chance.randint(1, 9))
        yield bytes(changed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "avro"])
def test_a_fuzzed_file_gives_a_message_or_a_dataset(tmp_path, capfd, kind):
    rows = [
        {"id": i, "i": i or None, "f": i / 3, "g": 0.5, "flag": i % 2 == 0, "s": "text " * i, "ragged": [i] * (i % 3), "pair": [1.0, i]}
        for i in range(1, 9)
    ]  # fmt: skip
    source, out = tmp_path / f"a.{kind}", tmp_path / "out"
    WRITERS[kind](source, rows)
    for data in mutations(source.read_bytes(), 25, seed=3):
        source.write_bytes(data)
        code = call(source, out)
        err = capfd.readouterr().err
        assert "Traceback" not in err and "worker failed with" not in err
        assert code == 0 or (code in (1, 2) and "must" in err)
        if code == 0:
            assert Manifest.load(out).verify() == []
        shutil.rmtree(out, ignore_errors=True)


def test_fuzzed_tfrecords_are_never_taken_for_whole(tmp_path, capfd):
    source = tmp_path / "a.csv"
    source.write_text("a,s\n" + "".join(f"{i},{'x' * i}\n" for i in range(50)))
    for compression in ("none", "gzip", "zlib"):
        out = tmp_path / compression
        assert call(source, out, "--num-shards", "1", "--compression", compression) == 0
        manifest = Manifest.load(out)
        path = manifest.paths("train")[0]
        whole = Path(path).read_bytes()
        for data in mutations(whole, 60, seed=5):
            Path(path).write_bytes(data)
            assert (data == whole) == (manifest.verify() == [])
        Path(path).write_bytes(whole)
    assert "Traceback" not in capfd.readouterr().err


def test_the_numbers_here_are_what_numpy_says():
    assert comparable({"g": 0.5}) == {"g": [np.float32(0.5).tobytes()]}
    assert comparable({"f": -0.0}) != comparable({"f": 0.0})
