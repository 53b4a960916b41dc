"""Imports run one way, and a process loads only the heavy packages that its job needs."""

import ast
import importlib
import subprocess
import sys

import pytest

import tfpipe
from tests.helpers import REPOSITORY

# A module imports from earlier layers, or from its own. A new module belongs in one of them.
LAYERS = [
    {"errors", "cpus"},
    {"schema", "tfrecord", "config", "attribution", "cluster", "sharding", "progress", "examples"},
    {"manifest", "example_summary", "index_files", "report_view", "launcher", "demo"},
    {"index_read", "index_schema"},
    {"data_quality", "index", "report_html", "report", "parsing", "stages", "checks", "forecast"},
    {"pipeline", "inspection"},
    {"models", "step", "rounds", "training", "worker", "trainer", "bench", "tune", "reduce"},
    {"cli"},
]
PURE = ("errors", "schema", "tfrecord", "manifest", "config", "sharding", "attribution", "forecast", "report",
        "examples", "example_summary", "index", "index_files", "index_read", "index_schema", "data_quality")  # fmt: skip
CONVERTER_MAY_USE = {"errors", "schema", "manifest", "tfrecord", "examples", "data_quality"}
MODULES = sorted(path.stem for path in (REPOSITORY / "tfpipe").glob("[!_]*.py"))


def imported(path) -> set[str]:
    """Every module a file imports, wherever in it; `from tfpipe import x` counts as tfpipe.x."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def tfpipe_modules(names: set[str]) -> set[str]:
    return {parts[1] for name in names if (parts := name.split("."))[0] == "tfpipe" and len(parts) > 1} & set(
        MODULES
    )


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_its_layer_and_those_below(module):
    layer = next((i for i, names in enumerate(LAYERS) if module in names), None)
    assert layer is not None, f"put tfpipe/{module}.py into LAYERS"
    allowed = set().union(*LAYERS[: layer + 1])
    names = imported(REPOSITORY / "tfpipe" / f"{module}.py")
    assert tfpipe_modules(names) <= allowed
    assert not [name for name in names if name.split(".")[0] in ("beam_jobs", "apache_beam")]


@pytest.mark.parametrize("path", sorted((REPOSITORY / "beam_jobs").rglob("*.py")), ids=lambda p: p.stem)
def test_the_converter_uses_only_the_foundation(path):
    names = imported(path)
    assert tfpipe_modules(names) <= CONVERTER_MAY_USE
    assert not [name for name in names if name.split(".")[0] in ("tensorflow", "keras", "tf_keras")]


def loaded(modules: list[str]) -> set[str]:
    script = f"import sys, {', '.join(modules)}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def present(modules: list[str]) -> list[str]:
    return [m for m in modules if (REPOSITORY / (m.replace(".", "/") + ".py")).exists()]


def test_pure_modules_load_no_heavy_package():
    heavy = {"tensorflow", "apache_beam", "pyarrow", "numba", "keras", "pandas"}
    assert not heavy & loaded(["tfpipe", *present([f"tfpipe.{name}" for name in PURE]), "tfpipe.cli"])


def test_a_training_worker_loads_no_converter():
    modules = present([f"tfpipe.{name}" for name in ("pipeline", "trainer", "worker", "training", "models")])
    assert not {"apache_beam", "pyarrow", "numba", "beam_jobs"} & loaded(modules)


def test_a_converter_loads_no_tensorflow():
    modules = present(["beam_jobs.convert", "beam_jobs.scan", "beam_jobs.write", "beam_jobs.encode"])
    assert modules, "the converter is gone"
    assert not {"tensorflow", "keras", "tf_keras"} & loaded(modules)


def test_all_is_every_public_name():
    assert sorted(tfpipe.__all__) == sorted({"__version__", *tfpipe._HOMES})
    assert dir(tfpipe) == sorted(tfpipe.__all__)
    for name in tfpipe.__all__:
        assert getattr(tfpipe, name) is not None
    for name, home in tfpipe._HOMES.items():
        assert getattr(tfpipe, name) is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = tfpipe.nope
