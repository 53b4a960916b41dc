"""TFRecord framing without TensorFlow: what `verify` and the converter's read-back use.

A record is: uint64 length, uint32 masked CRC32C of the length, the payload, uint32 masked
CRC32C of the payload, all little-endian. Checks go through google-crc32c and zlib, not
through the code that writes shards, so that one fault can't hide the other.

Source: TensorFlow's `tfrecord` format description (tensorflow.org/tutorials/load_data/tfrecord).
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import google_crc32c

from tfpipe.errors import ShardError

HEADER_BYTES = 12
FOOTER_BYTES = 4
CHUNK_BYTES = 1 << 20
# TensorFlow's own spelling -> zlib's window bits (16 more: gzip wrapper).
WINDOW_BITS = {"GZIP": 31, "ZLIB": 15}
SUFFIXES = {"GZIP": ".gz", "ZLIB": ".zlib", "": ""}


def mask_crc(crc: int) -> int:
    """Masks a CRC32C as the TFRecord format asks (rotate right by 15, add a constant)."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """Frames one serialized example as a TFRecord."""
    length = struct.pack("<Q", len(payload))
    return b"".join((
        length,
        struct.pack("<I", mask_crc(google_crc32c.value(length))),
        payload,
        struct.pack("<I", mask_crc(google_crc32c.value(payload))),
    ))  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardContent:
    """What reading a whole shard found.

    Attributes:
        num_records: records whose framing and checksums hold.
        num_bytes: the file's size.
        uncompressed_bytes: bytes of all framed records.
        sha256: of the file as it lies on disk, hexadecimal.
    """

    num_records: int
    num_bytes: int
    uncompressed_bytes: int
    sha256: str


class ShardReader:
    """Iterates over a shard's payloads, checking every length and checksum.

    Args:
        path: the shard.
        compression: "GZIP", "ZLIB" or "".

    After exhaustion, `content` holds what was read.
    """

    def __init__(self, path: Path | str, compression: str) -> None:
        self.path = Path(path)
        self.compression = compression
        self.content: ShardContent | None = None

    def __iter__(self) -> Iterator[bytes]:
        digest = hashlib.sha256()
        num_bytes = num_records = offset = 0
        buffer = b""
        try:
            with open(self.path, "rb") as file:
                for raw, data in _inflate(file, self.compression, self.path):
                    digest.update(raw)
                    num_bytes += len(raw)
                    buffer = buffer + data if buffer else data
                    start, end = 0, len(buffer)
                    while end - start >= HEADER_BYTES:
                        header = buffer[start : start + HEADER_BYTES]
                        length, crc = struct.unpack("<QI", header)
                        if mask_crc(google_crc32c.value(header[:8])) != crc:
                            raise self._damaged(num_records, offset, "the length's checksum is wrong")
                        stop = start + HEADER_BYTES + length + FOOTER_BYTES
                        if stop > end:
                            break
                        payload = buffer[start + HEADER_BYTES : stop - FOOTER_BYTES]
                        (crc,) = struct.unpack_from("<I", buffer, stop - FOOTER_BYTES)
                        if mask_crc(google_crc32c.value(payload)) != crc:
                            raise self._damaged(num_records, offset, "the payload's checksum is wrong")
                        yield payload
                        num_records += 1
                        offset += stop - start
                        start = stop
                    buffer = buffer[start:]
        except zlib.error as error:
            raise self._damaged(num_records, offset, f"decompression failed: {error}") from None
        if buffer:
            raise self._damaged(num_records, offset, f"{len(buffer)} bytes at the end are no record")
        self.content = ShardContent(
            num_records=num_records,
            num_bytes=num_bytes,
            uncompressed_bytes=offset,
            sha256=digest.hexdigest(),
        )

    def _damaged(self, index: int, offset: int, what: str) -> ShardError:
        return ShardError(
            f"every record must be readable, got damage at record {index} "
            f"(uncompressed offset {offset}): {what} ({self.path}). Convert the source again, "
            f"or restore the file from a copy."
        )


def read_shard(path: Path | str, compression: str) -> ShardContent:
    """Reads a whole shard and checks every record.

    Args:
        path: the shard.
        compression: "GZIP", "ZLIB" or "".

    Returns:
        What it holds.

    Raises:
        ShardError: the file is missing or damaged; names file, record and offset.
    """
    reader = ShardReader(path, compression)
    try:
        for _ in reader:
            pass
    except OSError as error:
        raise ShardError(f"a shard must be readable, got {error.strerror} ({path}).") from None
    assert reader.content is not None
    return reader.content


def _inflate(file: BinaryIO, compression: str, path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yields (bytes as on disk, bytes inflated); several gzip members in one file are one stream."""
    inflater = zlib.decompressobj(WINDOW_BITS[compression]) if compression else None
    while raw := file.read(CHUNK_BYTES):
        if inflater is None:
            yield raw, raw
            continue
        data, rest = [], raw
        while rest:
            data.append(inflater.decompress(rest))
            rest = inflater.unused_data
            if inflater.eof and rest:
                inflater = zlib.decompressobj(WINDOW_BITS[compression])
        yield raw, b"".join(data)
    if inflater is not None and not inflater.eof:
        raise zlib.error("the compressed stream ends early")
