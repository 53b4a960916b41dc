"""Converts CSV, TSV, JSONL, Parquet, Avro, IDX, TFRecord or text files into a sharded, verified dataset directory.

    python -m beam_jobs.convert --input data/*.csv --output data/train

Two passes: the first reads every record and decides the schema, the second writes shards in
their final, permuted order, reads them back, and publishes them; the manifest comes last.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from beam_jobs.layout import parse_pack, scan_wishes
from beam_jobs.outcome import Failure
from beam_jobs.output import OutputDirectory
from beam_jobs.plan import MOST_REJECTED, PlanSummary, Request
from beam_jobs.report import Progress, show_schema
from beam_jobs.scan import REJECTED, read_plan
from beam_jobs.sources import InputSplit, Source, SourceOptions
from beam_jobs.sources.find import FORMATS, open_source
from beam_jobs.write import ISAL_MAX_LEVEL, MAX_LEVEL
from tfpipe import __version__
from tfpipe.errors import (
    RecordError,
    SchemaError,
    UsageError,
    check_output_file,
    run_command,
    write_output_file,
)
from tfpipe.manifest import Manifest, Shard, Split
from tfpipe.schema import Schema

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)", re.IGNORECASE)
_COMPRESSIONS = {"auto": "auto", "gzip": "GZIP", "zlib": "ZLIB", "none": ""}
_SPLIT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments; the process's own by default.

    Returns:
        0 if the dataset was published, 1 if the work failed, 2 if the usage is wrong.
    """
    return run_command(lambda: _command(sys.argv[1:] if argv is None else list(argv)))


def _command(argv: Sequence[str]) -> None:
    args, beam_args = parse_args(argv)
    request = request_from(args)
    options = SourceOptions(format=args.format, header=not args.no_header, delimiter=args.delimiter)
    check_beam_args(beam_args)
    if args.json:
        check_output_file(args.json, "--json")
    if hasattr(signal, "SIGTERM"):
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        convert(inputs=args.input, output=args.output, options=options, request=request, mode=args.mode,
                beam_args=beam_args, json_file=args.json)  # fmt: skip
    except OSError as error:  # a full disk, a file that is gone: for the user, not a fault of ours
        raise Failure.of(error).to_error() from error


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def convert(
    *,
    inputs: Sequence[str],
    output: str,
    options: SourceOptions,
    request: Request,
    mode: str = "new",
    beam_args: Sequence[str] = (),
    json_file: str | None = None,
) -> Manifest:
    """Converts files into a dataset directory.

    Args:
        inputs: files, directories or globs.
        output: the dataset directory; missing or empty, but for the other modes.
        options: how to read the input.
        request: what to make of it.
        mode: "new", "overwrite" or "resume"; see `output.OutputDirectory`.
        beam_args: for Beam's local runner.
        json_file: where a summary goes as JSON, if anywhere.

    Returns:
        The manifest that was published.

    Raises:
        TfpipeError: the reason why nothing was published.
    """
    from beam_jobs.run import run  # imports Beam, which takes a second that a usage error need not wait for

    started = time.monotonic()
    source, ignored = open_source(inputs, options)
    # A dataset that is converted again keeps its features, but where the user says otherwise.
    if request.declared is None and not request.packs:
        request = dataclasses.replace(request, declared=getattr(source, "schema", None))
    wishes = scan_wishes(request.packs, request.declared, source.columns)
    splits = source.plan()
    num_bytes = sum(file.num_bytes for file in source.files)
    print(
        f"reading {len(source.files)} {source.format} file{'s' * (len(source.files) > 1)}, {num_bytes:,} bytes"
    )
    if ignored:
        listed = ", ".join(f"{count} {suffix}" for suffix, count in sorted(ignored.items()))
        print(f"ignored files, of no known format, of no dataset or empty: {listed}")
    check_apart(source, output)
    with OutputDirectory(output, mode, identity(source, splits, options, request)) as directory:
        manifest = directory.ready()
        if manifest is None:
            with Progress(directory.staging, num_splits=len(splits)) as progress:
                plan, shards = run(
                    source=source, splits=splits, wishes=wishes, request=request,
                    staging=directory.staging, beam_args=beam_args, watch=progress.update,
                )  # fmt: skip
            check_unchanged(source)
            manifest = make_manifest(request, source, plan, shards, ignored)
            written = sum(split.num_records for split in manifest.splits.values())
            if written != plan.num_records:
                raise RecordError(
                    f"every record read must be written or rejected, got {written} of {plan.num_records} written."
                )
        done = read_plan(directory.staging)
        directory.publish(manifest)
    written = sum(split.num_records for split in manifest.splits.values())
    elapsed_s = time.monotonic() - started
    if json_file:
        write_summary(json_file, manifest, done.notices if done else (), output, elapsed_s)
    total = sum(split.num_bytes for split in manifest.splits.values())
    print(
        f"{written / elapsed_s:,.0f} records/s, {num_bytes:,} bytes read, {total:,} bytes written, {elapsed_s:.1f} s"
    )
    if manifest.num_rejected:
        print(
            f"WARNING: {manifest.num_rejected} of {written + manifest.num_rejected} rows were left out; "
            f"see {os.path.join(output, REJECTED)}"
        )
    num_shards = sum(len(split.shards) for split in manifest.splits.values())
    print(f"wrote {written} records in {num_shards} shards to {output} ({manifest.num_rejected} rejected)")
    return manifest


def make_manifest(
    request: Request, source: Source, plan: PlanSummary, shards: Sequence[Shard], ignored: Counter[str]
) -> Manifest:
    """Describes what was written, with nothing in it that depends on machine or time."""
    by_split: dict[str, list[Shard]] = {name: [] for name, _ in request.splits}
    for split, shard in zip(plan.shard_splits, shards, strict=True):
        by_split[split].append(shard)
    described: dict[str, Any] = {
        "format": source.format,
        "files": [{"name": file.name, "num_bytes": file.num_bytes} for file in source.files],
    }
    if ignored:
        described["ignored_files"] = dict(sorted(ignored.items()))
    return Manifest(
        schema=plan.schema,
        splits={name: Split(shards=tuple(found)) for name, found in by_split.items()},
        compression=plan.compression,
        num_rejected=plan.num_rejected,
        statistics=plan.statistics,
        source=described,
        shuffle_seed=request.seed if request.shuffle else None,
        created_by=versions(),
    )


def versions() -> dict[str, str]:
    """What the bytes of a dataset may depend on."""
    packages = ("apache-beam", "pyarrow", "isal")
    return {"tfpipe": __version__, **{name: metadata.version(name) for name in packages}}


def identity(
    source: Source, splits: Sequence[InputSplit], options: SourceOptions, request: Request
) -> dict[str, Any]:
    """What must be the same for a conversion to be resumed: all that its result depends on, as plain values."""
    files = repr([(os.path.abspath(file.path), file.num_bytes, file.modified_ns) for file in source.files])
    asked = dataclasses.asdict(options) | {
        name: getattr(request, name) for name in (field.name for field in dataclasses.fields(request))
    }
    asked["declared"] = request.declared and request.declared.to_json()
    asked["packs"] = [dataclasses.asdict(pack) for pack in request.packs]
    return asked | {
        "format": source.format,
        "input (names, sizes, times)": hashlib.sha256(files.encode("utf-8", "surrogateescape")).hexdigest(),
        "plan of input splits": hashlib.sha256(repr(list(splits)).encode()).hexdigest(),
        "version": versions(),
    }


def check_apart(source: Source, output: str) -> None:
    """Makes sure that the conversion does not read what it is about to replace.

    Raises:
        UsageError: an input file lies in the output directory.
    """
    directory = os.path.join(os.path.realpath(output), "")
    for file in source.files:
        if os.path.realpath(file.path).startswith(directory):
            raise UsageError(
                f"the output must lie apart from the input, got an input file in it ({file.path}). "
                f"Choose another --output."
            )


def check_unchanged(source: Source) -> None:
    """Makes sure that no input file changed while it was read twice.

    Raises:
        RecordError: one did.
    """
    for file in source.files:
        stat = os.stat(file.path)
        if (stat.st_size, stat.st_mtime_ns) != (file.num_bytes, file.modified_ns):
            raise RecordError(
                f"the input must not change while it is converted, got another size or time ({file.path}). "
                f"Convert again when nothing writes to it."
            )


def write_summary(
    path: str, manifest: Manifest, notices: Sequence[str], output: str, elapsed_s: float
) -> None:
    """Writes the summary as JSON."""
    records = sum(split.num_records for split in manifest.splits.values())
    summary = {
        "output": output,
        "num_records": records,
        "num_rejected": manifest.num_rejected,
        "num_shards": sum(len(split.shards) for split in manifest.splits.values()),
        "num_bytes": sum(split.num_bytes for split in manifest.splits.values()),
        "splits": {name: split.num_records for name, split in manifest.splits.items()},
        "compression": manifest.compression,
        "schema": manifest.schema.to_json(),
        "notices": list(notices),
        "elapsed_s": elapsed_s,
        "records_per_s": records / elapsed_s,
    }
    write_output_file(path, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")


def parse_args(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the command line; what this parser doesn't know is Beam's."""
    parser = argparse.ArgumentParser(
        prog="tfpipe-convert", description=__doc__.split("\n")[0], allow_abbrev=False,
        epilog="Anything else goes to Beam, e.g. --direct_num_workers 4 or --direct_running_mode in_memory.",
    )  # fmt: skip
    add = parser.add_argument
    add(
        "--input",
        action="append",
        required=True,
        metavar="PATH",
        help="a file, a directory, a glob, or DIR:SPLIT for one split of a dataset; repeatable",
    )
    add("--output", required=True, metavar="DIR", help="the dataset directory; missing or empty")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--overwrite", dest="mode", action="store_const", const="overwrite", default="new",
        help="replace the dataset there, which stays readable until the new one is whole")  # fmt: skip
    modes.add_argument("--resume", dest="mode", action="store_const", const="resume",
        help="go on from what a conversion that did not finish left there; begin, if there is nothing")  # fmt: skip
    add("--format", choices=("auto", *FORMATS), default="auto", help="default: by content, then by name")
    add("--no-header", action="store_true", help="the first row of CSV is data; columns are c0, c1, ...")
    add("--delimiter", metavar="C", help="between CSV fields; default: a comma, of TSV a tab")
    add(
        "--schema",
        metavar="FILE",
        help="declared schema (the manifest's form); default: inferred from all records",
    )
    add("--pack", action="append", default=[], metavar="NAME=COLUMNS[:SHAPE]",
        help="numeric columns become one tensor feature, e.g. image=p0..p63:8x8; repeatable")  # fmt: skip
    add("--split", action="append", default=[], metavar="NAME=FRACTION", help="repeatable; default train=1")
    shards = parser.add_mutually_exclusive_group()
    shards.add_argument(
        "--num-shards", type=int, metavar="N", help="of each split; default: by size, at least 24"
    )
    shards.add_argument("--shard-bytes", metavar="SIZE", help="of a shard before compression, e.g. 128MiB")
    add("--compression", choices=sorted(_COMPRESSIONS), default="auto")
    add("--compression-level", type=int, default=1, metavar="L",
        help=f"0 to {ISAL_MAX_LEVEL} by ISA-L, up to {MAX_LEVEL} by zlib (smaller, much slower); default 1")  # fmt: skip
    add("--no-shuffle", action="store_true", help="keep the source's order")
    add("--seed", type=int, default=0, help="of the permutation; default 0")
    add("--on-error", choices=("fail", "quarantine"), default="fail",
        help="what a row that can't be taken does: stop the conversion (default), or go to rejected.jsonl")  # fmt: skip
    add("--max-rejected", metavar="N|P%",
        help="how many rows may go there before the conversion fails, e.g. 100 or 0.1%%; with quarantine")  # fmt: skip
    add("--json", metavar="FILE", help="write a summary as JSON")
    return parser.parse_known_args(argv)


def request_from(args: argparse.Namespace) -> Request:
    """Checks the arguments and turns them into a request.

    Raises:
        UsageError: an argument is wrong.
        SchemaError: the declared schema is malformed.
    """
    for name, least in (("num_shards", 1), ("compression_level", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {value}.")
    if args.compression_level > MAX_LEVEL:
        raise UsageError(f"--compression-level must be at most {MAX_LEVEL}, got {args.compression_level}.")
    max_rejected, max_rejected_fraction = parse_max_rejected(args.on_error, args.max_rejected)
    return Request(
        packs=tuple(parse_pack(text) for text in args.pack),
        declared=read_schema(args.schema) if args.schema else None,
        splits=parse_splits(args.split),
        num_shards=args.num_shards,
        shard_bytes=parse_size(args.shard_bytes) if args.shard_bytes else None,
        shuffle=not args.no_shuffle,
        seed=args.seed,
        compression=_COMPRESSIONS[args.compression],
        level=args.compression_level,
        max_rejected=max_rejected,
        max_rejected_fraction=max_rejected_fraction,
    )


def parse_max_rejected(on_error: str, text: str | None) -> tuple[int, float | None]:
    """Reads `--max-rejected`: a number of rows, or a percentage of all.

    Args:
        on_error: "fail" or "quarantine".
        text: as the user wrote it, or None.

    Returns:
        The number, and the fraction if it is a percentage.

    Raises:
        UsageError: another form, out of range, or one option without the other.
    """
    if on_error == "fail":
        if text not in (None, "0"):
            raise UsageError(f"--max-rejected {text} must come with --on-error quarantine, got fail.")
        return 0, None
    if text is None:
        raise UsageError(
            "--on-error quarantine must say how many rows may be left out, got no --max-rejected. "
            "Add e.g. --max-rejected 100 or --max-rejected 0.1%."
        )
    if (percent := re.fullmatch(r"(\d+(?:\.\d+)?)%", text)) and 0 < float(percent[1]) <= 100:
        return 0, float(percent[1]) / 100
    if text.isascii() and text.isdigit() and 0 < int(text) <= MOST_REJECTED:
        return int(text), None
    raise UsageError(
        f"--max-rejected must be a number from 1 to {MOST_REJECTED} or a percentage up to 100% like 0.1%, got {text!r}."
    )


def parse_splits(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Reads `NAME=FRACTION` arguments; fractions add up to 1.

    Raises:
        UsageError: another form, a name twice, or another sum.
    """
    splits: dict[str, float] = {}
    for text in texts or ["train=1"]:
        name, _, number = text.partition("=")
        try:
            fraction = float(number)
        except ValueError:
            fraction = -1.0
        if not _SPLIT_NAME.fullmatch(name) or not 0 < fraction <= 1 or name in splits:
            raise UsageError(
                f"--split must have the form NAME=FRACTION, each name once, fractions above 0 and up to 1, got {text!r}."
            )
        splits[name] = fraction
    if abs(sum(splits.values()) - 1) > 1e-6:
        raise UsageError(
            f"--split fractions must add up to 1, got {sum(splits.values()):g} ({', '.join(texts)})."
        )
    return tuple(splits.items())


def parse_size(text: str) -> int:
    """Reads a size in bytes like 1000000, 128MiB or 64M (powers of 1024; MB means 1000 * 1000).

    Raises:
        UsageError: another form, or 0.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise UsageError(f"a size must be a number with an optional unit, like 128MiB, got {text!r}.")
    number, unit, suffix = match.groups()
    base = 1000 if suffix.lower() == "b" and unit else 1024
    size = int(float(number) * base ** " kmgt".index(unit.lower() or " "))
    if size < 1:
        raise UsageError(f"--shard-bytes must be at least 1, got {text!r}.")
    return size


def read_schema(path: str) -> Schema:
    """Reads a declared schema.

    Raises:
        SchemaError: no JSON, or no schema.
    """
    try:
        with open(path, encoding="utf-8") as file:
            obj = json.load(file)
    except OSError as error:
        raise UsageError(f"--schema must name a readable file, got {error.strerror} ({path}).") from None
    except ValueError as error:
        raise SchemaError(f"a schema must be JSON, got {error} ({path}).") from None
    return Schema.from_json(obj, where=path)


def check_beam_args(beam_args: Sequence[str]) -> None:
    """Refuses what Beam doesn't know either, and other runners than the pinned one.

    Raises:
        UsageError: an unknown option or runner.
    """
    if not beam_args:
        return
    from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for cls in PipelineOptions.__subclasses__():
        try:
            cls._add_argparse_args(parser)
        except argparse.ArgumentError:
            continue
    try:
        _, unknown = parser.parse_known_args(list(beam_args))
    except (argparse.ArgumentError, SystemExit) as error:
        raise UsageError(f"options must have the values that they take, got {error}.") from None
    if unknown:
        raise UsageError(
            f"an option must be one of this command's (--help) or of Beam's, got {' '.join(unknown)}."
        )
    runner = PipelineOptions(list(beam_args)).view_as(StandardOptions).runner
    if runner and runner.rsplit(".", 1)[-1] not in ("FnApiRunner", "DirectRunner", "BundleBasedDirectRunner"):
        raise UsageError(
            f"--runner must be FnApiRunner, the local runner that this command pins, got {runner!r}."
        )


__all__ = ["convert", "main", "show_schema"]

if __name__ == "__main__":
    sys.exit(main())
