"""Finds the input files, tells their format, and opens them as one source.

A path that exists is meant literally, even if it holds glob characters; else it is a glob, and
one that matches nothing is an error. A directory stands for the files of a known format below
it; hidden ones and those of other formats are left out and counted. One that holds a dataset stands
for the files that its manifest lists.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from beam_jobs.sources import InputFile, Source, SourceOptions
from beam_jobs.sources.compressed import SUFFIXES as COMPRESSED_SUFFIXES
from beam_jobs.sources.compressed import damaged_errors, open_bytes
from beam_jobs.sources.datasets import dataset_files, split_of
from tfpipe.errors import RecordError, UsageError
from tfpipe.manifest import FILE_NAME
from tfpipe.tfrecord import is_tfrecord

# The module of each format and the function in it that opens files: (files, options) -> Source.
_OPENERS = {
    "csv": ("csv", "open_csv"),
    "tsv": ("csv", "open_csv"),
    "parquet": ("parquet", "open_parquet"),
    "jsonl": ("jsonl", "open_jsonl"),
    "text": ("lines", "open_lines"),
    "avro": ("avro", "open_avro"),
    "idx": ("idx", "open_idx"),
    "tfrecord": ("tfrecord", "open_tfrecord"),
}
FORMATS = tuple(_OPENERS)
_SUFFIXES = {
    ".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text", ".parquet": "parquet", ".pq": "parquet", ".avro": "avro", ".idx": "idx",
    ".tfrecord": "tfrecord",
}  # fmt: skip
_MAGIC = {b"PAR1": "parquet", b"Obj\x01": "avro"}
_MAGIC_BYTES = 1024
_IDX_TYPES = (0x08, 0x09, 0x0B, 0x0C, 0x0D, 0x0E)


@dataclass(kw_only=True, slots=True)
class Found:
    """The files that an input stands for."""

    files: list[str] = field(default_factory=list)
    formats: list[str] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)


def open_source(inputs: Sequence[str], options: SourceOptions) -> tuple[Source, Counter[str]]:
    """Finds the files and opens them as one source.

    Args:
        inputs: what the user named: files, directories, globs.
        options: how to read them.

    Returns:
        The source, and how many files were left out, by suffix.

    Raises:
        UsageError: an input names nothing, one file twice, or several formats.
        RecordError: a file is empty, unreadable or malformed.
    """
    found = find_files(inputs, options.format)
    formats = sorted(set(found.formats))
    if len(formats) > 1:
        examples = ", ".join(f"{name} ({found.files[found.formats.index(name)]})" for name in formats)
        raise UsageError(
            f"all input files must have one format, got {examples}. Convert each format into its own dataset, "
            f"or name one with --format."
        )
    files = []
    for path in found.files:
        stat = os.stat(path)
        if stat.st_size == 0 and formats == ["tfrecord"]:  # as many writers leave them
            found.ignored["empty .tfrecord"] += 1
            continue
        if stat.st_size == 0:
            raise RecordError(f"an input file must hold data, got an empty file ({path}). Leave it out.")
        files.append(InputFile(path=path, num_bytes=stat.st_size, modified_ns=stat.st_mtime_ns))
    if not files:
        raise RecordError(
            f"an input must hold at least one record, got only empty files ({found.files[0]}). Name other files."
        )
    # Imported late: each format's module is only needed where it is used.
    module, function = _OPENERS[formats[0]]
    options = dataclasses.replace(options, format=formats[0])
    source: Source = getattr(importlib.import_module(f"beam_jobs.sources.{module}"), function)(files, options)
    return source, found.ignored


def find_files(inputs: Sequence[str], wanted: str) -> Found:
    """Finds the files that the inputs stand for, sorted by path within each input.

    Args:
        inputs: files, directories, globs.
        wanted: a format, or "auto".

    Returns:
        Their paths and formats, and what was left out.

    Raises:
        UsageError: an input that names nothing, or a file that is named twice.
        RecordError: a file whose format can't be told.
    """
    found = Found()
    for given in inputs:
        before = len(found.files)
        literal, split = split_of(given)
        for path in _expand(literal):
            if os.path.isdir(path):
                _walk(path, wanted, found, split)
            else:
                found.files.append(path)
                found.formats.append(_format_of(path, wanted))
        if len(found.files) == before:
            ignored = ", ".join(f"{count} {suffix}" for suffix, count in sorted(found.ignored.items()))
            raise UsageError(
                f"an input must hold at least one file of a known format ({', '.join(FORMATS)}), "
                f"got {ignored or 'no files'} ({given}). Name other files, or say which --format they have."
            )
    seen: dict[str, str] = {}
    for path in found.files:
        real = os.path.realpath(path)
        if real in seen:
            raise UsageError(
                f"every input file must be named once, got {path} twice (also as {seen[real]}). "
                f"Its records would be doubled: name it once."
            )
        seen[real] = path
    return found


def _expand(given: str) -> list[str]:
    if os.path.lexists(given):
        return [given]
    matches = sorted(glob.glob(given, recursive=True)) if glob.has_magic(given) else []
    if not matches:
        what = "a pattern that matches nothing" if glob.has_magic(given) else "no such file or directory"
        raise UsageError(f"an input must exist, got {what} ({given}). Check the path.")
    return matches


def _walk(directory: str, wanted: str, found: Found, split: str = "") -> None:
    for parent, directories, names in os.walk(directory):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        if wanted in ("auto", "tfrecord") and FILE_NAME in names:
            dataset = dataset_files(parent, names, split)
            if dataset is not None:
                paths, names = dataset
                found.files += paths
                found.formats += ["tfrecord"] * len(paths)
                found.ignored.update(Path(name).suffix.lower() or name for name in names)
                continue
        for name in sorted(names):
            path = os.path.join(parent, name)
            kind = None if name.startswith(".") or not os.path.isfile(path) else sniff(path)
            if kind is None or wanted not in ("auto", kind):
                found.ignored[Path(name).suffix.lower() or name] += 1
            else:
                found.files.append(path)
                found.formats.append(kind)


def _format_of(path: str, wanted: str) -> str:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise RecordError(f"an input file must be readable, got {error.strerror} ({path}).") from None
    kind = wanted if wanted != "auto" else sniff(path)
    if kind is None:
        raise UsageError(
            f"an input's format must show in its content or name ({', '.join(sorted(_SUFFIXES))}; .gz, .bz2 and "
            f".zst too), got neither ({path}). Say which with --format, e.g. --format csv --delimiter '\\t'."
        )
    return kind


def sniff(path: str) -> str | None:
    """Tells a file's format by its content, then by its name.

    Args:
        path: a readable file.

    Returns:
        One of `FORMATS`, or None.
    """
    if is_tfrecord(path):  # first: a checksum tells, where others have a few bytes
        return "tfrecord"
    try:
        with open_bytes(path) as stream:
            head: bytes = stream.read(_MAGIC_BYTES)
    except damaged_errors():
        head = b""  # the name still tells who should read it, and say what is wrong with it
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    if len(head) >= 4 and head[:2] == b"\0\0" and head[2] in _IDX_TYPES and 1 <= head[3] <= 8:
        return "idx"
    name = Path(path).name.lower()
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    if ".tfrecord" in name:
        return "tfrecord"
    if name.endswith("-ubyte") and "idx" in name:
        return "idx"
    return _SUFFIXES.get(Path(name).suffix)
