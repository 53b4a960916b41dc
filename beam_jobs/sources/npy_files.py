"""NumPy's files as arrays of records: a `.npy` file, or the members of a `.npz` file, from their headers.

Source: PKWARE's APPNOTE, 4.3.7, for where a zip's member begins.
"""

from __future__ import annotations

import math
import os
import re
import struct
import zipfile
from dataclasses import dataclass

from beam_jobs.sources import InputFile
from beam_jobs.sources.compressed import SUFFIXES, open_bytes, unreadable
from beam_jobs.sources.npy_header import NpyHeader, read, read_header, wrong_length, zip_errors
from beam_jobs.sources.npy_values import NpyField, fields_of
from tfpipe.errors import RecordError

SUFFIX = ".npy"
_PIECE = re.compile(r"(.+?)[-_](\d+)(?:-of-\d+)?")
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_END = struct.Struct("<4s6xH10x")


@dataclass(frozen=True, kw_only=True, slots=True)
class NpyArray:
    """An array whose first axis counts records.

    Attributes:
        file: index of its file in the source.
        member: its name in a `.npz` file; "" for a `.npy` file.
        number: that its file's name ends with; -1 for none.
        header: of the array.
        fields: the columns that it gives.
        start: where it begins in its file, the header first; -1 if it is compressed.
        crc: that the zip has for it.
    """

    file: int
    member: str = ""
    number: int = -1
    header: NpyHeader
    fields: tuple[NpyField, ...]
    start: int
    crc: int = 0

    @property
    def num_records(self) -> int:
        return self.header.shape[0]

    @property
    def record_bytes(self) -> int:
        return math.prod(self.header.shape[1:]) * self.header.dtype.itemsize


def is_zip(file: InputFile) -> bool:
    """Whether it is a zip, as `.npz` files are.

    Raises:
        RecordError: it is one that is compressed as a whole.
    """
    with open_bytes(file.path) as stream:
        zipped = read(stream, 2, file.path) == b"PK"
    if zipped and file.compression:
        raise RecordError(
            f"a .npz file must be readable at any place, got one that is compressed as a whole with "
            f"{file.compression} ({file.path}). Decompress it first."
        )
    return zipped


def read_npy(index: int, file: InputFile) -> NpyArray:
    """Reads the header of a `.npy` file, compressed as a whole or not.

    Args:
        index: of the file in the source.
        file: to read.

    Returns:
        The array.

    Raises:
        RecordError: the header is malformed, disagrees with the file's length, or has no records.
    """
    with open_bytes(file.path) as stream:
        header = read_header(stream, file.path)
    name = os.path.basename(file.path)
    for suffix in (*SUFFIXES, SUFFIX):
        if name.lower().endswith(suffix):
            name = name[: -len(suffix)]
    piece = _PIECE.fullmatch(name)
    fields = _fields(header, piece[1] if piece else name, file.path)
    if not file.compression:
        _check_length(header, file.num_bytes, file.path)
    return NpyArray(
        file=index,
        number=int(piece[2]) if piece else -1,
        header=header,
        fields=fields,
        start=-1 if file.compression else 0,
    )


def read_npz(index: int, file: InputFile) -> list[NpyArray]:
    """Reads the headers of a `.npz` file's members.

    Args:
        index: of the file in the source.
        file: to read.

    Returns:
        The arrays, in the file's order.

    Raises:
        RecordError: a member is no array or one of the kinds that `read_npy` refuses, or the zip is damaged.
    """
    try:
        with zipfile.ZipFile(file.path) as archive:
            members = archive.infolist()
            _check_count(len(members), archive.comment, file)
            _check_names([info.filename for info in members], file.path)
            return [_read_member(archive, info, index, file) for info in members]
    except zip_errors() as error:
        raise unreadable(error, file.path) from None


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, index: int, file: InputFile) -> NpyArray:
    where = f"{file.path}: {info.filename}"
    with archive.open(info) as stream:
        header = read_header(stream, where)
    fields = _fields(header, info.filename[: -len(SUFFIX)], where)
    _check_length(header, info.file_size, where)
    start = -1
    if info.compress_type == zipfile.ZIP_STORED:
        with open(file.path, "rb") as plain:
            plain.seek(info.header_offset)
            _, *lengths = _LOCAL_HEADER.unpack(plain.read(_LOCAL_HEADER.size))
        start = info.header_offset + _LOCAL_HEADER.size + sum(lengths)
        _check_length(header, min(info.compress_size, file.num_bytes - start), where)
    return NpyArray(
        file=index,
        member=info.filename,
        header=header,
        fields=fields,
        start=start,
        crc=info.CRC,
    )


def _check_count(found: int, comment: bytes, file: InputFile) -> None:
    """Makes sure that a zip's directory gave as many members as its end tells: zipfile does not look."""
    with open(file.path, "rb") as plain:
        plain.seek(file.num_bytes - _END.size - len(comment))
        magic, count = _END.unpack(plain.read(_END.size))
    # The count's highest value stands for more.
    if magic != b"PK\5\6" or (count != found and (count < 0xFFFF or found < 0xFFFF)):
        what = f"{found} members of {count}" if magic == b"PK\5\6" else "more data behind its end"
        raise RecordError(
            f"a .npz file must be whole, got {what} ({file.path}). Fetch or save the file again."
        )


def _check_names(names: list[str], path: str) -> None:
    """Makes sure that each member of a zip is an array with a name of its own."""
    for i, name in enumerate(names):
        if not name.endswith(SUFFIX) or name == SUFFIX or name in names[:i]:
            what = f"{name!r} twice" if name in names[:i] else repr(name)
            raise RecordError(
                f"every member of a .npz file must be an array of its own, NAME.npy, got {what} ({path}). "
                f"Save the arrays again with numpy.savez."
            )
    if not names:
        raise RecordError(f"a .npz file must hold at least one array, got none ({path}). Leave it out.")


def _fields(header: NpyHeader, name: str, where: str) -> tuple[NpyField, ...]:
    if not header.shape:
        raise RecordError(
            f"an array's first axis must count the records, got a single value ({name!r}, {where}). "
            f"Leave it out, or save it once a record."
        )
    fields = tuple(fields_of(header.dtype, header.shape[1:], name, where))
    if not fields:
        raise RecordError(f"a structured array must have a field, got none ({where}). Leave it out.")
    return fields


def _check_length(header: NpyHeader, num_bytes: int, where: str) -> None:
    if num_bytes != header.total_bytes:
        raise wrong_length(header, f"{num_bytes}", where)
