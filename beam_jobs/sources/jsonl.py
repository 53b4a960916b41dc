"""JSONL: one JSON object a line, numbers exact to the digit.

    true, false                            bool
    a number                               as in CSV: int64, float32 or float64, whichever loses no digit
    a string                               string, also if it spells a number
    null, or a key that is not there       no value, never 0
    a list, or lists of lists              a tensor, of unknown length where records differ
    an object                              its keys, as `outer.inner`

Numbers stay text until the column's dtype is known, so that neither 2**53 + 1 nor 0.1 passes
through another type. A key twice in an object, a column of text and numbers, an object in a list
are refused. NaN, Infinity and -Infinity are taken as the floats that they name.

Source: RFC 8259; jsonlines.org.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from beam_jobs.sources import InputFile, InputSplit, SourceColumn, SourceOptions, Wishes
from beam_jobs.sources.bad_rows import RAW_CHARACTERS, BadRow
from beam_jobs.sources.fit import SPELLED
from beam_jobs.sources.text import decode, line_batches, line_splits, read_head
from beam_jobs.sources.typed import Batch, TypedSource
from tfpipe.errors import RecordError
from tfpipe.schema import TEXT_DTYPES

_SHOWN = 60


class _Number(str):
    """A number as it is written."""

    __slots__ = ()


class Mixed(Exception):
    """Values side by side that no one array holds."""


@dataclass(frozen=True, kw_only=True)
class JsonlSource(TypedSource):
    """JSONL files; their columns are the keys of all records."""

    files: tuple[InputFile, ...]
    columns: tuple[SourceColumn, ...] | None = None
    format: str = "jsonl"

    def plan(self) -> list[InputSplit]:
        """Plans the splits; see `Source`."""
        return line_splits(self.files)

    def origin(self, split: InputSplit, row: int) -> str:
        """Names a line; see `Source`."""
        return f"{self.files[split.file].path}:{row}"

    def batches(self, split: InputSplit, wishes: Wishes) -> Iterator[Batch]:
        """Yields a split batch by batch; see `TypedSource`."""
        last = 0
        for lines in line_batches(self.files[split.file], split):
            if isinstance(lines, BadRow):
                yield Batch(columns={}, numbers=np.empty(0, np.int64), last=lines.row, bad=[lines])
                return
            records: list[dict[str, Any]] = []
            numbers: list[int] = []
            texts: list[str] = []
            bad: list[BadRow] = []
            for number, line in enumerate(lines, last + 1):
                if not line or line.isspace():
                    continue
                text = decode(line, number)
                record = text if isinstance(text, BadRow) else _parse(text, number)
                if isinstance(record, BadRow):
                    bad.append(record)
                else:
                    records.append(record)
                    numbers.append(number)
                    texts.append(line.decode())
            last += len(lines)
            yield from _batches(records, np.array(numbers, np.int64), texts, wishes, last)
            if bad or not records:
                yield Batch(columns={}, numbers=np.empty(0, np.int64), last=last, bad=bad)


def open_jsonl(files: Sequence[InputFile], options: SourceOptions) -> JsonlSource:
    """Opens JSONL files.

    Args:
        files: non-empty files.
        options: not used.

    Returns:
        The source.

    Raises:
        RecordError: a file is damaged, no text, or one JSON array.
    """
    for file in files:
        if read_head(file.path, 1 << 10).lstrip()[:1] == b"[":
            raise RecordError(
                f"a JSONL file must hold one object a line, got an array ({file.path}). "
                f"Write each of its elements on a line of its own (jq -c '.[]')."
            )
    return JsonlSource(files=tuple(files))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} twice")
    return result


_decoder = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_Number, parse_float=_Number, parse_constant=_Number
)


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object, laid out flat; its numbers stay text.

    Args:
        text: the object.

    Returns:
        Values by key, `outer.inner` of an object in it: None, bool, str, numbers as they are written, lists.

    Raises:
        ValueError: what it is instead of one object, each key once.
    """
    try:
        record = _decoder.decode(text)
        if isinstance(record, dict):
            return _flat(record) if any(type(value) is dict for value in record.values()) else record
    except json.JSONDecodeError as error:
        near = text[max(error.pos - 20, 0) : error.pos + 20]
        raise ValueError(f"{error.msg} at character {error.pos + 1} ({near!r})") from None
    except RecursionError:
        raise ValueError("objects or lists nested too deeply to read") from None
    raise ValueError(f"{_kind(record)} ({text[:_SHOWN]!r})")


def _parse(text: str, number: int) -> dict[str, Any] | BadRow:
    """A line's object, laid out flat, or what is wrong with it."""
    try:
        return parse_object(text)
    except ValueError as error:
        return BadRow(
            row=number,
            problem=f"a line must hold one JSON object, each key once, got {error}",
            remedy="Correct the line.",
            raw=text[:RAW_CHARACTERS],
        )


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """Lays out objects in an object as keys like `outer.inner`."""
    result: dict[str, Any] = {}
    for name, value in record.items():
        inner = (
            {f"{name}.{key}": v for key, v in _flat(value).items()} if type(value) is dict else {name: value}
        )
        if doubled := result.keys() & inner.keys():
            raise ValueError(f"the key {min(doubled)!r} twice, once of an object in the object")
        result |= inner
    return result


def _kind(value: Any) -> str:
    return {
        dict: "an object",
        list: "a list",
        bool: "true or false",
        str: "a string",
        _Number: "a number",
    }.get(type(value), "null")


def _batches(
    records: Sequence[dict[str, Any]], numbers: np.ndarray, texts: Sequence[str], wishes: Wishes, last: int
) -> Iterator[Batch]:
    """Yields records as batches; as one, unless their values differ too much for one array."""
    if not records:
        return
    names = list(dict.fromkeys(name for record in records for name in record))
    columns, bad = {}, None
    for name in names:
        wish = wishes.of(name)
        if not wish.used:
            continue
        try:
            columns[name] = json_array([record.get(name) for record in records], wish.dtype in TEXT_DTYPES)
        except Mixed as error:
            bad = BadRow(
                row=int(numbers[0]),
                problem=f"column {name!r} must hold {error.args[0]}",
                remedy="Correct the value; or declare a schema without the column (--schema).",
                raw=texts[0][:RAW_CHARACTERS],
            )
            break
    if bad is None:
        yield Batch(columns=columns, numbers=numbers, last=last, texts=texts)
    elif len(records) == 1:
        yield Batch(columns={}, numbers=numbers[:0], last=last, bad=[bad])
    else:
        half = len(records) // 2
        yield from _batches(records[:half], numbers[:half], texts[:half], wishes, last)
        yield from _batches(records[half:], numbers[half:], texts[half:], wishes, last)


def json_array(values: list[Any], as_text: bool) -> pa.Array:
    """Values of one column as an array: bool, text, numbers as they are written, or lists of these.

    Args:
        values: as `parse_object` gives them.
        as_text: whether all are to be text.

    Raises:
        Mixed: they have no one type.
    """
    kinds = set(map(type, values))
    nulls = type(None) in kinds
    kinds.discard(type(None))
    if not kinds:
        return pa.nulls(len(values))
    if kinds == {list}:
        lengths = [len(value) if value else 0 for value in values]
        flat = [item for value in values if value for item in value]
        mask = pa.array([value is None for value in values]) if nulls else None
        offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
        return pa.ListArray.from_arrays(offsets, json_array(flat, as_text), mask=mask)
    if dict in kinds:
        raise Mixed("numbers, text or lists of them, got an object in a list or beside other values")
    if list in kinds:
        raise Mixed("single values throughout, or lists of one depth, got both")
    try:
        if kinds == {str}:
            return pa.array(values, pa.string())
        if kinds == {bool} and not as_text:
            return pa.array(values, pa.bool_())
        if str in kinds and not as_text:
            raise Mixed("text or numbers, got both")
        if bool in kinds:
            values = [("true" if value else "false") if type(value) is bool else value for value in values]
        return pa.array(values, pa.string() if as_text else SPELLED)
    except UnicodeEncodeError:
        raise Mixed("Unicode text, got half of a surrogate pair") from None
