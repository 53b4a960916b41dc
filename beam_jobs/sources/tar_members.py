"""Tar archives: members, read forward header by header, and nothing taken for the end but the end.

Python's tarfile takes a damaged header behind the first member, and a file that ends between two
members, for the archive's end; what would be lost is an error here.

Source: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Header Block"; GNU tar, "Basic Tar Format".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from beam_jobs.sources.compressed import read_bytes
from tfpipe.errors import RecordError

BLOCK_BYTES = 512
MAGIC = b"ustar"
MAGIC_AT = 257
_CHUNK_BYTES = 1 << 20
# Names and other attributes of one member.
_EXTENDED_MAX_BYTES = 1 << 20
_ZEROS = bytes(BLOCK_BYTES)
_PAX_RECORD = re.compile(rb"([1-9]\d{0,6}) ([^=\n]+)=")
_FILES = (b"0", b"\0", b"7")
_LEFT_OUT = {b"5": "a directory", b"D": "a directory", b"V": "a volume's label"}
_REFUSED = {
    b"1": "a hard link", b"2": "a symbolic link", b"3": "a character device", b"4": "a block device",
    b"6": "a FIFO", b"S": "a sparse file", b"M": "a part of a file in another volume",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One member's header.

    Attributes:
        name: of the file; half surrogates stand for bytes that are no UTF-8.
        num_bytes: of its content.
        start: where its headers begin in the archive.
        refused: what it is if it is no file whose content can be read; "" for a file.
    """

    name: str
    num_bytes: int
    start: int
    refused: str = ""


class TarReader:
    """Reads an archive's members, forward.

    Attributes:
        position: of the stream in the archive.
        end: where the zeros behind the last member begin; -1 before they are reached.
        num_hidden: members that were left out so far; counted by who reads them.

    Args:
        stream: of the archive's bytes, decompressed, at a header.
        path: of the file, for errors.
        position: of the stream in the archive.
        num_bytes: of the archive if the stream can be read at any place; -1 if only forward.
    """

    def __init__(self, stream: Any, path: str, position: int = 0, num_bytes: int = -1) -> None:
        self._stream, self._path, self._num_bytes = stream, path, num_bytes
        self.position, self.end, self.num_hidden = position, -1, 0
        self._left = self._padding = 0

    @property
    def following(self) -> int:
        """Where the header behind the member that `next` gave begins."""
        return self.position + self._left + self._padding

    def next(self) -> Member | None:
        """Goes to the next member that may be a file; None at the archive's end.

        Raises:
            RecordError: the archive is damaged, ends too early, or goes on behind its end.
        """
        self._skip(self._left + self._padding)
        self._left = self._padding = 0
        start = self.position
        name: bytes | None = None
        num_bytes: int | None = None
        sparse = False
        while True:
            at = self.position
            block = self._read(BLOCK_BYTES, "a header", at)
            if block == _ZEROS:
                if start != at:
                    raise self._damaged("the end behind a header that tells of another", at)
                self.end = at
                self._check_end()
                return None
            kind, short_name, size = self._parse(block, at)
            if kind in (b"x", b"X", b"g", b"L", b"K"):
                content = self._extended(size, at)
                if kind == b"L":
                    name = content.partition(b"\0")[0]
                elif kind != b"K":
                    found = self._attributes(content, at)
                    sparse = sparse or any(key.startswith(b"GNU.sparse.") for key in found)
                    if kind == b"g" and found.keys() & {b"path", b"size"}:
                        raise self._damaged("a global header with the name or size of a file", at)
                    name = found.get(b"GNU.sparse.name", found.get(b"path", name))
                    if b"size" in found:
                        num_bytes = self._number(found[b"size"], 10, at)
                continue
            if name is None:
                name = short_name
            if num_bytes is None:
                num_bytes = size
            is_directory = kind == b"\0" and name.endswith(b"/")  # as before there were types
            refused = "a sparse file" if sparse else _REFUSED.get(kind, "")
            if kind not in (*_FILES, *_LEFT_OUT) and not refused:
                refused = f"a member of unknown type {kind!r}"
            if kind in (b"1", b"2", b"3", b"4", b"5", b"6"):  # whatever their size says, nothing follows
                num_bytes = 0
            self._left, self._padding = num_bytes, -num_bytes % BLOCK_BYTES
            if kind in _LEFT_OUT or is_directory:
                self._skip(self._left + self._padding)
                self._left = self._padding = 0
                # Left out, but what begins here is the next record's.
                start, name, num_bytes, sparse = self.position, None, None, False
                continue
            text = name.decode("utf-8", "surrogateescape")
            return Member(name=text, num_bytes=num_bytes, start=start, refused=refused)

    def content(self) -> bytes:
        """The content of the member that `next` gave; once.

        Raises:
            RecordError: the archive ends too early, or can't be read.
        """
        size, self._left = self._left, 0
        return self._read(size, "a member", self.position)

    def _parse(self, block: bytes, at: int) -> tuple[bytes, bytes, int]:
        """A header's type, name and size."""
        field = block[148:156]
        unsigned = sum(block) - sum(field) + 8 * 0x20
        stored = self._number(field.strip(b" \0"), 8, at)
        if stored != unsigned and stored != unsigned - 256 * _high_bytes(block):  # signed, as old tars did
            raise self._damaged(f"a checksum of {unsigned} instead of {stored}", at)
        name = block[:100].partition(b"\0")[0]
        if block[MAGIC_AT : MAGIC_AT + 6] == b"ustar\0" and (prefix := block[345:500].partition(b"\0")[0]):
            name = prefix + b"/" + name
        size_field = block[124:136]
        if size_field[0] == 0x80:
            size = int.from_bytes(size_field[1:], "big")
        else:
            size = self._number(size_field.strip(b" \0") or b"0", 8, at)
        return block[156:157], name, size

    def _extended(self, size: int, at: int) -> bytes:
        if size > _EXTENDED_MAX_BYTES:
            raise self._damaged(f"{size} bytes of attributes", at)
        content = self._read(size, "a header", at)
        self._skip(-size % BLOCK_BYTES)
        return content

    def _attributes(self, content: bytes, at: int) -> dict[bytes, bytes]:
        """The records `LENGTH KEY=VALUE\\n` of a pax header."""
        found, position = {}, 0
        while position < len(content):
            match = _PAX_RECORD.match(content, position)
            end = position + int(match[1]) if match else 0
            if match is None or not match.end() < end <= len(content) or content[end - 1 : end] != b"\n":
                raise self._damaged("attributes that are not LENGTH KEY=VALUE", at)
            found[match[2]] = content[match.end() : end - 1]
            position = end
        return found

    def _number(self, digits: bytes, base: int, at: int) -> int:
        if not digits.isdigit() or (base == 8 and digits.strip(b"01234567")):
            raise self._damaged(f"{digits!r} for a number", at)
        return int(digits, base)

    def _read(self, size: int, what: str, start: int) -> bytes:
        data = read_bytes(self._stream, size, self._path)
        self.position += len(data)
        if len(data) < size:
            raise self._truncated(what, start)
        return data

    def _skip(self, size: int) -> None:
        start = self.position
        if self._num_bytes >= 0:
            self.position += size
            if self.position > self._num_bytes:
                raise self._truncated("a member", start)
            if size:
                self._stream.seek(self.position)
            return
        while size:
            size -= len(self._read(min(size, _CHUNK_BYTES), "a member", start))

    def _check_end(self) -> None:
        """Makes sure that only zeros follow the end: archives behind each other would be lost."""
        while data := read_bytes(self._stream, _CHUNK_BYTES, self._path):
            if data.strip(b"\0"):
                at = self.position + len(data) - len(data.lstrip(b"\0"))
                raise self._damaged("more data behind its end", at)
            self.position += len(data)

    def _truncated(self, what: str, at: int) -> RecordError:
        return RecordError(
            f"a tar archive must end with zeros behind its last member, got its end within {what} "
            f"({self._path}: byte {at}). It is truncated: fetch it again, or pack it again with tar."
        )

    def _damaged(self, found: str, at: int) -> RecordError:
        return RecordError(
            f"a tar archive must be whole, one header before each member, got {found} "
            f"({self._path}: byte {at}). Fetch it again, or pack it again with tar."
        )


def _high_bytes(block: bytes) -> int:
    return sum(byte > 127 for byte in block[:148] + block[156:])
