import json
import shutil

import pytest

from tests.helpers import write_dataset
from tfpipe.errors import ManifestError, SchemaError, ShardError
from tfpipe.manifest import FILE_NAME, Manifest, shard_name
from tfpipe.schema import Feature, Schema

SCHEMA = Schema(features={"id": Feature(dtype="int64")})


@pytest.fixture
def dataset(tmp_path):
    records = {"train": [{"id": i} for i in range(10)], "test": [{"id": 100}, {"id": 101}]}
    return write_dataset(tmp_path / "data", SCHEMA, records, 2)


def edit(manifest, change) -> None:
    path = manifest.directory / FILE_NAME
    obj = json.loads(path.read_text())
    change(obj)
    path.write_text(json.dumps(obj))


def test_round_trip_and_stable_bytes(dataset, tmp_path):
    before = (dataset.directory / FILE_NAME).read_bytes()
    loaded = Manifest.load(dataset.directory)
    assert loaded == dataset == Manifest.load(dataset.directory / FILE_NAME)
    loaded.save(dataset.directory)
    assert (dataset.directory / FILE_NAME).read_bytes() == before
    assert [p.name for p in dataset.directory.glob(".manifest-*")] == []
    assert loaded.splits["train"].num_records == 10 and loaded.splits["test"].num_records == 2
    assert loaded.splits["train"].shards[1].name == shard_name("train", 1, 2, "GZIP")
    assert loaded.splits["train"].num_bytes == sum(s.num_bytes for s in loaded.splits["train"].shards)
    assert loaded.verify() == []


def test_a_failed_save_leaves_nothing_behind(dataset, monkeypatch):
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    before = sorted(p.name for p in dataset.directory.iterdir())
    with pytest.raises(OSError, match="full"):
        dataset.save(dataset.directory)
    assert sorted(p.name for p in dataset.directory.iterdir()) == before


def test_without_a_manifest_the_message_says_what_is_there(dataset, tmp_path):
    with pytest.raises(ManifestError, match=r"must exist, got none \(.*nope\)"):
        Manifest.load(tmp_path / "nope")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ManifestError, match="got a file"):
        Manifest.load(tmp_path / "file")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ManifestError, match=r"got an empty directory.*Convert it with beam_jobs"):
        Manifest.load(empty)
    (empty / "a.csv").write_text("x")
    with pytest.raises(ManifestError, match=r"got a.csv \("):
        Manifest.load(empty)
    (dataset.directory / FILE_NAME).unlink()
    (dataset.directory / ".staging-1").mkdir()
    with pytest.raises(ManifestError, match=r"got 5 other files .*\.staging-1.*did not finish: run it again"):
        Manifest.load(dataset.directory)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda o: o.update(format_version=2), ManifestError, '"format_version" must be 1, got 2'),
        (lambda o: o.update(format="x"), ManifestError, "must be \"tfpipe-dataset\", got 'x'"),
        (lambda o: o.update(compression="zstd"), ManifestError, "got 'zstd'"),
        (lambda o: o.update(splits={}), ManifestError, "at least one split, got none"),
        (lambda o: o.pop("rejected"), ManifestError, "KeyError: 'rejected'"),
        (lambda o: o.update(schema=3), SchemaError, "got 3"),
        (lambda o: o["splits"]["train"].update(num_records=9), ManifestError, "sum 10, got 9"),
        (lambda o: o["splits"]["train"]["shards"].reverse(), ManifestError, "shard 0 of split 'train'"),
        (lambda o: o["splits"]["train"]["shards"][0].update(num_records=-1), ManifestError, "got -1"),
        (lambda o: o["splits"]["train"]["shards"][0].update(name="../x"), ManifestError, "got '../x'"),
    ],
)
def test_a_malformed_manifest_says_what_is_wrong_and_where(dataset, change, error, message):
    edit(dataset, change)
    with pytest.raises(error, match=message) as caught:
        Manifest.load(dataset.directory)
    assert FILE_NAME in str(caught.value)


def test_text_that_is_no_json(dataset):
    (dataset.directory / FILE_NAME).write_text("{")
    with pytest.raises(ManifestError, match=r"must be JSON, got .*manifest\.json"):
        Manifest.load(dataset.directory)


def test_missing_and_resized_shards(dataset):
    path = dataset.directory / dataset.splits["train"].shards[1].name
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ShardError, match=rf"must have the \d+ bytes.*got \d+ \(.*{path.name}\)\. Restore"):
        Manifest.load(dataset.directory)
    path.unlink()
    with pytest.raises(ShardError, match=rf"No such file.*{path.name}.*Restore"):
        Manifest.load(dataset.directory)
    faults = Manifest.load(dataset.directory, check_files=False).verify()
    assert len(faults) == 1 and path.name in faults[0]


def test_verify_finds_what_the_size_does_not_show(dataset):
    first, second = [dataset.directory / shard.name for shard in dataset.splits["train"].shards]
    data = bytearray(first.read_bytes())
    data[-10] ^= 1
    first.write_bytes(data)
    seen = []
    faults = Manifest.load(dataset.directory).verify(seen.append)
    assert len(seen) == 4 and faults and all(first.name in fault for fault in faults)
    shutil.copy(second, first)  # whole, but another shard: the SHA-256 tells
    faults = Manifest.load(dataset.directory, check_files=False).verify()
    assert any("sha256 must be" in fault for fault in faults)


def test_verify_names_a_compression_that_is_not_the_manifests(dataset):
    def call_it_plain(obj):
        obj["compression"] = ""
        for split in obj["splits"].values():
            for shard in split["shards"]:
                path = dataset.directory / shard["name"]
                shard["name"] = shard["name"].removesuffix(".gz")
                path.rename(dataset.directory / shard["name"])

    edit(dataset, call_it_plain)
    faults = Manifest.load(dataset.directory).verify()
    assert len(faults) == 4 and all("got GZIP compression where none was expected" in f for f in faults)


def test_only_listed_files_are_read_and_others_are_named(dataset, tmp_path):
    stale = dataset.directory / "train-00002-of-00004.tfrecord.gz"
    sibling = dataset.directory / "train-aug-00000-of-00002.tfrecord.gz"
    for path in (stale, sibling):
        shutil.copy(dataset.directory / dataset.splits["train"].shards[0].name, path)
    loaded = Manifest.load(dataset.directory)
    assert loaded.unlisted_files() == [stale.name, sibling.name]
    assert not {stale.name, sibling.name} & {path.rsplit("/", 1)[1] for path in loaded.paths("train")}


def test_a_split_that_is_not_there(dataset):
    with pytest.raises(ManifestError, match="split must be one of test, train, got 'val'"):
        dataset.split("val")
