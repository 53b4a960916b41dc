"""What a conversion shows while it runs."""

import re
from pathlib import Path

from beam_jobs import report
from beam_jobs.report import Progress


def marked(staging: Path, stage: str, indices, rows: int) -> None:
    for index in indices:
        (staging / f"done-{stage}-{index}-{rows}").touch()


def test_a_log_gets_lines_with_speed_and_time_left(tmp_path, monkeypatch, capsys):
    clock = [100.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: clock[0])
    with Progress(str(tmp_path), num_splits=10, num_bytes=50_000_000) as progress:
        marked(tmp_path, "scan", [0], 1000)
        progress.update()
        assert capsys.readouterr().out == ""  # too early for a line
        clock[0] += 20
        marked(tmp_path, "scan", range(1, 5), 1000)
        progress.update()
        # Four of ten in 20 s: 20 MB; five are left.
        assert capsys.readouterr().out == (
            "scanned: 5 of 10, 5,000 records, 200/s, 1.0 MB/s of the input, about 25 s left\n"
        )
        clock[0] += 1
        progress.update()
        assert capsys.readouterr().out == ""
        marked(tmp_path, "scan", range(5, 10), 1000)
        progress.update()
        assert capsys.readouterr().out == "scanned: 10,000 records\n"
        clock[0] += 60
        progress.update()
        assert capsys.readouterr().out == ""  # said once


def test_what_a_resumed_run_finds_done_does_not_count_as_speed(tmp_path, monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: clock[0])
    marked(tmp_path, "encode", range(8), 100)
    with Progress(str(tmp_path), num_splits=10, num_bytes=10) as progress:
        progress.update()
        clock[0] += 100
        marked(tmp_path, "encode", [8], 100)
        progress.update()
    out = capsys.readouterr().out
    assert re.search(r"encoded: 9 of 10, 900 records, 1/s, .* about 2 min left", out)


def test_durations_are_told_as_people_do():
    assert [report._duration(s) for s in (5, 89, 600, 7200)] == [
        "about 5 s",
        "about 89 s",
        "about 10 min",
        "about 2.0 h",
    ]
