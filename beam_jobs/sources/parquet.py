"""Parquet: splits are runs of row groups; types are the file's own, none is guessed.

    bool                                   bool
    int8 ... int64, uint8 ... uint32       int64: exact, and an ordinary int64_list
    uint64                                 uint64
    float16, float32 | float64             float32 | float64
    string | binary, fixed-size binary     string | bytes; a dictionary as its values
    date, time, timestamp, duration        int64 in the type's own unit, named in the statistics
    decimal                                string, every digit kept

A column of another type (list, struct, map, ...) is refused by name before anything is
written. A null is an absent feature, never 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from beam_jobs.sources import SPLIT_BYTES, InputFile, InputSplit, SourceColumn
from beam_jobs.sources.typed import TypedSource
from tfpipe.errors import RecordError

BATCH_ROWS = 1 << 15


@dataclass(frozen=True, kw_only=True)
class ParquetSource(TypedSource):
    """Parquet files with the same columns."""

    files: tuple[InputFile, ...]
    columns: tuple[SourceColumn, ...]
    format: str = "parquet"

    def plan(self) -> list[InputSplit]:
        """Plans the splits; see `Source`."""
        splits: list[InputSplit] = []
        for index, file in enumerate(self.files):
            metadata = pq.read_metadata(file.path)
            start = size = 0
            for group in range(metadata.num_row_groups):
                size += metadata.row_group(group).total_byte_size
                if size >= SPLIT_BYTES or group + 1 == metadata.num_row_groups:
                    splits.append(InputSplit(index=len(splits), file=index, start=start, stop=group + 1))
                    start, size = group + 1, 0
        return splits

    def origin(self, split: InputSplit, row: int) -> str:
        """Names a row; see `Source`."""
        return f"{self.files[split.file].path}:{row}"

    def batches(self, split: InputSplit) -> Iterator[list[pa.Array]]:
        """Yields a split's columns; see `TypedSource`."""
        path = self.files[split.file].path
        try:
            with pq.ParquetFile(path) as file:
                groups = list(range(split.start, split.stop))
                # One thread: the other cores have splits of their own.
                for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, use_threads=False):
                    yield [_convert(array) for array in batch.columns]
        except (OSError, pa.ArrowException) as error:
            raise RecordError(f"a Parquet file must be readable to its end, got {error} ({path}).") from None


def open_parquet(files: Sequence[InputFile]) -> ParquetSource:
    """Opens Parquet files with the same columns.

    Args:
        files: non-empty files.

    Returns:
        The source.

    Raises:
        RecordError: a file is damaged, or differs in columns or types; a column's type has no
            lossless form.
    """
    first: pa.Schema | None = None
    for file in files:
        try:
            schema = pq.read_schema(file.path)
        except (OSError, pa.ArrowException) as error:
            raise RecordError(f"a Parquet file must be readable, got {error} ({file.path}).") from None
        if first is None:
            first = schema
            columns = tuple(_column(field, file.path) for field in schema)
            if not columns:
                raise RecordError(f"a Parquet file must have a column, got none ({file.path}).")
            for i, column in enumerate(columns):
                if not column.name or column.name in schema.names[:i]:
                    raise RecordError(
                        f"every column must have a name of its own, got {column.name!r} ({file.path})."
                    )
        elif not schema.equals(first):
            wrong = next(
                f"{a!s} instead of {b!s}"
                for a, b in zip([*schema, None], [*first, None], strict=False)
                if a is None or b is None or not a.equals(b)
            )
            raise RecordError(
                f"all files must have the columns and types of the first ({files[0].path}), "
                f"got {wrong} ({file.path}). Convert them apart, or cast the columns."
            )
    return ParquetSource(files=tuple(files), columns=columns)


def _column(field: pa.Field, path: str) -> SourceColumn:
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    is_a = pa.types
    if is_a.is_boolean(kind):
        return SourceColumn(name=field.name, dtype="bool")
    if is_a.is_uint64(kind):
        return SourceColumn(name=field.name, dtype="uint64")
    if is_a.is_integer(kind):
        return SourceColumn(name=field.name, dtype="int64")
    if is_a.is_float16(kind) or is_a.is_float32(kind):
        return SourceColumn(name=field.name, dtype="float32")
    if is_a.is_float64(kind):
        return SourceColumn(name=field.name, dtype="float64")
    if is_a.is_string(kind) or is_a.is_large_string(kind) or is_a.is_decimal(kind):
        return SourceColumn(name=field.name, dtype="string")
    if is_a.is_binary(kind) or is_a.is_large_binary(kind) or is_a.is_fixed_size_binary(kind):
        return SourceColumn(name=field.name, dtype="bytes")
    if is_a.is_date32(kind):
        return SourceColumn(name=field.name, dtype="int64", unit="day")
    if is_a.is_date64(kind):
        return SourceColumn(name=field.name, dtype="int64", unit="ms")
    if is_a.is_timestamp(kind) or is_a.is_time(kind) or is_a.is_duration(kind):
        return SourceColumn(name=field.name, dtype="int64", unit=kind.unit)
    raise RecordError(
        f"a column's type must have a form without loss in an example, got {field.type} for column "
        f"{field.name!r} ({path}). Leave the column out, or flatten it into columns of its own."
    )


def _convert(array: pa.Array) -> pa.Array:
    """Brings an array to one of the few types that the encoder takes, exactly."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_integer(kind) and not pa.types.is_uint64(kind):
        return array.cast(pa.int64())
    if pa.types.is_float16(kind):
        return array.cast(pa.float32())
    if pa.types.is_decimal(kind):
        return array.cast(pa.string())
    if pa.types.is_fixed_size_binary(kind):
        return array.cast(pa.binary())
    if pa.types.is_date32(kind) or pa.types.is_time32(kind):
        return array.cast(pa.int32()).cast(pa.int64())
    if pa.types.is_temporal(kind):
        return array.cast(pa.int64())
    return array
