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
FAULT_STEP_BYTES = 64  # how closely a fault inside a compressed stream is located
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
        start: the byte to begin at, where a record does; only of an uncompressed shard.
        stop: the byte to end at; -1 for the shard's end.
        records_before: records before the first one, for errors.

    After exhaustion, `content` holds what was read.
    """

    def __init__(
        self, path: Path | str, compression: str, *, start: int = 0, stop: int = -1, records_before: int = 0
    ) -> None:
        self.path = Path(path)
        self.compression = compression
        self.start, self.stop, self.records_before = start, stop, records_before
        self.content: ShardContent | None = None

    def __iter__(self) -> Iterator[bytes]:
        digest = hashlib.sha256()
        num_bytes = num_records = offset = 0
        # A record longer than a piece is joined once, when it is complete.
        pieces: list[bytes] = []
        have, need = 0, HEADER_BYTES
        try:
            with open(self.path, "rb") as file:
                for raw, data in self._chunks(file):
                    digest.update(raw)
                    num_bytes += len(raw)
                    pieces.append(data)
                    have += len(data)
                    if have < need:
                        continue
                    buffer = b"".join(pieces)
                    start, end = 0, len(buffer)
                    need = HEADER_BYTES
                    while end - start >= HEADER_BYTES:
                        header = buffer[start : start + HEADER_BYTES]
                        length, crc = struct.unpack("<QI", header)
                        if mask_crc(google_crc32c.value(header[:8])) != crc:
                            raise self._damaged(num_records, offset, "the length's checksum is wrong")
                        stop = start + HEADER_BYTES + length + FOOTER_BYTES
                        if stop > end:
                            need = stop - start
                            break
                        payload = buffer[start + HEADER_BYTES : stop - FOOTER_BYTES]
                        (crc,) = struct.unpack_from("<I", buffer, stop - FOOTER_BYTES)
                        if mask_crc(google_crc32c.value(payload)) != crc:
                            raise self._damaged(num_records, offset, "the payload's checksum is wrong")
                        yield payload
                        num_records += 1
                        offset += stop - start
                        start = stop
                    pieces, have = [buffer[start:]], end - start
        except zlib.error as error:
            raise self._damaged(num_records, offset, f"decompression failed: {error}") from None
        if have:
            raise self._damaged(num_records, offset, f"{have} bytes at the end are no record")
        self.content = ShardContent(
            num_records=num_records,
            num_bytes=num_bytes,
            uncompressed_bytes=offset,
            sha256=digest.hexdigest(),
        )

    def _chunks(self, file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
        if self.stop < 0 and not self.start:
            yield from _inflate(file, self.compression)
            return
        file.seek(self.start)
        rest = self.stop - self.start
        while raw := file.read(CHUNK_BYTES if self.stop < 0 else min(CHUNK_BYTES, rest)):
            rest -= len(raw)
            yield raw, raw

    def _damaged(self, index: int, offset: int, what: str) -> ShardError:
        index, offset = self.records_before + index, self.start + offset
        found = sniff_compression(self.path) if index == 0 else None
        if found is not None and found != self.compression:
            return ShardError(
                f"a shard must be compressed as its manifest and name say, got {found or 'no'} compression "
                f"where {self.compression or 'none'} was expected ({self.path}). Restore the file from a "
                f"copy, or convert the source again."
            )
        return ShardError(
            f"every record must be readable, got damage at record {index} "
            f"(uncompressed offset {offset}): {what} ({self.path}). Convert the source again, "
            f"or restore the file from a copy."
        )


def sniff_compression(path: Path | str) -> str | None:
    """Tells from a file's first bytes how it is compressed.

    Args:
        path: a TFRecord file.

    Returns:
        "GZIP", "ZLIB", "" (a valid uncompressed record header), or None if it is none of them.

    Raises:
        OSError: the file can't be read.
    """
    with open(path, "rb") as file:
        head = file.read(HEADER_BYTES)
    if len(head) == HEADER_BYTES:
        (crc,) = struct.unpack_from("<I", head, 8)
        if mask_crc(google_crc32c.value(head[:8])) == crc:
            return ""
    if head[:2] == b"\x1f\x8b":
        return "GZIP"
    if len(head) >= 2 and head[0] & 0x0F == 8 and int.from_bytes(head[:2], "big") % 31 == 0:
        return "ZLIB"
    return None


def is_tfrecord(path: Path | str) -> bool:
    """Tells from a file's first record whether it holds TFRecords, plain or compressed with gzip or zlib.

    Args:
        path: a file.

    Returns:
        Whether a record begins it; False for a file without one.

    Raises:
        OSError: the file can't be read.
    """
    compression = sniff_compression(path)
    if not compression:
        return compression == ""
    with open(path, "rb") as file:
        raw = file.read(CHUNK_BYTES)
    try:
        head = zlib.decompressobj(WINDOW_BITS[compression]).decompress(raw, HEADER_BYTES)
    except zlib.error:
        return False
    return len(head) == HEADER_BYTES and head[8:] == struct.pack(
        "<I", mask_crc(google_crc32c.value(head[:8]))
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


def _inflate(file: BinaryIO, compression: str) -> Iterator[tuple[bytes, bytes]]:
    """Yields (new bytes as on disk, bytes inflated); several gzip members in one file are one stream.

    All bytes before a fault are yielded before the fault is raised, so that it is reported at
    the right record. A piece is at most `CHUNK_BYTES` long, however well the file is compressed.
    """
    if not compression:
        while raw := file.read(CHUNK_BYTES):
            yield raw, raw
        return
    inflater = zlib.decompressobj(WINDOW_BITS[compression])
    while raw := file.read(CHUNK_BYTES):
        new, rest = raw, raw
        while rest:
            if inflater.eof:
                inflater = zlib.decompressobj(WINDOW_BITS[compression])
            before = inflater.copy()
            try:
                data = inflater.decompress(rest, CHUNK_BYTES)
            except zlib.error:
                yield new, b""
                while True:  # as far as it goes; ends by raising the same error
                    data = before.decompress(rest, FAULT_STEP_BYTES)
                    rest = before.unconsumed_tail
                    yield b"", data
            rest = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            yield new, data
            new = b""
        # Input is used up, but a full window may still hold output.
        while not inflater.eof and (data := inflater.decompress(b"", CHUNK_BYTES)):
            yield b"", data
    if not inflater.eof:
        raise zlib.error("the compressed stream ends early")
