"""Faults that people reported of other tools, each as a kind: the right value in every format where it can occur.

Kinds that belong to one module are tested there: quoted newlines, ragged rows and stray quotes (test_csv,
test_quarantine), logical types (test_parquet..., test_avro), images (test_images), killed and
concurrent runs, stale shards (test_output), a worker that fails (test_bad_input).
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import zlib

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tfpipe
from beam_jobs import convert, encode
from tests.beam_jobs.test_round_trip import IN_MEMORY, in_order, records, run
from tfpipe.errors import ShardError
from tfpipe.tfrecord import frame

tf = pytest.importorskip("tensorflow")


def csv_of(rows):
    names = list(rows[0])
    lines = [",".join("" if row[n] is None else str(row[n]) for n in names) for row in rows]
    return ("\n".join([",".join(names), *lines]) + "\n").encode()


def jsonl_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet_of(rows):
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


def avro_of(rows):
    kinds = {int: "long", float: "double", str: "string", bool: "boolean"}
    fields = []
    for name in rows[0]:
        kind = next(kinds[type(row[name])] for row in rows if row[name] is not None)
        fields.append({"name": name, "type": ["null", kind]})
    out = io.BytesIO()
    fastavro.writer(out, fastavro.parse_schema({"type": "record", "name": "R", "fields": fields}), rows)
    return out.getvalue()


def tfrecord_of(rows):
    def feature(value):
        if isinstance(value, int):
            return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
        if isinstance(value, float):
            return tf.train.Feature(float_list=tf.train.FloatList(value=[value]))
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value.encode()]))

    def example(row):
        features = {name: feature(value) for name, value in row.items() if value is not None}
        return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()

    return b"".join(frame(example(row)) for row in rows)


FORMATS = {"csv": csv_of, "jsonl": jsonl_of, "parquet": parquet_of, "avro": avro_of, "tfrecord": tfrecord_of}
TEXTS = {"csv": csv_of, "jsonl": jsonl_of}


def converted(tmp_path, kind, rows, *options):
    (tmp_path / f"a.{kind}").write_bytes(FORMATS[kind](rows))
    manifest = run(tmp_path, *options, inputs=[tmp_path / f"a.{kind}"], output=f"out-{kind}")
    return manifest, in_order(records(manifest), "id")


def present(rows):
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


@pytest.mark.parametrize("kind", TEXTS)
def test_a_byte_order_mark_is_no_part_of_a_name_or_value(tmp_path, kind):  # A02
    rows = [{"id": i, "label": i % 2} for i in range(4)]
    paths = [tmp_path / f"{name}.{kind}" for name in "ab"]
    for path, part in zip(paths, (rows[:2], rows[2:]), strict=True):
        path.write_bytes(b"\xef\xbb\xbf" + TEXTS[kind](part))
    manifest = run(tmp_path, inputs=paths)
    assert in_order(records(manifest), "id") == rows


def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path):  # A02
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    manifest = run(tmp_path, "--format", "text", inputs=[tmp_path / "a.txt"])
    assert sorted(row["text"] for row in records(manifest)) == ["one", "two"]


@pytest.mark.parametrize("kind", TEXTS)
def test_a_dtype_holds_the_last_row_too(tmp_path, kind):  # A05
    rows = [{"id": i, "x": 5, "code": "007", "big": 9720798423} for i in range(200)]
    rows.append({"id": 200, "x": 5.5, "code": "010", "big": 1})
    manifest, found = converted(tmp_path, kind, rows)
    assert found == rows
    assert (
        manifest.schema.features["x"].dtype == "float32"
        and manifest.schema.features["code"].dtype == "string"
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_missing_is_no_zero(tmp_path, kind):  # A06
    rows = [
        {"id": i, "x": None if i % 3 == 0 else float(i % 2), "n": None if i % 4 == 0 else 0}
        for i in range(24)
    ]
    manifest, found = converted(tmp_path, kind, rows)
    assert found == present(rows)
    assert (manifest.statistics["x"]["nulls"], manifest.statistics["n"]["nulls"]) == (8, 6)
    config = tfpipe.PipelineConfig(per_worker_batch_size=24)
    (batch,) = tfpipe.make_dataset(manifest, config)
    seen = {int(i): bool(there) for i, there in zip(batch["id"], batch["x_present"], strict=True)}
    assert seen == {i: i % 3 != 0 for i in range(24)}


def test_missing_values_are_told_however_they_are_written(tmp_path):  # A06
    (tmp_path / "a.csv").write_text("id,y,x\n0,1,\n1,0, NA\n2,,3\n3,n/a,4\n4,null,5\n")
    manifest = run(tmp_path, inputs=[tmp_path / "a.csv"])
    found = in_order(records(manifest), "id")
    assert found == [
        {"id": 0, "y": 1},
        {"id": 1, "y": 0},
        {"id": 2, "x": 3},
        {"id": 3, "x": 4},
        {"id": 4, "x": 5},
    ]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_large_integer_beside_a_null_stays_exact(tmp_path, kind):  # A07
    rows = [
        {"id": 1, "n": 9007199254740993},
        {"id": 2, "n": None},
        {"id": 3, "n": -(2**63)},
        {"id": 4, "n": 2**63 - 1},
    ]
    manifest, found = converted(tmp_path, kind, rows)
    assert found == present(rows)
    assert manifest.schema.features["n"].dtype == "int64"
    assert manifest.statistics["n"]["max"] == 2**63 - 1


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "avro"])
def test_no_digit_of_a_double_is_lost(tmp_path, kind):  # A08
    values = [1700000050.5, 16777217.0, 0.620390625, 1e-320, 0.1]
    rows = [{"id": i, "t": value} for i, value in enumerate(values)]
    manifest, found = converted(tmp_path, kind, rows)
    assert [row["t"] for row in found] == values
    assert manifest.schema.features["t"].dtype == "float64"


def test_no_digit_of_a_double_in_an_array_is_lost(tmp_path):  # A08
    values = np.array([1700000050.5, 16777217.0, 0.1])
    np.savez(tmp_path / "a.npz", t=values)
    manifest = run(tmp_path, "--no-shuffle", inputs=[tmp_path / "a.npz"])
    assert [row["t"] for row in records(manifest)] == values.tolist()


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tfrecord"])
def test_optional_and_empty_lists_are_read_to_the_end(tmp_path, kind):  # A10
    rows = [{"id": 1, "tags": [1, 2]}, {"id": 2, "tags": []}, {"id": 3}, {"id": 4, "tags": [5]}]
    if kind == "jsonl":
        data = jsonl_of(rows)
    elif kind == "parquet":
        out = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), out)
        data = out.getvalue()
    else:

        def example(row):
            features = {
                name: tf.train.Feature(int64_list=tf.train.Int64List(value=v if isinstance(v, list) else [v]))
                for name, v in row.items()
            }
            return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()

        data = b"".join(frame(example(row)) for row in rows)
    (tmp_path / f"a.{kind}").write_bytes(data)
    manifest = run(tmp_path, inputs=[tmp_path / f"a.{kind}"])
    assert manifest.schema.features["tags"].shape == (None,) and manifest.schema.features["tags"].nullable
    (batch,) = tfpipe.make_dataset(manifest, tfpipe.PipelineConfig(per_worker_batch_size=4))
    tags = dict(zip(batch["id"].numpy().tolist(), batch["tags"].to_list(), strict=True))
    assert tags == {1: [1, 2], 2: [], 3: [], 4: [5]}


def test_files_are_found_whatever_the_case_of_their_suffix(tmp_path, capfd):  # A18
    (tmp_path / "in").mkdir()
    for name in ("x.CSV", "y.Csv", "z.csv"):
        (tmp_path / "in" / name).write_text("id\n1\n")
    for name in (".DS_Store", "Thumbs.db"):
        (tmp_path / "in" / name).write_bytes(b"\0\1")
    assert len(records(run(tmp_path, inputs=[tmp_path / "in"]))) == 3
    assert "1 .db" in capfd.readouterr().out
    pattern = str(tmp_path / "in" / "nothing*.csv")
    assert convert.main(["--input", pattern, "--output", str(tmp_path / "none"), *IN_MEMORY]) == 2
    assert "matches nothing" in capfd.readouterr().err


COMPRESSIONS = {"plain": bytes, "gz": gzip.compress, "bz2": bz2.compress}


@pytest.mark.parametrize("content", COMPRESSIONS)
@pytest.mark.parametrize("name", ["a.{}", "a.{}.gz", "a.{}.bz2"])
@pytest.mark.parametrize("kind", ["csv", "avro", pytest.param("jsonl", marks=pytest.mark.slow)])
def test_content_tells_the_compression_not_the_name(tmp_path, kind, name, content):  # A26
    rows = [{"id": i, "x": i * 2} for i in range(9)]
    path = tmp_path / name.format(kind)
    path.write_bytes(COMPRESSIONS[content](FORMATS[kind](rows)))
    assert in_order(records(run(tmp_path, inputs=[path])), "id") == rows


def test_compressions_of_tfrecords_may_be_mixed(tmp_path):  # A26
    rows = [{"id": i} for i in range(9)]
    for number, compress in enumerate((bytes, gzip.compress, zlib.compress)):
        data = compress(tfrecord_of(rows[3 * number : 3 * number + 3]))
        (tmp_path / f"{number}.tfrecord").write_bytes(data)
    paths = [tmp_path / f"{number}.tfrecord" for number in range(3)]
    assert in_order(records(run(tmp_path, inputs=paths)), "id") == rows


@pytest.mark.parametrize("kind", FORMATS)
def test_a_record_that_no_reader_takes_is_refused_by_its_place(tmp_path, capfd, monkeypatch, kind):  # A28
    monkeypatch.setattr(encode, "RECORD_MAX_BYTES", 10_000)
    monkeypatch.setattr("beam_jobs.write.RECORD_MAX_BYTES", 10_000)
    rows = [{"id": i, "s": "x" * (20_000 if i == 6 else 10)} for i in range(9)]
    (tmp_path / f"a.{kind}").write_bytes(FORMATS[kind](rows))
    arguments = ["--input", str(tmp_path / f"a.{kind}"), "--output", str(tmp_path / "out"), *IN_MEMORY]
    assert convert.main(arguments) == 1
    err = capfd.readouterr().err
    assert "at most 10000 bytes" in err and "record 7" in err and f"a.{kind}" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", ["in_memory", "multi_processing"])
def test_an_error_has_the_same_words_in_every_mode(tmp_path, capfd, mode):  # A30
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3\n")
    arguments = [
        "--input",
        str(tmp_path / "a.csv"),
        "--output",
        str(tmp_path / "out"),
        "--direct_running_mode",
        mode,
    ]
    assert convert.main(arguments) == 1
    assert capfd.readouterr().err.startswith("error: ") and not (tmp_path / "out").exists()


def test_only_three_records_make_only_three_shards(tmp_path):  # A23
    manifest, _ = converted(tmp_path, "jsonl", [{"id": i} for i in range(3)], "--num-shards", "8")
    assert [shard.num_records for shard in manifest.splits["train"].shards] == [1, 1, 1]
    with pytest.raises(ValueError, match="shards"):
        tfpipe.make_dataset(manifest, tfpipe.PipelineConfig(per_worker_batch_size=1), num_workers=4)


def test_a_shard_renamed_to_another_compression_is_told(tmp_path):  # A26
    manifest, _ = converted(tmp_path, "csv", [{"id": i} for i in range(30)], "--compression", "gzip")
    path = manifest.paths("train")[0]
    with open(path, "rb") as file:
        data = gzip.decompress(file.read())
    with open(path, "wb") as file:
        file.write(data)
    assert any("compress" in fault for fault in manifest.verify())
    with pytest.raises((ShardError, tfpipe.errors.TfpipeError)):
        tfpipe.Manifest.load(manifest.directory)
