"""Other runners than the pinned one: the same bytes, the same messages."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from beam_jobs import convert, engines, write
from beam_jobs.run import SaveFailures
from tests.helpers import REPOSITORY, free_ports
from tfpipe.errors import OutputError, UsageError
from tfpipe.manifest import Manifest

ROWS = 40_000


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Two files that make five input splits; the sizes of splits travel with the source's plan."""
    monkeypatch.setattr("beam_jobs.sources.csv.SPLIT_BYTES", 200_000)
    (tmp_path / "in").mkdir()
    for k in range(2):
        rows = (f"{i},{i % 97},text {i}\n" for i in range(k * ROWS, k * ROWS + ROWS // 2))
        (tmp_path / "in" / f"{k}.csv").write_text("id,user,s\n" + "".join(rows))
    return tmp_path / "in"


def run(source, output, *options):
    return convert.main(["--input", str(source), "--output", str(output), *options])


def contents(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


class Dask:
    """A real cluster: a scheduler and two workers, each a process of its own."""

    def __init__(self, logs: Path) -> None:
        (port,) = free_ports(1)
        self.address = f"tcp://127.0.0.1:{port}"
        self.logs = logs
        self.processes: list[subprocess.Popen[bytes]] = []
        # No nanny: a worker that is killed stays away.
        worker = ["dask", "worker", self.address, "--nthreads", "2", "--no-nanny", "--no-dashboard"]
        self._start(
            "scheduler", ["dask", "scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]
        )
        for i in range(2):
            self._start(f"worker-{i}", [*worker, "--local-directory", str(logs), "--death-timeout", "30"])
        deadline = time.monotonic() + 60
        while sum("Registered to" in self.log(f"worker-{i}") for i in range(2)) < 2:
            assert time.monotonic() < deadline, self.log("scheduler") + self.log("worker-0")
            time.sleep(0.1)

    def _start(self, name: str, command: list[str]) -> None:
        with open(self.logs / name, "wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", *command], stdout=log, stderr=log, cwd=REPOSITORY,
                    env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                )
            )  # fmt: skip

    def log(self, name: str) -> str:
        return (self.logs / name).read_text(errors="replace")

    def options(self) -> list[str]:
        return ["--runner", "DaskRunner", "--dask_client_address", self.address]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


@pytest.fixture(scope="module")
def dask(tmp_path_factory):
    pytest.importorskip("distributed", reason="Dask is an extra: pip install 'tfpipe[dask]'")
    cluster = Dask(tmp_path_factory.mktemp("dask"))
    yield cluster
    cluster.close()


OPTIONS = {
    "plain": [],
    "by key": ["--split", "train=0.7", "--split", "test=0.3", "--split-by", "user"],
    "small shards": ["--shard-bytes", "40000", "--compression", "none"],
    "in order": ["--no-shuffle", "--num-shards", "3"],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_pieces_of_both_forms_give_the_same_bytes(tmp_path, source, monkeypatch, name):
    monkeypatch.setattr("beam_jobs.write.INLINE_BYTES", 100_000)  # several pieces of a split for a shard
    for pieces in ("files", "inline"):
        assert run(source, tmp_path / pieces, "--pieces", pieces, *OPTIONS[name]) == 0
    assert contents(tmp_path / "files") == contents(tmp_path / "inline")
    assert Manifest.load(tmp_path / "inline").verify() == []


def test_inline_pieces_leave_no_records_in_staging(tmp_path, source, monkeypatch):
    seen = set()

    def look(path, *rest):
        seen.update(found.name for found in Path(path).parent.parent.iterdir())
        return verify(path, *rest)

    verify = write.verify_shard
    monkeypatch.setattr(write, "verify_shard", look)
    for pieces in ("inline", "files"):
        seen.clear()
        assert run(source, tmp_path / pieces, "--pieces", pieces) == 0
        assert any(name.startswith("pieces-") for name in seen) == (pieces == "files")


@pytest.mark.slow
@pytest.mark.parametrize("pieces", ["inline", "files"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_dask_cluster_gives_the_same_bytes(tmp_path, source, dask, name, pieces):
    assert run(source, tmp_path / "local", *OPTIONS[name]) == 0
    assert run(source, tmp_path / "dask", "--pieces", pieces, *OPTIONS[name], *dask.options()) == 0
    assert contents(tmp_path / "local") == contents(tmp_path / "dask")
    for process in dask.processes:
        assert process.poll() is None


@pytest.mark.slow
def test_a_portable_runner_gives_the_same_bytes(tmp_path, source):
    """Beam's own job server, as Flink's and Spark's are talked to."""
    portable = ["--runner", "PortableRunner", "--job_endpoint", "embed", "--environment_type", "LOOPBACK"]
    for name in ("plain", "by key"):
        assert run(source, tmp_path / f"local {name}", *OPTIONS[name]) == 0
        assert run(source, tmp_path / f"portable {name}", *OPTIONS[name], *portable) == 0
        assert contents(tmp_path / f"local {name}") == contents(tmp_path / f"portable {name}")


@pytest.mark.slow
def test_bad_rows_are_told_and_kept_by_dask_as_by_the_local_runner(tmp_path, source, dask, capfd):
    with (source / "1.csv").open("a") as file:
        file.write("1,2\n3,4,5,6\n")
    said = []
    for output, options in (("local", []), ("dask", dask.options())):
        assert run(source, tmp_path / output, *options) == 1
        said.append(capfd.readouterr().err)
        assert not (tmp_path / output).exists()
    assert said[0] == said[1] and f"1.csv:{ROWS // 2 + 2}" in said[0]
    for output, options in (("local", []), ("dask", dask.options())):
        quarantine = ["--on-error", "quarantine", "--max-rejected", "5"]
        assert run(source, tmp_path / output, *quarantine, *options) == 0
    assert contents(tmp_path / "local") == contents(tmp_path / "dask")
    assert Manifest.load(tmp_path / "dask").num_rejected == 2


@pytest.mark.slow
def test_a_dask_run_that_was_killed_is_resumed(tmp_path, source, dask):
    command = [sys.executable, "-m", "beam_jobs.convert", "--input", str(source), "--output"]
    subprocess.run([*command, tmp_path / "local"], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    command += [str(tmp_path / "out"), *dask.options()]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out").glob(".staging-*/done-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (begun,) = (tmp_path / "out").glob(".staging-*")
    assert not (tmp_path / "out" / "manifest.json").exists()
    subprocess.run([*command, "--resume"], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    assert not begun.exists()
    assert contents(tmp_path / "out") == contents(tmp_path / "local")


@pytest.mark.slow
def test_a_dask_worker_may_die(tmp_path, source, tmp_path_factory):
    pytest.importorskip("distributed", reason="Dask is an extra: pip install 'tfpipe[dask]'")
    assert run(source, tmp_path / "local") == 0
    cluster = Dask(tmp_path_factory.mktemp("dask"))
    try:

        def kill() -> None:
            while not list((tmp_path / "dask").glob(".staging-*/done-encode*")):
                time.sleep(0.01)
            cluster.processes[1].kill()

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        assert run(source, tmp_path / "dask", *cluster.options()) == 0
        thread.join(10)
        assert not thread.is_alive() and cluster.processes[1].wait(10) == -signal.SIGKILL
    finally:
        cluster.close()
    assert contents(tmp_path / "local") == contents(tmp_path / "dask")


@pytest.mark.slow
def test_a_scheduler_that_is_not_there_is_told(tmp_path, source, capfd):
    pytest.importorskip("distributed", reason="Dask is an extra: pip install 'tfpipe[dask]'")
    (port,) = free_ports(1)
    address = f"tcp://127.0.0.1:{port}"
    assert run(source, tmp_path / "out", "--runner", "DaskRunner", "--dask_client_address", address,
               "--dask_connection_timeout", "2") == 1  # fmt: skip
    err = capfd.readouterr().err
    assert address in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_a_worker_that_does_not_see_the_output_tells_its_host(tmp_path):
    save = SaveFailures(str(tmp_path / "elsewhere" / ".staging-1"), "scan-failures.json")
    with pytest.raises(
        OutputError, match=rf"every worker sees .*\({re.escape(str(tmp_path / 'elsewhere'))}\)"
    ):
        list(save.process((0, [])))


def test_an_unknown_runner_is_refused():
    assert engines.engine_of([]) == engines.engine_of(["--runner", "DirectRunner"]) == ""
    assert engines.engine_of(["--runner=apache_beam.runners.dask.dask_runner.DaskRunner"]) == "DaskRunner"
    with pytest.raises(UsageError, match=r"or one of DaskRunner, .* got 'InteractiveRunner'"):
        engines.engine_of(["--runner", "InteractiveRunner"])


def test_an_engine_whose_package_is_missing_is_refused(tmp_path, source, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert run(source, tmp_path / "out", "--runner", "DaskRunner") == 2
    assert "pip install 'tfpipe[dask]'" in capfd.readouterr().err


def test_dask_gets_a_partition_for_every_split_unless_the_user_says_otherwise():
    pytest.importorskip("distributed", reason="Dask is an extra: pip install 'tfpipe[dask]'")
    from apache_beam.runners.dask.dask_runner import DaskOptions

    def partitions(*args):
        return engines.engine_options(args, "DaskRunner", 40).view_as(DaskOptions).npartitions

    assert partitions() == 40
    assert partitions("--dask_npartitions=3") == 3
    assert partitions("--dask_partition_size", "7") is None
