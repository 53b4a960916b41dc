"""Reading files that are compressed as a whole: gzip, bz2 and zstd, told by content, never by name.

Such a file can only be read from its beginning, so it is one input split.
"""

from __future__ import annotations

import bz2
import gzip
import zlib
from typing import Any

import pyarrow as pa

from tfpipe.errors import RecordError

_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd"}
SUFFIXES = (".gz", ".bz2", ".zst", ".zstd")
_SKIP_BYTES = 1 << 20


def compression_of(head: bytes) -> str:
    """The compression that a file's first bytes tell: "gzip", "bz2", "zstd" or ""."""
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")


def open_bytes(path: str) -> Any:
    """Opens a file for reading its bytes, decompressed; all but plain files can only be read forward."""
    with open(path, "rb") as file:
        compression = compression_of(file.read(4))
    if compression == "gzip":
        from isal import igzip

        return igzip.open(path, "rb")
    if compression == "bz2":
        return bz2.open(path, "rb")
    if compression == "zstd":  # Arrow's reader takes several frames, and tells a truncated one
        return pa.CompressedInputStream(pa.OSFile(path), "zstd")
    return open(path, "rb")


def read_bytes(stream: Any, size: int, path: str) -> bytes:
    """Reads from a stream that `open_bytes` gave.

    Args:
        stream: to read from.
        size: how many bytes; fewer only at the end; -1 for all.
        path: of the file.

    Returns:
        The bytes.

    Raises:
        RecordError: the file is damaged.
    """
    try:
        data: bytes = stream.read() if size < 0 else stream.read(size)
    except damaged_errors() as error:
        raise unreadable(error, path) from None
    return data


def skip_bytes(stream: Any, size: int, path: str) -> None:
    """Goes forward in a stream that was just opened.

    Args:
        stream: that `open_bytes` gave.
        size: how many bytes.
        path: of the file.

    Raises:
        RecordError: the file is damaged.
    """
    if not isinstance(stream, pa.NativeFile) and stream.seekable():
        try:
            stream.seek(size)
        except damaged_errors() as error:
            raise unreadable(error, path) from None
        return
    while size > 0 and (chunk := read_bytes(stream, min(size, _SKIP_BYTES), path)):
        size -= len(chunk)


def damaged_errors() -> tuple[type[BaseException], ...]:
    """What reading a damaged or unreadable file raises; isal's own error is a subclass of none of them."""
    from isal import isal_zlib

    return (OSError, EOFError, gzip.BadGzipFile, zlib.error, isal_zlib.error)


def unreadable(found: object, path: str) -> RecordError:
    """The error of an input file that can't be read to its end."""
    text = str(found) or type(found).__name__
    return RecordError(f"an input file must be readable to its end, got {text} ({path}).")
