"""What the terminal shows while a conversion runs: the schema as a table, progress by stage.

On a terminal a bar, elsewhere a line now and then and at the end of each stage. The numbers come from the marks
that workers leave in staging.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from beam_jobs.plan import PlanSummary
from beam_jobs.scan import read_marks, read_plan

_STAGES = {"scan": "scanned", "encode": "encoded", "shard": "written and verified"}
# Between two lines of a log that nobody watches.
LINE_EVERY_S = 10.0


class Progress:
    """Shows how far the passes are, how fast, and when they will be done.

    Args:
        staging: the run's own directory.
        num_splits: of the input.
        num_bytes: of the input.
    """

    def __init__(self, staging: str, *, num_splits: int, num_bytes: int) -> None:
        self.staging, self.num_bytes = staging, num_bytes
        self.totals = {"scan": num_splits, "encode": num_splits, "shard": 0}
        self.console = Console(highlight=False)
        self.bars = Bars(
            TextColumn("{task.description:>20}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[speed]}"), TimeElapsedColumn(), console=self.console, transient=True,
        )  # fmt: skip
        self.tasks: dict[str, TaskID] = {}
        # By stage: when it was first seen, and how many pieces of work and records were done then.
        self.started: dict[str, tuple[float, int, int]] = {}
        self.finished: set[str] = set()
        self.shown = False
        self.last_line_s = time.monotonic()

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.update()
        if self.console.is_terminal:
            self.bars.stop()

    def update(self) -> None:
        """Looks at the marks and shows what is new."""
        if not self.shown and (plan := read_plan(self.staging)) is not None:
            self.shown = True
            self.totals["shard"] = len(plan.shard_splits)
            show_schema(plan, self.console)
        now = time.monotonic()
        in_between = now - self.last_line_s >= LINE_EVERY_S
        for stage, (done, records) in read_marks(self.staging).items():
            self.started.setdefault(stage, (now, done, records))
            total = self.totals[stage]
            if self.console.is_terminal:
                if stage not in self.tasks:
                    self.tasks[stage] = self.bars.add_task(_STAGES[stage], total=total, speed="")
                speed = self._speed(stage, done, records, now)
                self.bars.update(self.tasks[stage], completed=done, total=total, speed=speed)
            if stage in self.finished or not (in_between or done == total):
                continue
            if done == total:
                self.finished.add(stage)
                line = f"{_STAGES[stage]}: {records:,} records"
            else:
                line = f"{_STAGES[stage]}: {done} of {total}, {self._speed(stage, done, records, now)}"
            if not self.console.is_terminal:
                self.console.print(line, soft_wrap=True)
            self.last_line_s = now

    def _speed(self, stage: str, done: int, records: int, now: float) -> str:
        """Records and bytes a second, and the time left, as far as they can be told yet."""
        text = f"{records:,} records"
        started_s, done_then, records_then = self.started[stage]
        elapsed_s, newly_done, total = now - started_s, done - done_then, self.totals[stage]
        if elapsed_s <= 0 or newly_done <= 0 or not total:
            return text
        text += f", {(records - records_then) / elapsed_s:,.0f}/s"
        text += f", {self.num_bytes / total * newly_done / elapsed_s / 1e6:,.1f} MB/s of the input"
        left_s = (total - done) * elapsed_s / newly_done
        return f"{text}, {_duration(left_s)} left" if done < total else text


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def show_schema(plan: PlanSummary, console: Console) -> None:
    """Prints the schema as a table, one row a feature, and the notices."""
    table = Table(title=f"{len(plan.schema.features)} features, {plan.num_records:,} records")
    for title in ("feature", "dtype", "shape", "encoding", "nulls", "min", "max"):
        table.add_column(title, justify="right" if title in ("nulls", "min", "max") else "left")
    for name, feature in plan.schema.features.items():
        found = plan.statistics[name]
        shape = "x".join("?" if size is None else str(size) for size in feature.shape)
        cells = [
            f"{found[key]:.6g}" if isinstance(found.get(key), float) else str(found.get(key, ""))
            for key in ("min", "max")
        ]
        table.add_row(name, feature.dtype, shape, feature.encoding, str(found["nulls"] or ""), *cells)
    console.print(table)
    for notice in plan.notices:
        console.print(f"note: {notice}", soft_wrap=True)
