"""The output directory: overwritten, resumed, shared, full; whatever happens, never a mixture."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from beam_jobs import convert, output, scan, write
from tests.helpers import REPOSITORY
from tfpipe import index
from tfpipe.errors import ManifestError
from tfpipe.manifest import Manifest
from tfpipe.tfrecord import ShardReader

IN_MEMORY = ["--direct_running_mode", "in_memory"]


@pytest.fixture(autouse=True)
def small_splits(monkeypatch):
    monkeypatch.setattr("beam_jobs.sources.csv.SPLIT_BYTES", 2000)


def numbers_csv(path, rows, first=0):
    path.write_text("a,b\n" + "".join(f"{first + i},{i * 0.5}\n" for i in range(rows)))
    return path


def call(tmp_path, source, *options):
    return convert.main(["--input", str(source), "--output", str(tmp_path / "out"), *options, *IN_MEMORY])


def contents(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def num_records(directory):
    """Counted in the shards that the manifest names."""
    manifest = Manifest.load(directory)
    assert manifest.verify() == []
    return sum(len(list(ShardReader(path, manifest.compression))) for path in manifest.paths("train"))


class Killed(BaseException):
    """Stands for a process that ends without a chance to clean up."""


@pytest.fixture
def kill(monkeypatch):
    """Makes the n-th call of a function end the run as kill -9 would: nothing is cleaned."""

    def arrange(owner, name, number):
        calls = []
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            calls.append(args)
            if len(calls) == number:
                raise Killed
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)
        monkeypatch.setattr(output.OutputDirectory, "_clean", lambda self: os.close(self._handle))

        def after():
            monkeypatch.undo()
            monkeypatch.setattr("beam_jobs.sources.csv.SPLIT_BYTES", 2000)
            return len(calls)

        return after

    return arrange


def killed_call(tmp_path, source, *options):
    # In a worker the runner may turn Killed into an error of its own: then the command says so.
    with contextlib.suppress(Killed):
        assert call(tmp_path, source, *options) == 1


# Overwrite --------------------------------------------------------------------------------------


def test_overwriting_with_fewer_shards_leaves_none_of_the_old(tmp_path):
    first = numbers_csv(tmp_path / "a.csv", 100)
    assert call(tmp_path, first, "--num-shards", "4") == 0
    (tmp_path / "out" / "notes.txt").write_text("mine")
    second = numbers_csv(tmp_path / "b.csv", 10, first=1000)
    assert call(tmp_path, second, "--num-shards", "2", "--overwrite") == 0
    assert num_records(tmp_path / "out") == 10
    names = os.listdir(tmp_path / "out")
    assert sorted(name for name in names if "of-00004" in name or name.startswith(".")) == []
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert len(names) == 4


def test_overwriting_gives_the_bytes_of_a_new_conversion(tmp_path):
    source = numbers_csv(tmp_path / "a.csv", 500)
    (tmp_path / "fresh").mkdir()
    assert call(tmp_path / "fresh", source) == 0
    assert call(tmp_path, numbers_csv(tmp_path / "b.csv", 40)) == 0
    assert call(tmp_path, source, "--overwrite") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh" / "out")
    assert call(tmp_path / "fresh", source, "--overwrite") == 0  # with itself
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh" / "out")


def test_rejected_rows_of_the_old_dataset_go_with_it(tmp_path):
    (tmp_path / "a.csv").write_text("a\n1\n2,3\n4\n")
    assert call(tmp_path, tmp_path / "a.csv", "--on-error", "quarantine", "--max-rejected", "1") == 0
    assert (tmp_path / "out" / "rejected.jsonl").exists()
    assert call(tmp_path, numbers_csv(tmp_path / "b.csv", 10), "--overwrite") == 0
    assert not (tmp_path / "out" / "rejected.jsonl").exists()
    assert num_records(tmp_path / "out") == 10


def test_a_failed_overwrite_leaves_the_old_dataset_as_it_was(tmp_path, capfd):
    assert call(tmp_path, numbers_csv(tmp_path / "a.csv", 100)) == 0
    before = contents(tmp_path / "out")
    (tmp_path / "b.csv").write_text("a,b\n1\n")
    assert call(tmp_path, tmp_path / "b.csv", "--overwrite") == 1
    assert "b.csv:2" in capfd.readouterr().err
    assert contents(tmp_path / "out") == before


def test_the_old_dataset_is_readable_until_the_new_one_is_whole(tmp_path, monkeypatch):
    assert call(tmp_path, numbers_csv(tmp_path / "a.csv", 100)) == 0
    seen = []

    def look(*args):
        seen.append(num_records(tmp_path / "out"))
        return verify(*args)

    verify = write.verify_shard
    monkeypatch.setattr(write, "verify_shard", look)
    assert call(tmp_path, numbers_csv(tmp_path / "b.csv", 50), "--num-shards", "3", "--overwrite") == 0
    assert seen == [100] * 3
    assert num_records(tmp_path / "out") == 50


@pytest.mark.parametrize("mode", ["--overwrite", "--resume"])
def test_what_is_no_dataset_is_not_replaced(tmp_path, capfd, mode):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("keep")
    assert call(tmp_path, numbers_csv(tmp_path / "a.csv", 10), mode) == 1
    err = capfd.readouterr().err
    assert ("a directory without manifest.json" if mode == "--overwrite" else "thesis.tex") in err
    assert "Choose another --output" in err
    assert contents(tmp_path / "out") == {"thesis.tex": b"keep"}


def test_files_that_were_only_indexed_are_not_replaced(tmp_path, capfd):
    source = numbers_csv(tmp_path / "a.csv", 10)
    assert call(tmp_path, source) == 0
    (tmp_path / "out" / "manifest.json").unlink()
    index.index(tmp_path / "out")
    before = contents(tmp_path / "out")
    assert call(tmp_path, source, "--overwrite") == 1
    assert "may be the only copy" in capfd.readouterr().err
    assert contents(tmp_path / "out") == before


def test_the_input_may_not_lie_in_the_output(tmp_path, capfd):
    assert call(tmp_path, numbers_csv(tmp_path / "a.csv", 10)) == 0
    source = numbers_csv(tmp_path / "out" / "b.csv", 10)
    (tmp_path / "link.csv").symlink_to(source)
    assert call(tmp_path, tmp_path / "link.csv", "--overwrite") == 2
    assert "must lie apart from the input" in capfd.readouterr().err
    assert num_records(tmp_path / "out") == 10


@pytest.mark.parametrize("mode", ["--overwrite", "--resume", "--json"])
def test_a_directory_at_work_is_refused(tmp_path, capfd, mode):
    options = [mode] if mode != "--json" else []
    assert call(tmp_path, numbers_csv(tmp_path / "a.csv", 10)) == 0
    before = contents(tmp_path / "out")
    handle = os.open(tmp_path / "out", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert call(tmp_path, tmp_path / "a.csv", *options) == 1
    finally:
        os.close(handle)
    assert "another conversion at work" in capfd.readouterr().err
    assert contents(tmp_path / "out") == before


# Resume -----------------------------------------------------------------------------------------

KILLS = [
    (scan, "mark", 1), (scan, "mark", 3), (scan, "save_rejects", 1), (write, "mark", 1),
    (write, "mark", 4), (write, "write_shard", 1), (write, "write_shard", 5), (write, "verify_shard", 2),
    (output, "save", 2), (output.os, "replace", 36), (output.os, "replace", 40), (output.shutil, "rmtree", 1),
]  # fmt: skip


@pytest.mark.parametrize(
    "old",
    [pytest.param(False, id="new", marks=pytest.mark.slow), pytest.param(True, id="over an old dataset")],
)
@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [
        pytest.param(*kill, id=f"{kill[1]} {kill[2]}", marks=[] if kill in KILLS[-4:] else pytest.mark.slow)
        for kill in KILLS
    ],
)
def test_resuming_ends_in_the_bytes_of_an_undisturbed_run(tmp_path, kill, owner, name, number, old, capfd):
    source = numbers_csv(tmp_path / "a.csv", 600)
    (tmp_path / "whole").mkdir()
    assert call(tmp_path / "whole", source, "--num-shards", "7") == 0
    if old:
        assert call(tmp_path, numbers_csv(tmp_path / "b.csv", 33), "--num-shards", "9") == 0
    after = kill(owner, name, number)
    killed_call(tmp_path, source, "--num-shards", "7", *(["--overwrite"] if old else []))
    assert after() >= number
    try:
        assert num_records(tmp_path / "out") in ((33, 600) if old else (600,))
    except ManifestError:
        assert not (tmp_path / "out" / "manifest.json").exists()
    capfd.readouterr()
    assert call(tmp_path, source, "--num-shards", "7") == 1  # neither goes on nor starts anew unasked
    assert "--resume" in capfd.readouterr().err
    assert call(tmp_path, source, "--num-shards", "7", "--resume") == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("wrote 600 records in 7 shards")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole" / "out")


def test_what_is_done_is_not_done_again(tmp_path, kill, monkeypatch):
    source = numbers_csv(tmp_path / "a.csv", 600)
    after = kill(write, "write_shard", 5)
    killed_call(tmp_path, source, "--num-shards", "7")
    after()
    calls = {"scan": 0, "read": 0, "write_shard": 0}

    def count(owner, name):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    from beam_jobs.sources.csv import CsvSource

    count(CsvSource, "scan")
    count(CsvSource, "read")
    count(write, "write_shard")
    assert call(tmp_path, source, "--num-shards", "7", "--resume") == 0
    assert calls["scan"] == 0 and calls["write_shard"] == 3
    assert calls["read"] <= 2  # the sample that chooses the compression
    assert num_records(tmp_path / "out") == 600


def test_a_piece_that_lost_its_end_is_made_again(tmp_path, kill):
    source = numbers_csv(tmp_path / "a.csv", 600)
    (tmp_path / "whole").mkdir()
    assert call(tmp_path / "whole", source) == 0
    after = kill(write, "write_shard", 1)
    killed_call(tmp_path, source)
    after()
    data = sorted((tmp_path / "out").glob(".staging-*/pieces-*.data"))
    data[0].write_bytes(data[0].read_bytes()[:-7])
    index_file = data[1].with_suffix(".index")
    index_file.write_bytes(b"")
    assert call(tmp_path, source, "--resume") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole" / "out")


@pytest.mark.parametrize("change", ["seed", "input", "no_header", "version"])
def test_another_request_is_not_resumed(tmp_path, kill, capfd, monkeypatch, change):
    source = numbers_csv(tmp_path / "a.csv", 600)
    after = kill(write, "write_shard", 1)
    killed_call(tmp_path, source)
    after()
    before = sorted(path for path in (tmp_path / "out").rglob("*"))
    options = {"seed": ["--seed", "3"], "no_header": ["--no-header"]}.get(change, [])
    if change == "input":
        os.utime(source, ns=(1, 1))
    if change == "version":
        monkeypatch.setattr(convert, "__version__", "9.9")
    assert call(tmp_path, source, *options, "--resume") == 1
    err = capfd.readouterr().err
    said = {"seed": "another seed: 0 then, 3 now", "input": "another input (names, sizes, times)",
            "no_header": "another ", "version": "another version"}  # fmt: skip
    assert said[change] in err and "--overwrite" in err
    assert sorted(path for path in (tmp_path / "out").rglob("*")) == before


def test_resuming_nothing_begins_and_a_finished_dataset_is_said_to_be_one(tmp_path, capfd):
    source = numbers_csv(tmp_path / "a.csv", 60)
    assert call(tmp_path, source, "--resume") == 0
    assert call(tmp_path, source, "--resume") == 1
    assert "a finished dataset" in capfd.readouterr().err
    assert num_records(tmp_path / "out") == 60


def test_a_resumable_run_that_fails_keeps_what_is_done(tmp_path, capfd, monkeypatch):
    source = numbers_csv(tmp_path / "a.csv", 600)

    def full(*_):
        raise OSError(28, os.strerror(28), "disk")

    put = write._put
    monkeypatch.setattr(write, "_put", full)
    assert call(tmp_path, source, "--resume") == 1
    assert "--resume goes on from it" in capfd.readouterr().err
    monkeypatch.setattr(write, "_put", put)
    assert call(tmp_path, source, "--resume") == 0
    assert num_records(tmp_path / "out") == 600
    assert not [name for name in os.listdir(tmp_path / "out") if name.startswith(".")]


@pytest.mark.parametrize("old", [False, True])
def test_a_run_killed_in_its_first_moments_is_resumed(tmp_path, old):
    source = numbers_csv(tmp_path / "a.csv", 60)
    if old:
        assert call(tmp_path, source, "--num-shards", "3") == 0
    (tmp_path / "out" / ".staging-x").mkdir(parents=True)
    assert call(tmp_path, source, "--num-shards", "2", "--resume") == 0
    assert num_records(tmp_path / "out") == 60
    assert len(os.listdir(tmp_path / "out")) == 3


def test_overwriting_a_conversion_that_did_not_finish(tmp_path, kill):
    source = numbers_csv(tmp_path / "a.csv", 600)
    after = kill(output.os, "replace", 70)  # amid the publishing
    killed_call(tmp_path, source)
    after()
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert call(tmp_path, numbers_csv(tmp_path / "b.csv", 20), "--num-shards", "2", "--overwrite") == 0
    assert num_records(tmp_path / "out") == 20
    assert len(os.listdir(tmp_path / "out")) == 3


# Real processes ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_at_random_moments(tmp_path):
    source = tmp_path / "a.csv"
    source.write_text("id,x\n" + "".join(f"{i},{i * 0.25}\n" for i in range(300_000)))
    chance = random.Random(7)

    def command(directory, *options):
        return [sys.executable, "-m", "beam_jobs.convert", "--input", str(source), "--output", str(directory),
                "--num-shards", "5", *options]  # fmt: skip

    def run(directory, *options):
        started = time.monotonic()
        subprocess.run(command(directory, *options), cwd=REPOSITORY, check=True, capture_output=True)
        return time.monotonic() - started

    old = numbers_csv(tmp_path / "b.csv", 50)
    elapsed_s = run(tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    unfinished = 0
    for number in range(20):
        out = tmp_path / f"out-{number}"
        over = number % 2 == 1
        if over:
            assert convert.main(["--input", str(old), "--output", str(out), *IN_MEMORY]) == 0
        workers = ["--direct_num_workers", "2"] if number % 5 == 0 else []  # by itself: in one process
        options = ["--overwrite"] if over else []
        for attempt in range(1 + number % 2):  # some are killed twice
            mode = ["--resume"] if attempt and list(out.glob(".staging-*")) else options
            process = subprocess.Popen(
                command(out, *mode, *workers), cwd=REPOSITORY, start_new_session=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                process.wait(chance.uniform(0.3, 1.1) * elapsed_s)
            except subprocess.TimeoutExpired:
                # The driver alone, so that workers outlive it; or all of them.
                kill = os.kill if number % 3 == 0 else os.killpg
                kill(process.pid, signal.SIGKILL)
                process.wait()
            with contextlib.suppress(ManifestError):
                assert num_records(out) in ((50, 300_000) if over else (300_000,))
        if contents_if_whole(out) != expected:
            unfinished += 1
            # Killed before it claimed the directory, it left nothing to resume.
            run(out, *(["--resume"] if list(out.glob(".staging-*")) else options))
        assert contents_if_whole(out) == expected
        shutil.rmtree(out)
    assert unfinished >= 10


def contents_if_whole(directory):
    if not directory.exists() or not all(path.is_file() for path in directory.iterdir()):
        return None
    return contents(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small tmpfs")
def test_a_disk_that_is_full_is_told_and_the_old_dataset_stays(tmp_path, capfd):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting must be allowed: {mounted.stderr.decode().strip()}")
    try:
        assert call(disk, numbers_csv(tmp_path / "a.csv", 500)) == 0
        before = contents(disk / "out")
        large = tmp_path / "b.csv"
        large.write_text("x\n" + "".join(f"{random.Random(i).random()}\n" for i in range(60_000)))
        assert call(disk, large, "--overwrite") == 1
        err = capfd.readouterr().err
        assert "No space left on device" in err and "Traceback" not in err
        assert re.search(r"files must be|must end with", err)
        assert contents(disk / "out") == before
        assert num_records(disk / "out") == 500
        assert call(disk, large) == 1  # nor is there room beside it
        assert json.loads(before["manifest.json"])["splits"]["train"]["num_records"] == 500
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# What a review found ----------------------------------------------------------------------------


def test_staging_that_lost_how_it_was_begun_is_not_trusted(tmp_path, kill):
    source = numbers_csv(tmp_path / "a.csv", 600)
    after = kill(write, "write_shard", 5)
    killed_call(tmp_path, source, "--num-shards", "7")
    after()
    (begun,) = (tmp_path / "out").glob(".staging-*/begun.json")
    begun.unlink()
    (tmp_path / "whole").mkdir()
    numbers_csv(source, 600, first=1000)
    assert call(tmp_path / "whole", source, "--seed", "1", "--num-shards", "7") == 0
    assert call(tmp_path, source, "--seed", "1", "--num-shards", "7", "--resume") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole" / "out")


def test_an_interrupt_after_the_commit_deletes_nothing(tmp_path, monkeypatch):
    def interrupted(source, target):
        replace(source, target)
        if Path(target) == tmp_path / "out" / "manifest.json":
            raise KeyboardInterrupt

    replace = os.replace
    monkeypatch.setattr(os, "replace", interrupted)
    assert call(tmp_path, numbers_csv(tmp_path / "a.csv", 60)) == 130
    assert num_records(tmp_path / "out") == 60


def test_an_interrupt_as_the_old_manifest_goes_keeps_the_new_dataset(tmp_path, monkeypatch, capfd):
    assert call(tmp_path, numbers_csv(tmp_path / "a.csv", 60)) == 0

    def interrupted(path, *args, **kwargs):
        unlink(path, *args, **kwargs)
        if path == tmp_path / "out" / "manifest.json":
            raise KeyboardInterrupt

    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", interrupted)
    source = numbers_csv(tmp_path / "b.csv", 30)
    assert call(tmp_path, source, "--overwrite") == 130
    monkeypatch.setattr(Path, "unlink", unlink)
    assert "--resume goes on from it" in capfd.readouterr().err
    assert call(tmp_path, source, "--resume") == 0
    assert num_records(tmp_path / "out") == 30


@pytest.mark.parametrize("then", ["succeeds", "fails first"])
def test_overwriting_after_a_killed_publishing_beside_other_files(tmp_path, kill, then):
    source = numbers_csv(tmp_path / "a.csv", 600)
    assert call(tmp_path, source, "--num-shards", "9") == 0
    (tmp_path / "out" / "README").write_text("mine")
    after = kill(output.os, "replace", 36)
    killed_call(tmp_path, source, "--num-shards", "7", "--overwrite")
    after()
    assert not (tmp_path / "out" / "manifest.json").exists()
    if then == "fails first":
        (tmp_path / "bad.csv").write_text("a,b\n1\n")
        assert call(tmp_path, tmp_path / "bad.csv", "--overwrite") == 1
    small = numbers_csv(tmp_path / "b.csv", 20)
    assert call(tmp_path, small, "--num-shards", "2", "--overwrite") == 0
    assert num_records(tmp_path / "out") == 20
    assert len(os.listdir(tmp_path / "out")) == 4


def test_a_shard_that_is_gone_is_written_again(tmp_path, kill):
    source = numbers_csv(tmp_path / "a.csv", 600)
    (tmp_path / "whole").mkdir()
    assert call(tmp_path / "whole", source, "--num-shards", "7") == 0
    after = kill(write, "write_shard", 5)
    killed_call(tmp_path, source, "--num-shards", "7")
    after()
    next((tmp_path / "out").glob(".staging-*/shards/train-*")).unlink()
    assert call(tmp_path, source, "--num-shards", "7", "--resume") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole" / "out")


def test_names_that_are_no_utf8_are_written_as_escapes(tmp_path):
    (tmp_path / "in").mkdir()
    path = os.path.join(os.fsencode(tmp_path / "in"), b"x\xff.csv")
    with open(path, "wb") as file:
        file.write(b"a,b\n1,2\n3\n")
    options = ["--on-error", "quarantine", "--max-rejected", "1"]
    assert call(tmp_path, tmp_path / "in", *options) == 0
    assert Manifest.load(tmp_path / "out").source["files"][0]["name"] == "x\\xff.csv"
    assert "x\\\\xff.csv:3" in (tmp_path / "out" / "rejected.jsonl").read_text()
