"""Worker processes on this machine: started, watched, and ended together.

Comes in: a command and each worker's environment. Goes out: each worker's result, or one
error that names the worker at fault, the cause and its log.

A worker process reports through a pipe, one JSON object a line (`send_event`), and leaves
its standard output and error to a log file, so that library noise buries nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfpipe.errors import ClusterError, TfpipeError, UsageError

EVENTS_FD = "TFPIPE_EVENTS_FD"
CPUS = "TFPIPE_CPUS"
_GRACE_S = 1.0  # time for a peer's own account of a failure to arrive
_END_S = 5.0  # time to end after SIGTERM, before SIGKILL
_LOG_TAIL_LINES = 25


def send_event(kind: str, **fields: Any) -> None:
    """Reports from a worker process to the process that started it; does nothing without one.

    Args:
        kind: "progress" (text, done, total), "started", "result" (result) or
            "error" (message, exit_code, traceback).
        **fields: JSON values.
    """
    descriptor = os.environ.get(EVENTS_FD)
    if descriptor is not None:
        line = json.dumps({"kind": kind, **fields}) + "\n"
        data = line.encode()
        while data:
            data = data[os.write(int(descriptor), data) :]


def enter_worker() -> None:
    """Prepares a worker process: its share of the cores, and its end if its parent dies."""
    if cpus := os.environ.get(CPUS):
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def share_cpus(num_workers: int) -> list[str]:
    """Divides this machine's cores between local workers, so that none steals another's.

    Args:
        num_workers: on this machine.

    Returns:
        Comma-separated core numbers for each worker; "" for all where there are fewer
        cores than workers.

    Raises:
        ZeroDivisionError: never; there is at least one worker.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if num_workers > len(cpus):
        return [""] * num_workers
    each = len(cpus) // num_workers
    return [",".join(map(str, cpus[i * each : (i + 1) * each])) for i in range(num_workers)]


@dataclass(kw_only=True)
class _Worker:
    index: int
    process: subprocess.Popen[bytes]
    log: Path
    buffer: bytes = b""
    open: bool = True
    started: bool = False
    result: Any = None
    error: dict[str, Any] | None = None
    last_sign_s: float = field(default_factory=time.monotonic)

    @property
    def failed(self) -> bool:
        if self.result is not None:
            return False
        code = self.process.poll()
        # A worker that ended well may still have its result in the pipe.
        return self.error is not None or (code is not None and (code != 0 or not self.open))


def run_workers(
    command: Sequence[str],
    environments: Mapping[int, Mapping[str, str]],
    *,
    log_dir: Path,
    start_timeout_s: float,
    on_progress: Callable[[int, dict[str, Any]], None],
) -> dict[int, Any]:
    """Runs worker processes on this machine until all have ended well.

    Args:
        command: the same for each worker.
        environments: by worker index, variables added to this process's environment.
        log_dir: gets `worker-{index}.log` with each worker's output.
        start_timeout_s: the longest a worker may go without a sign of life before it sends
            "started"; from then on TensorFlow's own timeout of collectives bounds a wait.
        on_progress: called with the worker's index and its event.

    Returns:
        By worker index, the result that it sent, or None.

    Raises:
        ClusterError: a worker died, failed or stalled; its peers were ended. The message
            names the worker, the cause and the log. An error that the worker itself
            explained keeps its own exit code.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    workers: list[_Worker] = []
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with selectors.DefaultSelector() as selector:
            for index, environment in environments.items():
                worker, pipe = _start(command, index, environment, log_dir)
                workers.append(worker)
                selector.register(pipe, selectors.EVENT_READ, worker)
            _watch(workers, selector, start_timeout_s, on_progress)
        return {worker.index: worker.result for worker in workers}
    finally:
        _end(workers)
        signal.signal(signal.SIGTERM, previous)


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _start(
    command: Sequence[str], index: int, environment: Mapping[str, str], log_dir: Path
) -> tuple[_Worker, int]:
    read_end, write_end = os.pipe()
    log = log_dir / f"worker-{index}.log"
    try:
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment, EVENTS_FD: str(write_end), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                start_new_session=True,
            )
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    return _Worker(index=index, process=process, log=log), read_end


def _watch(
    workers: list[_Worker],
    selector: selectors.BaseSelector,
    start_timeout_s: float,
    on_progress: Callable[[int, dict[str, Any]], None],
) -> None:
    first_failure_s: float | None = None
    while any(worker.open or worker.process.poll() is None for worker in workers):
        for key, _ in selector.select(timeout=0.1):
            worker = key.data
            data = os.read(key.fd, 1 << 16)
            if not data:
                worker.open = False
                selector.unregister(key.fd)
                os.close(key.fd)
            _receive(worker, data, on_progress)
        now = time.monotonic()
        if first_failure_s is None and any(worker.failed for worker in workers):
            first_failure_s = now
        if first_failure_s is not None and now - first_failure_s > _GRACE_S:
            break
        for worker in workers:
            if not worker.started and now - worker.last_sign_s > start_timeout_s:
                raise ClusterError(
                    f"worker {worker.index} must start within {start_timeout_s:g} s, got no sign of it; "
                    f"its peers were ended too ({worker.log}).\n{_tail(worker.log)}"
                )
    if failed := [worker for worker in workers if worker.failed]:
        raise _explain(min(failed, key=_blame))


def _receive(worker: _Worker, data: bytes, on_progress: Callable[[int, dict[str, Any]], None]) -> None:
    *lines, worker.buffer = (worker.buffer + data).split(b"\n")
    for line in lines:
        event = json.loads(line)
        worker.last_sign_s = time.monotonic()
        if event["kind"] == "error":
            worker.error = event
        elif event["kind"] == "result":
            worker.result = event["result"]
        elif event["kind"] == "started":
            worker.started = True
        else:
            on_progress(worker.index, event)


def _blame(worker: _Worker) -> int:
    """Orders failed workers: a killed one is the cause, one that lost a peer the consequence."""
    if worker.error is None:
        return 0
    return 2 if worker.error["lost_peer"] else 1


def _explain(worker: _Worker) -> TfpipeError:
    code = worker.process.poll()
    if worker.error is not None and not worker.error["traceback"]:
        error = UsageError if worker.error["exit_code"] == UsageError.exit_code else ClusterError
        return error(worker.error["message"])
    if worker.error is not None:
        how, detail = f"failed: {worker.error['message']}", worker.error["traceback"]
    elif code is not None and code < 0:
        how, detail = f"was killed by signal {-code} ({signal.Signals(-code).name})", _tail(worker.log)
    else:
        how, detail = f"ended with exit code {code}", _tail(worker.log)
    return ClusterError(
        f"every worker must run to the end, worker {worker.index} {how}; "
        f"its peers were ended ({worker.log}).\n{detail}".rstrip()
    )


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    return "".join(f"  | {line}\n" for line in lines)


def _end(workers: list[_Worker]) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for worker in workers:
            if worker.process.poll() is None:
                os.killpg(worker.process.pid, signum)
        deadline = time.monotonic() + _END_S
        for worker in workers:
            try:
                worker.process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                continue
