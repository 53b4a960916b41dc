"""Progress of long work: a bar in a terminal, plain lines in a log.

with Progress(console) as progress:
    progress.update("round 1 of 5: real", 2, 20)
"""

from __future__ import annotations

import time
from types import TracebackType

from rich import progress as bars
from rich.console import Console

# Lines in a log: often enough to see life, rare enough to read.
_LINE_EVERY_S = 5.0


class Progress:
    """Shows one stage of work after another.

    Args:
        console: where to; a bar if it is a terminal, else lines.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None)
        self._last_line_s = -_LINE_EVERY_S

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def update(self, text: str, done: int, total: int) -> None:
        """Shows where the work is.

        Args:
            text: what is being done.
            done: units done.
            total: units in all; 0 if unknown.
        """
        if self._console.is_terminal:
            self._bar.update(self._task, description=text, completed=done, total=total or None)
            return
        now = time.monotonic()
        if now - self._last_line_s >= _LINE_EVERY_S or (total and done == total):
            self._console.print(text + (f" ({done}/{total})" if total else ""), highlight=False)
            self._last_line_s = now
