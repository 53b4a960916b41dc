"""IDX, the format of MNIST: one array a file, compressed or not.

`NAME-images-idx3-ubyte` and `NAME-labels-idx1-ubyte` of one directory pair up by their name
into the features `image` and `label`. A file without a partner gives one feature: `image`
where a record has two or more dimensions, else `label`. A label (and any scalar integer) is
int64; a tensor keeps its dtype.

Source: yann.lecun.com/exdb/mnist, "the IDX file format".
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from beam_jobs.sources import InputFile, InputSplit, SourceColumn, SourceOptions, Wishes, plan_records
from beam_jobs.sources.compressed import open_bytes, read_bytes, skip_bytes
from beam_jobs.sources.typed import Batch, TypedSource
from tfpipe.errors import RecordError

DTYPES = {0x08: "uint8", 0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}
BATCH_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class IdxArray:
    """One file's header.

    Attributes:
        file: its index in the source.
        dtype: of the values, which are big-endian.
        num_records: the first dimension.
        shape: of one record.
        header_bytes: before the first value.
    """

    file: int
    dtype: str
    num_records: int
    shape: tuple[int, ...]
    header_bytes: int

    @property
    def record_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class IdxSource(TypedSource):
    """IDX files, alone or in pairs of images and labels."""

    files: tuple[InputFile, ...]
    groups: tuple[tuple[IdxArray, ...], ...]
    columns: tuple[SourceColumn, ...]
    format: str = "idx"

    def plan(self) -> list[InputSplit]:
        """Plans the splits; see `Source`."""
        return plan_records(
            (
                group[0].num_records,
                sum(array.record_bytes for array in group),
                not any(self.files[array.file].compression for array in group),
            )
            for group in self.groups
        )

    def origin(self, split: InputSplit, row: int) -> str:
        """Names a record, the first is 1; see `Source`."""
        return f"{self.files[self.groups[split.file][0].file].path}:{row}"

    def batches(self, split: InputSplit, wishes: Wishes) -> Iterator[Batch]:
        """Yields a split batch by batch; see `TypedSource`."""
        group = self.groups[split.file]
        step = max(1, BATCH_BYTES // max(1, sum(array.record_bytes for array in group)))
        streams = [self._open(array, split.start) for array in group]
        try:
            for start in range(split.start, split.stop, step):
                count = min(step, split.stop - start)
                arrays = [self._read(*pair, count) for pair in zip(group, streams, strict=True)]
                done = start - split.start
                yield Batch(
                    columns={column.name: array for column, array in zip(self.columns, arrays, strict=True)},
                    numbers=np.arange(done + 1, done + count + 1),
                    last=done + count,
                )
            if split.stop == group[0].num_records:
                for array, stream in zip(group, streams, strict=True):
                    self._check_end(array, stream)
        finally:
            for stream in streams:
                stream.close()

    def _open(self, array: IdxArray, start: int) -> Any:
        path = self.files[array.file].path
        stream = open_bytes(path)
        skip_bytes(stream, array.header_bytes + start * array.record_bytes, path)
        return stream

    def _read(self, array: IdxArray, stream: Any, count: int) -> pa.Array:
        path = self.files[array.file].path
        wanted = count * array.record_bytes
        data = read_bytes(stream, wanted, path)
        if len(data) != wanted:
            raise _wrong_length(array, path, "fewer")
        values = np.frombuffer(data, np.dtype(array.dtype).newbyteorder(">")).astype(array.dtype)
        if not array.shape:
            return pa.array(values.astype(np.int64) if values.dtype.kind in "iu" else values)
        return pa.FixedSizeListArray.from_arrays(pa.array(values), math.prod(array.shape))

    def _check_end(self, array: IdxArray, stream: Any) -> None:
        path = self.files[array.file].path
        if read_bytes(stream, 1, path):
            raise _wrong_length(array, path, "more")


def open_idx(files: Sequence[InputFile], options: SourceOptions) -> IdxSource:
    """Opens IDX files, pairing images with labels.

    Args:
        files: non-empty files.
        options: not used.

    Returns:
        The source.

    Raises:
        RecordError: a header is malformed or disagrees with the file's length, a pair differs
            in its number of records, or groups differ in their features.
    """
    arrays = [_read_header(index, file) for index, file in enumerate(files)]
    groups: dict[str, list[IdxArray]] = {}
    for array in arrays:
        path = files[array.file].path
        directory, name = os.path.split(path)
        stem = name.lower().removesuffix(".gz")
        for role in ("images", "labels"):
            stem = stem.replace(f"-{role}-", "-*-").replace(f"-{role}.", "-*-")
        key = os.path.join(directory, stem.partition("-*-")[0] if "-*-" in stem else f"alone: {name}")
        groups.setdefault(key, []).append(array)
    described: list[tuple[IdxArray, ...]] = []
    for group in groups.values():
        # Tensors before scalars: image, label.
        ordered = tuple(sorted(group, key=lambda array: -len(array.shape)))
        paths = [files[array.file].path for array in ordered]
        if len({_feature_name(array) for array in ordered}) < len(ordered):
            raise RecordError(
                f"images and labels must pair up by name, got {' and '.join(paths)} for one of the two."
            )
        if len({array.num_records for array in ordered}) > 1:
            counts = " and ".join(
                f"{array.num_records} ({path})" for array, path in zip(ordered, paths, strict=True)
            )
            raise RecordError(
                f"images and labels must have as many records, got {counts}. Fetch the files again."
            )
        described.append(ordered)
    columns = [tuple(_column(array) for array in group) for group in described]
    for group, found in zip(described, columns, strict=True):
        if found != columns[0]:
            raise RecordError(
                f"all files must give the same features, got {_names(found)} "
                f"({files[group[0].file].path}) beside {_names(columns[0])} "
                f"({files[described[0][0].file].path}). Convert them apart, or name the missing partner."
            )
    return IdxSource(files=tuple(files), groups=tuple(described), columns=columns[0])


def _read_header(index: int, file: InputFile) -> IdxArray:
    with open_bytes(file.path) as stream:
        magic = read_bytes(stream, 4, file.path)
        if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in DTYPES or not 1 <= magic[3] <= 8:
            raise RecordError(
                f"an IDX file must begin with two zero bytes, a type and 1 to 8 dimensions, "
                f"got {magic.hex(' ')} ({file.path}). Is it another format? See --format."
            )
        sizes = read_bytes(stream, 4 * magic[3], file.path)
    if len(sizes) < 4 * magic[3]:
        raise RecordError(f"an IDX file's header must be complete, got its end within it ({file.path}).")
    shape = struct.unpack(f">{magic[3]}I", sizes)
    array = IdxArray(
        file=index,
        dtype=DTYPES[magic[2]],
        num_records=shape[0],
        shape=shape[1:],
        header_bytes=4 + len(sizes),
    )
    if not array.num_records or not array.record_bytes:
        raise RecordError(f"an IDX file must hold at least one value, got shape {list(shape)} ({file.path}).")
    expected = array.header_bytes + array.num_records * array.record_bytes
    if not file.compression and file.num_bytes != expected:
        raise _wrong_length(array, file.path, "more" if file.num_bytes > expected else "fewer")
    return array


def _wrong_length(array: IdxArray, path: str, which: str) -> RecordError:
    shape = [array.num_records, *array.shape]
    expected = array.header_bytes + array.num_records * array.record_bytes
    return RecordError(
        f"an IDX file must have the {expected} bytes that its header tells ({array.dtype} {shape}), "
        f"got {which} ({path}). Fetch the file again."
    )


def _feature_name(array: IdxArray) -> str:
    return "image" if len(array.shape) >= 2 else "label"


def _column(array: IdxArray) -> SourceColumn:
    scalar_integer = not array.shape and array.dtype in ("uint8", "int8", "int16", "int32")
    return SourceColumn(
        name=_feature_name(array),
        dtype="int64" if scalar_integer else array.dtype,
        shape=array.shape,
    )


def _names(columns: Sequence[SourceColumn]) -> str:
    return " and ".join(f"{c.name} ({c.dtype} {list(c.shape or ())})" for c in columns)
