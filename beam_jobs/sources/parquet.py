"""Parquet: splits are runs of row groups; types are the file's own, none is guessed.

    bool                                   bool
    int8 ... int64, uint8 ... uint32       int64: exact, and an ordinary int64_list
    uint64                                 uint64
    float16, float32 | float64             float32 | float64
    string | binary, fixed-size binary     string | bytes; a dictionary as its values
    date, time, timestamp, duration        int64 in the type's own unit, named in the statistics
    decimal                                string, every digit kept

A list of these, or of lists of one length, becomes a tensor of the list's own type, of unknown
length where records differ. A struct becomes its fields, as `outer.inner`. A column of another type
(map, list of structs, ...) is refused by name before anything is written. A null is an absent
feature, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from beam_jobs.sources import SPLIT_BYTES, InputFile, InputSplit, SourceColumn, SourceOptions, Wishes
from beam_jobs.sources.fit import dtype_of, is_list, list_lengths
from beam_jobs.sources.typed import Batch, TypedSource
from tfpipe.errors import RecordError

BATCH_ROWS = 1 << 15
BATCH_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class ParquetSource(TypedSource):
    """Parquet files with the same columns; a column's path is its name, after those of its structs."""

    files: tuple[InputFile, ...]
    columns: tuple[SourceColumn, ...]
    paths: tuple[tuple[str, ...], ...]
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

    def batches(self, split: InputSplit, wishes: Wishes) -> Iterator[Batch]:
        """Yields a split batch by batch; see `TypedSource`."""
        path = self.files[split.file].path
        used = {
            column.name: path
            for column, path in zip(self.columns, self.paths, strict=True)
            if wishes.of(column.name).used
        }
        tops = list(dict.fromkeys(path[0] for path in used.values()))
        groups = list(range(split.start, split.stop))
        done = 0
        try:
            with pq.ParquetFile(path) as file:
                metadata = [file.metadata.row_group(group) for group in groups]
                num_bytes = max(group.total_byte_size // max(group.num_rows, 1) for group in metadata)
                rows = max(1, min(BATCH_ROWS, BATCH_BYTES // max(num_bytes, 1)))
                # One thread: the other cores have splits of their own.
                for batch in file.iter_batches(rows, row_groups=groups, columns=tops, use_threads=False):
                    yield Batch(
                        columns={name: _convert(_at(batch, path)) for name, path in used.items()},
                        numbers=np.arange(done + 1, done + batch.num_rows + 1),
                        last=done + batch.num_rows,
                    )
                    done += batch.num_rows
        except (OSError, pa.ArrowException) as error:
            raise RecordError(f"a Parquet file must be readable to its end, got {error} ({path}).") from None


def open_parquet(files: Sequence[InputFile], options: SourceOptions) -> ParquetSource:
    """Opens Parquet files with the same columns.

    Args:
        files: non-empty files.
        options: not used.

    Returns:
        The source.

    Raises:
        RecordError: a file is damaged, or differs in columns or types; a column's type has no
            lossless form.
    """
    first: pa.Schema | None = None
    for file in files:
        if compression := file.compression:
            raise RecordError(
                f"a Parquet file must be readable at any place, got one that is compressed as a whole with "
                f"{compression} ({file.path}). Decompress it first: its columns are compressed already."
            )
        try:
            schema = pq.read_schema(file.path)
        except (OSError, pa.ArrowException) as error:
            raise RecordError(f"a Parquet file must be readable, got {error} ({file.path}).") from None
        if first is None:
            first = schema
            paths, columns = zip(*_columns(schema, (), file.path), strict=True) if len(schema) else ((), ())
            if not columns:
                raise RecordError(f"a Parquet file must have a column, got none ({file.path}).")
            names = [column.name for column in columns]
            for i, name in enumerate(names):
                if not name or name in names[:i]:
                    raise RecordError(
                        f"every column must have a name of its own, got {name!r} ({file.path})."
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
    return ParquetSource(files=tuple(files), columns=columns, paths=paths)


def _columns(
    fields: Iterable[pa.Field], outer: tuple[str, ...], path: str
) -> Iterator[tuple[tuple[str, ...], SourceColumn]]:
    """The columns of these fields and of the structs among them, with their paths."""
    for field in fields:
        inner = (*outer, field.name)
        if pa.types.is_struct(field.type):
            yield from _columns(field.type, inner, path)
        else:
            yield inner, _column(field, ".".join(inner), path)


def _at(batch: pa.RecordBatch, path: tuple[str, ...]) -> pa.Array:
    """A column, null where a struct that it lies in is null."""
    array = batch.column(path[0])
    for name in path[1:]:
        array = array.flatten()[array.type.get_field_index(name)]
    return array


def _column(field: pa.Field, name: str, path: str) -> SourceColumn:
    kind, nested = field.type, is_list(field.type)
    while is_list(kind):
        kind = kind.value_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    dtype, unit = _dtype(kind, nested)
    if not dtype:
        raise RecordError(
            f"a column's type must have a form without loss in an example, got {field.type} for column "
            f"{name!r} ({path}). Leave the column out, or flatten it into columns of its own."
        )
    return SourceColumn(name=name, dtype=dtype, shape=None if nested else (), unit=unit)


def _dtype(kind: pa.DataType, nested: bool) -> tuple[str, str]:
    """The feature dtype of a type of single values, "" for none, and the unit of a time."""
    is_a = pa.types
    if is_a.is_integer(kind):
        return (str(kind) if nested or is_a.is_uint64(kind) else "int64"), ""
    if is_a.is_float16(kind):
        return ("float16" if nested else "float32"), ""
    if is_a.is_decimal(kind):
        return "string", ""
    if is_a.is_fixed_size_binary(kind):
        return "bytes", ""
    if is_a.is_date(kind):
        return "int64", "day" if is_a.is_date32(kind) else "ms"
    if is_a.is_timestamp(kind) or is_a.is_time(kind) or is_a.is_duration(kind):
        return "int64", kind.unit
    return "string" if is_a.is_large_string(kind) else dtype_of(kind), ""


def _convert(array: pa.Array, nested: bool = False) -> pa.Array:
    """Brings an array to one of the few types that the encoder takes, exactly."""
    kind = array.type
    if is_list(kind):
        lengths = list_lengths(array)
        mask = array.is_null() if array.null_count else None
        return pa.ListArray.from_arrays(
            pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32()),
            _convert(array.flatten(), nested=True),
            mask=mask,
        )
    if pa.types.is_dictionary(kind):
        return _convert(array.dictionary_decode(), nested)
    if pa.types.is_integer(kind):
        return array if nested or pa.types.is_uint64(kind) else array.cast(pa.int64())
    if pa.types.is_float16(kind):
        return array if nested else array.cast(pa.float32())
    if pa.types.is_decimal(kind) or pa.types.is_large_string(kind):
        return array.cast(pa.string())
    if pa.types.is_fixed_size_binary(kind):
        return array.cast(pa.binary())
    if pa.types.is_date32(kind) or pa.types.is_time32(kind):
        return array.cast(pa.int32()).cast(pa.int64())
    if pa.types.is_temporal(kind):
        return array.cast(pa.int64())
    return array
