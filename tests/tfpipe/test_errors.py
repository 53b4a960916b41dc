import pytest

from tfpipe import errors
from tfpipe.errors import ShardError, TfpipeError, UsageError, run_command


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
