"""WebDataset's records: consecutive members of a tar archive that share a key, and what is in them.

The key is the directory and the name up to its first dot; the rest, in lower case, is the feature.
A feature's last part tells what its bytes are:

    txt, text, transcript                  string
    cls, cls2, id, index, inx              int64
    json                                   its keys, as `json.outer.inner`, exactly as in JSONL
    npy                                    a tensor of the array's own dtype
    anything else                          bytes, as they are

Source: github.com/webdataset/webdataset, `tariterators.base_plus_ext`, `autodecode.basichandlers`.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from beam_jobs.sources import Wish, Wishes, printable
from beam_jobs.sources.bad_rows import RAW_CHARACTERS, Fault
from beam_jobs.sources.jsonl import parse_object
from beam_jobs.sources.npy_header import read_header, wrong_length
from beam_jobs.sources.npy_values import MAX_DIMENSIONS, RECORD_MAX_BYTES, feature_dtype, refused
from beam_jobs.sources.tar_members import Member, TarReader
from tfpipe.errors import RecordError

KEY = "key"
_TEXTS = ("txt", "text", "transcript")
_INTEGERS = ("cls", "cls2", "id", "index", "inx")
# No leading zeros: they would be lost.
_INTEGER = re.compile(rb"\s*(0|-?[1-9][0-9]*)\s*")
_SHOWN = 60


@dataclass(kw_only=True)
class Record:
    """Members of one key.

    Attributes:
        key: of them all.
        start: where the first begins in the archive.
        names: of the members.
        contents: by feature; None for one that was not wanted.
        fault: the first reason why it can't be taken.
    """

    key: str
    start: int
    names: list[str] = field(default_factory=list)
    contents: dict[str, bytes | None] = field(default_factory=dict)
    fault: Fault | None = None

    @property
    def num_bytes(self) -> int:
        """Of the members that were wanted."""
        return sum(len(content) for content in self.contents.values() if content is not None)

    @property
    def raw(self) -> str:
        """The members' names, shortened."""
        return printable(", ".join(self.names))[:RAW_CHARACTERS]


def records(reader: TarReader, stop: int, wanted: Callable[[str], bool]) -> Iterator[Record]:
    """Yields the records of an archive, or of a part of it that begins and ends with whole ones.

    Args:
        reader: at the first record.
        stop: where the part ends; -1 for the end of the archive.
        wanted: whether a feature's content is to be read.

    Raises:
        RecordError: the archive is damaged.
    """
    record: Record | None = None
    while stop < 0 or reader.following < stop:
        member = reader.next()
        if member is None or 0 <= stop <= member.start:
            break
        if _is_hidden(member.name):
            reader.num_hidden += 1
            continue
        directory, slash, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")
        key = directory + slash + stem
        if record is None or record.key != key:
            if record is not None:
                yield record
            record = Record(key=key, start=member.start)
        record.names.append(member.name)
        feature = extension.lower()
        record.fault = record.fault or _fault(member, feature, record)
        if record.fault is None:
            record.contents[feature] = reader.content() if wanted(feature) else None
    if record is not None:
        yield record


def values(record: Record, wishes: Wishes) -> dict[str, Any]:
    """A record's values by column.

    Args:
        record: without a fault.
        wishes: what the dataset wants of them.

    Returns:
        Of each column that has a value: str, bytes, int, an array, or as `parse_object` gives it.

    Raises:
        Fault: a content is not what its feature must hold.
    """
    result: dict[str, Any] = {KEY: record.key}
    for feature, content in record.contents.items():
        if content is None:
            continue
        found = _decoded(feature, content, wishes.of(feature))
        if doubled := result.keys() & found.keys():
            raise Fault(
                f"every feature must have a name of its own, got {min(doubled)!r} twice, once of {feature!r}",
                "Rename the member, or the key in it.",
            )
        result |= found
    return result


def is_wanted(feature: str, wishes: Wishes) -> bool:
    """Whether the dataset wants something of a feature's content."""
    if _kind(feature) != "json":
        return wishes.of(feature).used
    inner = f"{feature}."
    return wishes.others.used or any(w.used and name.startswith(inner) for name, w in wishes.columns.items())


def _kind(feature: str) -> str:
    return feature.rpartition(".")[2]


def _is_hidden(name: str) -> bool:
    """Whether it is no data: what archivers and file managers put beside it."""
    return any(
        part.startswith("__") or (part.startswith(".") and part not in (".", ".."))
        for part in name.split("/")
    )


def _fault(member: Member, feature: str, record: Record) -> Fault | None:
    """Why a member can't be taken, by its header."""
    name = printable(member.name)
    if name != member.name:
        return Fault(f"a member's name must be UTF-8, got {name!r}", "Rename it.")
    if member.refused:
        return Fault(f"a member must be a file, got {member.refused}, {name!r}", "Pack the file itself.")
    if not feature or feature == KEY:
        what = "no extension" if not feature else f"the extension {KEY!r}, which is the record's key"
        return Fault(f"a member's name must be KEY.FEATURE, got {what} in {name!r}", "Rename it.")
    if feature in record.contents:
        return Fault(f"a record must have each member once, got {feature!r} twice", "Leave one out.")
    if member.num_bytes > RECORD_MAX_BYTES:
        return Fault(
            f"a member must have at most {RECORD_MAX_BYTES} bytes, got {member.num_bytes} in {name!r}",
            "Split it into several.",
        )
    return None


def _decoded(feature: str, content: bytes, wish: Wish) -> dict[str, Any]:
    """The values by column that a member gives."""
    kind = _kind(feature)
    if kind == "json":
        text = _text(feature, content.removeprefix(codecs.BOM_UTF8))
        try:
            return {f"{feature}.{name}": value for name, value in parse_object(text).items()}
        except ValueError as error:
            raise Fault(
                f"column {feature!r} must hold one JSON object, each key once, got {error}", "Correct it."
            ) from None
    if kind == "npy":
        return {feature: _array(feature, content)}
    if kind not in (*_TEXTS, *_INTEGERS) or wish.dtype == "bytes":
        return {feature: content}
    if kind in _TEXTS or wish.dtype == "string":
        return {feature: _text(feature, content)}
    match = _INTEGER.fullmatch(content)
    if match is None or not -(2**63) <= int(match[1]) < 2**63:
        raise Fault(
            f"column {feature!r} must hold an int64 without leading zeros, got {content[:_SHOWN]!r}",
            'Correct it; or declare dtype "string" (--schema).',
        )
    return {feature: int(match[1])}


def _text(feature: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise Fault(
            f"column {feature!r} must hold UTF-8 text, got the byte 0x{content[error.start]:02x} at {error.start + 1}",
            'Convert it to UTF-8; or declare dtype "bytes" (--schema).',
        ) from None


def _array(feature: str, content: bytes) -> np.ndarray:
    """The array of a `.npy` file."""
    try:
        header = read_header(io.BytesIO(content), feature)
        if header.total_bytes != len(content):
            raise wrong_length(header, f"{len(content)}", feature)
    except RecordError as error:
        problem, _, remedy = str(error).partition(f" ({feature}). ")
        raise Fault(f"column {feature!r}: {problem}", remedy) from None
    dtype, shape = header.dtype, header.shape
    found = ""
    if dtype.names is not None:
        found = "a structured type"
    elif dtype.kind in "mM":
        found = f"a time (dtype {dtype}), whose unit no record can name"
    elif not feature_dtype(dtype, single=not shape)[0]:
        found = refused(dtype)
    elif not dtype.itemsize or 0 in shape[1:] or len(shape) >= MAX_DIMENSIONS:
        found = f"shape {list(shape)} of dtype {dtype}"
    if found:
        raise Fault(
            f"column {feature!r} must hold an array of numbers or text, got {found}",
            "Save it with another dtype, in fields of its own, or leave it out.",
        )
    order = "F" if header.fortran else "C"
    array: np.ndarray = np.ndarray(shape, dtype, content, header.header_bytes, order=order)
    return array
