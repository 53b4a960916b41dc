"""The whole journey on real data, by the real commands: python -m tfpipe.demo

    python -m tfpipe.demo [--output demo_out] [--workers 2] [--epochs 20]

Comes in: the 1797 handwritten digits that scikit-learn ships as CSV (8 by 8 pixels, 0 to 16, and
the digit). Goes out, below the output folder: the dataset (data/), the result (result.json), the
report (report.html), the CSV that was converted (digits.csv) and the logs (logs/).

A second run replaces what the first one made, and nothing else: `.tfpipe-demo.json` in the output
folder says what the demo made there. Whatever else lies in the way is named, and stays.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfpipe.errors import OutputError, TfpipeError, UsageError, run_command

LEDGER = ".tfpipe-demo.json"
_FORMAT = "tfpipe-demo"

# What a run may make, by the name in the ledger: files, and in folders only names of these forms.
_FILES = ("digits.csv", "result.json", "report.html")
_FOLDERS = {
    "data": re.compile(
        r"manifest\.json|rejected\.jsonl|(train|test)-\d{5}-of-\d{5}\.tfrecord(\.gz|\.zlib)?|\.staging-.+"
    ),
    "logs": re.compile(r"[\w.-]+\.log"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        argv: without the program's name; default: sys.argv's.

    Returns:
        The exit code: 0 ok, 1 the work failed, 2 wrong usage.

    Raises:
        SystemExit: from argparse, with code 2 for a malformed command line.
    """
    parser = argparse.ArgumentParser(prog="python -m tfpipe.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("demo_out"), help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    args = parser.parse_args(argv)
    return run_command(lambda: _main(args.output, args.workers, args.epochs))


def _main(output: Path, workers: int, epochs: int) -> None:
    if workers < 1 or epochs < 1:
        raise UsageError(f"--workers and --epochs must be >= 1, got {workers} and {epochs}.")
    start_s = time.monotonic()
    source = _find_digits()
    prepare_output(output)

    _stage(1, "the data: handwritten digits, as CSV")
    (raw,) = _claim(output, "digits.csv")
    count = write_csv(source, raw)
    print(f"wrote {count} rows of 64 pixels and a label to {raw}")

    _stage(2, "convert: CSV to TFRecord shards with a manifest")
    (data,) = _claim(output, "data")
    convert = ["-m", "beam_jobs.convert", "--input", str(raw), "--pack", "image=p0..p63:8x8"]
    convert += ["--split", "train=0.8", "--split", "test=0.2", "--output", str(data)]
    _run(convert)

    _stage(3, f"train on {workers} workers, and measure where a step's time goes")
    result, html, logs = _claim(output, "result.json", "report.html", "logs")
    train = ["-m", "tfpipe.trainer", "--data", str(data), "--workers", str(workers), "--train"]
    train += ["--epochs", str(epochs), "--json", str(result), "--html", str(html), "--log-dir", str(logs)]
    _run(train, logs)

    _stage(4, f"done in {time.monotonic() - start_s:.0f} s")
    for name, path in (("dataset", f"{data}{os.sep}"), ("result", result), ("report", html)):
        print(f"{name:<8} {path}")


def prepare_output(output: Path) -> None:
    """Makes the output folder ready: removes what an earlier demo made there, and nothing else.

    Args:
        output: missing, empty, or holding an earlier demo's ledger.

    Raises:
        OutputError: something that the demo did not make is in the way. Nothing was removed then.
    """
    ledger = output / LEDGER
    try:
        if output.is_dir():
            if not ledger.is_file() and any(output.iterdir()):
                raise OutputError(
                    f"the demo's output folder must be new, empty or an earlier demo's, got one that holds "
                    f"other files ({output}). Choose another with --output."
                )
            # All is looked at before anything is removed.
            for path in list(_made_before(output, _read_ledger(ledger))):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        output.mkdir(parents=True, exist_ok=True)
        for name in (*_FILES, *_FOLDERS):
            if os.path.lexists(output / name):
                raise _in_the_way(output / name)
        _write_ledger(output, [])
    except OSError as error:
        raise OutputError(
            f"the demo's output folder must be writable, got {error} ({output}). "
            f"Choose another with --output."
        ) from None


def write_csv(source: Path, destination: Path) -> int:
    """Writes the digits as CSV with a header line: p0 to p63, label.

    Args:
        source: scikit-learn's digits.csv.gz, which has none.
        destination: the file to write.

    Returns:
        The number of rows.
    """
    header = ",".join([*(f"p{i}" for i in range(64)), "label"])
    with gzip.open(source, "rt", encoding="ascii") as file:
        rows = [line.strip() for line in file if line.strip()]
    destination.write_text("\n".join([header, *rows]) + "\n", encoding="ascii")
    return len(rows)


def _find_digits() -> Path:
    spec = importlib.util.find_spec("sklearn")  # found without the second that importing it takes
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return path
    raise UsageError(
        f"the demo must find scikit-learn's digits, got none in {sys.executable}'s packages. "
        f"Run `make demo`, or install it: pip install 'scikit-learn>=1.3'."
    )


def _read_ledger(ledger: Path) -> list[str]:
    if not ledger.is_file():
        return []
    try:
        content = json.loads(ledger.read_text(encoding="utf-8"))
        made = content["made"] if content["format"] == _FORMAT else None
    except (ValueError, KeyError, TypeError):
        made = None
    if not isinstance(made, list):
        raise OutputError(
            f"a demo's ledger must be the file that the demo wrote, got something else ({ledger}). "
            f"Move the folder away, or choose another with --output."
        )
    # The ledger only narrows down: a name that the demo never uses is never removed.
    return [name for name in made if name in _FILES or name in _FOLDERS]


def _write_ledger(output: Path, made: Sequence[str]) -> None:
    content = json.dumps({"format": _FORMAT, "made": list(made)}) + "\n"
    (output / LEDGER).write_text(content, encoding="utf-8")


def _claim(output: Path, *names: str) -> list[Path]:
    """Notes what the next stage makes: before it does, so that a killed run is cleared away too."""
    for name in names:
        if os.path.lexists(output / name):
            raise _in_the_way(output / name)
    _write_ledger(output, [*_read_ledger(output / LEDGER), *names])
    return [output / name for name in names]


def _made_before(output: Path, names: Sequence[str]) -> Iterator[Path]:
    """What may be removed, a folder after what it holds.

    Raises:
        OutputError: something else lies among it.
    """
    for name in names:
        path = output / name
        if not os.path.lexists(path):
            continue
        if path.is_symlink() or path.is_dir() != (name in _FOLDERS):
            raise _in_the_way(path)
        if name in _FOLDERS:
            for child in sorted(path.iterdir()):
                if child.is_symlink() or not _FOLDERS[name].fullmatch(child.name):
                    raise _in_the_way(child)
                # Only a killed conversion leaves a folder: its own staging, whatever that holds.
                if child.is_dir():
                    for root, folders, files in os.walk(child, topdown=False):
                        yield from (Path(root) / found for found in (*files, *folders))
                yield child
        yield path


def _in_the_way(path: Path) -> OutputError:
    return OutputError(
        f"the demo must not remove what it did not make, got {path} in its way. "
        f"Move it, or choose another folder with --output."
    )


def _stage(number: int, title: str) -> None:
    print(f"\n[{number}/4] {title}", flush=True)


def _run(arguments: Sequence[str], logs: Path | None = None) -> None:
    """Runs a command of ours where the reader sees it: the line to copy, then its own output."""
    executable = os.path.relpath(sys.executable)
    print(
        f"$ {shlex.join([executable if not executable.startswith('..') else 'python', *arguments])}",
        flush=True,
    )
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
    # A cluster described in the environment is not the demo's: its workers are local.
    environment.pop("TF_CONFIG", None)
    code = subprocess.run([sys.executable, *arguments], env=environment, check=False).returncode
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise TfpipeError(
            f"the command must succeed, got exit code {code} (python {shlex.join(arguments)}). "
            f"Its message is above" + (f"; the logs are in {logs}." if logs else ".")
        )


if __name__ == "__main__":
    sys.exit(main())
