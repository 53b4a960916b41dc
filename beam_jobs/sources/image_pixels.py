"""How one image is stored: copied byte by byte where every decoder gets the same pixels, else decoded.

    JPEG, grey or RGB, not turned by EXIF            copied
    PNG of 8 or 16 bits, grey or RGB, with or        copied; a grey one of 16 bits keeps them, and must
      without alpha, not turned by EXIF                be decoded as uint16
    PNG or other with a palette                      RGB, or RGBA where a colour is transparent
    PNG or other of 1 bit (or 2, 4)                  grey of 8 bits, black is 0, white is 255
    JPEG that EXIF turns                             its pixels, turned
    CMYK, YCCK                                       RGB, without a colour profile
    GIF, WebP, TIFF with several frames or pages     the first
    BMP, GIF, WebP, TIFF; JPEG lossless, arithmetic  their pixels; grey TIFF of 16 bits keeps them

What is decoded becomes a PNG, which loses nothing, or a raw tensor where that is asked for. Other
modes (32 bits, floats, Lab, colours of 16 bits that would have to be decoded ...) are refused by name.

    --image-channels   an alpha channel is left out, not blended; colours become grey by the weights
                       of ITU-R 601-2 (299, 587, 114)
    --image-size       resized, bilinear with anti-aliasing, without keeping the aspect
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from beam_jobs.sources import ImageOptions
from beam_jobs.sources.bad_rows import Fault
from beam_jobs.sources.image_files import (
    PNG_CHANNELS,
    PNG_GREY,
    PNG_PALETTE,
    USUAL_JPEG_FRAMES,
    image_kind,
    jpeg_frame,
    orientation,
    png_chunks,
)

# Where Pillow begins to warn of a decompression bomb; 256 MiB of RGB.
MAX_PIXELS = 89_478_485
# What libpng takes.
MAX_SIDE = 1_000_000
# By the true format: Pillow's own choice would look at more formats than are known to be right here.
_READERS: dict[str, Any] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "WebP": WebPImagePlugin.WebPImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
}
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_PLAIN = ("L", "LA", "RGB", "RGBA")
_SHOWN = {"L": "grey", "LA": "grey+alpha"}
_NAMES = {"1": "1-bit", "L": "grey", "LA": "grey", "P": "palette", "PA": "palette", "CMYK": "CMYK"}
# Bits of TIFF tags; TIFF 6.0.
_SUBFILE, _BITS, _PHOTOMETRIC, _SAMPLES, _SAMPLE_FORMAT = 254, 258, 262, 277, 339
_PNG_COLOURS = {channels: colour for colour, channels in PNG_CHANNELS.items()}
_SUB_FILTER = 1


class BadImage(Fault):
    """A file that is no image, or none that can be taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """An image as it is stored.

    Attributes:
        data: of a file, or the pixels, uint8 or uint16 [height, width, channels].
        notes: what was done to it, in words that follow a number of images.
    """

    data: Any
    notes: tuple[str, ...]


def take_image(data: bytes, options: ImageOptions, check: bool) -> Taken:
    """Brings an image to the form in which it is stored.

    Args:
        data: the file's bytes.
        options: as the user asked for.
        check: whether an image that is copied must be decoded to its end to see whether it can be;
            one that is converted always is.

    Returns:
        The image; the same whether it was checked or not.

    Raises:
        BadImage: it is empty, damaged, too big, none, or of a sort that can't be stored without loss.
    """
    with warnings.catch_warnings():  # about metadata that is left alone
        warnings.simplefilter("ignore")
        try:
            return _take(data, options, check)
        except (BadImage, MemoryError):
            raise
        except Exception as error:  # Pillow has no error of its own: OSError, SyntaxError, struct.error ...
            raise BadImage(
                f"an image must be readable to its end, got {str(error) or type(error).__name__}",
                "Fetch the file again, or leave it out.",
            ) from None


def _take(data: bytes, options: ImageOptions, check: bool) -> Taken:
    kind = image_kind(data)
    if not kind:
        found = f"a beginning of {data[:12]!r}" if data else "an empty file"
        raise BadImage(
            f"an image must begin as JPEG, PNG, GIF, BMP, WebP or TIFF do, got {found}",
            "Fetch the file again, or leave it out.",
        )
    chunks = png_chunks(data, check) if kind == "PNG" else {}
    frame = jpeg_frame(data) if kind == "JPEG" else 0
    image = _READERS[kind](io.BytesIO(data))
    width, height = image.size
    if not 0 < width * height <= MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise BadImage(
            f"an image must have 1 to {MAX_PIXELS} pixels (more may be a bomb), at most {MAX_SIDE} a side, "
            f"got {height}x{width}",
            "Scale it down, or leave it out.",
        )
    turn = orientation(chunks.get(b"eXIf", b"") if kind == "PNG" else image.info.get("exif", b""))
    if kind == "TIFF":  # Pillow turns it by itself
        turn = 1
        _check_tiff(image, data)
    wide = kind == "PNG" and chunks[b"IHDR"][8] == 16
    if options.form == "encoded" and turn == 1 and _can_be_copied(image, frame, chunks, options):
        if check:
            if kind == "JPEG":  # an eighth of its size: all of the file is read, and few pixels are made
                image.draft(image.mode, (1, 1))
            image.load()
        note = " (decode them as uint16)" if wide else ""
        return Taken(data=data, notes=(f"{'16-bit ' if wide else ''}{kind} copied byte by byte{note}",))
    if wide and (chunks[b"IHDR"][9] != PNG_GREY or b"tRNS" in chunks):
        raise _refused("a PNG with colours or transparency of 16 bits")
    several = kind in ("GIF", "WebP", "TIFF") and image.is_animated
    name = kind if kind in ("BMP", "GIF", "TIFF", "WebP") else f"{_name(image)} {kind}".lstrip()
    image, notes = _changed(_plain(image, kind), turn, options)
    pixels = np.asarray(image)
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    mode = "16-bit grey" if pixels.dtype == np.uint16 else _SHOWN.get(image.mode, image.mode)
    if several:
        notes.append("had several frames or pages: the first was taken")
    if options.form == "raw":
        return Taken(data=np.ascontiguousarray(pixels), notes=(f"{name} became {mode} tensors", *notes))
    return Taken(data=write_png(pixels), notes=(f"{name} became {mode} PNG", *notes))


def _can_be_copied(image: Any, frame: int, chunks: dict[bytes, bytes], options: ImageOptions) -> bool:
    """Whether the file's bytes give the wanted pixels with any decoder."""
    if options.size not in (None, (image.height, image.width)):
        return False
    if frame:
        channels = len(image.getbands())
        usual = image.mode in ("L", "RGB") and frame in USUAL_JPEG_FRAMES
    elif chunks:
        depth, colour = chunks[b"IHDR"][8:10]
        usual = depth >= 8 and colour != PNG_PALETTE
        channels = PNG_CHANNELS.get(colour, 0)
    else:
        return False
    return usual and options.channels in (None, channels)


def _check_tiff(image: Any, data: bytes) -> None:
    """Refuses what Pillow would shorten or leave out without a word."""
    tags = image.tag_v2
    bits, samples = max(tags.get(_BITS, (1,))), tags.get(_SAMPLES, 1)
    grey16 = image.mode.startswith("I;16")
    if data[8:10] == b"CR" or tags.get(_SUBFILE, 0) & 1:
        raise _refused("a TIFF that begins with a preview (a camera's raw file?)")
    if bits > 8 and not grey16:
        raise _refused(f"a TIFF with {bits} bits a sample and {samples} samples a pixel (mode {image.mode})")
    if set(tags.get(_SAMPLE_FORMAT, (1,))) != {1} or (grey16 and tags.get(_PHOTOMETRIC) == 0):
        raise _refused("a TIFF with signed numbers, floats, or 0 for white at 16 bits")
    if samples > len(image.getbands()):
        raise _refused(f"a TIFF with {samples} samples a pixel (mode {image.mode} has fewer)")


def _refused(what: str) -> BadImage:
    return BadImage(
        f"an image must be one that can be stored without loss, got {what}",
        "Convert it into PNG yourself, or leave it out.",
    )


def _name(image: Any) -> str:
    return _NAMES.get(image.mode, "16-bit" if image.mode.startswith("I") else "")


def _plain(image: Any, kind: str) -> Any:
    """Decodes an image: grey of 8 or 16 bits, grey with alpha, RGB or RGBA; nothing is lost.

    Raises:
        BadImage: its mode is another.
    """
    image.load()
    if image.mode.startswith("I;16"):
        return Image.fromarray(np.asarray(image).astype(np.uint16))
    if image.mode in ("P", "PA"):
        return image.convert("RGBA" if image.has_transparency_data else "RGB")
    if image.mode == "CMYK":
        return image.convert("RGB")
    if image.mode not in ("1", *_PLAIN):
        raise _refused(f"mode {image.mode} ({kind})")
    if "transparency" in image.info and image.mode in ("1", "L", "RGB"):
        grey = image.convert("L") if image.mode == "1" else image
        return grey.convert("RGBA" if image.mode == "RGB" else "LA")
    return image.convert("L") if image.mode == "1" else image


def _changed(image: Any, turn: int, options: ImageOptions) -> tuple[Any, list[str]]:
    """A plain image, turned and brought to the channels and size asked for, and notes on it."""
    notes = []
    if turn != 1:
        image = image.transpose(_TURNS[turn])
        notes.append("turned as their EXIF says")
    mode = _MODES.get(options.channels or 0, image.mode)
    if image.mode.startswith("I;16"):
        if options.channels not in (None, 1):
            raise _refused(f"a grey image of 16 bits for --image-channels {options.channels}")
    elif mode != image.mode:
        if "A" in image.getbands() and mode != "RGBA" and image.getchannel("A").getextrema()[0] < 255:
            notes.append("lost their alpha channel (--image-channels)")
        if "R" in image.getbands() and mode == "L":
            notes.append("had colours and became grey (--image-channels)")
        image = image.convert(mode)
    if options.size not in (None, (image.height, image.width)):
        height, width = options.size or (0, 0)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        notes.append(f"resized to {height}x{width}")
    return image, notes


def write_png(pixels: np.ndarray) -> bytes:
    """Encodes pixels as PNG: one filter and ISA-L, which is as small as Pillow's and 10 times as fast.

    The bytes depend on nothing but the pixels and ISA-L's version.

    Args:
        pixels: uint8 or uint16 [height, width, channels]; 1 to 4 channels.

    Returns:
        The file's bytes.
    """
    from isal import isal_zlib

    height, width, channels = pixels.shape
    depth = 8 * pixels.itemsize
    rows = np.ascontiguousarray(pixels, pixels.dtype.newbyteorder(">")).view(np.uint8).reshape(height, -1)
    step = channels * pixels.itemsize
    filtered = np.empty((height, 1 + rows.shape[1]), np.uint8)
    filtered[:, 0] = _SUB_FILTER
    filtered[:, 1:] = rows
    filtered[:, 1 + step :] -= rows[:, :-step]
    header = struct.pack(">IIBBBBB", width, height, depth, _PNG_COLOURS[channels], 0, 0, 0)
    content = isal_zlib.compress(filtered, 2)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in ((b"IHDR", header), (b"IDAT", content), (b"IEND", b""))
    )
