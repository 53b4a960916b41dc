"""Where records come from: how a format's module is used.

Comes in: files (`find.open_source` finds and opens them). Goes out: a `Source`, which plans
input splits and reads one as Arrow record batches. A source is plain data, so that it travels
to Beam workers.

    >>> source, _ = open_source(["data/a.csv"], SourceOptions())
    >>> for split in source.plan():
    ...     scan = source.scan(split, wishes)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from beam_jobs.sources.compressed import compression_of
from tfpipe.schema import Schema

# Bytes of one input split. A split is what one worker reads at a time; the number does not
# depend on the number of workers, so that statistics (sums of floats) don't either.
SPLIT_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOptions:
    """How images are to be stored.

    Attributes:
        form: "encoded" for files, "raw" for tensors of pixels.
        channels: 1, 3 or 4 of every image; None for its own.
        size: (height, width) of every image; None for its own.
        decode_check: whether the scan decodes also what is copied as it is.
        labels_from: the manifest, or its dataset, whose class numbers are used; "" for new ones.
    """

    form: str = "encoded"
    channels: int | None = None
    size: tuple[int, int] | None = None
    decode_check: bool = True
    labels_from: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """How the user asked for the input to be read.

    Attributes:
        format: one of `find.FORMATS`, or "auto".
        header: whether a CSV file's first row names the columns.
        delimiter: between CSV fields, one ASCII character; None for the format's own.
        images: of images.
    """

    format: str = "auto"
    header: bool = True
    delimiter: str | None = None
    images: ImageOptions = ImageOptions()


def printable(name: str) -> str:
    """A name whose bytes that are no UTF-8 are written as escapes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One file as it was when the conversion began.

    Attributes:
        path: as the input leads to it.
        num_bytes: its size.
        modified_ns: its time.
        root: the directory that the input named, or a file's own; `path` begins with it.
    """

    path: str
    num_bytes: int
    modified_ns: int
    root: str = ""

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def compression(self) -> str:
        """Of the file as a whole: "gzip", "bz2", "zstd" or "" for none."""
        with open(self.path, "rb") as file:
            return compression_of(file.read(4))


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSplit:
    """A part of the input that one worker reads at a time.

    Attributes:
        index: its place in the order of all splits.
        file: index of its file (or pair of files) in the source.
        start: first byte, row group or record.
        stop: where it ends, exclusive; -1 for the end of the file.
        rows_before: rows of the file before it, where the plan knows them.
    """

    index: int
    file: int
    start: int
    stop: int
    rows_before: int = 0


def plan_records(files: Iterable[tuple[int, int, bool]]) -> list[InputSplit]:
    """Plans the splits of files whose records all have one size.

    Args:
        files: of each (or of each pair that is read together) its records, their bytes, and whether
            it can be read from any of them on.

    Returns:
        The splits, in the order of the records.
    """
    splits: list[InputSplit] = []
    for index, (num_records, record_bytes, splittable) in enumerate(files):
        step = max(1, SPLIT_BYTES // max(1, record_bytes) if splittable else num_records)
        for start in range(0, num_records, step):
            stop = min(num_records, start + step)
            splits.append(InputSplit(index=len(splits), file=index, start=start, stop=stop))
    return splits


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceColumn:
    """A column as its source has it.

    Attributes:
        name: unique.
        dtype: "" where only the values tell (text).
        shape: of one value; () for a scalar, None where only the values tell (lists).
        unit: of a time that became an integer, like "us"; "" for none.
        labels: names of the classes that it counts, if it does.
    """

    name: str
    dtype: str = ""
    shape: tuple[int | None, ...] | None = ()
    unit: str = ""
    labels: tuple[str, ...] | None = None


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


class FileSource:
    """What a source says of itself; a format that has more to say overrides it."""

    format: str
    files: tuple[InputFile, ...]

    @property
    def work_bytes(self) -> int:
        """How many bytes of CSV are as much work as the input: tells whether workers are worth their start."""
        return sum(file.num_bytes for file in self.files)

    @property
    def is_compressed(self) -> bool:
        """Whether its records are known to be compressed already, so that no sample need show it."""
        return False

    @property
    def decoder(self) -> str:
        """Name and version of what decodes its values, where their bytes depend on it; "" for nothing."""
        return ""

    @property
    def schema(self) -> Schema | None:
        """Of the final features, where the source is a dataset that has one."""
        return None

    def describe(self) -> dict[str, Any]:
        """What was read, as the manifest keeps it."""
        files = [{"name": printable(file.name), "num_bytes": file.num_bytes} for file in self.files]
        return {"format": self.format, "files": files}

    def notices(self) -> list[str]:
        """Sentences that the user should read."""
        return []


class Source(Protocol):
    """What each format's module provides; `columns` is None where only the records tell."""

    format: str
    files: tuple[InputFile, ...]
    columns: tuple[SourceColumn, ...] | None

    @property
    def work_bytes(self) -> int:
        """See `FileSource`."""

    @property
    def is_compressed(self) -> bool:
        """See `FileSource`."""

    @property
    def decoder(self) -> str:
        """See `FileSource`."""

    @property
    def schema(self) -> Schema | None:
        """See `FileSource`."""

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

    def describe(self) -> dict[str, Any]:
        """See `FileSource`."""

    def notices(self) -> list[str]:
        """See `FileSource`."""
