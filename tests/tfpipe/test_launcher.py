"""Real processes: a worker's end, whatever its kind, ends its peers and is told truly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tfpipe.errors import ClusterError, UsageError
from tfpipe.launcher import run_workers, share_cpus

PRELUDE = """
import os, signal, sys, time
from tfpipe.launcher import enter_worker, send_event
enter_worker()
index = int(os.environ["INDEX"])
"""


def launch(tmp_path, body, *, workers=2, start_timeout_s=60.0, on_progress=lambda index, event: None):
    return run_workers(
        [sys.executable, "-c", PRELUDE + body],
        {index: {"INDEX": str(index)} for index in range(workers)},
        log_dir=tmp_path,
        start_timeout_s=start_timeout_s,
        on_progress=on_progress,
    )


def no_children_left():
    """But for what Python keeps for itself once any test has started a pool."""
    children = psutil.Process().children(recursive=True)
    living = [p for p in children if p.status() != psutil.STATUS_ZOMBIE]
    return not [p for p in living if "resource_tracker" not in " ".join(p.cmdline())]


def test_results_and_progress_arrive_and_output_is_kept(tmp_path):
    seen = []
    body = """
print("noise of worker", index)
send_event("started")
send_event("progress", text="half", done=1, total=2)
send_event("result", result={"index": index, "big": "x" * 300_000})
"""
    results = launch(tmp_path, body, on_progress=lambda index, event: seen.append((index, event["text"])))
    assert [results[i]["index"] for i in (0, 1)] == [0, 1]
    assert len(results[1]["big"]) == 300_000
    assert sorted(seen) == [(0, "half"), (1, "half")]
    assert (tmp_path / "worker-1.log").read_text() == "noise of worker 1\n"


def test_a_killed_worker_is_named_and_its_peers_are_ended(tmp_path):
    body = """
send_event("started")
print("last words of", index, flush=True)
if index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    start_s = time.monotonic()
    with pytest.raises(ClusterError) as caught:
        launch(tmp_path, body, workers=3)
    assert time.monotonic() - start_s < 20
    assert "worker 1 was killed by signal 9 (SIGKILL)" in str(caught.value)
    assert "last words of 1" in str(caught.value)
    assert str(tmp_path / "worker-1.log") in str(caught.value)
    assert no_children_left()


def test_the_cause_is_told_not_its_consequence(tmp_path):
    # Worker 0 notices the loss of worker 1, and reports it, before worker 1's own account arrives.
    body = """
if index == 0:
    send_event("error", message="a peer is gone", exit_code=1, traceback="", lost_peer=True)
else:
    time.sleep(0.5)
    send_event("error", message="the true cause", exit_code=1, traceback="model.py:7", lost_peer=False)
sys.exit(1)
"""
    with pytest.raises(ClusterError) as caught:
        launch(tmp_path, body)
    assert "worker 1 failed: the true cause" in str(caught.value)
    assert "model.py:7" in str(caught.value)


def test_an_error_meant_for_the_user_keeps_its_words_and_exit_code(tmp_path):
    body = 'send_event("error", message="got 7. Use 8.", exit_code=2, traceback="", lost_peer=False)'
    with pytest.raises(UsageError) as caught:
        launch(tmp_path, body, workers=1)
    assert str(caught.value) == "got 7. Use 8."


@pytest.mark.parametrize("ending", ["sys.exit(3)", "sys.exit(0)"])
def test_a_worker_that_leaves_without_a_result_has_failed(tmp_path, ending):
    with pytest.raises(ClusterError, match="worker 0 ended with exit code"):
        launch(tmp_path, ending, workers=1)


def test_a_worker_that_never_starts_is_bounded(tmp_path):
    with pytest.raises(ClusterError, match="worker 1 must start within 1 s"):
        launch(
            tmp_path,
            'send_event("started") if index == 0 else None\ntime.sleep(600)',
            start_timeout_s=1.0,
        )
    assert no_children_left()


def test_a_worker_that_ignores_sigterm_is_killed(tmp_path):
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
send_event("started")
time.sleep(1.0 if index == 1 else 600)
sys.exit(1)
"""
    with pytest.raises(ClusterError):
        launch(tmp_path, body)
    assert no_children_left()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_process_that_started_them(tmp_path, signum):
    script = f"""
import sys
from pathlib import Path
from tfpipe.launcher import run_workers
run_workers([sys.executable, "-c", {PRELUDE + "time.sleep(600)"!r}],
            {{0: {{"INDEX": "0"}}, 1: {{"INDEX": "1"}}}}, log_dir=Path({str(tmp_path)!r}),
            start_timeout_s=600, on_progress=lambda index, event: None)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    process = psutil.Process(parent.pid)
    deadline = time.monotonic() + 30
    while len(process.children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    children = process.children()
    time.sleep(1.0)  # until they have asked to end with their parent
    parent.send_signal(signum)
    parent.wait(timeout=20)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert len(children) == 2 and not alive


def test_cores_are_shared_out_without_overlap():
    cpus = os.sched_getaffinity(0)
    shares = [set(map(int, cores.split(","))) for cores in share_cpus(len(cpus))]
    assert set().union(*shares) == cpus
    assert sum(map(len, shares)) == len(cpus)


def test_more_workers_than_cores_are_left_alone():
    assert share_cpus(len(os.sched_getaffinity(0)) + 1) == [""] * (len(os.sched_getaffinity(0)) + 1)
