import os
import threading

import pytest

from tfpipe import errors
from tfpipe.errors import (
    OutputError,
    ShardError,
    TfpipeError,
    UsageError,
    check_output_file,
    run_command,
    write_output_file,
)


def test_the_tree_in_the_docstring_is_the_tree_in_the_code():
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, TfpipeError)]
    for cls in classes:
        assert f"{cls.__name__} " in errors.__doc__
    assert issubclass(UsageError, ValueError)


@pytest.mark.parametrize(
    ("raised", "code"), [(UsageError("a"), 2), (ShardError("a"), 1), (KeyboardInterrupt(), 130)]
)
def test_a_command_turns_errors_into_exit_codes(raised, code, capsys):
    def body():
        raise raised

    assert run_command(body) == code
    assert "Traceback" not in capsys.readouterr().err


def test_a_command_returns_its_code_and_keeps_our_own_faults():
    assert (run_command(lambda: None), run_command(lambda: 1)) == (0, 1)
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


def test_where_a_result_cannot_be_written_is_said_before_the_work(tmp_path):
    (tmp_path / "file").write_text("kept")
    check_output_file(tmp_path / "new.json", "--json")
    check_output_file(tmp_path / "file", "--json")
    for path, found in (
        (tmp_path, "a directory"),
        (tmp_path / "no" / "x.json", "a directory that does not exist"),
        (tmp_path / "file" / "x.json", "a directory that does not exist"),
    ):
        with pytest.raises(UsageError, match=f"--json must name a file .* got .*{found}"):
            check_output_file(path, "--json")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_place_without_permission_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root, whom CI may be, may write anywhere
    with pytest.raises(UsageError, match="without permission"):
        check_output_file(tmp_path / "x.json", "--json")


def test_a_result_replaces_the_file_whole_and_follows_links(tmp_path):
    (tmp_path / "file").write_text("a much longer text that must go")
    (tmp_path / "link").symlink_to("file")
    write_output_file(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_result_can_go_to_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_output_file(tmp_path / "pipe", "text")
    reader.join()
    assert read == ["text"]


def test_a_result_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(OutputError, match=r"No such file or directory .*x\.json"):
        write_output_file(tmp_path / "no" / "x.json", "text")
