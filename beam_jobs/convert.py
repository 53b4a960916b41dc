"""Converts raw files of any of `sources.find.FORMATS` into a sharded, verified dataset directory.

    python -m beam_jobs.convert --input data/*.csv --output data/train

Two passes: the first reads every record and decides the schema, the second writes shards in
their final, permuted order, reads them back, and publishes them; the manifest comes last.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from beam_jobs.layout import scan_wishes
from beam_jobs.options import check_beam_args, parse_args, request_from, source_options
from beam_jobs.outcome import Failure
from beam_jobs.output import OTHER_FILES, OutputDirectory
from beam_jobs.plan import PlanSummary, Request
from beam_jobs.report import Progress, show_schema
from beam_jobs.scan import REJECTED, read_plan
from beam_jobs.sources import InputSplit, Source, SourceOptions, printable
from beam_jobs.sources.find import open_source, real_paths
from beam_jobs.tfds import metadata_files, write_metadata
from tfpipe import __version__
from tfpipe.data_quality import data_warnings
from tfpipe.errors import (
    RecordError,
    UsageError,
    check_output_file,
    run_command,
    write_output_file,
)
from tfpipe.manifest import Manifest, Shard, Split


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
    options = source_options(args)
    check_beam_args(beam_args)
    if args.json:
        check_output_file(args.json, "--json")
    if hasattr(signal, "SIGTERM"):
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        convert(inputs=args.input, output=args.output, options=options, request=request, mode=args.mode,
                beam_args=beam_args, json_file=args.json, pieces=args.pieces)  # fmt: skip
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
    pieces: str = "auto",
) -> Manifest:
    """Converts files into a dataset directory.

    Args:
        inputs: files, directories or globs.
        output: the dataset directory; missing or empty, but for the other modes.
        options: how to read the input.
        request: what to make of it.
        mode: "new", "overwrite" or "resume"; see `output.OutputDirectory`.
        beam_args: for Beam: its runner and that runner's options.
        json_file: where a summary goes as JSON, if anywhere.
        pieces: "inline", "files" or "auto"; see `pieces.py`.

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
        request = dataclasses.replace(request, declared=source.schema)
    wishes = scan_wishes(request.packs, request.declared, source.columns)
    splits = source.plan()
    num_bytes = sum(file.num_bytes for file in source.files)
    kind = "image" if source.format == "images" else source.format
    print(f"reading {len(source.files)} {kind} file{'s' * (len(source.files) > 1)}, {num_bytes:,} bytes")
    if ignored:
        listed = ", ".join(f"{count} {suffix}" for suffix, count in sorted(ignored.items()))
        print(f"ignored files, of no known format, of no dataset or empty: {listed}")
    check_apart(source, output)
    with OutputDirectory(output, mode, identity(source, splits, options, request)) as directory:
        manifest = directory.ready()
        if manifest is None:
            with Progress(directory.staging, num_splits=len(splits), num_bytes=num_bytes) as progress:
                plan, shards = run(
                    source=source, splits=splits, wishes=wishes, request=request,
                    staging=directory.staging, beam_args=beam_args, watch=progress.update, pieces=pieces,
                )  # fmt: skip
            check_unchanged(source)
            manifest = make_manifest(request, source, plan, shards, ignored)
            written = sum(split.num_records for split in manifest.splits.values())
            if written != plan.num_records:
                raise RecordError(
                    f"every record read must be written or rejected, got {written} of {plan.num_records} written."
                )
            if request.tfds_metadata:
                write_metadata(directory.staging, manifest, os.path.basename(os.path.abspath(output)))
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
            f"see {printable(os.path.join(output, REJECTED))}"
        )
    for warning in data_warnings(manifest):
        print(f"warning: {warning}")
    num_shards = sum(len(split.shards) for split in manifest.splits.values())
    print(
        f"wrote {written} records in {num_shards} shards to {printable(output)} ({manifest.num_rejected} rejected)"
    )
    return manifest


def make_manifest(
    request: Request, source: Source, plan: PlanSummary, shards: Sequence[Shard], ignored: Counter[str]
) -> Manifest:
    """Describes what was written, with nothing in it that depends on machine or time."""
    by_split: dict[str, list[Shard]] = {name: [] for name, _ in request.splits}
    for split, shard in zip(plan.shard_splits, shards, strict=True):
        by_split[split].append(shard)
    described = source.describe()
    if plan.counts:
        described["stored"] = plan.counts
    if request.tfds_metadata:
        described[OTHER_FILES] = metadata_files(plan.schema)
    if request.split_by:
        described["split_by"] = request.split_by
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
    asked = dataclasses.asdict(options) | dataclasses.asdict(request)
    return asked | {
        "declared": request.declared and request.declared.to_json(),
        "format": source.format,
        "input (names, sizes, times)": hashlib.sha256(files.encode("utf-8", "surrogateescape")).hexdigest(),
        "plan of input splits": hashlib.sha256(repr(list(splits)).encode()).hexdigest(),
        "columns": hashlib.sha256(repr(source.columns).encode()).hexdigest(),
        "version": versions() | {"decoder": source.decoder},
    }


def check_apart(source: Source, output: str) -> None:
    """Makes sure that the conversion does not read what it is about to replace.

    Raises:
        UsageError: an input file lies in the output directory.
    """
    directory = os.path.join(os.path.realpath(output), "")
    paths = [file.path for file in source.files]
    for path, real in zip(paths, real_paths(paths), strict=True):
        if real.startswith(directory):
            raise UsageError(
                f"the output must lie apart from the input, got an input file in it ({path}). "
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


__all__ = ["convert", "main", "show_schema"]

if __name__ == "__main__":
    sys.exit(main())
