"""Files of text as UTF-8 bytes: ranges of them, and lines.

UTF-8 may begin with a byte order mark, which is left out. UTF-16 is told by its byte order mark
and becomes UTF-8 on the way; such a file, like a compressed one, can only be read from its
beginning, so it is one input split.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from beam_jobs.sources import SPLIT_BYTES, InputFile, InputSplit
from beam_jobs.sources.bad_rows import RAW_CHARACTERS, BadRow
from beam_jobs.sources.compressed import open_bytes, read_bytes, skip_bytes
from tfpipe.errors import RecordError

BOM = codecs.BOM_UTF8
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_UTF32 = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
BLOCK_BYTES = 4 << 20
# The longest line: one without end would otherwise read the whole file.
LINE_MAX_BYTES = 256 << 20


def is_plain(file: InputFile) -> bool:
    """Whether a file's bytes are its text, so that reading may begin anywhere."""
    with open(file.path, "rb") as stream:
        head = stream.read(4)
    return not file.compression and head[:2] not in _UTF16 and head not in _UTF32


def read_head(path: str, size: int) -> bytes:
    """Reads a file's first bytes, to see whether it is text.

    Args:
        path: the file, compressed or not.
        size: how many bytes.

    Returns:
        UTF-8, without a byte order mark.

    Raises:
        RecordError: it is damaged, binary data, or text in another encoding.
    """
    stream = _Utf8(path)
    try:
        return stream.read(size)
    finally:
        stream.close()


def chunks(file: InputFile, split: InputSplit, size: int = BLOCK_BYTES) -> Iterator[tuple[bytes, bool]]:
    """Yields a split's UTF-8 bytes, and whether they are the last; at least one chunk, which may be empty.

    Args:
        file: the split's.
        split: of bytes, whose end is -1 where the file is not plain.
        size: of a chunk.

    Raises:
        RecordError: the file is damaged, or no text.
    """
    left = split.stop - split.start if split.stop >= 0 else None
    stream: Any = open_bytes(file.path) if split.start else _Utf8(file.path)
    try:
        if split.start:
            skip_bytes(stream, split.start, file.path)
        elif left is not None:
            left -= stream.mark_bytes
        chunk = _read(stream, size, left, file.path)
        while True:
            if left is not None:
                left -= len(chunk)
            following = _read(stream, size, left, file.path)
            yield chunk, not following
            if not following:
                return
            chunk = following
    finally:
        stream.close()


def line_splits(files: Sequence[InputFile]) -> list[InputSplit]:
    """Plans splits that begin at the start of a line.

    Args:
        files: of lines that end with a line feed.

    Returns:
        The splits, in order.
    """
    splits: list[InputSplit] = []
    for index, file in enumerate(files):
        bounds = [0, -1]
        if is_plain(file):
            bounds = [0]
            with open(file.path, "rb") as stream:
                while (target := bounds[-1] + SPLIT_BYTES) < file.num_bytes:
                    bounds.append(_line_start(stream, target))
            if bounds[-1] < file.num_bytes:
                bounds.append(file.num_bytes)
        for start, stop in itertools.pairwise(bounds):
            splits.append(InputSplit(index=len(splits), file=index, start=start, stop=stop))
    return splits


def line_batches(file: InputFile, split: InputSplit) -> Iterator[list[bytes] | BadRow]:
    """Yields a split's lines without their ends (LF or CRLF), block by block; at last what is no line.

    Args:
        file: the split's.
        split: as `line_splits` planned it.

    Raises:
        RecordError: the file is damaged, or no text.
    """
    rest = b""
    number = 0
    for chunk, final in chunks(file, split):
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        if final and rest:
            lines.append(rest)
            rest = b""
        number += len(lines)
        if lines:
            yield [line[:-1] if line.endswith(b"\r") else line for line in lines]
        if len(rest) > LINE_MAX_BYTES:
            yield BadRow(
                row=number + 1,
                problem=f"a line must end within {LINE_MAX_BYTES >> 20} MiB, got a longer one",
                remedy="Break it into several lines, or use a format for large values, such as Parquet.",
                raw=rest[:RAW_CHARACTERS].decode(errors="replace"),
                fatal=True,
            )
            return


def decode(line: bytes, row: int) -> str | BadRow:
    """A line as text, or why it is none.

    Args:
        line: without its end.
        row: its number within the split.
    """
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        return BadRow(
            row=row,
            problem=f"a line must be UTF-8 text, got the byte 0x{line[error.start]:02x} at {error.start + 1}",
            remedy="Convert the file to UTF-8 (iconv -t UTF-8).",
            raw=line[: 4 * RAW_CHARACTERS].decode(errors="backslashreplace")[:RAW_CHARACTERS],
        )


def _line_start(stream: Any, at: int) -> int:
    """Where the first line begins that begins at or after that byte; the file's size if none does."""
    stream.seek(at - 1)
    while block := stream.read(1 << 16):
        found: int = block.find(b"\n")
        if found >= 0:
            return at + found
        at += len(block)
    return at - 1


def _read(stream: Any, size: int, left: int | None, path: str) -> bytes:
    return read_bytes(stream, size if left is None else min(size, left), path)


class _Utf8:
    """Reads a file as UTF-8, from its beginning.

    Attributes:
        mark_bytes: of its byte order mark, which is not read.
    """

    def __init__(self, path: str) -> None:
        self._path, self._stream = path, open_bytes(path)
        self._decoder: codecs.IncrementalDecoder | None = None
        self._head = read_bytes(self._stream, 64, path)
        self.mark_bytes = 0
        if self._head.startswith(BOM):
            self.mark_bytes = len(BOM)
        elif self._head[:2] in _UTF16 and self._head[:4] not in _UTF32:
            self._decoder = codecs.getincrementaldecoder(_UTF16[self._head[:2]])()
            self.mark_bytes = 2
        elif self._head[:4] in _UTF32 or b"\0" in self._head:
            self.close()
            what = (
                "UTF-32" if self._head[:4] in _UTF32 else "UTF-16 without a byte order mark, or binary data"
            )
            raise RecordError(
                f"a file of text must be UTF-8, or UTF-16 with a byte order mark, got {what} ({path}). "
                f"Convert it first: iconv -f UTF-16LE -t UTF-8."
            )
        self._head = self._head[self.mark_bytes :]

    def read(self, size: int) -> bytes:
        """Reads about as many bytes of UTF-8; none only at the end, or if none are asked for."""
        if self._decoder is None:
            head, self._head = self._head[:size], self._head[size:]
            return head + read_bytes(self._stream, size - len(head), self._path)
        while size > 0:
            data, self._head = self._head + read_bytes(self._stream, size, self._path), b""
            try:
                text = self._decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise RecordError(
                    f"a file that begins with a UTF-16 byte order mark must be UTF-16, got {error.reason} "
                    f"({self._path}). Convert it to UTF-8."
                ) from None
            if text or not data:
                return text.encode()
        return b""

    def close(self) -> None:
        self._stream.close()
