import dataclasses
import json

import pytest
import tensorflow as tf

from tests.helpers import write_dataset, write_shard
from tfpipe import index_read
from tfpipe.cli import main
from tfpipe.config import PipelineConfig
from tfpipe.errors import ManifestError, OutputError, RecordError, SchemaError, ShardError, UsageError
from tfpipe.index import index, parse_split_patterns
from tfpipe.manifest import FILE_NAME, Manifest
from tfpipe.pipeline import make_dataset
from tfpipe.schema import Feature, Schema, read_schema
from tfpipe.tfrecord import ShardReader

LABELLED = Schema(features={"id": Feature(dtype="int64"), "name": Feature(dtype="string", nullable=True)})


def example(**features):
    lists = {}
    for name, values in features.items():
        if isinstance(values[0], int):
            lists[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        elif isinstance(values[0], float):
            lists[name] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
        else:
            lists[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    return tf.train.Example(features=tf.train.Features(feature=lists)).SerializeToString()


def rows(start, stop):
    return [example(id=[i], name=[b"n%d" % i]) for i in range(start, stop)]


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_a_converted_dataset_gets_the_same_shards_and_values_again(tmp_path, compression):
    records = [{"id": i, "name": None if i == 3 else f"n{i}"} for i in range(20)]
    made = write_dataset(tmp_path / "data", LABELLED, records, 3, compression)
    (made.directory / FILE_NAME).unlink()
    manifest = index(made.directory)
    assert manifest.splits == made.splits
    assert manifest.compression == compression
    assert manifest.schema == LABELLED
    assert manifest.statistics["id"] == {"nulls": 0, "min": 0, "max": 19, "mean": 9.5}
    assert manifest.statistics["name"]["nulls"] == 1
    assert manifest.verify() == []


def test_names_and_order_stay_and_every_record_trains(tmp_path):
    for name, (start, stop) in {
        "part-10.tfrecord": (7, 9),
        "part-2.tfrecord": (0, 7),
        "my_eval.tfrecord-00000-of-00001": (9, 12),
    }.items():
        write_shard(tmp_path / name, rows(start, stop), "")
    manifest = index(tmp_path)
    assert {name: [s.name for s in split.shards] for name, split in manifest.splits.items()} == {
        "train": ["part-2.tfrecord", "part-10.tfrecord"],
        "eval": ["my_eval.tfrecord-00000-of-00001"],
    }
    dataset = make_dataset(manifest, PipelineConfig(per_worker_batch_size=4))
    found = sorted(int(i) for batch in dataset for i in batch["id"])
    assert found == list(range(9))


def test_lists_floats_and_bytes_become_features_that_take_every_record(tmp_path):
    payloads = [
        example(fixed=[1.5, float("nan")], ragged=[1], blob=[b"\xff\xfe"], big=[-(2**63)]),
        example(fixed=[2.5, float("inf")], ragged=[1, 300], blob=[b"\xff\xff\xff"], big=[2**63 - 1]),
    ]
    write_shard(tmp_path / "a.tfrecord", payloads, "")
    manifest = index(tmp_path)
    assert {name: (f.dtype, f.shape) for name, f in manifest.schema.features.items()} == {
        "fixed": ("float32", (2,)),
        "ragged": ("int64", (None,)),
        "blob": ("bytes", ()),
        "big": ("int64", ()),
    }
    assert manifest.statistics["fixed"] == {
        "nulls": 0, "min": 1.5, "max": 2.5, "mean": 2.0, "nan": 1, "infinite": 1
    }  # fmt: skip
    assert manifest.statistics["big"]["min"] == -(2**63)
    assert manifest.statistics["big"]["max"] == 2**63 - 1


def test_patterns_choose_splits_and_what_is_left_out_is_said(tmp_path):
    write_shard(tmp_path / "a.tfrecord", rows(0, 2), "")
    write_shard(tmp_path / "b.tfrecord", rows(2, 3), "")
    write_shard(tmp_path / "c.tfrecord", rows(3, 4), "")
    (tmp_path / "empty.tfrecord").write_bytes(b"")
    (tmp_path / "README.md").write_text("# data")
    notices = []
    patterns = parse_split_patterns(["test=b*", "train=a*", "train=*.md", "train=empty*"])
    manifest = index(tmp_path, split_patterns=patterns, on_notice=notices.append)
    assert {name: split.num_records for name, split in manifest.splits.items()} == {"train": 2, "test": 1}
    said = "\n".join(notices)
    for text in ("no --split matches: c.tfrecord", "without records: empty.tfrecord", "1 .md"):
        assert text in said
    with pytest.raises(UsageError, match="must match a file"):
        index(tmp_path, split_patterns=[("test", "nope*")], overwrite=True)
    for text in ("test", "=x", "test=", "test=a/b", "../x=*"):
        with pytest.raises(UsageError, match="NAME=GLOB"):
            parse_split_patterns([text])


def test_a_declared_schema_is_checked_against_every_record(tmp_path):
    write_shard(tmp_path / "a.tfrecord", [example(x=[b"\0" * 4], y=[1]), example(x=[b"\1" * 4])], "")
    pixels = Feature(dtype="uint8", shape=(2, 2))
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(Schema(features={"x": pixels}).to_json()))
    notices = []
    manifest = index(tmp_path, schema=read_schema(schema), on_notice=notices.append)
    assert manifest.schema.features == {"x": pixels}
    assert "not in the declared schema: y" in "\n".join(notices)
    for feature, text in (
        ({"x": Feature(dtype="uint8", shape=(5,))}, "must have 5 bytes, got 4 in .*a.tfrecord: record 0"),
        ({"y": Feature(dtype="int64")}, "must be nullable, got 1 of 2 records without it"),
        ({"y": Feature(dtype="float32", nullable=True)}, "int64_list, got float_list"),
        ({"z": Feature(dtype="int64")}, "must have a value in a record, got none; the records have x, y"),
    ):
        with pytest.raises(SchemaError, match=text):
            index(tmp_path, schema=Schema(features=feature), overwrite=True)


def test_damage_is_named_by_file_and_record_and_leaves_no_manifest(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_shard(path, rows(0, 5), "")
    whole = path.read_bytes()
    for data, text in ((whole[:-3], "record 4"), (whole[:-9] + b"X" + whole[-8:], "record 4")):
        path.write_bytes(data)
        with pytest.raises(ShardError, match=text):
            index(tmp_path)
    path.write_bytes(b"not TFRecords at all")
    with pytest.raises(ShardError, match="must begin with a TFRecord"):
        index(tmp_path)
    write_shard(path, [*rows(0, 2), b"\xff\xff"], "")
    with pytest.raises(RecordError, match=r"a\.tfrecord: record 2"):
        index(tmp_path)
    write_shard(path, [example(a=[1]), example(a=[1.0])], "")
    with pytest.raises(SchemaError, match=r"int64_list .*record 0.* float_list .*record 1"):
        index(tmp_path)
    write_shard(tmp_path / "b.tfrecord.gz", rows(0, 1), "GZIP")
    with pytest.raises(ManifestError, match="one compression"):
        index(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tfrecord", "b.tfrecord.gz"]


def test_a_manifest_or_an_unfinished_conversion_is_refused(tmp_path):
    made = write_dataset(tmp_path / "data", LABELLED, [{"id": 1}], 1)
    before = (made.directory / FILE_NAME).read_bytes()
    with pytest.raises(ManifestError, match="--overwrite"):
        index(made.directory)
    assert (made.directory / FILE_NAME).read_bytes() == before
    index(made.directory, overwrite=True)
    assert Manifest.load(made.directory).statistics["id"] == {"nulls": 0, "min": 1, "max": 1, "mean": 1.0}
    (made.directory / ".staging-x").mkdir()
    with pytest.raises(ManifestError, match="did not finish"):
        index(made.directory, overwrite=True)
    with pytest.raises(ManifestError, match="must exist"):
        index(tmp_path / "nope")
    (tmp_path / "none").mkdir()
    with pytest.raises(ManifestError, match="must hold TFRecord files"):
        index(tmp_path / "none")


def test_a_manifest_of_foreign_names_can_not_lead_out_of_its_directory(tmp_path):
    write_shard(tmp_path / "a.tfrecord", rows(0, 2), "")
    index(tmp_path)
    text = (tmp_path / FILE_NAME).read_text()
    for name in ("../a.tfrecord", "..", "", "/etc/passwd"):
        (tmp_path / FILE_NAME).write_text(text.replace('"a.tfrecord"', json.dumps(name)))
        with pytest.raises(ManifestError, match="must be named a file in the directory"):
            Manifest.load(tmp_path)


def test_the_command_ends_with_what_it_counted(tmp_path, capsys):
    write_shard(tmp_path / "train.tfrecord", rows(0, 4), "")
    result = tmp_path / "out.json"
    assert main(["index", str(tmp_path), "--json", str(result)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"indexed 4 records in 1 shards in {tmp_path}"
    assert json.loads(result.read_text())["splits"]["train"]["num_records"] == 4
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["index", str(tmp_path)]) == 1
    assert main(["index", str(tmp_path), "--split", "x", "--overwrite"]) == 2
    assert main(["index", str(tmp_path), "--schema", str(tmp_path / "no.json"), "--overwrite"]) == 2


def test_an_unwritable_manifest_is_a_message(tmp_path, monkeypatch):
    write_shard(tmp_path / "a.tfrecord", rows(0, 1), "")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tfpipe.manifest.os.replace", full)
    with pytest.raises(OutputError, match="No space left"):
        index(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.tfrecord"]


LABELS = Schema(features={
    "image": Feature(dtype="uint8", shape=(2, 2)),
    "label": Feature(dtype="int64", labels=("cat", "dog")),
    "note": Feature(dtype="string", nullable=True),
    "at": Feature(dtype="int64"),
})  # fmt: skip


def labelled(directory):
    """A converted dataset, of which no record has a note."""
    rows = [{"image": [[i, 0], [0, 0]], "label": i % 2, "at": i} for i in range(6)]
    made = write_dataset(directory, LABELS, {"train": rows[:4], "test": rows[4:]}, 2)
    made = dataclasses.replace(
        made, statistics={"at": {"unit": "ms"}}, source={"format": "csv"}, shuffle_seed=7, num_rejected=3
    )
    made.save(directory)
    return made


def test_what_only_the_old_manifest_knew_stays(tmp_path):
    made = labelled(tmp_path)
    notices = []
    again = index(tmp_path, overwrite=True, on_notice=notices.append)
    assert dataclasses.replace(again, statistics={}) == dataclasses.replace(made, statistics={})
    assert again.statistics["at"] == {"nulls": 0, "min": 0, "max": 5, "mean": 2.5, "unit": "ms"}
    assert again.statistics["note"] == {"nulls": 6}
    assert any(
        "kept of the manifest that was there" in text and "schema, source, seed" in text for text in notices
    )
    assert index(tmp_path, overwrite=True) == again


def test_new_shards_have_no_seed_but_the_old_schema(tmp_path):
    made = labelled(tmp_path)
    path = tmp_path / made.splits["train"].shards[0].name
    extra = example(image=[b"abcd"], label=[1], at=[9], more=[1])
    write_shard(path, [*ShardReader(path, "GZIP"), extra])
    notices = []
    again = index(tmp_path, overwrite=True, on_notice=notices.append)
    assert again.schema == LABELS and again.statistics["at"]["unit"] == "ms"
    assert again.shuffle_seed is None and again.source["format"] == "index" and again.num_rejected == 0
    assert any("still holds: schema;" in text for text in notices)
    assert any("left out, since not in the declared schema: more" in text for text in notices)


@pytest.mark.parametrize("record, said", [
    ({"image": [b"abcd"], "label": [2], "at": [1]}, "'label' must count its 2 labels from 0, got 0 to 2"),
    ({"image": [b"abc"], "label": [1], "at": [1]}, "'image' must have 4 bytes, got 3"),
    ({"image": [b"abcd"], "label": [1]}, "'at' must be nullable, got 1 of 7 records without it"),
    ({"image": [b"abcd"], "label": [1], "at": [1], "note": [1]}, "'note' must have the encoding of its lists"),
])  # fmt: skip
def test_an_old_schema_that_fits_no_more_is_not_kept(tmp_path, record, said):
    made = labelled(tmp_path)
    path = tmp_path / made.splits["train"].shards[0].name
    write_shard(path, [*ShardReader(path, "GZIP"), example(**record)])
    notices = []
    again = index(tmp_path, overwrite=True, on_notice=notices.append)
    assert (
        again.schema.features["image"].encoding == "bytes_list"
        and again.schema.features["label"].labels is None
    )
    assert any("fits no more" in text and said in text for text in notices), notices


def test_a_declared_schema_goes_before_the_old_one(tmp_path):
    labelled(tmp_path)
    declared = Schema(features={"label": Feature(dtype="int64")})
    again = index(tmp_path, schema=declared, overwrite=True)
    assert again.schema == declared and again.shuffle_seed == 7


def test_an_old_manifest_that_can_not_be_read_is_replaced_with_a_word(tmp_path):
    labelled(tmp_path)
    (tmp_path / FILE_NAME).write_text("{")
    notices = []
    assert index(tmp_path, overwrite=True, on_notice=notices.append).schema.features["image"].shape == ()
    assert any("nothing was kept" in text and "must be JSON" in text for text in notices)


def test_the_same_manifest_for_any_number_of_processes(tmp_path, monkeypatch):
    for name in "abc":
        (tmp_path / name).mkdir()
        for i in range(5):
            payloads = [example(x=[j / 7], y=[b"t"]) for j in range(i * 100, i * 150 + 10)]
            write_shard(tmp_path / name / f"{i}.tfrecord", payloads, "")
    monkeypatch.setattr(index_read, "_BYTES_OF_A_PROCESS", 1)
    seen = []
    one = index(tmp_path / "a")
    two = index(tmp_path / "b", num_processes=2, on_progress=lambda *told: seen.append(told))
    assert dataclasses.replace(two, directory=one.directory) == one
    assert [done for _, done, total in seen] == [0, 1, 2, 3, 4, 5]
    path = tmp_path / "c" / "3.tfrecord"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ShardError, match=r"damage at record 159 .*3\.tfrecord"):
        index(tmp_path / "c", num_processes=2)
    assert main(["index", str(tmp_path / "c"), "--processes", "0"]) == 2
