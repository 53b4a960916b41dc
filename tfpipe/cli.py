"""The `tfpipe` command: one subcommand a question.

    tfpipe inspect DIR            what a dataset holds
    tfpipe verify DIR             reads every byte and compares it with the manifest
    tfpipe index DIR              describes TFRecord files that somebody else made: writes their manifest
    tfpipe measure --data DIR     where a training step's time goes (python -m tfpipe.trainer)

Exit codes: 0, 1 (the work failed or found faults), 2 (usage).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfpipe.errors import check_output_file, run_command, write_output_file


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments; None takes `sys.argv`.

    Returns:
        The exit code: 0, 1 (the work failed or found faults), 2 (usage).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["measure"]:  # its options are the trainer's own
        from tfpipe.trainer import main as measure

        return run_command(lambda: measure(arguments[1:]))
    options = _parser().parse_args(arguments)

    def run() -> int:
        if options.json is not None:
            check_output_file(options.json, "--json")
        return options.command(options)

    return run_command(run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfpipe", description="TensorFlow input, and where each training step's time goes."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, text in (
        ("inspect", _inspect, "show what a dataset holds"),
        ("verify", _verify, "read every record and compare it with the manifest"),
        ("index", _index, "read TFRecord files that somebody else made and write their manifest"),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("directory", metavar="DIR", type=Path, help="dataset directory")
        sub.add_argument("--json", metavar="FILE", type=Path, help="write the result as JSON too")
        sub.set_defaults(command=command)
    sub.add_argument("--split", metavar="NAME=GLOB", action="append", default=[],
        help="files of a split by their names, e.g. test='*-eval-*'; repeatable; the first that matches "
        "counts; default: by the words train, test, validation ... in the names")  # fmt: skip
    sub.add_argument(
        "--schema",
        metavar="FILE",
        type=Path,
        help="declared schema (the manifest's form); default: inferred from all records",
    )
    sub.add_argument("--overwrite", action="store_true",
        help="replace a manifest that is there already; what it alone knew and still holds is kept")  # fmt: skip
    sub.add_argument("--processes", metavar="N", type=int, help="that read files; default: one a CPU")
    commands.add_parser("measure", help="measure where a training step's time goes", add_help=False)
    return parser


def _write_json(path: Path | None, obj: Any) -> None:
    if path is not None:
        write_output_file(path, json.dumps(obj, indent=1, ensure_ascii=False) + "\n")


def _inspect(options: argparse.Namespace) -> int:
    from tfpipe.inspection import show, summarize
    from tfpipe.manifest import Manifest

    manifest = Manifest.load(options.directory)
    summary = summarize(manifest)
    _write_json(options.json, summary)
    show(manifest, summary)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from tfpipe.manifest import Manifest

    manifest = Manifest.load(options.directory, check_files=False)
    splits = manifest.splits.values()
    columns = (TextColumn("verify"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("verify", total=sum(split.num_bytes for split in splits))
        faults = manifest.verify(lambda shard: progress.advance(task, shard.num_bytes))
    records, shards = sum(s.num_records for s in splits), sum(len(s.shards) for s in splits)
    result = {"directory": str(manifest.directory), "num_records": records, "num_shards": shards}
    _write_json(options.json, {**result, "faults": faults})
    for fault in faults:
        print(f"fault: {fault}")
    if faults:
        print(f"{len(faults)} faults in {shards} shards", file=sys.stderr)
        return 1
    print(f"verified {records} records in {shards} shards")
    return 0


def _index(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tfpipe.cpus import usable_cpus
    from tfpipe.errors import UsageError
    from tfpipe.index import index, parse_split_patterns
    from tfpipe.inspection import show, summarize
    from tfpipe.progress import Progress
    from tfpipe.schema import read_schema

    if options.processes is not None and options.processes < 1:
        raise UsageError(f"--processes must be at least 1, got {options.processes}.")

    split_patterns = parse_split_patterns(options.split)
    schema = read_schema(options.schema) if options.schema else None
    notices: list[str] = []
    with Progress(Console(stderr=True)) as progress:
        manifest = index(
            options.directory,
            split_patterns=split_patterns,
            schema=schema,
            overwrite=options.overwrite,
            num_processes=options.processes or usable_cpus(),
            on_progress=progress.update,
            on_notice=notices.append,
        )
    summary = summarize(manifest)
    _write_json(options.json, {**summary, "notices": notices})
    show(manifest, summary)
    for notice in notices:
        print(f"note: {notice}")
    splits = manifest.splits.values()
    records, shards = sum(s.num_records for s in splits), sum(len(s.shards) for s in splits)
    print(f"indexed {records} records in {shards} shards in {options.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
