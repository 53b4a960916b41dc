"""The converter's command line: arguments -> a `Request`, `SourceOptions`, and what is Beam's.

Nothing is read but a declared schema, so wrong usage is told before any work.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from beam_jobs.layout import parse_pack
from beam_jobs.plan import MOST_REJECTED, Request
from beam_jobs.sources import ImageOptions, SourceOptions
from beam_jobs.sources.find import FORMATS
from beam_jobs.write import ISAL_MAX_LEVEL, MAX_LEVEL
from tfpipe.errors import UsageError
from tfpipe.manifest import SPLIT_NAME
from tfpipe.schema import read_schema

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(i?b?)", re.IGNORECASE)
_COMPRESSIONS = {"auto": "auto", "gzip": "GZIP", "zlib": "ZLIB", "none": ""}


def parse_args(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the command line; what this parser doesn't know is Beam's."""
    parser = argparse.ArgumentParser(
        prog="tfpipe-convert", description=f"Converts files ({', '.join(FORMATS)}) into a sharded, verified dataset directory.", allow_abbrev=False,
        epilog="Anything else goes to Beam, e.g. --direct_num_workers 4, or --runner DaskRunner with its options.",
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
    images = parser.add_argument_group("images")
    images.add_argument("--image-as", choices=("encoded", "raw"), default="encoded",
        help="files as they are, or PNG (default); or tensors of pixels, all of one shape")  # fmt: skip
    images.add_argument(
        "--image-channels", type=int, choices=(1, 3, 4), help="of every image: grey, RGB, RGBA"
    )
    images.add_argument("--image-size", metavar="HxW",
        help="of every image, e.g. 224x224: bilinear with anti-aliasing, the aspect is not kept")  # fmt: skip
    images.add_argument("--no-decode-check", action="store_true",
        help="do not decode images that are copied as they are: faster, but damage shows only in training")  # fmt: skip
    images.add_argument("--labels-from", metavar="MANIFEST", default="",
        help="number the classes as this dataset does (validation data as the training data)")  # fmt: skip
    add(
        "--schema",
        metavar="FILE",
        help="declared schema (the manifest's form); default: inferred from all records",
    )
    add("--pack", action="append", default=[], metavar="NAME=COLUMNS[:SHAPE]",
        help="numeric columns become one tensor feature, e.g. image=p0..p63:8x8; repeatable")  # fmt: skip
    add("--split", action="append", default=[], metavar="NAME=FRACTION", help="repeatable; default train=1")
    add("--split-by", metavar="FEATURE", default="",
        help="keep records of equal values in one split (a user's, a patient's); fractions then hold about")  # fmt: skip
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
    add("--tfds-metadata", action="store_true",
        help="write what tfds.builder_from_directory needs, too; implies --compression none")  # fmt: skip
    add("--pieces", choices=("auto", "inline", "files"), default="auto",
        help="whether encoded records travel through the runner (default on an engine) or as files in the output")  # fmt: skip
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
    if args.split_by and len(args.split) < 2:
        raise UsageError(
            f"--split-by {args.split_by} must come with two splits or more, got {len(args.split)}. Add e.g. "
            f"--split train=0.9 --split test=0.1."
        )
    if args.tfds_metadata and args.compression not in ("auto", "none"):
        raise UsageError(
            f"--tfds-metadata must come with --compression none, which is all that TFDS reads, got {args.compression}."
        )
    return Request(
        packs=tuple(parse_pack(text) for text in args.pack),
        declared=read_schema(args.schema) if args.schema else None,
        splits=parse_splits(args.split),
        split_by=args.split_by,
        num_shards=args.num_shards,
        shard_bytes=parse_size(args.shard_bytes) if args.shard_bytes else None,
        shuffle=not args.no_shuffle,
        seed=args.seed,
        compression="" if args.tfds_metadata else _COMPRESSIONS[args.compression],
        tfds_metadata=args.tfds_metadata,
        level=args.compression_level,
        max_rejected=max_rejected,
        max_rejected_fraction=max_rejected_fraction,
    )


def source_options(args: argparse.Namespace) -> SourceOptions:
    """How the arguments want the input to be read.

    Raises:
        UsageError: an argument is wrong.
    """
    return SourceOptions(
        format=args.format, header=not args.no_header, delimiter=args.delimiter, images=image_options(args)
    )


def image_options(args: argparse.Namespace) -> ImageOptions:
    """Reads the options of images.

    Raises:
        UsageError: --image-size has another form than HxW.
    """
    size = None
    if args.image_size is not None:
        match = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", args.image_size, re.ASCII)
        if not match:
            raise UsageError(
                f"--image-size must have the form HEIGHTxWIDTH, e.g. 224x224, each 1 to 9999, got {args.image_size!r}."
            )
        size = int(match[1]), int(match[2])
    return ImageOptions(
        form=args.image_as,
        channels=args.image_channels,
        size=size,
        decode_check=not args.no_decode_check,
        labels_from=args.labels_from,
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
    if text.isascii() and text.isdigit() and len(text) < 19 and 0 < int(text) <= MOST_REJECTED:
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
        if not SPLIT_NAME.fullmatch(name) or not 0 < fraction <= 1 or name in splits:
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


def check_beam_args(beam_args: Sequence[str]) -> None:
    """Refuses what Beam doesn't know either, and runners that are not known to work.

    Raises:
        UsageError: an unknown option or runner.
    """
    if not beam_args:
        return
    from apache_beam.options.pipeline_options import PipelineOptions

    from beam_jobs.engines import engine_of, engine_options

    if engine := engine_of(beam_args):
        engine_options(
            beam_args, engine, 1
        )  # tells a package that is missing, and brings the engine's options
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
