"""Finds the input files, tells their format, and opens them as one source.

A path that exists is meant literally, even if it holds glob characters; else it is a glob, and
one that matches nothing is an error. A directory stands for the files of a known format below
it, behind links too; hidden ones and those of other formats are left out and counted. One that holds
a dataset stands for the files that its manifest lists. Content tells a format; a name does where
content does not.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib
import os
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from beam_jobs.sources import ImageOptions, InputFile, Source, SourceOptions
from beam_jobs.sources.compressed import SUFFIXES as COMPRESSED_SUFFIXES
from beam_jobs.sources.compressed import compression_of, damaged_errors, open_bytes
from beam_jobs.sources.datasets import dataset_files, split_of
from beam_jobs.sources.image_files import SUFFIXES as IMAGE_SUFFIXES
from beam_jobs.sources.image_files import image_kind
from beam_jobs.sources.tar_members import MAGIC as TAR_MAGIC
from beam_jobs.sources.tar_members import MAGIC_AT as TAR_MAGIC_AT
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
    "npz": ("npy", "open_npz"),
    "webdataset": ("tar", "open_tar"),
    "tfrecord": ("tfrecord", "open_tfrecord"),
    "images": ("images", "open_images"),
}
FORMATS = tuple(_OPENERS)
_SUFFIXES = {
    ".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text", ".parquet": "parquet",
    ".pq": "parquet", ".avro": "avro", ".idx": "idx", ".npz": "npz", ".npy": "npz",
    ".tar": "webdataset", ".tgz": "webdataset", ".tfrecord": "tfrecord",
    **dict.fromkeys(IMAGE_SUFFIXES, "images"),
}  # fmt: skip
_MAGIC = {b"PAR1": "parquet", b"Obj\x01": "avro", b"\x93NUMPY": "npz"}
_MAGIC_BYTES = 1024
_IMAGE_OPTIONS = {
    "form": "--image-as", "channels": "--image-channels", "size": "--image-size",
    "decode_check": "--no-decode-check", "labels_from": "--labels-from",
}  # fmt: skip
_IDX_TYPES = (0x08, 0x09, 0x0B, 0x0C, 0x0D, 0x0E)


@dataclass(kw_only=True, slots=True)
class Found:
    """The files that an input stands for, each with its format and the directory that the input named."""

    files: list[str] = field(default_factory=list)
    formats: list[str] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)
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
    if formats != ["images"] and options.images != ImageOptions():
        wrong = [f.name for f in dataclasses.fields(ImageOptions)
                 if getattr(options.images, f.name) != getattr(ImageOptions(), f.name)]  # fmt: skip
        raise UsageError(
            f"options of images must come with images, got {_IMAGE_OPTIONS[wrong[0]]} with {formats[0]} "
            f"({found.files[0]}). Leave it out."
        )
    files = []
    for path, root in zip(found.files, found.roots, strict=True):
        stat = os.stat(path)
        if stat.st_size == 0 and formats == ["tfrecord"]:  # as many writers leave them
            found.ignored["empty .tfrecord"] += 1
            continue
        if stat.st_size == 0 and formats != ["images"]:  # one of many images, which may be left out
            raise RecordError(f"an input file must hold data, got an empty file ({path}). Leave it out.")
        files.append(InputFile(path=path, num_bytes=stat.st_size, modified_ns=stat.st_mtime_ns, root=root))
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
        found.roots += [_root(given)] * (len(found.files) - before)
        if len(found.files) == before:
            ignored = ", ".join(f"{count} {suffix}" for suffix, count in sorted(found.ignored.items()))
            raise UsageError(
                f"an input must hold at least one file of a known format ({', '.join(FORMATS)}), "
                f"got {ignored or 'no files'} ({given}). Name other files, or say which --format they have."
            )
    seen: dict[str, str] = {}
    for path, real in zip(found.files, real_paths(found.files), strict=True):
        if real in seen:
            raise UsageError(
                f"every input file must be named once, got {path} twice (also as {seen[real]}). "
                f"Its records would be doubled: name it once."
            )
        seen[real] = path
    return found


def real_paths(paths: Sequence[str]) -> list[str]:
    """Each path without symbolic links; a directory of many files is only looked up once."""
    directories: dict[str, str] = {}
    result = []
    for path in paths:
        if os.path.islink(path):
            result.append(os.path.realpath(path))
            continue
        directory, name = os.path.split(path)
        if directory not in directories:
            directories[directory] = os.path.realpath(directory)
        result.append(os.path.join(directories[directory], name))
    return result


def _expand(given: str) -> list[str]:
    if os.path.lexists(given):
        return [given]
    matches = sorted(glob.glob(given, recursive=True)) if glob.has_magic(given) else []
    if not matches:
        what = "a pattern that matches nothing" if glob.has_magic(given) else "no such file or directory"
        raise UsageError(f"an input must exist, got {what} ({given}). Check the path.")
    return matches


def _root(given: str) -> str:
    """The directory that an input names: itself, the one of a file, or what a glob's matches begin with."""
    if os.path.isdir(given):
        return given
    if os.path.lexists(given):
        return os.path.dirname(given)
    parts = given.split(os.sep)
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return os.sep.join(parts[: min(fixed, len(parts) - 1)])


def _walk(directory: str, wanted: str, found: Found, split: str = "") -> None:
    """Adds the files below a directory, those behind symbolic links among them, in a fixed order."""

    def fail(error: OSError) -> None:
        raise RecordError(
            f"a directory must be readable, got {error.strerror} ({error.filename}). Allow it, or leave it out."
        ) from None

    for parent, directories, names in os.walk(directory, onerror=fail, followlinks=True):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in directories:
            path = os.path.join(parent, name)
            target = os.path.realpath(path) if os.path.islink(path) else ""
            if target and os.path.commonpath((target, os.path.realpath(parent))) == target:
                raise UsageError(
                    f"a directory must not lie within itself, got a link to one of those above it ({path}). "
                    f"Remove the link."
                )
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
            if not name.startswith(".") and not os.path.exists(path) and format_by_name(name):
                raise RecordError(
                    f"a link must lead to a file, got one to nothing ({path}). Remove or mend it."
                )
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
        with open(path, "rb") as file:
            head: bytes = file.read(_MAGIC_BYTES)
        if compression_of(head):
            with open_bytes(path) as stream:
                head = stream.read(_MAGIC_BYTES)
    except damaged_errors():
        head = b""  # the name still tells who should read it, and say what is wrong with it
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    if image_kind(head):
        return "images"
    if len(head) >= 4 and head[:2] == b"\0\0" and head[2] in _IDX_TYPES and 1 <= head[3] <= 8:
        return "idx"
    if head.startswith(b"PK") and _holds_arrays(path):
        return "npz"
    if head[TAR_MAGIC_AT:].startswith(TAR_MAGIC):
        return "webdataset"
    return format_by_name(os.path.basename(path))


def format_by_name(name: str) -> str | None:
    """Tells a file's format by its name alone; None if it does not tell."""
    name = name.lower()
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    if ".tfrecord" in name:
        return "tfrecord"
    if name.endswith("-ubyte") and "idx" in name:
        return "idx"
    return _SUFFIXES.get(Path(name).suffix)


def _holds_arrays(path: str) -> bool:
    """Whether it is a zip of nothing but NumPy's files, whatever it is called."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile, NotImplementedError):
        return False  # the name still tells
    return bool(names) and all(name.endswith(".npy") for name in names)
