"""What the terminal shows while a conversion runs: the schema as a table, progress by stage.

On a terminal a bar, elsewhere a line at the end of each stage. The numbers come from the marks
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


class Progress:
    """Shows how far the passes are.

    Args:
        staging: the run's own directory.
        num_splits: of the input.
    """

    def __init__(self, staging: str, *, num_splits: int) -> None:
        self.staging = staging
        self.totals = {"scan": num_splits, "encode": num_splits, "shard": 0}
        self.console = Console(highlight=False)
        self.bars = Bars(
            TextColumn("{task.description:>20}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[speed]}"), TimeElapsedColumn(), console=self.console, transient=True,
        )  # fmt: skip
        self.tasks: dict[str, TaskID] = {}
        self.started: dict[str, float] = {}
        self.finished: set[str] = set()
        self.shown = False

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
        for stage, (done, records) in read_marks(self.staging).items():
            now = time.monotonic()
            start = self.started.setdefault(stage, now)
            speed = f"{records:,} records"
            if now > start:
                speed += f", {records / (now - start):,.0f}/s"
            total = self.totals[stage]
            if self.console.is_terminal:
                if stage not in self.tasks:
                    self.tasks[stage] = self.bars.add_task(_STAGES[stage], total=total, speed="")
                self.bars.update(self.tasks[stage], completed=done, total=total, speed=speed)
            if done == total and stage not in self.finished:
                self.finished.add(stage)
                if not self.console.is_terminal:
                    self.console.print(f"{_STAGES[stage]}: {records:,} records", soft_wrap=True)


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
