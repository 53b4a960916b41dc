"""TFRecords converted again: the same examples, whoever wrote them; damage never passes for the end."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import itertools
import json
import struct
import zlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tfpipe
from beam_jobs import convert
from beam_jobs.encode import encode_batch
from beam_jobs.layout import scan_wishes
from beam_jobs.plan import Request, make_plan
from beam_jobs.sources import SourceOptions, Wishes, example_columns, tfrecord
from beam_jobs.sources.find import open_source, sniff
from tests.beam_jobs.test_round_trip import IN_MEMORY, in_order, records, run
from tests.helpers import write_dataset, write_shard
from tfpipe.errors import RecordError, SchemaError, ShardError, TfpipeError
from tfpipe.examples import parse_example
from tfpipe.index import index
from tfpipe.manifest import FILE_NAME, Manifest
from tfpipe.schema import Feature, Schema
from tfpipe.tfrecord import ShardReader, frame

tf = pytest.importorskip("tensorflow")
QUARANTINE = ["--on-error", "quarantine", "--max-rejected", "50%"]


def example(**features):
    """A serialized Example of lists of int, float or bytes; None for a feature without a kind."""
    made = tf.train.Example()
    for name, values in features.items():
        feature = made.features.feature[name]
        if values is None:
            continue
        kind = (
            feature.int64_list if all(type(v) is int for v in values)
            else feature.float_list if type(values[0]) is float else feature.bytes_list
        )  # fmt: skip
        kind.SetInParent()
        kind.value.extend(values)
    return made.SerializeToString()


def payloads(manifest, split="train"):
    return [p for path in manifest.paths(split) for p in ShardReader(path, manifest.compression)]


def values(payload):
    """A record by feature, as bits: what a null is, an absent feature, leaves nothing."""
    found = {}
    for name, value in parse_example(payload).features.items():
        if value.kind:
            data = value.decode()
            if value.kind == "float_list":
                data = np.frombuffer(b"".join(value.chunks), "<u4").tolist()
            found[name] = (value.kind, tuple(data))
    return found


def fail(tmp_path, capfd, *options, inputs=None):
    arguments = [option for path in inputs or [tmp_path / "in"] for option in ("--input", str(path))]
    code = convert.main([*arguments, "--output", str(tmp_path / "out"), *options, *IN_MEMORY])
    assert code in (1, 2) and not (tmp_path / "out" / FILE_NAME).exists()
    return capfd.readouterr().err


def declare(tmp_path, **features):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"features": features}))
    return ["--schema", str(path)]


@pytest.fixture
def source(tmp_path):
    """Writes files of payloads, by name; the compression is the one that the name says."""

    def write(**files):
        (tmp_path / "in").mkdir(exist_ok=True)
        for name, content in files.items():
            compression = {"gz": "GZIP", "zlib": "ZLIB"}.get(name.rpartition("_")[2], "")
            write_shard(tmp_path / "in" / f"{name}.tfrecord", content, compression)
        return tmp_path / "in"

    return write


def converted(inputs, declared=None, allowed=0):
    """What a conversion would write, without Beam: records in their order, schema, statistics, rejects."""
    found, _ = open_source(list(map(str, inputs)), SourceOptions())
    request = Request(declared=declared or found.schema, max_rejected=allowed)
    wishes = scan_wishes((), request.declared, found.columns)
    splits = found.plan()
    plan, rejects = make_plan(
        request, found, splits, [found.scan(split, wishes, allowed) for split in splits]
    )
    result = []
    for split in splits:
        for batch in found.read(split, plan.wishes, plan.rejected.get(split.index, ())):
            encoded = encode_batch(plan.layout.assemble(batch), plan.schema)
            data, ends = encoded.data.tobytes(), encoded.offsets.tolist()
            result += [data[a + 12 : b - 4] for a, b in itertools.pairwise(ends)]
    return result, plan.schema, plan.statistics, rejects


def schema_of(**features):
    return Schema.from_json({"features": features}, where="test")


# What protobuf may be given; and NaN of any bits, which Python's floats do not keep.
FLOAT_BITS = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 1 << 31, 0x7FC00001, 0xFF800001]))
INT64 = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-300, 300))
LISTS = {
    "bytes_list": st.lists(
        st.one_of(st.binary(max_size=300), st.text(max_size=5).map(str.encode)), max_size=4
    ),
    "int64_list": st.lists(INT64, max_size=40),
    "float_list": st.lists(FLOAT_BITS, max_size=4),
}


@st.composite
def corpora(draw):
    """Serialized records, with lists of one kind a feature, some not there, some without a kind."""
    kinds = draw(
        st.dictionaries(
            st.text(min_size=1, max_size=9), st.sampled_from(sorted(LISTS)), min_size=1, max_size=5
        )
    )
    result = []
    for _ in range(draw(st.integers(1, 12))):
        record = tf.train.Example()
        for name, kind in kinds.items():
            what = draw(st.sampled_from(["list", "list", "list", "none", "no kind"]))
            if what == "none":
                continue
            feature = record.features.feature[name]
            if what == "list":
                made = draw(LISTS[kind])
                if kind == "float_list":
                    packed = struct.pack(f"<{len(made)}I", *made)
                    feature.float_list.MergeFromString(b"\x0a" + bytes([len(packed)]) + packed)
                else:
                    getattr(feature, kind).value.extend(made)
                getattr(feature, kind).SetInParent()
        result.append(record.SerializeToString())
    return result


def is_text(value):
    try:
        return value.decode() is not None
    except UnicodeDecodeError:
        return False


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(corpora(), st.sampled_from(["", "GZIP", "ZLIB"]), st.integers(1, 12))
def test_every_example_comes_out_as_it_went_in(tmp_path_factory, made, compression, cut):
    directory = tmp_path_factory.mktemp("corpus")
    parts = [part for part in (made[:cut], made[cut:]) if part]
    paths = [directory / f"{i}.tfrecord" for i in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        write_shard(path, part, compression)
    before = [values(payload) for payload in made]
    if not any(before):
        return
    after, schema, statistics, _ = converted(paths)
    for name, feature in schema.features.items():
        lengths = {len(record[name][1]) for record in before if name in record}
        if None not in feature.shape:  # an empty list beside lists of one length is no value
            assert lengths - {0} == {feature.num_elements}
            for record in before:
                if name in record and not record[name][1]:
                    del record[name]
        else:
            assert len(lengths - {0}) != 1
        nulls = sum(name not in record for record in before)
        assert statistics[name]["nulls"] == nulls and feature.nullable == (nulls > 0)
        if feature.encoding == "bytes_list":
            texts = [value for record in before for value in record.get(name, ("", ()))[1]]
            assert feature.dtype == ("string" if all(map(is_text, texts)) else "bytes")
    assert [values(payload) for payload in after] == before
    again, schema_again, *_ = converted(paths)
    assert again == after and schema_again == schema


def test_text_is_bytes_where_any_record_of_any_split_holds_other_bytes(source, monkeypatch):
    monkeypatch.setattr(tfrecord, "SPLIT_BYTES", 200)
    rows = [example(s=[b"a%d" % i], b=[b"\xff" if i == 90 else b"text"]) for i in range(100)]
    path = source(a=rows)
    after, schema, *_ = converted([path])
    assert {n: f.dtype for n, f in schema.features.items()} == {"b": "bytes", "s": "string"}
    assert list(map(values, after)) == list(map(values, rows))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_bytes_are_examples_where_the_strict_parser_says_so(data):
    """The compiled parser finds what the strict one does, in whatever form it is written."""
    payload = bytearray(example(a=[1, 300, -1], b=[b"x", b""], c=[1.5, -0.0], d=None, e=[]))
    for _ in range(data.draw(st.integers(0, 2))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    payload = bytes(payload) * data.draw(st.sampled_from([1, 1, 2]))
    plain = example(a=[7])
    parsed = example_columns.parse([plain, payload, plain])
    try:
        expected = parse_example(payload)
    except RecordError as error:
        assert parsed.faults.keys() == {1} and str(error).startswith(parsed.faults[1])
        expected = None
    if expected is not None and expected.other_fields:
        assert "SequenceExample" in parsed.faults[1]
        expected = None
    elif expected is not None:
        assert not parsed.faults
    for name, lines in parsed.features.items():
        for row in (0, 1, 2):
            here = lines[lines[:, 0] == row]
            if row != 1:
                assert len(here) == (name == "a")
                continue
            theirs = expected.features.get(name) if expected else None
            assert bool(len(here)) == bool(theirs and theirs.kind)
            if len(here):
                one = dataclasses.replace(parsed, features={name: here})
                array, _ = example_columns.column(one, name, example_columns.Form(text=False))
                found = array[1].values
                bits = (
                    found.to_numpy().view(np.uint32).tolist()
                    if theirs.kind == "float_list"
                    else found.to_pylist()
                )
                wanted = (
                    np.frombuffer(b"".join(theirs.chunks), "<u4").tolist()
                    if theirs.kind == "float_list" else theirs.decode()
                )  # fmt: skip
                assert bits == wanted


def test_many_features_with_long_names(source):
    rows = [
        example(**{f"f{i}_{'n' * 200}_{(i * 7 + row) % 3000}": [i] for i in range(1500)}) for row in range(4)
    ]
    after, schema, *_ = converted([source(a=rows)])
    assert list(map(values, after)) == list(map(values, rows)) and len(schema.features) > 3000


def test_plain_gzip_and_zlib_files_of_any_name_become_one_dataset(tmp_path, source):
    """A26."""
    path = source(a=[example(n=[i], x=[i / 2]) for i in range(5)])
    for name, compression, start in (
        ("b.tfrecord.gz", "", 5),
        ("c", "GZIP", 10),
        ("d.tfrecord", "ZLIB", 15),
        ("part-0", "", 20),
    ):
        write_shard(path / name, [example(n=[i], x=[i / 2]) for i in range(start, start + 5)], compression)
    members = b"".join(frame(example(n=[i], x=[i / 2])) for i in range(25, 30))
    (path / "e.tfrecord").write_bytes(gzip.compress(members[:50]) + gzip.compress(members[50:]))
    manifest = run(tmp_path, inputs=[path])
    assert in_order(records(manifest), "n") == [{"n": i, "x": i / 2} for i in range(30)]
    assert manifest.schema.features == {"n": Feature(dtype="int64"), "x": Feature(dtype="float32")}
    assert manifest.source["format"] == "tfrecord" and len(manifest.source["files"]) == 6


def test_files_without_records_are_left_out_and_counted(tmp_path, source, capfd):
    path = source(a=[example(n=[1])])
    (path / "b.tfrecord").touch()
    (path / "c.tfrecord-00001-of-00002").touch()
    (path / "d.tfrecord.gz").write_bytes(gzip.compress(b""))
    (path / "readme.md").write_text("x")
    manifest = run(tmp_path, inputs=[path])
    assert records(manifest) == [{"n": 1}]
    assert manifest.source["ignored_files"] == {".md": 1, "empty .tfrecord": 2}
    assert "2 empty .tfrecord" in capfd.readouterr().out
    with pytest.raises(RecordError, match=r"at least one record, got only empty files .*b\.tfrecord"):
        converted([path / "b.tfrecord"])


def test_big_files_are_split_between_records_and_every_record_has_its_number(
    tmp_path, source, monkeypatch, capfd
):
    monkeypatch.setattr(tfrecord, "SPLIT_BYTES", 1000)
    rows = [example(n=[i], s=[b"x" * (i % 50)]) for i in range(200)]
    rows[150] = b"\x0a\xff"
    path = source(a=rows, b_gz=rows[:10])
    opened, _ = open_source([str(path)], SourceOptions())
    splits = opened.plan()
    assert len(splits) > 8 and splits[-1].start == 0 and splits[-1].file == 1
    assert [s.stop for s in splits[:-2]] == [s.start for s in splits[1:-1]]
    manifest = run(tmp_path, *QUARANTINE, inputs=[path])
    found = sorted(record["n"] for record in records(manifest))
    assert found == sorted([*(i for i in range(200) if i != 150), *range(10)])
    line = json.loads((tmp_path / "out" / "rejected.jsonl").read_text())
    assert line == {
        "origin": f"{path / 'a.tfrecord'}:151", "raw": "0aff",
        "reason": "a record must be a serialized tf.train.Example, got a field that ends after its message, at byte 0",
    }  # fmt: skip


def test_a_dataset_comes_out_with_its_records_schema_labels_and_units(tmp_path, monkeypatch):
    text = "id,p0,p1,p2,p3,name\n" + "".join(
        f"{i},{i % 256},1,2,3,{'' if i % 5 else 'n'}\n" for i in range(300)
    )
    (tmp_path / "a.csv").write_text(text)
    first = run(
        tmp_path, "--pack", "image=p0..p3:2x2", "--split", "train=0.9", "--split", "test=0.1", "--num-shards", "5",
        inputs=[tmp_path / "a.csv"], output="first",
    )  # fmt: skip
    features = dict(first.schema.features)
    features["id"] = Feature(dtype="int64", nullable=True, labels=tuple(f"c{i}" for i in range(300)))
    statistics = {**first.statistics, "id": {**first.statistics["id"], "unit": "ms"}}
    first = dataclasses.replace(first, schema=Schema(features=features), statistics=statistics)
    first.save(first.directory)
    (first.directory / "train-00000-of-00009.tfrecord.gz").write_bytes(b"stale")
    second = run(
        tmp_path,
        "--num-shards",
        "3",
        "--compression",
        "zlib",
        "--seed",
        "5",
        inputs=[first.directory],
        output="second",
    )
    assert second.schema == first.schema and list(second.schema.features) == list(first.schema.features)
    assert second.statistics["id"]["unit"] == "ms"
    assert second.compression == "ZLIB" and len(second.splits["train"].shards) == 3
    assert Counter(payloads(second)) == Counter([*payloads(first), *payloads(first, "test")])
    assert second.source["ignored_files"] == {".gz": 1}
    dataset = tfpipe.make_dataset(second, tfpipe.PipelineConfig(per_worker_batch_size=32), split="train")
    seen = {
        int(i): image.tolist()
        for batch in dataset
        for i, image in zip(batch["id"], batch["image"].numpy(), strict=True)
    }
    assert seen == {i: [[i % 256, 1], [2, 3]] for i in range(300)}
    only = run(tmp_path, inputs=[f"{first.directory}:test"], output="test")
    assert Counter(payloads(only)) == Counter(payloads(first, "test"))
    glob = run(tmp_path, inputs=[f"{first.directory}/train-*-of-00005.tfrecord*"], output="train")
    assert Counter(payloads(glob)) == Counter(payloads(first)) and glob.schema == first.schema


TYPES = {
    "bool": "?",
    "int8": "i1",
    "uint16": "<u2",
    "uint64": "<u8",
    "float16": "<f2",
    "float64": "<f8",
    "int64": "<i8",
}


@pytest.mark.parametrize("described", [True, False], ids=["manifest", "schema"])
def test_raw_tensors_are_taken_bit_by_bit(source, described):
    rng = np.random.default_rng(0)
    rows = []
    for i in range(40):
        row = {}
        for dtype, code in TYPES.items():
            size = 4 * np.dtype(code).itemsize
            row[dtype] = [bytes(rng.integers(0, 2 if dtype == "bool" else 256, size, np.uint8))]
        row["ragged"] = [bytes(rng.integers(0, 256, 8 * (i % 3), np.uint8))]
        if i % 4 == 0:
            del row["int8"]
        rows.append(example(**row, id=[i]))
    features = {
        dtype: {"dtype": dtype, "shape": [2, 2], "encoding": "raw", "nullable": dtype == "int8"}
        for dtype in TYPES
    }
    features["ragged"] = {"dtype": "float32", "shape": [None, 2], "encoding": "raw"}
    features["id"] = {"dtype": "int64"}
    path = source(a=rows)
    schema = schema_of(**features)
    if described:
        index(path, schema=schema)
    after, found, *_ = converted([path], None if described else schema)
    assert found == schema and list(map(values, after)) == list(map(values, rows))


@pytest.mark.parametrize("feature, value, said", [
    ({"dtype": "float32", "shape": [2, 2]}, [b"x" * 15], "must hold 16 bytes (float32, shape [2, 2]), got 15 bytes"),
    ({"dtype": "float32", "shape": [2, 2]}, [b"x" * 16] * 2, "got 2 values of bytes"),
    ({"dtype": "uint16", "shape": [None, 3]}, [b"x" * 7], "a multiple of 6 bytes (uint16, shape [null, 3]), got 7"),
    ({"dtype": "bool", "shape": [2]}, [b"\0\2"], "bytes of 0 and 1 (bool), got others"),
    ({"dtype": "int64", "shape": [2, 2]}, [1, 2, 3], "must hold 4 values (shape [2, 2]), got 3 values"),
    ({"dtype": "int64"}, [1, 2], "must hold a single value, got 2 values"),
    ({"dtype": "string"}, [b"\xff"], "must hold UTF-8 text"),
    ({"dtype": "int8"}, [200], "must hold int8, got 200"),
    ({"dtype": "int64"}, [], "must hold a value in every row, got null"),
])  # fmt: skip
def test_a_record_that_is_not_as_declared_is_named_or_goes_aside(source, feature, value, said):
    good = {"float32": [b"\0" * 16], "uint16": [b"\0" * 12], "bool": [b"\0\1"], "string": [b"a"], "int8": [7],
            "int64": [1, 2, 3, 4] if feature.get("shape") else [1]}[feature["dtype"]]  # fmt: skip
    path = source(a=[example(x=good, n=[0]), example(x=value, n=[1]), example(x=good, n=[2])])
    declared = schema_of(x=feature, n={"dtype": "int64"})
    with pytest.raises(RecordError) as error:
        converted([path], declared)
    assert said in str(error.value) and "'x'" in str(error.value)
    assert f"({path / 'a.tfrecord'}:2)" in str(error.value)
    after, _, _, (reject,) = converted([path], declared, allowed=1)
    assert [values(payload)["n"][1] for payload in after] == [(0,), (2,)]
    assert said in reject.reason and reject.origin == f"{path / 'a.tfrecord'}:2" and reject.raw


def sequence():
    made = tf.train.SequenceExample()
    made.feature_lists.feature_list["a"].feature.add().int64_list.value.append(1)
    return made.SerializeToString()


@pytest.mark.parametrize("other, said", [
    (sequence(), "got fields other than its features, as a tf.train.SequenceExample has"),
    (b"\x0b\x0c", "got wire type 3 at byte 0"),
    (b"not a message" * 100, "got wire type 6 at byte 0"),
])  # fmt: skip
def test_a_record_that_is_no_example_can_be_left_out(source, other, said):
    path = source(a=[example(n=[0]), example(n=[1]), other, example(n=[3])])
    with pytest.raises(RecordError, match=r"must be a serialized tf\.train\.Example") as error:
        converted([path])
    assert said in str(error.value) and "a.tfrecord:3" in str(error.value)
    after, _, _, (reject,) = converted([path], allowed=1)
    assert [values(payload)["n"][1] for payload in after] == [(0,), (1,), (3,)]
    assert (
        said in reject.reason and reject.raw == other[:500].hex() and reject.origin.endswith("a.tfrecord:3")
    )


@pytest.mark.parametrize("files", [
    {"a": [example(n=[0], x=[1]), example(x=[1]), example(x=[1.5])]},
    {"a": [example(n=[0], x=[1]), example(x=[1])], "b_gz": [example(n=[1]), example(n=[1]), example(x=[1.5])]},
], ids=["one file", "two files"])  # fmt: skip
def test_a_feature_of_two_kinds_is_an_error_that_names_both_places(source, files):
    path = source(**files)
    last = path / f"{list(files)[-1]}.tfrecord"
    with pytest.raises(SchemaError) as error:
        converted([path], allowed=10)
    assert f"int64_list ({path / 'a.tfrecord'}:1: feature 'x')" in str(error.value)
    assert f"float_list ({last}:3: feature 'x')" in str(error.value) and "--schema" in str(error.value)
    after, *_ = converted([path], schema_of(n={"dtype": "int64", "nullable": True}))
    assert [values(p).get("n") for p in after] == [
        values(p).get("n") for rows in files.values() for p in rows
    ]


def damage(name, data):
    data = bytearray(data)
    if name == "payload":
        data[-6] ^= 1
    elif name == "length":
        data[len(data) // 2] ^= 1
    elif name == "cut":
        del data[-3:]
    elif name == "cut header":
        del data[-(len(data) // 3) + 5 :]
    elif name == "tail":
        data += b"rubbish"
    return bytes(data)


@pytest.mark.parametrize("split_bytes", [16 << 20, 40], ids=["whole", "split"])
@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
@pytest.mark.parametrize("what", ["payload", "length", "cut", "cut header", "tail"])
def test_damage_is_named_and_never_left_out(tmp_path, monkeypatch, what, compression, split_bytes):
    monkeypatch.setattr(tfrecord, "SPLIT_BYTES", split_bytes)
    path = tmp_path / "a.tfrecord"
    write_shard(path, [example(n=[i]) for i in range(3)] + [example(n=[3])] * 3, compression)
    path.write_bytes(damage(what, path.read_bytes()))
    opened, _ = open_source([str(path)], SourceOptions())
    with pytest.raises(ShardError, match=r"damage at record \d+ .*a\.tfrecord"):
        for split in opened.plan():
            opened.scan(split, Wishes(), max_rejected=1000)


def test_damage_far_behind_is_at_its_own_record(tmp_path, source, monkeypatch, capfd):
    monkeypatch.setattr(tfrecord, "SPLIT_BYTES", 500)
    path = source(a=[example(n=[i]) for i in range(100)]) / "a.tfrecord"
    data = bytearray(path.read_bytes())
    size = len(data) // 100
    data[size * 80 + 20] ^= 1
    path.write_bytes(data)
    err = fail(tmp_path, capfd, *QUARANTINE)  # no record to leave out
    assert f"damage at record 80 (uncompressed offset {size * 80}): the payload's checksum" in err


@pytest.mark.parametrize("content, said", [
    (b"hello, here is text", "must begin with a record, plain or compressed with gzip or zlib, got 68 65"),
    (bz2.compress(frame(example(n=[1]))), "got bz2"),
    (b"\1", "got 01"),
])  # fmt: skip
def test_other_files_of_that_name_are_refused(tmp_path, content, said):
    (tmp_path / "a.tfrecord").write_bytes(content)
    with pytest.raises(RecordError, match=r"a\.tfrecord") as error:
        converted([tmp_path])
    assert said in str(error.value)


def dataset(directory, features=None, rows=None, **options):
    schema = Schema(features=features or {"n": Feature(dtype="int64")})
    return write_dataset(directory, schema, rows or [{"n": i} for i in range(8)], 2, **options)


def test_a_shard_that_is_another_than_the_manifest_names_is_refused(tmp_path):
    made = dataset(tmp_path / "in", compression="")
    shard = tmp_path / "in" / made.splits["train"].shards[1].name
    write_shard(shard, [example(n=[i]) for i in (1, 1, 1, 1)], "")
    with pytest.raises(ShardError, match=r"must have the sha256 .*00001-of-00002"):
        converted([tmp_path / "in"], allowed=10)
    shard.unlink()
    with pytest.raises(ShardError, match="No such file"):
        converted([tmp_path / "in"])


@pytest.mark.parametrize("change, given, said", [
    ("", "in:val", "split must be one of train, got 'val'"),
    ("unlisted", "in/b.tfrecord", "must be listed in it, got one that is not"),
    ("staging", "loose", "a conversion that did not finish"),
    ("loose", "loose", "or all without one"),
    ("other", "other", "must have the same features, labels and units, got other ones for 'n'"),
    ("version", "in", "format_version"),
])  # fmt: skip
def test_what_is_no_dataset_as_its_manifest_says_is_refused(tmp_path, change, given, said):
    dataset(tmp_path / "in")
    inputs = (
        [f"{tmp_path / 'in'}", f"{tmp_path}/{given}"]
        if change in ("loose", "other")
        else [f"{tmp_path}/{given}"]
    )
    (tmp_path / "loose").mkdir()
    write_shard(tmp_path / "loose" / "a.tfrecord", [example(n=[1])], "")
    if change == "unlisted":
        write_shard(tmp_path / "in" / "b.tfrecord", [example(n=[1])], "")
    elif change == "staging":
        (tmp_path / "loose" / ".staging-x").mkdir()
    elif change == "other":
        dataset(tmp_path / "other", {"n": Feature(dtype="int64", labels=("a",))}, [{"n": 0}] * 2)
    elif change == "version":
        manifest = json.loads((tmp_path / "in" / FILE_NAME).read_text())
        (tmp_path / "in" / FILE_NAME).write_text(json.dumps(manifest | {"format_version": 9}))
    with pytest.raises(TfpipeError) as error:
        converted(inputs)
    assert said in str(error.value)


def test_datasets_of_the_same_features_become_one(tmp_path):
    dataset(tmp_path / "a", {"n": Feature(dtype="int64", labels=("a", "b"))}, [{"n": 0}, {"n": 1}])
    dataset(tmp_path / "b", {"n": Feature(dtype="int64", labels=("a", "b"), nullable=True)}, [{"n": 1}, {}])
    manifest = run(tmp_path, inputs=[tmp_path / "a", tmp_path / "b"])
    assert manifest.schema.features == {"n": Feature(dtype="int64", labels=("a", "b"), nullable=True)}
    assert Counter(row.get("n") for row in records(manifest)) == {0: 1, 1: 2, None: 1}


def test_packing_keeps_the_labels_of_the_rest(tmp_path):
    features = {"n": Feature(dtype="int64", labels=("a", "b")), "x": Feature(dtype="float32"), "y": Feature(dtype="float32"),
                "t": Feature(dtype="uint8", shape=(2, 2))}  # fmt: skip
    rows = [{"n": i % 2, "x": float(i), "y": 0.5, "t": [[i, 1], [2, 3]]} for i in range(6)]
    dataset(tmp_path / "a", features, rows)
    manifest = run(tmp_path, "--pack", "xy=x,y", inputs=[tmp_path / "a"])
    assert manifest.schema.features == {
        "n": features["n"], "xy": Feature(dtype="float32", shape=(2,), encoding="raw"), "t": features["t"],
    }  # fmt: skip
    found = in_order(records(manifest), "xy")
    assert found == [{"n": i % 2, "xy": [float(i), 0.5], "t": [[i, 1], [2, 3]]} for i in range(6)]


def test_a_declared_schema_goes_before_the_manifest(tmp_path):
    dataset(
        tmp_path / "a",
        {"n": Feature(dtype="int64"), "b": Feature(dtype="bytes")},
        [{"n": i, "b": bytes([i, 0])} for i in range(6)],
    )
    options = declare(tmp_path, n={"dtype": "uint8"}, b={"dtype": "uint16"})
    manifest = run(tmp_path, *options, inputs=[tmp_path / "a"])
    assert manifest.schema.features["b"] == Feature(dtype="uint16")
    assert in_order(records(manifest), "n") == [{"n": i, "b": i} for i in range(6)]


def test_the_same_shards_however_they_were_read(tmp_path, source):
    path = source(a=[example(n=[i], s=[b"x" * i]) for i in range(50)])
    one = run(tmp_path, inputs=[path], output="one")
    assert convert.main(["--input", str(path), "--output", str(tmp_path / "two"), "--direct_num_workers", "2",
                         "--direct_running_mode", "multi_threading"]) == 0  # fmt: skip
    assert Manifest.load(tmp_path / "two").splits == one.splits


def test_records_without_a_value_make_no_dataset(source):
    with pytest.raises(SchemaError, match="at least one feature, got none"):
        converted([source(a=[example(), example(x=None)])])


def test_a_feature_without_a_name_is_refused_or_left_out(source):
    path = source(a=[example(**{"": [1], "n": [2]})])
    with pytest.raises(SchemaError, match=r"must have a name, got one without .*a\.tfrecord:1"):
        converted([path])
    after, *_ = converted([path], schema_of(n={"dtype": "int64"}))
    assert list(map(values, after)) == [{"n": ("int64_list", (2,))}]


def test_the_content_tells_a_tfrecord(tmp_path):
    data = frame(b"x" * 100)
    for name, content in (
        ("a", data),
        ("b.csv", gzip.compress(data)),
        ("c.txt", zlib.compress(data)),
        ("d.tfrecords", b"?"),
    ):
        (tmp_path / name).write_bytes(content)
        assert sniff(str(tmp_path / name)) == "tfrecord"
    (tmp_path / "e.txt").write_bytes(b"x\x9c is how this text begins")
    assert sniff(str(tmp_path / "e.txt")) == "text"


def test_splits_that_become_one_are_told(tmp_path, capfd):
    (tmp_path / "a.csv").write_text("a\n" + "".join(f"{i}\n" for i in range(40)))
    run(tmp_path, "--split", "train=0.5", "--split", "test=0.5", inputs=[tmp_path / "a.csv"], output="first")
    capfd.readouterr()
    run(tmp_path, inputs=[tmp_path / "first"], output="both")
    assert "splits train, test are read together" in capfd.readouterr().out
    manifest = run(tmp_path, inputs=[f"{tmp_path / 'first'}:test"], output="one")
    assert "read together" not in capfd.readouterr().out
    assert manifest.splits["train"].num_records == 20
