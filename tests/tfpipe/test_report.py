"""Reports: the figures of a result reach the reader, as they are and where they are known."""

import copy
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from rich.console import Console

from tfpipe import report
from tfpipe.errors import OutputError, UsageError
from tfpipe.report_view import build_view, ms


def _times(median, low=None, high=None):
    return {
        "median": median,
        "low": median * 0.9 if low is None else low,
        "high": median * 1.1 if high is None else high,
        "samples": 10,
    }


RESULT = {
    "format": "tfpipe-measurement",
    "format_version": 1,
    "verdict": "communication_bound",
    "headline": "Communication takes 64 % of each step.",
    "num_workers": 2,
    "replicas_in_sync": 2,
    "per_worker_batch_size": 64,
    "global_batch_size": 128,
    "step_s": _times(0.031),
    "parts_s": {
        "input": _times(0.0041),
        "compute": _times(0.0071),
        "communication": _times(0.0198),
        "imbalance": _times(0.0, 0.0, 0.0),
    },
    "examples_per_s": 4129.03,
    "examples_consumed": 32000,
    "input_capacity_examples_per_s": 61250.0,
    "workers": [
        {
            "index": i,
            "input_s": 0.0041,
            "compute_s": 0.0071,
            "wait_s": 0.0198,
            "examples": 16000,
            "bytes_read": 1,
            "cpus": 1,
        }
        for i in range(2)
    ],
    "network": {
        "gradient_bytes": 11082536,
        "bytes_per_step": 11082536,
        "latency_s": 0.0008,
        "bandwidth_bytes_per_s": 6.1e8,
    },
    "versus_one_worker": {"examples_per_s": 3180.0, "speedup": 1.3, "efficiency": 0.65},
    "advice": [
        {
            "change": "--accumulate-steps 8",
            "expected_step_s": 0.0101,
            "expected_speedup": 3.0,
            "why": "One exchange for eight batches.",
        }
    ],
    "pipeline": {"cache": "none", "deterministic": True},
    "trainer": {"model": "tfpipe.models:mnist_cnn"},
    "environment": {"tensorflow": "2.16.2", "gpu": None},
    "training": {
        "epochs": 5,
        "steps": 60,
        "final_loss": 0.1234,
        "eval_split": "test",
        "eval_accuracy": 0.972,
        "eval_examples": 360,
        "train_s": 12.34,
    },
}


def _changed(**changes):
    return {**copy.deepcopy(RESULT), **changes}


def _terminal(result, **options):
    out = io.StringIO()
    report.render_terminal(result, Console(file=out, width=80, highlight=False, **options))
    return out.getvalue()


def _line(text, start):
    return next(line for line in text.splitlines() if line.strip().startswith(start))


def test_terminal_shows_verdict_parts_workers_and_advice_within_80_plain_columns():
    text = _terminal(RESULT)
    assert text.startswith("Communication takes 64 % of each step.")
    assert _line(text, "input").split()[1:7] == ["4.1", "3.7", "–", "4.5", "13", "%"]
    assert _line(text, "communication").split()[1:7] == ["19.8", "17.8", "–", "21.8", "64", "%"]
    assert _line(text, "imbalance").split()[1:] == ["0", "0", "–", "0", "0", "%"]
    assert _line(text, "step ").split()[1] == "31.0"
    assert _line(text, "1  ").split() == ["1", "4.1", "7.1", "19.8", "1", "16,000"]
    assert "4,129 examples/s; the input alone can deliver 61,250" in text
    assert "1.30× one worker's 3,180 examples/s (65 % efficiency)" in text
    assert "test accuracy 97.2 % (360 examples)" in re.sub(r"\s+", " ", text)
    assert "--accumulate-steps 8 (3.00× the throughput, 10.1 ms a step): One exchange" in text
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 30
    assert "\x1b" not in text


def test_bar_lengths_follow_the_shares():
    text = _terminal(RESULT)
    lengths = {part: _line(text, part).count("█") for part in RESULT["parts_s"]}
    assert lengths == {"input": 2, "compute": 4, "communication": 10, "imbalance": 0}


def test_a_step_of_seconds_still_fits_the_columns():
    parts = {name: _times(1234.5) for name in RESULT["parts_s"]}
    text = _terminal(_changed(step_s=_times(4 * 1234.5), parts_s=parts))
    assert max(map(len, text.splitlines())) <= 80
    row = "communication 1,234,500 1,111,050 – 1,357,950 25 % ████"
    assert " ".join(_line(text, "communication").split()) == row


def test_terminal_without_unicode_prints_ascii_only():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    report.render_terminal(_changed(headline="Worker „eins“ – slow"), Console(file=out, width=80))
    out.flush()
    assert "####" in raw.getvalue().decode("ascii")


def test_markup_in_values_is_printed_as_it_is():
    assert _terminal(_changed(headline="[bold]x[/] [/nope]")).startswith("[bold]x[/] [/nope]")


@pytest.mark.parametrize("missing", [None, float("nan"), "absent"])
def test_unknown_fields_are_called_unknown_and_never_zero(missing):
    result = _changed(step_s=_times(0.031), versus_one_worker=None, training=None)
    if missing == "absent":
        del result["parts_s"]["input"], result["examples_per_s"], result["workers"][0]["cpus"]
    else:
        result["parts_s"]["input"] = {"median": missing, "low": missing, "high": missing}
        result["examples_per_s"] = missing
        result["workers"][0]["cpus"] = missing
    text = _terminal(result)
    assert _line(text, "input").split() == ["input", "unknown", "unknown", "unknown"]
    assert "unknown examples/s" in text
    assert _line(text, "0  ").split()[4] == "unknown"
    html = report.render_html(result)
    assert html.count('<span class="unknown">unknown</span>') >= 4
    assert "nan" not in html.lower().replace("font-variant-numeric", "")


def test_a_result_with_nothing_measured_still_renders():
    bare = {"format": "tfpipe-measurement", "format_version": 1}
    assert "unknown" in _terminal(bare)
    assert "The parts of the step are unknown" in report.render_html(bare)


def test_one_worker_has_no_worker_table():
    result = _changed(num_workers=1, workers=RESULT["workers"][:1])
    assert "compute ms" not in _terminal(result)
    assert "1 worker × 64" in _terminal(result)


def test_time_that_belongs_to_no_part_is_shown():
    parts = {**RESULT["parts_s"], "communication": _times(0.0098)}
    assert _line(_terminal(_changed(parts_s=parts)), "other").split()[1:4] == ["10.0", "32", "%"]
    assert "other" not in _terminal(RESULT)


def test_inconclusive_says_which_parts_overlap_and_what_to_do():
    parts = {**RESULT["parts_s"], "communication": _times(0.0100), "compute": _times(0.0095)}
    result = _changed(verdict="inconclusive", headline="No part leads clearly.", parts_s=parts)
    for text in (_terminal(result), report.render_html(result)):
        text = re.sub(r"\s+", " ", text)
        assert "communication (9.0 – 11.0 ms) and compute (8.6 – 10.5 ms)" in text
        assert "--rounds" in text
    named = "Inconclusive: communication 9.0 to 11.0 ms and compute 8.6 to 10.5 ms can't be told apart."
    text = _terminal({**result, "headline": named})
    assert "--rounds" in text and "overlap" not in text  # said once is enough


class _Page(HTMLParser):
    VOID = ("meta", "br")

    def __init__(self):
        super().__init__()
        self.stack, self.tags, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag


def test_html_is_well_formed_and_needs_nothing_else():
    html = report.render_html(RESULT)
    page = _Page()
    page.feed(html)
    assert page.stack == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    assert "url(" not in html and "@import" not in html
    assert "prefers-color-scheme: dark" in html and "@media print" in html
    for text in ("Communication takes 64 %", "17.8 – 21.8", "97.2 %", "--accumulate-steps 8", "2.16.2"):
        assert text in html


def test_html_bar_segments_add_up_to_the_step():
    bar = re.search(r'<svg class="bar".*?</svg>', report.render_html(RESULT), re.S).group()
    assert re.findall(r'class="(\w+)" x', bar) == ["input", "compute", "communication"]
    assert sum(map(float, re.findall(r'width="([\d.]+)"', bar))) == pytest.approx(100, abs=0.1)


def _poison(value):
    if isinstance(value, dict):
        return {k: _poison(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_poison(v) for v in value]
    return "<script>alert('x')</script>\"&" if isinstance(value, str) else value


def test_html_escapes_every_string():
    result = _poison(RESULT) | {"format": "tfpipe-measurement", "verdict": "<b>\"'"}
    result["environment"] = {"<i>": "<u>", "nested": {"<s>": ["<q>"]}}
    html = report.render_html(result)
    assert "alert(&#x27;x&#x27;)" in html
    for tag in ("<script", "<i>", "<u>", "<s>", "<q>", '<b>"'):
        assert tag not in html


def test_write_html_replaces_the_file_whole(tmp_path):
    path = tmp_path / "report.html"
    report.write_html(RESULT, path)
    assert path.read_text(encoding="utf-8") == report.render_html(RESULT)
    report.write_html(_changed(headline="Second."), path)
    assert "Second." in path.read_text(encoding="utf-8")
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_write_html_to_a_folder_that_cannot_be_made_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/report.html.*another path"):
        report.write_html(RESULT, tmp_path / "file" / "report.html")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(OutputError, match=r"folder\.html"):
        report.write_html(RESULT, tmp_path / "folder.html")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.html"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "readable JSON file"),
        ("[]", "tfpipe-measurement"),
        ('{"format": "tfpipe-dataset"}', "'tfpipe-dataset'"),
        (json.dumps(_changed(format_version=2)), "must be 1, got 2"),
    ],
)
def test_load_result_refuses_what_is_no_measurement(tmp_path, content, message):
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message) as error:
        report.load_result(path)
    assert str(path) in str(error.value)


def test_load_result_reads_what_was_written(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(RESULT))
    assert build_view(report.load_result(path)) == build_view(RESULT)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "unknown"), (0.0, "0"), (1e-6, "<0.01"), (0.00831, "8.31"), (1.24, "1,240.00")],
)
def test_ms(seconds, text):
    assert ms(seconds) == text


def test_a_report_needs_no_tensorflow_and_no_beam():
    code = (
        "import sys, tfpipe.report; "
        "sys.exit(any(m.split('.')[0] in ('tensorflow', 'apache_beam') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("training", "shown"),
    [
        ({"eval_split": None, "eval_accuracy": None}, "5 epochs (60 steps)"),
        ({"eval_split": "test", "eval_accuracy": None}, "5 epochs (60 steps); test accuracy unknown"),
        (
            {"eval_split": "val", "eval_accuracy": None, "eval_loss": 0.25, "eval_examples": 9},
            "5 epochs (60 steps); val loss 0.25 (9 examples)",
        ),
        ({"eval_split": "test", "eval_accuracy": 1.0}, "5 epochs (60 steps); test accuracy 100.0 %"),
    ],
)
def test_training_names_what_was_evaluated(training, shown):
    result = _changed(training={"epochs": 5, "steps": 60, **training})
    assert build_view(result).training == shown
    report.render_html(result)
