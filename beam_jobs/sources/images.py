"""Folders of images: one a file, its class the folder that it lies in. Format `images`.

    image   bytes of the file, or with `--image-as raw` a uint8 or uint16 tensor [height, width, channels]
    label   number of its class (int64), whose names are the feature's labels: each folder that holds
            images, relative to the input directory, by code point ("10" before "2"); there is none
            where all images lie directly in the input directory
    path    of the file, relative to the input directory, with "/" between its parts; to the directory
            above them all where there are several

How each sort of image is stored, and which are refused, stands in `image_pixels`. By default the
scan decodes every image to its end. A file that is empty, damaged, or named as an image and none
is a bad row, which can be left out (`--on-error quarantine`).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL
import pyarrow as pa

from beam_jobs.sources import (
    SPLIT_BYTES,
    ImageOptions,
    InputFile,
    InputSplit,
    SourceColumn,
    SourceOptions,
    Wishes,
)
from beam_jobs.sources.bad_rows import BadRow
from beam_jobs.sources.compressed import compression_of, damaged_errors, open_bytes
from beam_jobs.sources.file_list import FileList
from beam_jobs.sources.image_classes import (
    SHOWN_CLASSES,
    check_names,
    class_name,
    find_classes,
    relative_path,
)
from beam_jobs.sources.image_pixels import BadImage, Taken, take_image
from beam_jobs.sources.typed import Batch, TypedSource
from tfpipe.errors import RecordError

# A worker holds a batch and one file more. Opening a file costs as much as reading 100 kB.
BATCH_BYTES = 4 << 20
SPLIT_FILES = 4096
MAX_FILE_BYTES = 1 << 30
_SHOWN_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class ImageSource(TypedSource):
    """Image files.

    Attributes:
        files: in the order of the records.
        columns: image, label unless there are no classes, path.
        how: the images are to be stored.
        classes: by number; empty if there are none.
        first: of raw images, the file whose shape all must have.
        base: of several input directories, the one above them all, absolute.
    """

    files: Sequence[InputFile]  # type: ignore[assignment]
    columns: tuple[SourceColumn, ...]
    how: ImageOptions
    classes: tuple[str, ...] = ()
    first: str = ""
    base: str = ""
    format: str = "images"

    @property
    def work_bytes(self) -> int:
        """See `FileSource`. A byte of a JPEG takes a sixth of a byte of CSV, a file 0.1 ms: 1250 bytes of CSV."""
        return sum(file.num_bytes for file in self.files) // 6 + 1250 * len(self.files)

    @property
    def is_compressed(self) -> bool:
        """JPEG and PNG are; what gzip saves of the headers of tiny ones, reading pays for; see `FileSource`."""
        return self.how.form == "encoded"

    def plan(self) -> list[InputSplit]:
        """Plans the splits: runs of files; see `Source`."""
        splits: list[InputSplit] = []
        start = num_bytes = 0
        for index, file in enumerate(self.files):
            if index > start and (num_bytes + file.num_bytes > SPLIT_BYTES or index - start == SPLIT_FILES):
                splits.append(InputSplit(index=len(splits), file=start, start=start, stop=index))
                start, num_bytes = index, 0
            num_bytes += file.num_bytes
        return [*splits, InputSplit(index=len(splits), file=start, start=start, stop=len(self.files))]

    def origin(self, split: InputSplit, row: int) -> str:
        """Names a file; see `Source`."""
        return self.files[split.start + row - 1].path

    @property
    def decoder(self) -> str:
        """See `FileSource`."""
        return f"pillow {PIL.__version__}"

    def describe(self) -> dict[str, Any]:
        """Totals and images by class, bad ones among them; a list of all files may be a large part of them."""
        described: dict[str, Any] = {
            "format": self.format,
            "num_files": len(self.files),
            "num_bytes": sum(file.num_bytes for file in self.files),
            "decoder": self.decoder,
        }
        if self.classes:
            described["classes"] = self._class_sizes()
        return described

    def notices(self) -> list[str]:
        """Names the classes of another dataset that have no images here."""
        missing = [name for name, size in self._class_sizes().items() if not size]
        if not missing:
            return []
        more = f" and {len(missing) - SHOWN_CLASSES} more" if len(missing) > SHOWN_CLASSES else ""
        shown = ", ".join(map(repr, missing[:SHOWN_CLASSES]))
        return [f"{len(missing)} of {len(self.classes)} classes have no images here: {shown}{more}"]

    def batches(self, split: InputSplit, wishes: Wishes) -> Iterator[Batch]:
        """Yields a split batch by batch; see `TypedSource`."""
        return self._batches(split, wishes, check=False)

    def checked_batches(self, split: InputSplit, wishes: Wishes) -> Iterator[Batch]:
        """Yields the same, having decoded what is copied; see `TypedSource`."""
        return self._batches(split, wishes, check=self.how.decode_check)

    def _batches(self, split: InputSplit, wishes: Wishes, check: bool) -> Iterator[Batch]:
        batch, bad, num_bytes, last = _Rows(), [], 0, 0
        for last, file in enumerate(self.files[split.start : split.stop], 1):
            try:
                taken = self._take(file, check)
            except BadImage as error:
                bad.append(_bad_row(error, file, last))
            else:
                batch.add(last, file, taken)
                num_bytes += len(memoryview(taken.data).cast("B"))
            if num_bytes >= BATCH_BYTES:
                yield self._batch(batch, bad, last, wishes)
                batch, bad, num_bytes = _Rows(), [], 0
        yield self._batch(batch, bad, last, wishes)

    def _take(self, file: InputFile, check: bool) -> Taken:
        taken = take_image(_read(file), self.how, check)
        column = self.columns[0]
        if self.how.form == "raw" and (taken.data.shape, taken.data.dtype.name) != (
            column.shape,
            column.dtype,
        ):
            raise BadImage(
                f"raw images must all have one shape and depth, got {_shape(taken.data.shape, taken.data.dtype.name)} "
                f"beside {_shape(column.shape, column.dtype)} of {self.first}",
                "Give --image-size HxW and --image-channels 1, 3 or 4, or --image-as encoded.",
            )
        return taken

    def _batch(self, rows: _Rows, bad: list[BadRow], last: int, wishes: Wishes) -> Batch:
        numbers = {name: number for number, name in enumerate(self.classes)}
        columns: dict[str, pa.Array] = {}
        for column in self.columns:
            if not wishes.of(column.name).used:
                continue
            if column.name == "path":
                columns["path"] = pa.array(map(self._path, rows.files), pa.string())
            elif column.name == "label":
                columns["label"] = pa.array([numbers[class_name(file)] for file in rows.files], pa.int64())
            else:
                columns["image"] = self._images(rows.data)
        files = rows.files
        return Batch(
            columns=columns,
            numbers=np.array(rows.numbers, np.int64),
            last=last,
            bad=bad,
            origin=lambda row: files[row].path,
            notes=rows.notes,
        )

    def _path(self, file: InputFile) -> str:
        return os.path.relpath(file.path, self.base) if self.base else relative_path(file)

    def _images(self, data: list[Any]) -> pa.Array:
        if self.how.form == "encoded":
            return pa.array(data, pa.binary())
        size = math.prod(length or 0 for length in self.columns[0].shape or ())
        flat = np.concatenate([pixels.reshape(-1) for pixels in data] or [np.empty(0, self.columns[0].dtype)])
        return pa.FixedSizeListArray.from_arrays(pa.array(flat), size)

    def _class_sizes(self) -> dict[str, int]:
        sizes = Counter(map(class_name, self.files))
        return {name: sizes[name] for name in self.classes}


class _Rows:
    """What a batch will hold."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.files: list[InputFile] = []
        self.data: list[Any] = []
        self.notes: list[tuple[str, ...]] = []

    def add(self, number: int, file: InputFile, taken: Taken) -> None:
        self.numbers.append(number)
        self.files.append(file)
        self.data.append(taken.data)
        self.notes.append(taken.notes)


def open_images(files: Sequence[InputFile], options: SourceOptions) -> ImageSource:
    """Opens image files.

    Args:
        files: in order; empty and damaged ones are bad rows later.
        options: how the images are to be stored, and where the numbers of the classes come from.

    Returns:
        The source.

    Raises:
        RecordError: a name is no UTF-8, a class is unknown, some images lie in folders and others do
            not, or raw images are asked for and none can be read.
        ManifestError: the dataset whose class numbers are asked for can't be read.
        SchemaError: it has none.
    """
    how = options.images
    check_names(files)
    columns = [SourceColumn(name="image", dtype="bytes"), SourceColumn(name="path", dtype="string")]
    classes = find_classes(files, how)
    if classes:
        columns.insert(1, SourceColumn(name="label", dtype="int64", labels=classes))
    roots = {os.path.abspath(root) for root in {file.root for file in files}}
    source = ImageSource(
        files=FileList.of(files), columns=tuple(columns), how=how, classes=classes,
        base=os.path.commonpath(roots) if len(roots) > 1 else "",
    )  # fmt: skip
    return source if how.form == "encoded" else _with_shape(source)


def _with_shape(source: ImageSource) -> ImageSource:
    """The source of raw images with the shape of its first good one."""
    problem = ""
    for file in source.files:
        try:
            pixels = take_image(_read(file), source.how, check=True).data
        except BadImage as error:
            problem = problem or f"{error.problem} ({file.path})"
            continue
        image = dataclasses.replace(source.columns[0], dtype=pixels.dtype.name, shape=pixels.shape)
        return dataclasses.replace(source, columns=(image, *source.columns[1:]), first=file.path)
    raise RecordError(f"the input must hold an image that can be read, got none, at first: {problem}.")


def _read(file: InputFile) -> bytes:
    """A file's bytes, decompressed.

    Raises:
        BadImage: it can't be read, or is too big.
    """
    try:
        data = b""
        if file.num_bytes <= MAX_FILE_BYTES:
            with open(file.path, "rb") as plain:
                data = plain.read()
            if compression_of(data[:4]):
                with open_bytes(file.path) as stream:
                    data = stream.read(MAX_FILE_BYTES + 1)
    except damaged_errors() as error:
        found = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise BadImage(f"an image file must be readable, got {found}", "Fetch it again.") from None
    if max(len(data), file.num_bytes) > MAX_FILE_BYTES:
        found = str(max(len(data), file.num_bytes))
        raise BadImage(
            f"an image file must have at most {MAX_FILE_BYTES} bytes, got {found}", "Leave it out."
        )
    return data


def _bad_row(error: BadImage, file: InputFile, number: int) -> BadRow:
    try:
        with open(file.path, "rb") as stream:
            head = stream.read(_SHOWN_BYTES)
    except OSError:
        head = b""
    raw = f"{file.num_bytes} bytes, beginning {head.hex(' ')}"
    return BadRow(row=number, problem=error.problem, remedy=error.remedy, raw=raw, origin=file.path)


def _shape(shape: Any, dtype: str) -> str:
    return f"{dtype} [{', '.join(map(str, shape))}]"
