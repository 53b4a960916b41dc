"""Errors as data: what goes wrong in a worker travels to the command line as an element.

An exception that leaves a DoFn would reach the user as the runner's RuntimeError with a
traceback in text, in another form on each runner, after retries. So a DoFn yields a `Failure`
instead, stages pass it on, and the driver raises it as the error it was.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfpipe import errors

# The key of what is to be looked at together.
ALL = 0
FAILED, RESULTS, PLAN_FAILURE = "failed", "results.json", "plan-failure.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An error on its way to the user.

    Attributes:
        kind: the name of its class in `tfpipe.errors`; "" for a fault of ours.
        message: in words meant for the user.
        trace: the traceback, for the log file.
    """

    kind: str
    message: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describes an exception that is being handled."""
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, errors.TfpipeError):
            return cls(kind=type(error).__name__, message=str(error), trace=trace)
        if isinstance(error, OSError):
            where = f" ({error.filename})" if error.filename else ""
            return cls(
                kind="OutputError",
                message=f"files must be readable and writable, got {error.strerror or error}{where}.",
                trace=trace,
            )
        if isinstance(error, MemoryError):
            message = "a worker must have the memory it asks for, got none. Use fewer --direct_num_workers."
            return cls(kind="OutputError", message=message, trace=trace)
        return cls(kind="", message=f"a worker failed with {type(error).__name__}: {error}", trace=trace)

    def to_error(self) -> errors.TfpipeError:
        """The error to raise."""
        return getattr(errors, self.kind, errors.TfpipeError)(self.message)


def save(staging: str, name: str, content: Any, *, durable: bool = False) -> None:
    """Leaves JSON in staging, whole or not at all: the driver may be looking.

    Args:
        staging: the run's own directory.
        name: of the file.
        content: plain values.
        durable: whether it must be there after a loss of power, too.

    Raises:
        OSError: it can't be written.
    """
    temporary = Path(staging) / f"{name}{unfinished()}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, Path(staging) / name)


def load(staging: str, name: str) -> Any:
    """Reads what `save` left, or None if it is not there (yet), or not whole after a loss of power."""
    try:
        return json.loads((Path(staging) / name).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def unfinished() -> str:
    """What ends a file's name until it is whole: of this process alone, on whichever machine it runs."""
    return f".{platform.node()}-{os.getpid()}.part"


def mark_failed(staging: str) -> None:
    """Tells the workers that are still busy that their work is in vain."""
    with contextlib.suppress(OSError):  # the disk may be full; they will find out by themselves
        (Path(staging) / FAILED).touch()


def has_failed(staging: str) -> bool:
    """Whether some worker marked the run as failed."""
    return os.path.exists(os.path.join(staging, FAILED))


def guarded(wrap: Callable[[Any, Failure], Any]) -> Callable[[Any], Any]:
    """Makes a DoFn's process method yield failures instead of raising.

    Args:
        wrap: (element, failure) -> the element to yield.

    Returns:
        A decorator for a generator method.
    """

    def decorate(process: Any) -> Any:
        @functools.wraps(process)
        def inner(self: Any, element: Any, *args: Any) -> Iterator[Any]:
            try:
                yield from process(self, element, *args)
            except Exception as error:
                mark_failed(self.staging)
                yield wrap(element, Failure.of(error))

        return inner

    return decorate
