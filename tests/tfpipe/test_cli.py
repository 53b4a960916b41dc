import json
import subprocess
import sys
import types

import pytest

from tests.helpers import REPOSITORY, write_dataset
from tfpipe.cli import main
from tfpipe.schema import Feature, Schema


@pytest.fixture
def dataset(tmp_path):
    schema = Schema(
        features={"id": Feature(dtype="int64"), "image": Feature(dtype="uint8", shape=(2, 3), nullable=True)}
    )
    return write_dataset(tmp_path / "data", schema, [{"id": i} for i in range(10)], 3)


def test_inspect_shows_splits_schema_and_warnings(dataset, capsys, tmp_path):
    (dataset.directory / "train-00000-of-00009.tfrecord.gz").write_bytes(b"")
    assert main(["inspect", str(dataset.directory), "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    for text in ("train", "10", "3 to 4", "GZIP", "image", "2×3", "uint8", "raw", "yes", "never read"):
        assert text in out
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["splits"]["train"]["num_records"] == 10
    assert result["splits"]["train"]["max_records_per_shard"] == 4
    assert result["schema"] == dataset.schema.to_json()
    assert len(result["warnings"]) == 1


def test_verify_counts_or_lists_faults(dataset, capsys, tmp_path):
    assert main(["verify", str(dataset.directory)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "verified 10 records in 3 shards"
    path = dataset.directory / dataset.splits["train"].shards[1].name
    path.write_bytes(path.read_bytes()[:-9])
    report = tmp_path / "out.json"
    assert main(["verify", str(dataset.directory), "--json", str(report)]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("fault: ") and path.name in captured.out
    assert "in 3 shards" in captured.err
    assert len(json.loads(report.read_text())["faults"]) == 1


def test_bad_input_is_a_message_and_a_code(dataset, capsys, tmp_path):
    assert main(["inspect", str(tmp_path / "nope")]) == 1
    assert capsys.readouterr().err.startswith("error: a dataset directory must exist, got none")
    assert main(["inspect", str(dataset.directory), "--json", str(tmp_path / "no" / "x.json")]) == 2
    assert "--json must name a file in a directory that exists" in capsys.readouterr().err
    for arguments in ([], ["nope"], ["verify"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_measure_hands_its_arguments_to_the_trainer(monkeypatch):
    seen = []
    trainer = types.SimpleNamespace(main=lambda argv: seen.extend(argv) or 1)
    monkeypatch.setitem(sys.modules, "tfpipe.trainer", trainer)
    assert main(["measure", "--data", "x", "--help"]) == 1
    assert seen == ["--data", "x", "--help"]


def test_the_command_needs_no_tensorflow(dataset):
    script = (
        "import sys; from tfpipe.cli import main; "
        f"code = main(['verify', {str(dataset.directory)!r}]); "
        "assert 'tensorflow' not in sys.modules and 'apache_beam' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
