"""What an image file tells without being decoded: its true format, and what decides how it is stored.

All of it pure, on bytes. Names say nothing here: a PNG called x.jpg is a PNG.

Source: ITU T.81 Annex B (JPEG markers), w3.org/TR/png-3 (PNG chunks), CIPA DC-008 (EXIF).
"""

from __future__ import annotations

import struct
import zlib

SUFFIXES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".dib", ".webp", ".tif", ".tiff",
)  # fmt: skip
# Frames that every decoder takes: baseline, extended and progressive, by Huffman codes.
USUAL_JPEG_FRAMES = (0xC0, 0xC1, 0xC2)
PNG_GREY, PNG_PALETTE = 0, 3
# Channels by PNG colour type.
PNG_CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}

_MAGIC = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF87a": "GIF", b"GIF89a": "GIF",
    b"II*\0": "TIFF", b"MM\0*": "TIFF", b"II+\0": "TIFF", b"MM\0+": "TIFF",
}  # fmt: skip
_PNG_MAGIC_BYTES = 8
# Text may begin with BM as well: the size of the header behind it must be one of those there are.
_BMP_HEADERS = (12, 16, 40, 52, 56, 64, 108, 124)
_FRAMES = {0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
_BARE_MARKERS = {0x01, *range(0xD0, 0xDA)}
_ORIENTATION_TAG = 0x0112


def image_kind(head: bytes) -> str:
    """Tells an image's format by its content.

    Args:
        head: its first bytes, 18 or more if there are as many.

    Returns:
        "JPEG", "PNG", "GIF", "BMP", "WebP", "TIFF", or "" for none of them.
    """
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WebP"
    if head[:2] == b"BM" and len(head) >= 18 and struct.unpack_from("<I", head, 14)[0] in _BMP_HEADERS:
        return "BMP"
    return ""


def jpeg_frame(data: bytes) -> int:
    """The marker of a JPEG's frame, 0xC0 to 0xCF, which tells how it is coded; 0 if there is none."""
    at = 2
    while at + 4 <= len(data):
        marker = data[at + 1]
        if data[at] != 0xFF or marker in (0x00, 0xFF):  # garbage, or a filling byte: decoders skip them
            at += 1
        elif marker in _FRAMES:
            return marker
        elif marker in _BARE_MARKERS:
            at += 2
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return 0


def png_chunks(data: bytes, check: bool) -> dict[bytes, bytes]:
    """Goes through a PNG's chunks to its end.

    TensorFlow refuses a chunk with a wrong checksum where Pillow does not look.

    Args:
        data: the whole file.
        check: whether to compare the checksums.

    Returns:
        The first chunk of each name but IDAT.

    Raises:
        ValueError: the file ends early, or a checksum is wrong.
    """
    found: dict[bytes, bytes] = {}
    at = _PNG_MAGIC_BYTES
    while b"IEND" not in found:
        if at + 12 > len(data):
            raise ValueError("its end before the last chunk")
        size, name = struct.unpack_from(">I4s", data, at)
        end = at + 12 + size
        if end > len(data):
            raise ValueError(f"its end within the chunk {name!r} at byte {at}")
        if check and zlib.crc32(memoryview(data)[at + 4 : end - 4]) != int.from_bytes(
            data[end - 4 : end], "big"
        ):
            raise ValueError(f"a wrong checksum in the chunk {name!r} at byte {at}")
        if name != b"IDAT":
            found.setdefault(name, data[at + 8 : end - 4])
        at = end
    return found


def orientation(exif: bytes) -> int:
    """How an image must be turned to be seen as it was meant.

    Args:
        exif: its EXIF data, or nothing.

    Returns:
        2 to 8, or 1 for not at all, also where the data is malformed or the number unknown.
    """
    data = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(data[:2])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(f"{order}I", data, 4)
        (count,) = struct.unpack_from(f"{order}H", data, at)
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", data, entry)
            if tag == _ORIENTATION_TAG:
                return value if kind == 3 and 2 <= value <= 8 else 1
    except struct.error:
        pass
    return 1
