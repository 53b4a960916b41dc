"""Where records come from: which files, in which format, and how a format's module is used.

Comes in: what the user named. Goes out: a `Source`, which plans input splits and reads one as
Arrow record batches. A source is plain data, so that it travels to Beam workers.

    >>> source = open_source(["data/a.csv"], SourceOptions())
    >>> for split in source.plan():
    ...     scan = source.scan(split, wishes)

A path that exists is meant literally, even if it holds glob characters; else it is a glob, and
one that matches nothing is an error. A directory stands for the files of a known format below
it; hidden ones and those of other formats are left out and counted.
"""

from __future__ import annotations

import glob
import gzip
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tfpipe.errors import RecordError, UsageError

FORMATS = ("csv", "parquet", "idx")
# Bytes of one input split. A split is what one worker reads at a time; the number does not
# depend on the number of workers, so that statistics (sums of floats) don't either.
SPLIT_BYTES = 16 << 20
_SUFFIXES = {".csv": "csv", ".parquet": "parquet", ".pq": "parquet", ".idx": "idx"}
_MAGIC_BYTES = 1024
_IDX_TYPES = (0x08, 0x09, 0x0B, 0x0C, 0x0D, 0x0E)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """How the user asked for the input to be read.

    Attributes:
        format: one of `FORMATS`, or "auto".
        header: whether a CSV file's first row names the columns.
        delimiter: between CSV fields, one ASCII character.
    """

    format: str = "auto"
    header: bool = True
    delimiter: str = ","


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One file as it was when the conversion began."""

    path: str
    num_bytes: int
    modified_ns: int

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def gzipped(self) -> bool:
        with open(self.path, "rb") as file:
            return file.read(2) == b"\x1f\x8b"


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSplit:
    """A part of the input that one worker reads at a time.

    Attributes:
        index: its place in the order of all splits.
        file: index of its file (or pair of files) in the source.
        start: first byte, row group or record.
        stop: where it ends, exclusive; -1 for the end of the file.
    """

    index: int
    file: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceColumn:
    """A column as its source has it.

    Attributes:
        name: unique.
        dtype: "" where only the values tell (text).
        shape: of one value; () for a scalar, None where only the values tell (lists).
        unit: of a time that became an integer, like "us"; "" for none.
    """

    name: str
    dtype: str = ""
    shape: tuple[int | None, ...] | None = ()
    unit: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What the dataset wants of a source column.

    Attributes:
        used: whether it is wanted at all.
        dtype: that it must have; "" for whatever loses nothing.
        shape: that it must have; None for whatever it has.
        required: whether a null is an error.
        numeric: whether anything but numbers is an error.
    """

    used: bool = True
    dtype: str = ""
    shape: tuple[int | None, ...] | None = None
    required: bool = False
    numeric: bool = False


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the dataset wants of the source.

    Attributes:
        columns: by name.
        others: of every column that is not named.
    """

    columns: Mapping[str, Wish] = field(default_factory=dict)
    others: Wish = Wish()

    def of(self, name: str) -> Wish:
        """What it wants of the column of that name."""
        return self.columns.get(name, self.others)


class Source(Protocol):
    """What each format's module provides; `columns` is None where only the records tell."""

    format: str
    files: tuple[InputFile, ...]
    columns: tuple[SourceColumn, ...] | None

    def plan(self) -> list[InputSplit]:
        """Plans the splits, in the order of the records."""

    def scan(self, split: InputSplit, wishes: Wishes, max_rejected: int = 0) -> Any:
        """Reads a split and returns its `summary.SplitScan`; more than `max_rejected` bad rows end it."""

    def read(self, split: InputSplit, wishes: Wishes, rejected: Sequence[int] = ()) -> Iterator[Any]:
        """Yields a split's records as Arrow record batches of the used columns, in dtypes wished.

        Rows whose number within the split is among `rejected` are left out.
        """

    def origin(self, split: InputSplit, row: int) -> str:
        """Names a row of the split's file, as `file:row`."""


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
        if stat.st_size == 0:
            raise RecordError(f"an input file must hold data, got an empty file ({path}). Leave it out.")
        files.append(InputFile(path=path, num_bytes=stat.st_size, modified_ns=stat.st_mtime_ns))
    # Imported late: each format's module is only needed where it is used.
    if formats == ["csv"]:
        from beam_jobs.sources.csv import open_csv

        return open_csv(files, options), found.ignored
    if formats == ["parquet"]:
        from beam_jobs.sources.parquet import open_parquet

        return open_parquet(files), found.ignored
    from beam_jobs.sources.idx import open_idx

    return open_idx(files), found.ignored


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
        for path in _expand(given):
            if os.path.isdir(path):
                _walk(path, wanted, found)
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


def _walk(directory: str, wanted: str, found: Found) -> None:
    for parent, directories, names in os.walk(directory):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
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
            f"an input's format must show in its content or name (.csv, .parquet, -idx3-ubyte; .gz too), "
            f"got neither ({path}). Say which with --format, e.g. --format csv --delimiter '\\t'."
        )
    return kind


def sniff(path: str) -> str | None:
    """Tells a file's format by its content, then by its name.

    Args:
        path: a readable file.

    Returns:
        One of `FORMATS`, or None.
    """
    with open(path, "rb") as file:
        head = file.read(_MAGIC_BYTES)
    if head[:2] == b"\x1f\x8b":
        try:
            head = zlib.decompressobj(31).decompress(head, _MAGIC_BYTES)
        except zlib.error:
            head = b""
    if head[:4] == b"PAR1":
        return "parquet"
    if len(head) >= 4 and head[:2] == b"\0\0" and head[2] in _IDX_TYPES and 1 <= head[3] <= 8:
        return "idx"
    name = Path(path).name.lower()
    name = name.removesuffix(".gz")
    if name.endswith("-ubyte") and "idx" in name:
        return "idx"
    return _SUFFIXES.get(Path(name).suffix)


def open_bytes(path: str) -> Any:
    """Opens a file for reading bytes, through gzip where the content is gzip."""
    with open(path, "rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    if not gzipped:
        return open(path, "rb")
    from isal import igzip

    return igzip.open(path, "rb")


# What reading a damaged gzip file raises; isal's own error is a subclass of none of them.
def damaged_errors() -> tuple[type[BaseException], ...]:
    """The exceptions that stand for a damaged compressed file."""
    from isal import isal_zlib

    return (EOFError, gzip.BadGzipFile, zlib.error, isal_zlib.error)
