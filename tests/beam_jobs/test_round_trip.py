"""Every record of the source is in the dataset exactly once, and no value has changed."""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import io
import json
import struct
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tfpipe
from beam_jobs import convert, encode, shuffle
from beam_jobs.sources import SourceOptions, Wish, Wishes
from beam_jobs.sources import csv as csv_source
from beam_jobs.sources.find import open_source
from tests.helpers import REPOSITORY
from tfpipe.manifest import Manifest
from tfpipe.schema import Feature, Schema
from tfpipe.tfrecord import ShardReader

tf = pytest.importorskip("tensorflow")
IN_MEMORY = ["--direct_running_mode", "in_memory"]


def run(tmp_path, *options, inputs=(), output="out"):
    arguments = [option for path in inputs for option in ("--input", str(path))]
    assert convert.main([*arguments, "--output", str(tmp_path / output), *options, *IN_MEMORY]) == 0
    manifest = Manifest.load(tmp_path / output)
    assert manifest.verify() == []
    return manifest


def value_of(feature, value):
    """One feature of a parsed tf.train.Example as plain Python."""
    kind = value.WhichOneof("kind")
    items = list(getattr(value, kind).value)
    if feature.encoding != "raw":
        assert kind == feature.encoding and (feature.shape or len(items) == 1)
        items = [item.decode() for item in items] if feature.dtype == "string" else items
        return items if feature.shape else items[0]
    shape = [-1 if size is None else size for size in feature.shape]
    array = np.frombuffer(items[0], np.dtype(feature.dtype).newbyteorder("<")).reshape(shape)
    return array.item() if feature.shape == () else array.tolist()


def records(manifest, split="train"):
    found = []
    for path in manifest.paths(split):
        for payload in ShardReader(path, manifest.compression):
            example = tf.train.Example.FromString(payload).features.feature
            found.append({n: value_of(manifest.schema.features[n], example[n]) for n in example})
    return found


def in_order(rows, key):
    return sorted(rows, key=lambda row: row[key])


def test_csv_with_all_its_quirks(tmp_path):
    text = '﻿id,txt,code,t,big\r\n1,"a\nb",007,1700000050.5,9007199254740993\r\n2,"c ""d"", e",010,16777217,\r\n3,,000,0.1,-5\r\n'
    (tmp_path / "a.csv").write_bytes(text.encode())
    manifest = run(tmp_path, inputs=[tmp_path / "a.csv"])
    assert {n: f.dtype for n, f in manifest.schema.features.items()} == {
        "id": "int64", "txt": "string", "code": "string", "t": "float64", "big": "int64",
    }  # fmt: skip
    assert in_order(records(manifest), "id") == [
        {"id": 1, "txt": "a\nb", "code": "007", "t": 1700000050.5, "big": 9007199254740993},
        {"id": 2, "txt": 'c "d", e', "code": "010", "t": 16777217.0},
        {"id": 3, "code": "000", "t": 0.1, "big": -5},
    ]
    assert [n for n, f in manifest.schema.features.items() if f.nullable] == ["txt", "big"]
    assert manifest.statistics["big"]["nulls"] == 1


def test_types_are_inferred_from_all_rows(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n" + "5,1\n" * 200 + "5.5,NA\n")
    manifest = run(tmp_path, inputs=[tmp_path / "a.csv"])
    assert manifest.schema.features["x"].dtype == "float32"
    assert manifest.schema.features["y"] == Feature(dtype="int64", nullable=True)


@pytest.mark.parametrize("gzipped", [False, True])
def test_csv_without_header_packed_and_split(tmp_path, gzipped):
    rows = [[(i * j) % 17 for j in range(6)] + [i] for i in range(500)]
    data = "".join(";".join(map(str, row)) + "\n" for row in rows).encode()
    (tmp_path / "a.csv").write_bytes(gzip.compress(data) if gzipped else data)
    manifest = run(
        tmp_path, "--no-header", "--delimiter", ";", "--pack", "image=c0..c5:2x3",
        "--split", "train=0.8", "--split", "test=0.2", inputs=[tmp_path / "a.csv"],
    )  # fmt: skip
    assert manifest.schema.features["image"] == Feature(dtype="uint8", shape=(2, 3), encoding="raw")
    train, test = records(manifest), records(manifest, "test")
    assert (len(train), len(test)) == (400, 100)
    expected = [{"image": [row[:3], row[3:6]], "c6": row[6]} for row in rows]
    assert in_order(train + test, "c6") == expected
    assert [row["c6"] for row in train] != sorted(row["c6"] for row in train)
    for split in manifest.splits.values():
        counts = [shard.num_records for shard in split.shards]
        assert len(counts) == 24 and max(counts) - min(counts) <= 1


def test_parquet_keeps_its_types(tmp_path):
    table = pa.table({
        "id": pa.array([9007199254740993, None, 3]),
        "price": pa.array([decimal.Decimal("12.34"), None, decimal.Decimal("-0.10")], pa.decimal128(9, 2)),
        "at": pa.array([datetime.datetime(1970, 1, 1, 0, 0, 1), None, datetime.datetime(1969, 12, 31)], pa.timestamp("us")),
        "kind": pa.array(["a", None, ""]).dictionary_encode(),
        "score": pa.array([0.1, float("nan"), None]),
        "small": pa.array([1, 2, 255], pa.uint8()),
        "huge": pa.array([2**64 - 1, 0, None], pa.uint64()),
        "flag": pa.array([True, False, None]),
        "blob": pa.array([b"\xff\0", b"", None]),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet")
    manifest = run(tmp_path, "--no-shuffle", inputs=[tmp_path / "a.parquet"])
    first, second, third = records(manifest)
    assert first == {
        "id": 9007199254740993, "price": "12.34", "at": 1_000_000, "kind": "a", "score": 0.1,
        "small": 1, "huge": 2**64 - 1, "flag": True, "blob": b"\xff\0",
    }  # fmt: skip
    assert np.isnan(second.pop("score"))
    assert second == {"small": 2, "huge": 0, "flag": False, "blob": b""}
    assert third == {"id": 3, "price": "-0.10", "at": -86_400_000_000, "kind": "", "small": 255}
    assert manifest.statistics["at"]["unit"] == "us"


def test_parquet_in_many_row_groups_and_files(tmp_path, monkeypatch):
    from beam_jobs.sources import parquet

    monkeypatch.setattr(parquet, "SPLIT_BYTES", 500)
    for name, start in (("a", 0), ("b", 1000)):
        pq.write_table(
            pa.table({"x": range(start, start + 1000)}), tmp_path / f"{name}.parquet", row_group_size=90
        )
    manifest = run(tmp_path, "--num-shards", "7", inputs=[tmp_path / "*.parquet"])
    assert sorted(row["x"] for row in records(manifest)) == list(range(2000))
    assert len(manifest.splits["train"].shards) == 7


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gz"])
def test_idx_pairs_images_with_labels(tmp_path, compress, monkeypatch):

    monkeypatch.setattr("beam_jobs.sources.SPLIT_BYTES", 100)
    images = np.arange(50 * 2 * 3, dtype=np.uint32).astype(np.uint8).reshape(50, 2, 3)
    head = struct.pack(">4B3I", 0, 0, 8, 3, 50, 2, 3)
    (tmp_path / "t-images-idx3-ubyte").write_bytes(compress(head + images.tobytes()))
    labels = struct.pack(">4BI", 0, 0, 8, 1, 50) + bytes(range(50))
    (tmp_path / "t-labels-idx1-ubyte").write_bytes(compress(labels))
    manifest = run(tmp_path, inputs=[tmp_path / "t-*"])
    expected = [{"image": images[i].tolist(), "label": i} for i in range(50)]
    assert in_order(records(manifest), "label") == expected


def test_big_endian_idx_of_floats(tmp_path):
    values = np.array([[1.5, -2.0], [3.25, 1e30]], ">f4")
    (tmp_path / "v.idx").write_bytes(struct.pack(">4B2I", 0, 0, 0x0D, 2, 2, 2) + values.tobytes())
    manifest = run(tmp_path, "--no-shuffle", inputs=[tmp_path / "v.idx"])
    assert [row["label"] for row in records(manifest)] == values.astype(np.float32).tolist()


def test_a_declared_schema_narrows_what_it_may_and_says_so(tmp_path, capfd):
    (tmp_path / "a.csv").write_text("a,b,c\n1,0.1,x\n2,0.5,y\n")
    schema = {"features": {"a": {"dtype": "uint8"}, "b": {"dtype": "float32"}}}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    options = ["--schema", str(tmp_path / "schema.json"), "--no-shuffle"]
    manifest = run(tmp_path, *options, inputs=[tmp_path / "a.csv"])
    assert records(manifest) == [{"a": 1, "b": float(np.float32(0.1))}, {"a": 2, "b": 0.5}]
    assert "c" in capfd.readouterr().out  # left out, and told


@pytest.mark.parametrize("compression, suffix", [("gzip", ".gz"), ("zlib", ".zlib"), ("none", "")])
def test_tensorflow_reads_every_compression(tmp_path, compression, suffix):
    (tmp_path / "a.csv").write_text("x\n" + "".join(f"{i}\n" for i in range(100)))
    manifest = run(tmp_path, "--compression", compression, "--num-shards", "3", inputs=[tmp_path / "a.csv"])
    paths = manifest.paths("train")
    assert all(path.endswith(".tfrecord" + suffix) for path in paths)
    assert sum(1 for _ in tf.data.TFRecordDataset(paths, manifest.compression)) == 100


def shas(manifest):
    return [shard.sha256 for shard in manifest.splits["train"].shards]


@pytest.mark.slow
def test_the_same_bytes_in_any_mode_with_any_number_of_workers(tmp_path, monkeypatch):
    text = "a,b,c\n" + "".join(f"{i},{i / 7},row {i}\n" for i in range(300_000))
    (tmp_path / "a.csv").write_text(text)
    first = run(tmp_path, inputs=[tmp_path / "a.csv"], output="memory")
    for workers in ("1", "2"):
        output = tmp_path / f"processes-{workers}"
        command = [sys.executable, "-m", "beam_jobs.convert", "--input", str(tmp_path / "a.csv")]
        command += ["--output", str(output), "--direct_num_workers", workers]
        subprocess.run([*command, "--direct_running_mode", "multi_processing"], cwd=REPOSITORY, check=True)
        assert shas(Manifest.load(output)) == shas(first)
        assert (output / "manifest.json").read_bytes() == (tmp_path / "memory" / "manifest.json").read_bytes()
    other = run(tmp_path, "--seed", "1", inputs=[tmp_path / "a.csv"], output="seed")
    assert shas(other) != shas(first)
    assert sorted(row["a"] for row in records(other)) == list(range(300_000))


def test_datasets_whose_names_begin_alike_leave_each_other_alone(tmp_path):
    (tmp_path / "a.csv").write_text("x\n1\n2\n")
    options = ["--split", "train=0.5", "--split", "train-aug=0.5", "--num-shards", "1"]
    manifest = run(tmp_path, *options, inputs=[tmp_path / "a.csv"])
    assert {len(records(manifest, split)) for split in ("train", "train-aug")} == {1}


def test_more_shards_than_records_become_one_a_record(tmp_path, capfd):
    (tmp_path / "a.csv").write_text("x\n1\n2\n3\n")
    manifest = run(tmp_path, "--num-shards", "8", inputs=[tmp_path / "a.csv"])
    assert [shard.num_records for shard in manifest.splits["train"].shards] == [1, 1, 1]
    assert "3" in capfd.readouterr().out


def test_the_last_line_says_what_was_written(tmp_path, capfd):
    (tmp_path / "a.csv").write_text("x\n1\n2\n3\n")
    run(tmp_path, "--json", str(tmp_path / "s.json"), inputs=[tmp_path / "a.csv"])
    last = capfd.readouterr().out.strip().splitlines()[-1]
    assert last == f"wrote 3 records in 3 shards to {tmp_path / 'out'} (0 rejected)"
    assert json.loads((tmp_path / "s.json").read_text())


def test_a_glob_character_in_a_name_that_exists_is_literal(tmp_path):
    (tmp_path / "a[1].csv").write_text("x\n1\n")
    (tmp_path / "a1.csv").write_text("x\n2\n")
    assert records(run(tmp_path, inputs=[tmp_path / "a[1].csv"])) == [{"x": 1}]


# Properties ------------------------------------------------------------------------------------

text_field = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(text_field, text_field, st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=30
    ),
    split_bytes=st.integers(1, 200),
    ending=st.sampled_from(["\n", "\r\n"]),
)
def test_csv_splits_give_the_rows_of_the_csv_module(tmp_path, rows, split_bytes, ending, monkeypatch):
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator=ending, quoting=csv.QUOTE_ALL).writerows([("a", "b", "n"), *rows])
    path = tmp_path / "p.csv"
    path.write_bytes(buffer.getvalue().encode())
    monkeypatch.setattr(csv_source, "SPLIT_BYTES", split_bytes)
    source, _ = open_source([str(path)], SourceOptions(format="csv"))
    wishes = Wishes(columns={"a": Wish(dtype="string"), "b": Wish(dtype="string"), "n": Wish(dtype="int64")})
    splits = source.plan()
    found = [
        tuple(row.values())
        for split in splits
        for batch in source.read(split, wishes)
        for row in batch.to_pylist()
    ]
    assert found == rows
    assert sum(source.scan(split, wishes).rows for split in splits) == len(rows)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(
        st.floats(allow_nan=False, allow_infinity=False) | st.decimals(-1000, 1000, places=4),
        min_size=1,
        max_size=50,
    )
)
def test_csv_floats_are_what_python_reads(tmp_path, values):
    path = tmp_path / "f.csv"
    path.write_text("x\n" + "".join(f"{value!s}\n" for value in values))
    source, _ = open_source([str(path)], SourceOptions(format="csv"))
    (split,) = source.plan()
    (batch,) = source.read(split, Wishes(others=Wish(dtype="float64")))
    assert batch.column(0).to_pylist() == [float(str(value)) for value in values]


def test_parquet_lists_of_every_sort(tmp_path):
    lists = {
        "n": pa.int64(),
        "ragged": pa.list_(pa.int64()),
        "narrow": pa.list_(pa.int16()),
        "floats": pa.large_list(pa.float32()),
        "halves": pa.list_(pa.float16()),
        "texts": pa.list_(pa.string()),
        "fixed": pa.list_(pa.float64(), 2),
        "same": pa.list_(pa.uint8()),
        "matrix": pa.list_(pa.list_(pa.int32())),
        "times": pa.list_(pa.timestamp("us")),
        "categories": pa.list_(pa.dictionary(pa.int8(), pa.string())),
        "nothing": pa.list_(pa.int64()),
        "empty": pa.list_(pa.int64()),
    }
    rows = [
        {
            "n": i, "ragged": None if i % 5 == 4 else [i] * (i % 3), "narrow": [-i, i], "floats": [0.5] * (i % 4),
            "halves": [1.5, i], "texts": ["ü", ""] * (i % 3), "fixed": [i, 0.1],
            "same": [1, 2, i], "matrix": [[i, -1], [2, 3]][: i % 3], "times": [i, i + 1], "categories": ["a", "b"],
            "nothing": None, "empty": [],
        }
        for i in range(40)
    ]  # fmt: skip
    table = pa.table({
        name: pa.array([row[name] for row in rows], pa.list_(pa.float32()) if name == "halves" else kind)
        .cast(kind) if name != "categories" else pa.array([row[name] for row in rows], pa.list_(pa.string()))
        for name, kind in lists.items()
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    manifest = run(tmp_path, inputs=[tmp_path / "a.parquet"])
    features = manifest.schema.features
    assert {name: (f.dtype, f.shape, f.encoding, f.nullable) for name, f in features.items()} == {
        "n": ("int64", (), "int64_list", False),
        "ragged": ("int64", (None,), "int64_list", True),
        "narrow": ("int16", (2,), "raw", False),
        "floats": ("float32", (None,), "float_list", False),
        "halves": ("float16", (2,), "raw", False),
        "texts": ("string", (None,), "bytes_list", False),
        "fixed": ("float64", (2,), "raw", False),
        "same": ("uint8", (3,), "raw", False),
        "matrix": ("int32", (None, 2), "raw", False),
        "times": ("int64", (2,), "raw", False),
        "categories": ("string", (2,), "bytes_list", False),
        "nothing": ("int64", (None,), "int64_list", True),
        "empty": ("int64", (None,), "int64_list", False),
    }
    assert manifest.statistics["times"]["unit"] == "us" and manifest.statistics["ragged"]["nulls"] == 8
    expected = [{name: value for name, value in row.items() if value is not None} for row in rows]
    assert in_order(records(manifest), "n") == expected
    batches = list(tfpipe.make_dataset(manifest, tfpipe.PipelineConfig(per_worker_batch_size=40)))
    order = np.argsort(batches[0]["n"].numpy())
    assert [batches[0]["matrix"][i].numpy().tolist() for i in order] == [row["matrix"] for row in rows]
    assert [batches[0]["floats"][i].numpy().tolist() for i in order] == [row["floats"] for row in rows]


def test_parquet_structs_become_their_fields(tmp_path):
    rows = [
        {"s": {"x": 1, "t": {"y": "a", "l": [1, 2]}}, "n": 1},
        {"s": None, "n": 2},
        {"s": {"x": None, "t": None}, "n": 3},
    ]
    inner = pa.struct([("y", pa.string()), ("l", pa.list_(pa.int16()))])
    kind = pa.struct([("x", pa.int64()), ("t", inner)])
    table = pa.table({"s": pa.array([row["s"] for row in rows], kind), "n": [1, 2, 3]})
    pq.write_table(table, tmp_path / "a.parquet")
    manifest = run(tmp_path, inputs=[tmp_path / "a.parquet"])
    assert in_order(records(manifest), "n") == [
        {"s.x": 1, "s.t.y": "a", "s.t.l": [1, 2], "n": 1}, {"n": 2}, {"n": 3},
    ]  # fmt: skip


@pytest.mark.parametrize("values, kind, said", [
    ([[1], [2, None]], pa.list_(pa.int64()), ["a.parquet:2", "'x'", "every place of a list", "null"]),
    ([[[1], [2]], [[1], [2, 3]]], pa.list_(pa.list_(pa.int64())), ["a.parquet:2", "'x'", "one length"]),
    ([[[1], [2]], [[1, 2]]], pa.list_(pa.list_(pa.int64())), ["'x'", "first dimension"]),
], ids=["null", "within a row", "between rows"])  # fmt: skip
def test_lists_that_are_no_tensors_are_refused(tmp_path, capfd, values, kind, said):
    pq.write_table(pa.table({"x": pa.array(values, kind)}), tmp_path / "a.parquet")
    output = tmp_path / "out"
    assert convert.main(["--input", str(tmp_path / "a.parquet"), "--output", str(output), *IN_MEMORY]) == 1
    err = capfd.readouterr().err
    assert all(text in err for text in said) and not output.exists(), err


SCHEMA = Schema(features={
    "i": Feature(dtype="int64", nullable=True),
    "f": Feature(dtype="float32", nullable=True),
    "d": Feature(dtype="float64", nullable=True),
    "s": Feature(dtype="string", nullable=True),
    "u": Feature(dtype="uint8", nullable=True),
    "t": Feature(dtype="int16", shape=(2,)),
})  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(
        st.fixed_dictionaries({
            "i": st.none() | st.integers(-(2**63), 2**63 - 1),
            "f": st.none() | st.floats(width=32),
            "d": st.none() | st.floats(),
            "s": st.none() | st.text(max_size=200),
            "u": st.none() | st.integers(0, 255),
            "t": st.tuples(st.integers(-(2**15), 2**15 - 1), st.integers(-(2**15), 2**15 - 1)),
        }),
        min_size=1, max_size=20,
    ),
    data=st.data(),
)  # fmt: skip
def test_encoded_batches_are_what_protobuf_writes(rows, data):
    order = np.array(data.draw(st.permutations(range(len(rows)))), np.int64)
    types = {
        "i": pa.int64(),
        "f": pa.float32(),
        "d": pa.float64(),
        "s": pa.string(),
        "u": pa.uint8(),
        "t": pa.list_(pa.int16(), 2),
    }
    batch = pa.RecordBatch.from_arrays(
        [pa.array([row[name] for row in rows], kind) for name, kind in types.items()], names=list(types)
    )
    encoded = encode.encode_batch(batch, SCHEMA, order)
    for place, row in enumerate(order):
        framed = encoded.data[encoded.offsets[place] : encoded.offsets[place + 1]].tobytes()
        example = tf.train.Example()
        for name, value in rows[row].items():
            if value is None:
                continue
            feature, dtype = example.features.feature[name], SCHEMA.features[name].dtype
            if name == "i":
                feature.int64_list.value.append(value)
            elif name == "f":
                feature.float_list.value.append(value)
            elif name == "s":
                feature.bytes_list.value.append(value.encode())
            else:
                feature.bytes_list.value.append(np.array(value, np.dtype(dtype)).tobytes())
        from tfpipe.tfrecord import frame

        assert framed == frame(example.SerializeToString(deterministic=True))


@given(num_records=st.integers(1, 3000), seed=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_the_permutation_is_one(num_records, seed):
    places = shuffle.permute(np.arange(num_records), num_records=num_records, seed=seed)
    assert sorted(places.tolist()) == list(range(num_records))
