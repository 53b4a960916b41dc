"""The demo: what it removes, what it runs, and once the whole of it."""

import csv
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tfpipe import demo
from tfpipe.errors import OutputError

REPOSITORY = Path(__file__).parents[2]


def _tree(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def _pretend_run(folder):
    """Leaves what a finished demo leaves."""
    demo.prepare_output(folder)
    names = ("digits.csv", "data", "result.json", "report.html", "logs")
    raw, data, result, html, logs = demo._claim(folder, *names)
    for path in (raw, result, html):
        path.write_text("made")
    data.mkdir()
    logs.mkdir()
    for name in ("manifest.json", "train-00000-of-00024.tfrecord.gz", "test-00001-of-00002.tfrecord"):
        (data / name).write_text("made")
    (data / ".staging-1a" / "pieces").mkdir(parents=True)
    (data / ".staging-1a" / "pieces" / "0").write_text("made")
    (logs / "worker-0.log").write_text("made")


@pytest.mark.parametrize("state", ["missing", "empty", "earlier demo"])
def test_output_is_ready_when_new_empty_or_an_earlier_demos(tmp_path, state):
    out = tmp_path / "a" / "out"
    if state != "missing":
        out.mkdir(parents=True)
    if state == "earlier demo":
        _pretend_run(out)
    demo.prepare_output(out)
    assert _tree(out) == [demo.LEDGER]


def test_a_folder_that_the_demo_did_not_make_is_refused_untouched(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text("mine")
    before = _tree(tmp_path)
    with pytest.raises(OutputError, match=f"other files \\({re.escape(str(tmp_path))}\\).*--output"):
        demo.prepare_output(tmp_path)
    assert _tree(tmp_path) == before


@pytest.mark.parametrize("name", ["notes.txt", "mine/x", "data2"])
def test_the_users_files_beside_the_demos_stay(tmp_path, name):
    _pretend_run(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    demo.prepare_output(tmp_path)
    assert (tmp_path / name).read_text() == "mine"
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", ["data/notes.txt", "data/mine/x", "logs/keep.txt", "data/train.tfrecord"])
def test_the_users_files_among_the_demos_stop_it_before_anything_goes(tmp_path, name):
    _pretend_run(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    before = _tree(tmp_path)
    with pytest.raises(OutputError, match=re.escape(str(tmp_path / Path(*Path(name).parts[:2])))):
        demo.prepare_output(tmp_path)
    assert _tree(tmp_path) == before


def test_a_link_is_never_followed(tmp_path):
    _pretend_run(tmp_path / "out")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "manifest.json").write_text("mine")
    shutil.rmtree(tmp_path / "out" / "data")
    (tmp_path / "out" / "data").symlink_to(mine)
    with pytest.raises(OutputError, match="out/data"):
        demo.prepare_output(tmp_path / "out")
    assert (mine / "manifest.json").read_text() == "mine"


def test_a_file_that_the_ledger_does_not_list_is_not_replaced(tmp_path):
    demo.prepare_output(tmp_path)  # a run that ended before it made a result
    (tmp_path / "result.json").write_text("mine")
    with pytest.raises(OutputError, match=r"result\.json"):
        demo.prepare_output(tmp_path)
    assert (tmp_path / "result.json").read_text() == "mine"


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": "other", "made": []}', '{"format": "tfpipe-demo", "made": "data"}']
)
def test_a_foreign_ledger_is_refused(tmp_path, content):
    (tmp_path / demo.LEDGER).write_text(content)
    (tmp_path / "data").mkdir()
    with pytest.raises(OutputError, match=re.escape(demo.LEDGER)):
        demo.prepare_output(tmp_path)


def test_a_ledger_cannot_name_what_the_demo_never_makes(tmp_path):
    demo.prepare_output(tmp_path)
    (tmp_path / "precious").write_text("mine")
    (tmp_path / demo.LEDGER).write_text('{"format": "tfpipe-demo", "made": ["precious", "../precious"]}')
    demo.prepare_output(tmp_path)
    assert (tmp_path / "precious").read_text() == "mine"


def test_the_csv_has_a_header_and_every_value(tmp_path):
    source = tmp_path / "digits.csv.gz"
    rows = [[str((i * j) % 17) for j in range(65)] for i in range(3)]
    with gzip.open(source, "wt") as file:
        file.writelines(",".join(row) + "\n" for row in rows)
    assert demo.write_csv(source, tmp_path / "digits.csv") == 3
    with open(tmp_path / "digits.csv", newline="") as file:
        header, *found = csv.reader(file)
    assert header == [*(f"p{i}" for i in range(64)), "label"]
    assert found == rows


def test_the_real_commands_run_in_order_and_are_echoed(tmp_path, monkeypatch, capfd):
    commands = []
    monkeypatch.setenv("TF_CONFIG", "{}")

    def run(command, *, env, check):
        commands.append(command)
        assert "TF_CONFIG" not in env
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=run))
    assert demo.main(["--output", str(tmp_path / "out"), "--workers", "3"]) == 0
    assert [command[2] for command in commands] == ["beam_jobs.convert", "tfpipe.trainer"]
    assert "image=p0..p63:8x8" in commands[0]
    assert commands[1][commands[1].index("--workers") + 1] == "3"
    out = capfd.readouterr().out
    for command in commands:
        assert " ".join(command[1:]) in out
    assert len((tmp_path / "out" / "digits.csv").read_text().splitlines()) == 1798


def test_a_failed_command_ends_the_demo_and_a_rerun_starts_clean(tmp_path, monkeypatch, capfd):
    codes = iter([0, 1, 0, 0])

    def run(command, *, env, check):
        return SimpleNamespace(returncode=next(codes))

    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=run))
    assert demo.main(["--output", str(tmp_path)]) == 1
    error = capfd.readouterr().err
    assert re.search(r"exit code 1 \(python -m tfpipe\.trainer .*logs are in \S+logs", error)
    assert demo.main(["--output", str(tmp_path)]) == 0


def test_interrupting_a_command_interrupts_the_demo(tmp_path, monkeypatch):
    run = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=130))
    monkeypatch.setattr(demo, "subprocess", run)
    assert demo.main(["--output", str(tmp_path)]) == 130


def test_no_workers_is_a_usage_error_before_anything_is_made(tmp_path, capfd):
    assert demo.main(["--output", str(tmp_path / "out"), "--workers", "0"]) == 2
    assert "got 0" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_demo_converts_trains_and_explains_over_an_earlier_run(tmp_path):
    out = tmp_path / "out"
    _pretend_run(out)
    command = [sys.executable, "-m", "tfpipe.demo", "--output", str(out)]
    environment = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
    found = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=450
    )
    assert found.returncode == 0, found.stdout + found.stderr
    text = re.sub(r"\s+", " ", found.stdout)
    assert re.search(r"wrote 1797 records in \d+ shards to \S+data \(0 rejected\)", text)
    accuracy = re.search(r"test accuracy (\d+\.\d) % \((\d+) examples\)", text)
    assert float(accuracy[1]) > 90 and 300 < int(accuracy[2]) < 420
    result = json.loads((out / "result.json").read_text())
    assert result["headline"] in text
    assert result["num_workers"] == 2 and result["training"]["epochs"] == 20
    for part in ("input", "compute", "communication", "imbalance"):
        assert part in text
    for path in (out / "result.json", out / "report.html", out / "data"):
        assert str(path) in text
    assert result["verdict"].split("_")[0] in (out / "report.html").read_text().lower()
    # TensorFlow's and Beam's own log lines stay in the log files.
    assert not re.search(r"^(\d{4}-\d\d-\d\d|[IWE]\d{4}|WARNING|INFO)", found.stdout + found.stderr, re.M)
