"""Avro object container files: splits are runs of blocks; types are the file's own, none is guessed.

    boolean                                bool
    int, long                              int64
    float | double                         float32 | float64
    string, enum, uuid | bytes, fixed      string | bytes
    date, time-*, timestamp-*              int64 in the type's own unit, named in the statistics
    decimal                                string, every digit kept
    ["null", T]                            T, nullable: a null is an absent feature, never 0
    array                                  a tensor of the items' own type, of unknown length where records differ
    record                                 its fields, as `outer.inner`

A field of another type (map, another union, a type within itself) is refused by name before
anything is written. The files may be compressed as a whole, and hold any codec that fastavro reads.

Source: avro.apache.org/docs/1.12.0/specification, "Object Container Files".
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa

from beam_jobs.sources import SPLIT_BYTES, InputFile, InputSplit, SourceColumn, SourceOptions, Wishes
from beam_jobs.sources.compressed import open_bytes
from beam_jobs.sources.fit import arrow_type
from beam_jobs.sources.typed import Batch, TypedSource
from tfpipe.errors import RecordError

BATCH_ROWS = 1 << 13
BATCH_BYTES = 4 << 20
_SYNC_BYTES = 16
_HEADER = fastavro.parse_schema({
    "type": "record", "name": "header", "fields": [
        {"name": "meta", "type": {"type": "map", "values": "bytes"}},
        {"name": "sync", "type": {"type": "fixed", "name": "sync", "size": _SYNC_BYTES}},
    ]
})  # fmt: skip
_MAGIC = b"Obj\x01"
_DTYPES = {
    "boolean": "bool", "int": "int32", "long": "int64", "float": "float32", "double": "float64",
    "string": "string", "enum": "string", "bytes": "bytes", "fixed": "bytes",
}  # fmt: skip
_UNITS = {
    "date": "day", "time-millis": "ms", "time-micros": "us",
    "timestamp-millis": "ms", "timestamp-micros": "us", "timestamp-nanos": "ns",
    "local-timestamp-millis": "ms", "local-timestamp-micros": "us", "local-timestamp-nanos": "ns",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class AvroField:
    """A field of single values, or of arrays of them.

    Attributes:
        path: its name, after those of the records that it lies in.
        column: as the dataset has it.
        depth: of the arrays.
        scale: digits behind the point of a decimal; -1 for none.
    """

    path: tuple[str, ...]
    column: SourceColumn
    depth: int
    scale: int


@dataclass(frozen=True, kw_only=True)
class AvroSource(TypedSource):
    """Avro files with the same fields."""

    files: tuple[InputFile, ...]
    fields: tuple[AvroField, ...]
    format: str = "avro"

    @property
    def columns(self) -> tuple[SourceColumn, ...]:  # type: ignore[override]
        return tuple(field.column for field in self.fields)

    def plan(self) -> list[InputSplit]:
        """Plans the splits; see `Source`."""
        splits: list[InputSplit] = []
        for index, file in enumerate(self.files):
            if file.compression:
                splits.append(InputSplit(index=len(splits), file=index, start=0, stop=-1))
                continue
            start = None
            for offset, end in _blocks(file):
                start = offset if start is None else start
                if end - start >= SPLIT_BYTES or end == file.num_bytes:
                    splits.append(InputSplit(index=len(splits), file=index, start=start, stop=end))
                    start = None
        return splits

    def origin(self, split: InputSplit, row: int) -> str:
        """Names a record, the first is 1; see `Source`."""
        return f"{self.files[split.file].path}:{row}"

    def batches(self, split: InputSplit, wishes: Wishes) -> Iterator[Batch]:
        """Yields a split batch by batch; see `TypedSource`."""
        path = self.files[split.file].path
        used = [field for field in self.fields if wishes.of(field.column.name).used]
        done = num_bytes = 0
        rows: list[Any] = []

        def batch() -> Batch:
            columns = {field.column.name: _array(field, rows) for field in used}
            numbers = np.arange(done - len(rows) + 1, done + 1)
            return Batch(columns=columns, numbers=numbers, last=done)

        try:
            with open_bytes(path) as stream:
                header, _ = _read_header(stream)
                content = stream
                if split.stop >= 0:
                    stream.seek(split.start)
                    content = io.BytesIO(stream.read(split.stop - split.start))
                for block in fastavro.block_reader(_Joined(header, content)):
                    rows.extend(block)
                    done += block.num_records
                    num_bytes += block.size
                    if len(rows) >= BATCH_ROWS or num_bytes >= BATCH_BYTES:
                        yield batch()
                        rows, num_bytes = [], 0
            if rows:
                yield batch()
        except Exception as error:  # fastavro has no error of its own: struct, zlib, index errors ...
            raise _unreadable(error, path) from None


def open_avro(files: Sequence[InputFile], options: SourceOptions) -> AvroSource:
    """Opens Avro files with the same fields.

    Args:
        files: non-empty files.
        options: not used.

    Returns:
        The source.

    Raises:
        RecordError: a file is damaged, or differs in its fields; a field's type has no lossless form.
    """
    first: tuple[AvroField, ...] = ()
    for file in files:
        try:
            with open_bytes(file.path) as stream:
                _, schema = _read_header(stream)
        except Exception as error:  # see AvroSource.batches
            raise _unreadable(error, file.path) from None
        if not isinstance(schema, dict) or schema.get("type") != "record" or not schema["fields"]:
            kind = schema.get("type") if isinstance(schema, dict) else schema
            raise RecordError(f"an Avro file must hold records with fields, got {kind} ({file.path}).")
        fields = tuple(_fields(schema, (), file.path))
        names = [field.column.name for field in fields]
        if doubled := [name for name in names if names.count(name) > 1]:
            raise RecordError(
                f"every field must have a name of its own, got {doubled[0]!r} twice, once of a record in the "
                f"record ({file.path})."
            )
        first = first or fields
        if fields != first:
            raise RecordError(
                f"all files must have the fields and types of the first ({files[0].path}: {_names(first)}), "
                f"got {_names(fields)} ({file.path}). Convert them apart."
            )
    return AvroSource(files=tuple(files), fields=first)


class _Joined:
    """A header and then the rest of a stream, for a reader that only reads forward."""

    def __init__(self, head: bytes, stream: Any) -> None:
        self._head, self._stream = io.BytesIO(head), stream
        self._position = 0

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        head = self._head.read(size)
        data: bytes = head if len(head) == size else head + self._stream.read(size - len(head))
        self._position += len(data)
        return data


def _read_header(stream: Any) -> tuple[bytes, Any]:
    """A header whose schema has no logical types, so that values come as they are stored; the schema.

    fastavro turns times into datetime, which has no nanoseconds and not every year.
    """
    if (magic := stream.read(len(_MAGIC))) != _MAGIC:
        raise ValueError(f"a beginning other than Avro's: {magic!r}")
    header: Any = fastavro.schemaless_reader(stream, _HEADER, None)
    schema = json.loads(header["meta"]["avro.schema"])
    header["meta"]["avro.schema"] = json.dumps(_stored(schema)).encode()
    out = io.BytesIO()
    out.write(_MAGIC)
    fastavro.schemaless_writer(out, _HEADER, header)
    return out.getvalue(), fastavro.schema.expand_schema(schema)


def _stored(schema: Any) -> Any:
    """The schema without logical types and default values."""
    if isinstance(schema, list):
        return [_stored(branch) for branch in schema]
    if isinstance(schema, dict):
        return {k: _stored(v) for k, v in schema.items() if k not in ("logicalType", "default")}
    return schema


def _blocks(file: InputFile) -> Iterator[tuple[int, int]]:
    """Where each block begins and ends, without reading what is in it."""
    with open(file.path, "rb") as stream:
        stream.seek(len(_MAGIC))
        fastavro.schemaless_reader(stream, _HEADER, None)
        position = stream.tell()
        while position < file.num_bytes:
            stream.seek(position)
            try:
                fastavro.schemaless_reader(stream, "long", None)
                num_bytes: Any = fastavro.schemaless_reader(stream, "long", None)
            except (EOFError, IndexError, ValueError):
                num_bytes = -1
            end = stream.tell() + num_bytes + _SYNC_BYTES
            if num_bytes < 0 or end > file.num_bytes:
                raise _unreadable(f"its end within the block at byte {position}", file.path)
            yield position, end
            position = end


def _unreadable(error: object, path: str) -> RecordError:
    if isinstance(error, RecordError):
        return error
    text = str(error) or type(error).__name__
    return RecordError(
        f"an Avro file must be readable to its end, got {text} ({path}). Fetch it again, or name its true --format."
    )


def _fields(schema: Any, path: tuple[str, ...], file: str) -> Iterator[AvroField]:
    """The fields of a record and of the records in it."""
    for field in schema["fields"]:
        inner = (*path, field["name"])
        kind = _without_null(field["type"])
        if isinstance(kind, dict) and kind.get("type") == "record":
            yield from _fields(kind, inner, file)
            continue
        depth = 0
        while isinstance(kind, dict) and kind.get("type") == "array":
            kind, depth = _without_null(kind["items"]), depth + 1
        plain, logical = (kind["type"], kind.get("logicalType")) if isinstance(kind, dict) else (kind, "")
        dtype = _DTYPES.get(plain) if isinstance(plain, str) else None
        if dtype is None:
            what = "a union of several types" if isinstance(kind, list) else plain
            raise RecordError(
                f"a field's type must have a form without loss in an example, got {what} for field "
                f"{'.'.join(inner)!r} ({file}). Leave the field out, or flatten it into fields of its own."
            )
        if dtype == "int32" and not depth:  # an int64_list is what every reader takes
            dtype = "int64"
        decimal = logical == "decimal"
        column = SourceColumn(
            name=".".join(inner),
            dtype="string" if decimal else dtype,
            shape=None if depth else (),
            unit=_UNITS.get(logical or "", ""),
        )
        yield AvroField(
            path=inner, column=column, depth=depth, scale=int(kind.get("scale", 0)) if decimal else -1
        )


def _without_null(kind: Any) -> Any:
    """A type without its null."""
    if isinstance(kind, list):
        others = [branch for branch in kind if branch != "null"]
        return others[0] if len(others) == 1 else kind
    return kind


def _array(field: AvroField, rows: Sequence[Any]) -> pa.Array:
    """A field's values of all rows."""
    values = rows
    for name in field.path:
        values = [None if value is None else value[name] for value in values]
    if field.scale >= 0:
        values = [_decimal(value, field.scale) for value in values]
    kind = arrow_type(field.column.dtype, ())
    for _ in range(field.depth):
        kind = pa.list_(kind)
    return pa.array(values, kind)


def _decimal(value: Any, scale: int) -> Any:
    """An unscaled decimal's digits, of a value or of those in lists."""
    if value is None or isinstance(value, list):
        return None if value is None else [_decimal(item, scale) for item in value]
    number = int.from_bytes(value, "big", signed=True)
    digits = tuple(map(int, str(abs(number))))
    return format(Decimal((int(number < 0), digits, -scale)), "f")


def _names(fields: Sequence[AvroField]) -> str:
    columns = [field.column for field in fields]
    return ", ".join(f"{c.name} ({c.dtype}{' ' + c.unit if c.unit else ''})" for c in columns)
