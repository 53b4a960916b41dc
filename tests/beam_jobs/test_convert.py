"""The command line end to end: options, other sources' types, faults at each step, real processes."""

from __future__ import annotations

import datetime
import decimal
import errno
import gzip
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from beam_jobs import convert, run, write
from beam_jobs.sources import idx, parquet
from tests.helpers import REPOSITORY
from tfpipe.manifest import Manifest
from tfpipe.tfrecord import ShardReader

tf = pytest.importorskip("tensorflow")
IN_MEMORY = ["--direct_running_mode", "in_memory"]


def call(tmp_path, source, *options):
    return convert.main(["--input", str(source), "--output", str(tmp_path / "out"), *options, *IN_MEMORY])


def converted(tmp_path, source, *options):
    assert call(tmp_path, source, *options) == 0
    manifest = Manifest.load(tmp_path / "out")
    assert manifest.verify() == []
    assert sorted(os.listdir(tmp_path / "out")) == sorted(
        ["manifest.json", *(shard.name for split in manifest.splits.values() for shard in split.shards)]
    )
    return manifest


def examples(manifest, split="train"):
    return [
        tf.train.Example.FromString(bytes(payload)).features.feature
        for path in manifest.paths(split)
        for payload in ShardReader(path, manifest.compression)
    ]


def integers(manifest, name, split="train"):
    return [example[name].int64_list.value[0] for example in examples(manifest, split)]


def numbers_csv(path, rows):
    path.write_text("a,b\n" + "".join(f"{i},{i * 0.5}\n" for i in range(rows)))
    return path


# Options ---------------------------------------------------------------------------------------


def test_what_is_converted_is_what_a_pipeline_trains_on(tmp_path):
    import tfpipe

    rows = ["id,x,name", "1,0.5,a", "2,,b", "3,2.5,"]
    (tmp_path / "a.csv").write_text("\n".join(rows) + "\n")
    manifest = converted(tmp_path, tmp_path / "a.csv")
    config = tfpipe.PipelineConfig(per_worker_batch_size=2)
    found = {}
    for batch in tfpipe.make_dataset(manifest, config):
        batch = {name: np.asarray(value) for name, value in batch.items()}
        for i, key in enumerate(batch["id"].tolist()):
            assert key not in found
            present = bool(batch["x_present"][i]), bool(batch["name_present"][i])
            found[key] = (*present, float(batch["x"][i]), batch["name"][i])
    assert found[1] == (True, True, 0.5, b"a")
    assert found[2][:2] == (False, True) and found[2][3] == b"b"
    assert found[3][:3] == (True, False, 2.5)
    assert len(found) == 3


def test_a_rerun_gives_the_same_bytes_and_another_seed_the_same_records(tmp_path):
    source = numbers_csv(tmp_path / "a.csv", 5000)
    contents = []
    for name, seed in (("first", "3"), ("again", "3"), ("other", "4")):
        (tmp_path / name).mkdir()
        manifest = converted(tmp_path / name, source, "--seed", seed)
        assert sorted(integers(manifest, "a")) == list(range(5000))
        contents.append({path.name: path.read_bytes() for path in (tmp_path / name / "out").iterdir()})
    assert contents[0] == contents[1]
    assert contents[0].keys() == contents[2].keys()
    assert all(contents[0][name] != contents[2][name] for name in contents[0])


def test_unshuffled_splits_keep_the_order_of_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr("beam_jobs.sources.csv.SPLIT_BYTES", 2000)
    source = numbers_csv(tmp_path / "a.csv", 3000)
    options = ["--no-shuffle", "--split", "train=0.7", "--split", "val=0.3", "--num-shards", "5"]
    manifest = converted(tmp_path, source, *options)
    train, val = integers(manifest, "a"), integers(manifest, "a", "val")
    assert (len(train), len(val)) == (2100, 900)
    assert train == sorted(train) and val == sorted(val)
    assert sorted(train + val) == list(range(3000))
    assert val != list(range(2100, 3000))  # drawn from everywhere
    assert manifest.shuffle_seed is None


def test_no_shuffle_with_one_split_is_the_source(tmp_path):
    manifest = converted(tmp_path, numbers_csv(tmp_path / "a.csv", 1000), "--no-shuffle")
    assert integers(manifest, "a") == list(range(1000))


def test_shards_may_be_cut_by_size_and_into_parts_that_fit_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("beam_jobs.plan.BUCKET_BYTES", 1000)
    source = numbers_csv(tmp_path / "a.csv", 4000)
    manifest = converted(tmp_path, source, "--shard-bytes", "20kB", "--compression", "none")
    sizes = [shard.num_bytes for shard in manifest.splits["train"].shards]
    assert len(sizes) > 5 and max(sizes) <= 20_000
    assert sorted(integers(manifest, "a")) == list(range(4000))


@pytest.mark.parametrize("level", ["0", "3", "9"])
def test_every_compression_level_is_read_by_tensorflow(tmp_path, level):
    source = numbers_csv(tmp_path / "a.csv", 500)
    options = ["--compression", "gzip", "--compression-level", level, "--num-shards", "2"]
    manifest = converted(tmp_path, source, *options)
    assert sum(1 for _ in tf.data.TFRecordDataset(manifest.paths("train"), "GZIP")) == 500


def test_what_does_not_compress_stays_as_it_is(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (200, 500), np.uint8)
    head = struct.pack(">4B2I", 0, 0, 8, 2, *noise.shape)
    (tmp_path / "noise.idx").write_bytes(head + noise.tobytes())
    assert converted(tmp_path, tmp_path / "noise.idx").compression == ""


def test_a_directory_is_walked_and_what_is_left_out_is_told(tmp_path, capfd):
    for name, text in {"a.CSV": "x\n1\n", "sub/b.csv": "x\n2\n", ".hidden.csv": "x\n3\n", "notes.md": "#", ".git/c.csv": "x\n4\n"}.items():  # fmt: skip
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    manifest = converted(tmp_path, tmp_path / "in")
    assert sorted(integers(manifest, "x")) == [1, 2]
    assert "1 .md" in capfd.readouterr().out
    assert manifest.source["ignored_files"][".md"] == 1


@pytest.mark.parametrize(
    "options, said",
    [
        (["--seed", "x"], "invalid int"),
        (["--num-shards", "3", "--shard-bytes", "1MiB"], "not allowed with"),
        (["--shard-bytes", "12 parsecs"], "12 parsecs"),
        (["--shard-bytes", "0"], "at least 1"),
        (["--compression", "bz2"], "bz2"),
        (["--compression-level", "10"], "at most 9"),
        (["--format", "orc"], "orc"),
        (["--split", "train=0.5", "--split", "train=0.5"], "each name once"),
        (["--split", "../x=1"], "../x=1"),
        (["--split", "a=0.999", "--split", "b=0.001"], "at least one record"),
        (["--pack", "p=a..b"], "'a..b'"),
        (["--pack", "p=a,a"], "twice"),
        (["--pack", "p=a", "--pack", "q=a"], "packed once"),
        (["--pack", "b=a"], "new name"),
        (["--runner", "InteractiveRunner"], "InteractiveRunner"),
        (["--schema", "missing.json"], "missing.json"),
        (["--json", "missing/summary.json"], "missing/summary.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_end_with_2_and_make_nothing(tmp_path, capfd, options, said):
    source = numbers_csv(tmp_path / "a.csv", 20)
    try:
        assert call(tmp_path, source, *options) == 2
    except SystemExit as error:  # argparse's own
        assert error.code == 2
    err = capfd.readouterr().err
    assert said in err and "Traceback" not in err
    assert os.listdir(tmp_path) == ["a.csv"]


def test_a_wrong_format_is_said_with_what_the_file_begins_with(tmp_path, capfd):
    source = numbers_csv(tmp_path / "a.csv", 20)
    assert call(tmp_path, source, "--format", "avro") == 1
    err = capfd.readouterr().err
    assert "a beginning other than Avro's" in err and "a.csv" in err and "--format" in err


def test_files_of_several_formats_are_no_dataset(tmp_path, capfd):
    numbers_csv(tmp_path / "a.csv", 3)
    pq.write_table(pa.table({"a": [1], "b": [0.5]}), tmp_path / "b.parquet")
    assert call(tmp_path, tmp_path) == 2
    err = capfd.readouterr().err
    assert "a.csv" in err and "b.parquet" in err


# Parquet and IDX -------------------------------------------------------------------------------

D = decimal.Decimal
KINDS = {
    "date": (pa.array([datetime.date(1970, 1, 3), None, datetime.date(1969, 12, 31)]), [2, None, -1], "day"),
    "seconds": (pa.array([1, None, -1], pa.timestamp("s")), [1000, None, -1000], "ms"),
    "nanoseconds": (pa.array([2**62 + 1, None, -1], pa.timestamp("ns", "Asia/Tokyo")), [2**62 + 1, None, -1], "ns"),
    "time": (pa.array([datetime.time(1, 2, 3), None, datetime.time()], pa.time32("ms")), [3_723_000, None, 0], "ms"),
    "duration": (pa.array([7, None, -7], pa.duration("us")), [7, None, -7], "us"),
    "uint32": (pa.array([2**32 - 1, None, 0], pa.uint32()), [2**32 - 1, None, 0], None),
    "dictionary of int": (pa.array([2**53 + 1, None, 5]).dictionary_encode(), [2**53 + 1, None, 5], None),
    "small decimal": (pa.array([D("0.0000001"), None, D("-1.5000000")], pa.decimal128(30, 7)), [D("1E-7"), None, D("-1.5")], None),
    "wide decimal": (pa.array([D(10) ** 60 + 1, None, D(0)], pa.decimal256(70, 0)), [D(10) ** 60 + 1, None, D(0)], None),
    "large text": (pa.array(["é", None, ""], pa.large_string()), ["é", None, ""], None),
    "fixed binary": (pa.array([b"ab", None, b"\0\xff"], pa.binary(2)), [b"ab", None, b"\0\xff"], None),
    "half": (pa.array(np.array([0.5, 0, -2], np.float16), mask=np.array([False, True, False])), [0.5, None, -2.0], None),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_parquet_types_lose_nothing(tmp_path, kind):
    array, values, unit = KINDS[kind]
    pq.write_table(pa.table({"x": array, "n": range(len(array))}), tmp_path / "a.parquet")
    manifest = converted(tmp_path, tmp_path / "a.parquet", "--no-shuffle", "--num-shards", "1")
    found = []
    for example in examples(manifest):
        if "x" not in example:
            found.append(None)
            continue
        feature = example["x"]
        (value,) = getattr(feature, feature.WhichOneof("kind")).value
        found.append(value)
    if isinstance(values[0], (D, str)):
        found = [value if value is None else type(values[0])(value.decode()) for value in found]
    assert found == values
    assert manifest.schema.features["x"].nullable and not manifest.schema.features["n"].nullable
    assert manifest.statistics["x"].get("unit") == unit
    assert manifest.statistics["x"]["nulls"] == 1


def test_parquet_columns_are_packed_and_counted_over_row_groups(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(parquet, "SPLIT_BYTES", 100)
    table = pa.table({"p0": range(100), "p1": range(100, 200), "y": [i % 3 for i in range(100)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    manifest = converted(tmp_path, tmp_path / "a.parquet", "--pack", "x=p0..p1", "--no-shuffle")
    rows = [np.frombuffer(e["x"].bytes_list.value[0], np.uint8).tolist() for e in examples(manifest)]
    assert rows == [[i, i + 100] for i in range(100)]

    for name, values, said in (
        ("null", [1] * 50 + [None], "got null"),
        ("text", ["a"] * 51, "'p1' (string)"),
    ):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"p0": range(51), "p1": values}), path, row_group_size=7)
        arguments = ["--input", str(path), "--output", str(tmp_path / name), "--pack", "x=p0..p1", *IN_MEMORY]
        assert convert.main(arguments) == (1 if name == "null" else 2)
        err = capfd.readouterr().err
        assert said in err and "'p1'" in err
        assert name == "text" or f"{path}:51" in err
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    "dtype, values, said",
    [
        ("int8", [1, 2, 128], "128"),
        ("uint8", [1, 2, -1], "-1"),
        ("float32", [1.0, 2.0, 1e39], "1e+39"),
        ("int64", [1.0, 2.0, 2.5], "2.5"),
        ("float64", [1, 2, 2**53 + 1], str(2**53 + 1)),
        ("string", [1.5, 2.5, 3.5], "float64"),
    ],
)
def test_a_parquet_value_that_the_schema_cannot_hold_is_named(tmp_path, capfd, dtype, values, said):
    pq.write_table(pa.table({"x": values}), tmp_path / "a.parquet", row_group_size=2)
    (tmp_path / "s.json").write_text(json.dumps({"features": {"x": {"dtype": dtype}}}))
    assert call(tmp_path, tmp_path / "a.parquet", "--schema", str(tmp_path / "s.json")) == 1
    err = capfd.readouterr().err
    row = 1 if dtype == "string" else 3
    assert f"column 'x' must hold {dtype}" in err and said in err and f"a.parquet:{row})" in err
    assert not (tmp_path / "out").exists()


def test_a_parquet_file_damaged_within_is_told_and_not_published(tmp_path, capfd):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": np.random.default_rng(0).random(20_000)}), path)
    data = bytearray(path.read_bytes())
    data[4:60] = b"\xff" * 56  # the first page's header
    path.write_bytes(data)
    assert call(tmp_path, path) == 1
    err = capfd.readouterr().err
    assert "Parquet" in err and str(path) in err and "Traceback" not in err
    assert os.listdir(tmp_path) == ["a.parquet"]


def test_a_parquet_file_without_rows_is_no_dataset(tmp_path, capfd):
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    assert call(tmp_path, tmp_path / "a.parquet") == 1
    assert "at least one record" in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["a.parquet"]


def idx_bytes(array):
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def test_a_truncated_gzipped_idx_pair_is_told_and_not_published(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(idx, "BATCH_BYTES", 1000)
    images = np.random.default_rng(0).integers(0, 256, (100, 8, 8), np.uint8)
    name = "t-images-idx3-ubyte.gz"
    (tmp_path / name).write_bytes(gzip.compress(idx_bytes(images))[:-500])
    (tmp_path / "t-labels-idx1-ubyte.gz").write_bytes(
        gzip.compress(idx_bytes(np.arange(100, dtype=np.uint8)))
    )
    assert call(tmp_path, tmp_path / "t-*") == 1
    err = capfd.readouterr().err
    assert name in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_images_of_one_set_and_labels_of_another_are_no_pair(tmp_path, capfd):
    (tmp_path / "a-images-idx3-ubyte").write_bytes(idx_bytes(np.zeros((3, 2, 2), np.uint8)))
    (tmp_path / "b-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(3, np.uint8)))
    assert call(tmp_path, tmp_path / "*-ubyte") == 1
    err = capfd.readouterr().err
    assert "same features" in err and "a-images" in err and "b-labels" in err


# Faults on the way -----------------------------------------------------------------------------


def fails_clean(tmp_path, capfd, *said, exit_code=1):
    """Converts a good file while something fails; nothing must be left but the source."""
    source = numbers_csv(tmp_path / "a.csv", 200)
    content = source.read_bytes()
    assert call(tmp_path, source) == exit_code
    err = capfd.readouterr().err
    for text in said:
        assert text in err
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == ["a.csv"]
    assert source.read_bytes() == content


def test_a_shard_that_the_disk_altered_is_noticed(tmp_path, capfd, monkeypatch):
    def flip(path, shard, compression):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        verify(path, shard, compression)

    verify = write.verify_shard
    monkeypatch.setattr(write, "verify_shard", flip)
    fails_clean(tmp_path, capfd, "train-0")


def test_a_full_disk_while_writing_is_told(tmp_path, capfd, monkeypatch):
    def full(file, digest, chunk):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)

    monkeypatch.setattr(write, "_put", full)
    fails_clean(tmp_path, capfd, "No space left on device")


def test_a_full_disk_while_committing_is_told(tmp_path, capfd, monkeypatch):
    def full(source, target):
        if Path(target) == tmp_path / "out" / "manifest.json":
            assert any(path.name.startswith("train-") for path in (tmp_path / "out").iterdir())
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "manifest.json")
        replace(source, target)

    replace = os.replace
    monkeypatch.setattr(os, "replace", full)
    fails_clean(tmp_path, capfd, "No space left on device", "manifest.json")


def test_a_fault_of_ours_in_a_worker_is_told_with_its_log(tmp_path, capfd, monkeypatch):
    def broken(*_):
        raise TypeError("broken on purpose")

    monkeypatch.setattr(write, "encode_batch", broken)
    source = numbers_csv(tmp_path / "a.csv", 200)
    assert call(tmp_path, source) == 1
    err = capfd.readouterr().err
    assert "TypeError: broken on purpose" in err and "Traceback" not in err
    log = Path(err.rsplit("Details: ", 1)[1].strip())
    assert "in broken" in log.read_text()
    log.unlink()
    assert os.listdir(tmp_path) == ["a.csv"]


def test_a_worker_whose_death_the_runner_waits_out_is_told(tmp_path, capfd, monkeypatch):
    class WaitingRunner(run.FnApiRunner):
        def run_pipeline(self, *_):
            def die():
                raise RuntimeError("Worker subprocess exited with return code -9")

            threading.Thread(target=die, name="run_worker").start()
            threading.Event().wait()

    monkeypatch.setattr(run, "FnApiRunner", WaitingRunner)
    monkeypatch.setattr(run, "DEAD_WORKER_S", 0.3)
    fails_clean(tmp_path, capfd, "exited with return code -9", "Details: ")


@pytest.mark.parametrize("change", ["grow", "remove"])
def test_an_input_that_changes_meanwhile_is_told(tmp_path, capfd, monkeypatch, change):
    source = numbers_csv(tmp_path / "a.csv", 200)

    def verified(path, shard, compression):
        if change == "grow":
            with source.open("a") as file:
                file.write("9,9.5\n")
        else:
            source.unlink(missing_ok=True)

    monkeypatch.setattr(write, "verify_shard", verified)
    assert call(tmp_path, source) == 1
    err = capfd.readouterr().err
    assert str(source) in err and "Traceback" not in err
    assert ("must not change" if change == "grow" else "No such file") in err
    assert not (tmp_path / "out").exists()


def test_a_name_taken_meanwhile_is_left_alone(tmp_path, capfd, monkeypatch):
    source = numbers_csv(tmp_path / "a.csv", 200)
    taken = tmp_path / "out" / "train-00001-of-00002.tfrecord.gz"

    def verified(path, shard, compression):
        taken.mkdir(exist_ok=True)
        (taken / "mine.txt").write_text("keep")

    monkeypatch.setattr(write, "verify_shard", verified)
    assert call(tmp_path, source, "--num-shards", "2", "--compression", "gzip") == 1
    assert str(taken) in capfd.readouterr().err
    assert [path.relative_to(tmp_path / "out") for path in sorted((tmp_path / "out").rglob("*"))] == [
        Path(taken.name),
        Path(taken.name) / "mine.txt",
    ]


@pytest.mark.parametrize("output", ["file", "file/below"])
def test_an_output_that_cannot_be_a_directory_is_refused(tmp_path, capfd, output):
    source = numbers_csv(tmp_path / "a.csv", 3)
    (tmp_path / "file").write_text("mine")
    assert convert.main(["--input", str(source), "--output", str(tmp_path / output), *IN_MEMORY]) == 1
    err = capfd.readouterr().err
    assert "must be a directory" in err and "Traceback" not in err
    assert (tmp_path / "file").read_text() == "mine"


# Real processes --------------------------------------------------------------------------------

NO_TENSORFLOW = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tensorflow", "keras", "tf_keras"):
            import os
            open(os.environ["BLOCKED_LOG"], "a").write(f"tried {name}\\n")
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import os
open(os.environ["BLOCKED_LOG"], "a").write("process\\n")
"""


@pytest.mark.slow
def test_no_process_of_a_conversion_imports_tensorflow_and_the_terminal_stays_clean(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(NO_TENSORFLOW)
    log = tmp_path / "log"
    source = numbers_csv(tmp_path / "a.csv", 20_000)
    command = [sys.executable, "-m", "beam_jobs.convert", "--input", str(source), "--output", str(tmp_path / "out"),
               "--direct_num_workers", "2"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(site), "BLOCKED_LOG": str(log)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert (
        done.stdout.splitlines()[-1] == f"wrote 20000 records in 24 shards to {tmp_path / 'out'} (0 rejected)"
    )
    lines = log.read_text().splitlines()
    assert lines.count("process") >= 3  # the driver and two workers were all watched
    assert set(lines) == {"process"}
    assert sorted(integers(Manifest.load(tmp_path / "out"), "a")) == list(range(20_000))


def processes_of(group):
    """(pid, command line) of the living processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == group and fields[0] != "Z":
                found.append((int(path.name), (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM", "a worker killed"])
def test_a_run_that_is_ended_from_outside_leaves_nothing(tmp_path, how):
    source, output = numbers_csv(tmp_path / "a.csv", 600_000), tmp_path / "out"
    command = [sys.executable, "-m", "beam_jobs.convert", "--input", str(source), "--output", str(output)]
    process = subprocess.Popen(
        [*command, "--direct_num_workers", "2"], cwd=REPOSITORY, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not list(output.glob(".staging-*/done-scan*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        if how == "a worker killed":
            workers = [
                pid
                for pid, line in processes_of(process.pid)
                if line.split()[-1:] and "sdk_worker_main" in line
            ]
            os.kill(workers[-1], signal.SIGKILL)
        else:
            process.send_signal(signal.SIGINT if how == "Ctrl-C" else signal.SIGTERM)
        _, err = process.communicate(timeout=120)
        assert process.returncode == (1 if how == "a worker killed" else 130)
        assert err.count("\n") == 1 and "Traceback" not in err
        assert err == "interrupted\n" or "the pipeline must end with every shard written" in err
        assert os.listdir(tmp_path) == ["a.csv"]
        while processes_of(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes_of(process.pid) == []
    finally:
        for pid, _ in processes_of(process.pid):
            os.kill(pid, signal.SIGKILL)
