"""A report's page: `View` -> one HTML file that loads nothing and runs nothing.

Every value passes through `html.escape`: a path, a model's name or a headline is text, whatever it
holds. The style sheet is report.css, put into the page; colours follow the reader's light or dark
setting, and each is also named in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from tfpipe import __version__
from tfpipe.report_view import UNKNOWN, Part, View, Worker, count, percent

_ACCENTS = {
    "input_bound": "input",
    "compute_bound": "compute",
    "communication_bound": "communication",
    "imbalance_bound": "imbalance",
}


def page(view: View) -> str:
    """Lays out a report.

    Args:
        view: what it shows.

    Returns:
        a complete HTML document.
    """
    css = resources.files("tfpipe").joinpath("report.css").read_text(encoding="utf-8")
    accent = _ACCENTS.get(view.verdict, "other")
    body = [
        _header(view, accent),
        _tiles(view),
        _section("Where a step's time goes", _stacked_bar(view) + _parts(view)),
        _section("Workers", _workers(view)) if len(view.workers) > 1 else "",
        _section("What to change", _advice(view)) if view.advice else "",
        _section("Throughput and training", _facts(view)),
        _section("How it was measured", _tables(view)) if view.tables else "",
    ]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(view.title)}: where a training step's time goes</title>
<style>
{css}</style>
</head>
<body>
<main>
{"".join(body)}<footer>Times are medians per training step; intervals come from the rounds of one run.
Written by tfpipe {escape(__version__)}.</footer>
</main>
</body>
</html>
"""


def _header(view: View, accent: str) -> str:
    return (
        f'<header style="--accent: var(--{accent})">\n<div class="badge">{escape(view.title)}</div>\n'
        f"<h1>{escape(view.headline)}</h1>\n<p>{escape(view.setting)}</p>\n"
        f"<p>{escape(view.explanation)}</p>\n</header>\n"
    )


def _tiles(view: View) -> str:
    tiles = [(f"{view.ms(view.step.median)} <small>ms</small>", "a step takes")]
    number, _, unit = view.examples_per_s.partition(" ")
    tiles.append((escape(number), escape(unit.replace("/s", " per second"))))
    if view.speedup:
        factor, _, rest = view.speedup.partition(" ")
        tiles.append((escape(factor), escape(rest)))
    if view.evaluation:
        name, value, examples = view.evaluation
        tiles.append((escape(value), escape(", ".join(filter(None, (name, examples))))))
    items = "".join(f'<div class="tile"><b>{value}</b><span>{name}</span></div>\n' for value, name in tiles)
    return f'<div class="tiles">\n{items}</div>\n'


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}</section>\n"


def _stacked_bar(view: View) -> str:
    known = [(part, part.share) for part in view.parts if part.share and part.share > 0]
    if not known:
        return f'<p class="unknown">The parts of the step are {UNKNOWN}.</p>\n'
    scale = 100 / max(1.0, sum(share for _, share in known))
    words = ", ".join(f"{part.name} {percent(part.share)}" for part, _ in known)
    segments, x = [], 0.0
    for part, share in known:
        width = share * scale
        tip = escape(f"{part.name}: {view.ms(part.median)} ms, {percent(part.share)}")
        segments.append(
            f'<rect class="{part.name}" x="{x:.2f}" y="0" width="{width:.2f}" height="10">'
            f"<title>{tip}</title></rect>"
        )
        x += width
    return (
        f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(words)}">{"".join(segments)}</svg>\n'
    )


def _interval_chart(part: Part, longest: float) -> str:
    """The part's median as a bar, its interval as a whisker, on a scale that all parts share."""
    if part.median is None or longest <= 0:
        return ""
    scale = 98 / longest
    shapes = (
        f'<rect class="track" x="0" y="4" width="100" height="6"/>'
        f'<rect class="{part.name}" x="0" y="4" width="{max(part.median, 0) * scale:.2f}" height="6"/>'
    )
    if part.low is not None and part.high is not None and part.high > part.low:
        low, high = max(part.low, 0) * scale, max(part.high, 0) * scale
        shapes += "".join(
            f'<line class="whisker" vector-effect="non-scaling-stroke" '
            f'x1="{x1:.2f}" y1="{y1}" x2="{x2:.2f}" y2="{y2}"/>'
            for x1, y1, x2, y2 in ((low, 7, high, 7), (low, 3, low, 11), (high, 3, high, 11))
        )
    return (
        f'<svg class="mini" viewBox="0 0 100 14" preserveAspectRatio="none" aria-hidden="true">{shapes}</svg>'
    )


def _parts(view: View) -> str:
    longest = max((value for p in view.parts for value in (p.median, p.high) if value), default=0.0)
    rows = []
    for part in view.parts:
        cells = [
            f'<th scope="row"><span class="swatch {part.name}"></span>{escape(part.name)}'
            f'<span class="meaning">{escape(part.meaning)}</span></th>',
            _number(view.ms(part.median)),
            _number(view.interval(part) if part.name != "other" else "", wide=True),
            _number(percent(part.share)),
            f'<td class="chart">{_interval_chart(part, longest)}</td>',
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>\n")
    step = view.step
    total = [view.ms(step.median), view.interval(step), percent(step.share)]
    return (
        '<table>\n<thead><tr><th>part</th><th class="n">ms</th><th class="n wide">interval</th>'
        '<th class="n">share</th><th class="chart"></th></tr></thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody>\n"
        f'<tfoot><tr><th scope="row">step</th>{_number(total[0])}{_number(total[1], wide=True)}'
        f'{_number(total[2])}<td class="chart"></td></tr></tfoot>\n</table>\n'
    )


def _workers(view: View) -> str:
    titles = ("input ms", "compute ms", "wait ms", "CPUs", "examples")

    def times(worker: Worker) -> str:
        values = (worker.input, worker.compute, worker.wait)
        return "".join(_number(view.ms(value)) for value in values)

    head = "<th>worker</th>" + "".join(f'<th class="n">{escape(title)}</th>' for title in titles)
    rows = "".join(
        f'<tr><th scope="row">{escape(w.index)}</th>{times(w)}'
        f"{_number(count(w.cpus))}{_number(count(w.examples))}</tr>\n"
        for w in view.workers
    )
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody>\n</table></div>\n"
    )


def _advice(view: View) -> str:
    items = []
    for advice in view.advice:
        gain = f' <span class="gain">{escape(advice.gain)}</span>' if advice.gain else ""
        why = f"<p>{escape(advice.why)}</p>" if advice.why else ""
        items.append(f"<li><b>{escape(advice.change)}</b>{gain}{why}</li>\n")
    return f"<ol>\n{''.join(items)}</ol>\n"


def _facts(view: View) -> str:
    facts = (
        ("throughput", view.throughput),
        ("speed-up", view.speedup),
        ("network", view.network),
        ("training", view.training),
    )
    return _definitions((name, value) for name, value in facts if value)


def _tables(view: View) -> str:
    groups = (
        f"<div>\n<h3>{escape(title)}</h3>\n{_definitions(rows)}</div>\n"
        for title, rows in view.tables.items()
    )
    return f'<div class="groups">\n{"".join(groups)}</div>\n'


def _definitions(rows: Iterable[Sequence[str]]) -> str:
    items = (f"<dt>{escape(name)}</dt><dd>{_marked(escape(value))}</dd>\n" for name, value in rows)
    return f"<dl>\n{''.join(items)}</dl>\n"


def _number(text: str, *, wide: bool = False) -> str:
    return f'<td class="n{" wide" if wide else ""}">{_marked(escape(text))}</td>'


def _marked(text: str) -> str:
    return f'<span class="unknown">{text}</span>' if text == UNKNOWN else text
