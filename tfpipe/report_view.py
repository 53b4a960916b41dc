"""What a report says, before it is laid out: result JSON -> sentences, rows and figures.

Comes in: a measurement (`"format": "tfpipe-measurement"`). Goes out: a `View` of plain values that
the terminal (report.py) and the page (report_html.py) lay out, so that both say the same.

A field that is null, absent or not finite is unknown, and is shown as `unknown`: never as 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfpipe.errors import UsageError

FORMAT = "tfpipe-measurement"
FORMAT_VERSION = 1
UNKNOWN = "unknown"

# In the order in which a step goes through them, which is the order of the bar's segments.
PART_MEANINGS = {
    "input": "waiting for the next batch: what prefetch could not hide",
    "compute": "the model's arithmetic on the median worker",
    "communication": "exchanging gradients, once every worker has them",
    "imbalance": "waiting for the worker that computes slowest",
}

VERDICTS = {
    "input_bound": (
        "Input-bound",
        "The step waits for data: preparing a batch takes longer than the step can hide.",
    ),
    "communication_bound": (
        "Communication-bound",
        "Exchanging gradients between the workers takes the largest share of the step.",
    ),
    "compute_bound": (
        "Compute-bound",
        "The model's own arithmetic takes the largest share; neither input nor network holds it back.",
    ),
    "imbalance_bound": (
        "Imbalance-bound",
        "One worker computes more slowly than its peers, and they wait for it in every step.",
    ),
    "inconclusive": (
        "Inconclusive",
        "This run can't tell which part is the largest. More steps or rounds (--steps, --rounds) or a "
        "quieter machine narrow the intervals.",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a step. Times in seconds, share of the step from 0 to 1; None is unknown."""

    name: str
    meaning: str
    median: float | None
    low: float | None
    high: float | None
    share: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One worker's row. Times in seconds; None is unknown."""

    index: str
    input: float | None
    compute: float | None
    wait: float | None
    cpus: float | None
    examples: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One change to try: what, what it would give, and why."""

    change: str
    gain: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Everything that a report shows.

    Attributes:
        verdict: the verdict's key in the result, such as `input_bound`.
        title: the verdict in words.
        headline: the verdict in one sentence.
        explanation: what the verdict means, and what to do if it is none.
        setting: workers and batch sizes, in one line.
        step: the whole step, as a part whose share is 1.
        digits: decimals of times in milliseconds, the same down a column.
        parts: input, compute, communication, imbalance, in this order; then, if they do not add up
            to the step, the time that belongs to none of them.
        workers: one row a worker.
        throughput, examples_per_s, speedup, training, network: figures in words; None for those that do
            not apply to this run.
        evaluation: what was evaluated, its value, and on how many examples; None if nothing was.
        advice: changes to try, best first.
        tables: title -> rows of (name, value): the pipeline, the trainer, the environment.
    """

    verdict: str
    title: str
    headline: str
    explanation: str
    setting: str
    step: Part
    digits: int
    parts: tuple[Part, ...]
    workers: tuple[Worker, ...]
    throughput: str
    examples_per_s: str
    speedup: str | None
    training: str | None
    evaluation: tuple[str, str, str] | None
    network: str | None
    advice: tuple[Advice, ...]
    tables: Mapping[str, tuple[tuple[str, str], ...]]

    def ms(self, seconds: float | None) -> str:
        """A time in milliseconds, with the decimals that this report uses."""
        return ms(seconds, digits=self.digits)

    def interval(self, part: Part) -> str:
        """A part's interval in milliseconds."""
        return interval(part, digits=self.digits)


def build_view(result: Mapping[str, Any]) -> View:
    """Reads a measurement.

    Args:
        result: the result JSON, parsed.

    Returns:
        what a report shows.

    Raises:
        UsageError: not a measurement, or of a version that this tfpipe does not know.
    """
    found = result.get("format") if isinstance(result, Mapping) else type(result).__name__
    if found != FORMAT:
        raise UsageError(
            f'a result must be a JSON object with "format": "{FORMAT}", got {found!r}. '
            f"`python -m tfpipe.trainer --json FILE` writes one."
        )
    if (version := result.get("format_version")) != FORMAT_VERSION:
        raise UsageError(
            f"a result's format_version must be {FORMAT_VERSION}, got {version!r}. "
            f"Read it with the tfpipe version that wrote it."
        )
    verdict = str(result.get("verdict") or UNKNOWN)
    title, explanation = VERDICTS.get(verdict, (verdict.replace("_", " ").capitalize(), ""))
    step, parts = _parts(result)
    digits = digits_for(step.median)
    headline = str(result.get("headline") or f"{title}.")
    if verdict == "inconclusive" and (overlap := _overlap(parts, digits, headline)):
        explanation = f"{overlap} {explanation}"
    examples_per_s = _quantity(result.get("examples_per_s"), "examples/s")
    training = _mapping(result.get("training"))
    return View(
        verdict=verdict,
        title=title,
        headline=headline,
        explanation=explanation,
        setting=_setting(result),
        step=step,
        digits=digits,
        parts=parts,
        workers=tuple(_worker(i, w) for i, w in enumerate(_sequence(result.get("workers")))),
        throughput=_throughput(result, examples_per_s),
        examples_per_s=examples_per_s,
        speedup=_speedup(result),
        training=_training(training),
        evaluation=_evaluation(training),
        network=_network(_mapping(result.get("network"))),
        advice=tuple(_advice(a) for a in _sequence(result.get("advice"))),
        tables={
            name.capitalize(): rows
            for name in ("pipeline", "trainer", "environment")
            if (rows := tuple(_flatten(_mapping(result.get(name)))))
        },
    )


def number(value: Any) -> float | None:
    """The value as a finite float, or None where it is unknown."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def ms(seconds: float | None, *, digits: int = 2) -> str:
    """Seconds as milliseconds: `8.31`; `0` only for zero itself, `<0.01` for what rounds to it."""
    if seconds is None:
        return UNKNOWN
    if seconds == 0:
        return "0"
    if abs(seconds) * 1000 < 0.5 * 10**-digits:
        return f"<{10**-digits:g}"
    return f"{seconds * 1000:,.{digits}f}"


def digits_for(seconds: float | None) -> int:
    """Decimals of a column of milliseconds whose largest value this is: about three digits."""
    return 2 if seconds is None or seconds < 0.01 else 1 if seconds < 1 else 0


def percent(share: float | None) -> str:
    """A share as `42 %`; below one percent, but not zero, `<1 %`."""
    if share is None:
        return UNKNOWN
    return "<1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


def interval(part: Part, *, digits: int) -> str:
    """`4.10 – 5.20`, in milliseconds."""
    if part.low is None or part.high is None:
        return UNKNOWN
    return f"{ms(part.low, digits=digits)} – {ms(part.high, digits=digits)}"


def count(value: float | None) -> str:
    """A number of things: `1,240`, `0.5`."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:,.3g}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _quantity(value: Any, unit: str) -> str:
    found = number(value)
    return f"{count(found)} {unit}" if found is not None else f"{UNKNOWN} {unit}"


def _parts(result: Mapping[str, Any]) -> tuple[Part, tuple[Part, ...]]:
    def part(name: str, meaning: str, times: Mapping[str, Any], whole: float | None) -> Part:
        median, low, high = (number(times.get(key)) for key in ("median", "low", "high"))
        share = median / whole if median is not None and whole else None
        return Part(name=name, meaning=meaning, median=median, low=low, high=high, share=share)

    step_times = _mapping(result.get("step_s"))
    whole = number(step_times.get("median"))
    step = part("step", "the whole step, with real input and exchange", step_times, whole)
    all_times = _mapping(result.get("parts_s"))
    parts = [part(n, m, _mapping(all_times.get(n)), whole) for n, m in PART_MEANINGS.items()]
    known = [p.median for p in parts if p.median is not None]
    # A part that is zero within its interval is reported as zero, so the sum may fall short a little.
    if whole and len(known) == len(parts) and (rest := whole - sum(known)) > 0.02 * whole:
        parts.append(part("other", "belongs to none of the parts above", {"median": rest}, whole))
    return step, tuple(parts)


def _overlap(parts: Sequence[Part], digits: int, headline: str) -> str:
    """Which parts can't be told apart; empty where none do, or the headline says so itself."""
    known = sorted((p for p in parts if p.median and p.low is not None), key=lambda p: -(p.median or 0))
    if len(known) < 2 or (known[1].high or 0) < (known[0].low or 0):
        return ""
    if sum(name in headline for name in PART_MEANINGS) > 1:
        return ""
    first, second = (f"{p.name} ({interval(p, digits=digits)} ms)" for p in known[:2])
    return f"The two largest parts overlap: {first} and {second}."


def _setting(result: Mapping[str, Any]) -> str:
    workers, local, whole = (
        number(result.get(key)) for key in ("num_workers", "per_worker_batch_size", "global_batch_size")
    )
    noun = "worker" if workers == 1 else "workers"
    return f"{count(workers)} {noun} × {count(local)} examples = {count(whole)} examples a step"


def _worker(position: int, worker: Any) -> Worker:
    values = _mapping(worker)
    index = number(values.get("index"))
    return Worker(
        index=count(index if index is not None else position),
        input=number(values.get("input_s")),
        compute=number(values.get("compute_s")),
        wait=number(values.get("wait_s")),
        cpus=number(values.get("cpus")),
        examples=number(values.get("examples")),
    )


def _throughput(result: Mapping[str, Any], examples_per_s: str) -> str:
    capacity = number(result.get("input_capacity_examples_per_s"))
    if capacity is None:
        return examples_per_s
    return f"{examples_per_s}; the input alone can deliver {count(capacity)}"


def _speedup(result: Mapping[str, Any]) -> str | None:
    versus = result.get("versus_one_worker")
    if not isinstance(versus, Mapping):
        return None
    speedup, efficiency = number(versus.get("speedup")), number(versus.get("efficiency"))
    factor = f"{speedup:.2f}×" if speedup is not None else UNKNOWN
    one = _quantity(versus.get("examples_per_s"), "examples/s")
    return f"{factor} one worker's {one} ({percent(efficiency)} efficiency)"


def _evaluation(training: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """None where nothing was evaluated; the loss where the model does not classify."""
    if (split := training.get("eval_split")) is None:
        return None
    accuracy, loss, examples = (
        number(training.get(f"eval_{key}")) for key in ("accuracy", "loss", "examples")
    )
    seen = f"{count(examples)} examples" if examples is not None else ""
    if accuracy is None and loss is not None:
        return f"{split} loss", f"{loss:.4g}", seen
    return f"{split} accuracy", f"{accuracy * 100:.1f} %" if accuracy is not None else UNKNOWN, seen


def _training(training: Mapping[str, Any]) -> str | None:
    if not training:
        return None
    epochs, steps, seconds, loss = (
        number(training.get(key)) for key in ("epochs", "steps", "train_s", "final_loss")
    )
    text = f"{count(epochs)} {'epoch' if epochs == 1 else 'epochs'} ({count(steps)} steps)"
    text += f" in {seconds:,.1f} s" if seconds is not None else ""
    text += f", final loss {loss:.4g}" if loss is not None else ""
    if (evaluation := _evaluation(training)) is None:
        return text
    name, value, examples = evaluation
    return f"{text}; {name} {value}" + (f" ({examples})" if examples else "")


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} GB"


def _network(network: Mapping[str, Any]) -> str | None:
    gradients, per_step, latency, bandwidth = (
        number(network.get(key))
        for key in ("gradient_bytes", "bytes_per_step", "latency_s", "bandwidth_bytes_per_s")
    )
    said = [
        f"{_bytes(gradients)} of gradients" if gradients is not None else "",
        f"{_bytes(per_step)} sent per worker and step" if per_step is not None else "",
        f"{ms(latency)} ms latency" if latency is not None else "",
        f"{_bytes(bandwidth)}/s" if bandwidth is not None else "",
    ]
    return ", ".join(filter(None, said)) or None


def _advice(advice: Any) -> Advice:
    values = _mapping(advice)
    step, speedup = number(values.get("expected_step_s")), number(values.get("expected_speedup"))
    gain = [
        f"{speedup:.2f}× the throughput" if speedup is not None else "",
        f"{ms(step, digits=digits_for(step))} ms a step" if step is not None else "",
    ]
    return Advice(
        change=str(values.get("change") or (advice if isinstance(advice, str) else UNKNOWN)),
        gain=", ".join(filter(None, gain)),
        why=str(values.get("why") or ""),
    )


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            rows += _flatten(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", _plain(value)))
    return rows


def _plain(value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (Mapping, list, tuple, str)) and not value:
        return "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(v) for v in value)
    return str(value)
