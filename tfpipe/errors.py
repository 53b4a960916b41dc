"""The errors that tfpipe and beam_jobs raise, as one tree.

    TfpipeError                  whatever went wrong, in words meant for the user
    ├── UsageError               an argument or option is wrong (also a ValueError)
    ├── SchemaError              a schema is malformed, or two schemas disagree
    ├── ManifestError            no manifest, an unknown version, or it does not match its shards
    │   └── ShardError           one shard is damaged: file, record index, offset
    ├── RecordError              an input record can't be taken: origin, column, value
    ├── OutputError              an output place can't be used, or was not written as asked
    ├── ClusterError             TF_CONFIG, an unreachable peer, a worker that died
    └── MeasurementError         a measurement that would mislead is refused

Every message says what must hold, what was found and where, and the remedy. A command
prints the message without a traceback and exits with the class's `exit_code`. What a command
writes where the user says is checked before its work (`check_output_file`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable


class TfpipeError(Exception):
    """Base of every error meant for the user."""

    exit_code = 1


class UsageError(TfpipeError, ValueError):
    """An argument or option is wrong."""

    exit_code = 2


class SchemaError(TfpipeError):
    """A schema is malformed, or data and schema disagree."""


class ManifestError(TfpipeError):
    """A dataset directory has no usable manifest."""


class ShardError(ManifestError):
    """One shard is damaged or is not the file that the manifest describes."""


class RecordError(TfpipeError):
    """An input record can't be taken as it is."""


class OutputError(TfpipeError):
    """An output place can't be used, or does not hold what was written."""


class ClusterError(TfpipeError):
    """The cluster is described wrongly, incomplete, or lost a worker."""


class MeasurementError(TfpipeError):
    """A measurement that would mislead is refused."""


def run_command(command: Callable[[], int | None]) -> int:
    """Runs a command line's body and turns errors meant for the user into its exit code.

    Args:
        command: the body; None stands for 0.

    Returns:
        0 if it succeeded, the error's `exit_code` after printing its message, 130 after Ctrl-C.

    Raises:
        Exception: whatever is not meant for the user: a fault of ours keeps its traceback.
    """
    try:
        return command() or 0
    except TfpipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def check_output_file(path: str | os.PathLike[str], option: str) -> None:
    """Makes sure, before any work, that a result can be written where the user wants it.

    Args:
        path: the file.
        option: that named it, "--json" say.

    Raises:
        UsageError: it is a directory, or lies in none that exists and can be written.
    """
    parent = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        found = "a directory"
    elif not os.path.isdir(parent):
        found = "one in a directory that does not exist"
    elif not os.access(path if os.path.exists(path) else parent, os.W_OK):
        found = "one without permission to write"
    else:
        return
    raise UsageError(
        f"{option} must name a file in a directory that exists and can be written, got {found} "
        f"({os.fspath(path)}). Make the directory, or name another file."
    )


def write_output_file(path: str | os.PathLike[str], text: str) -> None:
    """Writes a result; a file is there whole or as it was before.

    Args:
        path: a file, new or to be replaced; a device or pipe is written to as it is.
        text: what it shall hold.

    Raises:
        OutputError: it can't be written.
    """
    target, temporary = os.path.realpath(path), None
    try:
        if os.path.exists(target) and not os.path.isfile(target):
            with open(target, "w", encoding="utf-8") as file:
                file.write(text)
            return
        folder, name = os.path.split(target)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp made it private; a result is for sharing
        os.replace(temporary, target)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise OutputError(
            f"a result's file must be writable, got {error.strerror} ({os.fspath(path)}). Choose another path."
        ) from None
