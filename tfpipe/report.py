"""A measurement, told to people: result JSON -> terminal, or one HTML file.

Comes in: the result of `tfpipe.trainer` (`"format": "tfpipe-measurement"`). Goes out: about twenty
lines of terminal that read well at 80 columns, without colour and in a log file; or a page that
needs nothing but itself.

    result = load_result("result.json")
    render_terminal(result)
    write_html(result, "report.html")
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tfpipe import report_html
from tfpipe.errors import UsageError, write_output_file
from tfpipe.report_view import View, build_view, count, percent

_BAR_WIDTH = 16
_STYLES = {
    "input": "blue",
    "compute": "green",
    "communication": "yellow",
    "imbalance": "magenta",
    "other": "bright_black",
}
_ASCII = str.maketrans({"–": "-", "×": "x", "█": "#", "·": "|"})


def load_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a result file.

    Args:
        path: a file that `tfpipe.trainer --json` wrote.

    Returns:
        the parsed result.

    Raises:
        UsageError: the file can't be read, or holds no measurement.
    """
    try:
        with open(path, encoding="utf-8") as file:
            result: dict[str, Any] = json.load(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"a result must be a readable JSON file, got {error} ({path}).") from None
    try:
        build_view(result)
    except UsageError as error:
        raise UsageError(f"{error} ({path})") from None
    return result


def render_terminal(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints the report.

    Args:
        result: the result JSON, parsed.
        console: where to print; default: standard output.

    Raises:
        UsageError: not a measurement.
    """
    view = build_view(result)
    console = console or Console(highlight=False)
    ascii_only = console.options.ascii_only

    def text(value: str, style: str = "") -> Text:
        # Text, never markup: a model or path named "[red]" is printed as it is.
        if ascii_only:
            value = value.translate(_ASCII).encode("ascii", "replace").decode()
        return Text(value, style=style)

    console.print(text(view.headline, "bold"))
    if view.verdict == "inconclusive":
        console.print(text(view.explanation))
    console.print(text(view.setting, "dim"))
    console.print()
    console.print(_parts_table(view, text))
    console.print()
    if len(view.workers) > 1:
        console.print(_workers_table(view, text))
        console.print()
    facts = Table.grid(padding=(0, 2))
    for name, value in (
        ("throughput", view.throughput),
        ("speed-up", view.speedup),
        ("network", view.network),
        ("training", view.training),
    ):
        if value:
            facts.add_row(text(name, "bold"), text(value))
    console.print(Padding(facts, (0, 1)))
    if view.advice:
        console.print()
        console.print(text("What to change", "bold"))
        advice = Table.grid(padding=(0, 1))
        for rank, item in enumerate(view.advice, start=1):
            gain = f" ({item.gain})" if item.gain else ""
            why = f": {item.why}" if item.why else ""
            advice.add_row(text(f"{rank}."), text(f"{item.change}{gain}{why}"))
        console.print(Padding(advice, (0, 1)))


def render_html(result: Mapping[str, Any]) -> str:
    """The report as one self-contained HTML page.

    Args:
        result: the result JSON, parsed.

    Returns:
        the page; it loads nothing and runs no script.

    Raises:
        UsageError: not a measurement.
    """
    return report_html.page(build_view(result))


def write_html(result: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes `render_html(result)`; the file is there whole or not at all.

    Args:
        result: the result JSON, parsed.
        path: the file to write.

    Raises:
        UsageError: not a measurement.
        OutputError: the file can't be written.
    """
    write_output_file(path, render_html(result))


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))


def _parts_table(view: View, text: Any) -> Table:
    table = _table()
    table.add_column(text("where a step's time goes"))
    for title in ("median ms", "interval", "share"):
        table.add_column(text(title), justify="right", no_wrap=True)
    table.add_column("")
    for part in view.parts:
        # A part that is there but small still shows: a bar of no length reads as zero.
        cells = max(1, round((part.share or 0) * _BAR_WIDTH)) if part.median else 0
        table.add_row(
            text(part.name),
            text(view.ms(part.median)),
            text(view.interval(part) if part.name != "other" else ""),
            text(percent(part.share)),
            text("█" * min(cells, _BAR_WIDTH), _STYLES[part.name]),
        )
    table.add_section()
    table.add_row(
        text("step", "bold"),
        text(view.ms(view.step.median), "bold"),
        text(view.interval(view.step)),
        text(percent(view.step.share)),
        "",
    )
    return table


def _workers_table(view: View, text: Any) -> Table:
    table = _table()
    for title in ("worker", "input ms", "compute ms", "wait ms", "cpus", "examples"):
        table.add_column(text(title), justify="right", no_wrap=True)
    for worker in view.workers:
        times = (worker.input, worker.compute, worker.wait)
        values = [
            *(view.ms(time) for time in times),
            count(worker.cpus),
            count(worker.examples),
        ]
        table.add_row(*(text(value) for value in (worker.index, *values)))
    return table
