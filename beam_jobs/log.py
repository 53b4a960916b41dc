"""A file that takes what Beam and its workers say, so that the terminal shows only what is for the user."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator


class Log:
    """A file that takes what Beam and its workers say."""

    def __init__(self, path: str) -> None:
        self.path, self.kept = path, False
        self.dead_worker: BaseException | None = None

    def keep(self, trace: str) -> None:
        """Keeps the file, with a traceback at its end."""
        self.kept = True
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"\n{trace}\n")


@contextlib.contextmanager
def quiet_log() -> Iterator[Log]:
    """Sends the log and the workers' stderr to a file, which is kept only if something goes wrong.

    The workers inherit this process's stderr as a file descriptor, so that one is redirected;
    Python's own `sys.stderr` keeps pointing to the terminal.
    """
    handle, path = tempfile.mkstemp(prefix="tfpipe-convert-", suffix=".log")
    log = Log(path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = open(handle, "a", encoding="utf-8")  # noqa: SIM115
    root.handlers[:] = [logging.StreamHandler(stream)]
    root.setLevel(logging.WARNING)
    sys.stderr.flush()
    terminal = os.dup(2)
    python_stderr = sys.stderr
    redirect = python_stderr is sys.__stderr__

    def note(args: threading.ExceptHookArgs) -> None:
        traceback.print_exception(args.exc_value, file=stream)
        if args.thread is not None and args.thread.name == "run_worker":  # waits for one process
            log.dead_worker = args.exc_value

    # What ends in a thread of the runner's, such as the stream to a worker that was killed.
    excepthook, threading.excepthook = threading.excepthook, note
    os.dup2(stream.fileno(), 2)
    if redirect:
        sys.stderr = open(os.dup(terminal), "w", buffering=1, encoding="utf-8")  # noqa: SIM115
    try:
        yield log
    except BaseException:
        log.kept = True
        raise
    finally:
        if redirect:
            sys.stderr.close()
            sys.stderr = python_stderr
        os.dup2(terminal, 2)
        os.close(terminal)
        root.handlers[:] = handlers
        root.setLevel(level)
        threading.excepthook = excepthook
        stream.close()
        if not log.kept:
            os.unlink(path)
