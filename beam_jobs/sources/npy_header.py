"""The header of a `.npy` file: dtype, shape and order, parsed by NumPy itself as a literal.

Source: numpy.org/doc/stable/reference/generated/numpy.lib.format.html.
"""

from __future__ import annotations

import io
import lzma
import math
import struct
import warnings
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from beam_jobs.sources.compressed import damaged_errors, unreadable
from tfpipe.errors import RecordError

_MAGIC_BYTES = 8
_LENGTHS = {(1, 0): "<H", (2, 0): "<I", (3, 0): "<I"}
# NumPy's own limit is 10000, too short for a structured dtype of some hundred fields.
_HEADER_MAX_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class NpyHeader:
    """What an array's header says.

    Attributes:
        dtype: of a value.
        shape: of the whole array.
        fortran: whether the first axis is the innermost.
        header_bytes: before the first value.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    fortran: bool
    header_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of header and values."""
        return self.header_bytes + math.prod(self.shape) * self.dtype.itemsize


def read_header(stream: Any, where: str) -> NpyHeader:
    """Reads the header of a `.npy` file.

    Args:
        stream: of bytes, at its beginning.
        where: the file, for errors.

    Returns:
        The header.

    Raises:
        RecordError: it is malformed, or says what no array has.
    """
    magic = read(stream, _MAGIC_BYTES, where)
    length = _LENGTHS.get(tuple(magic[6:]))  # type: ignore[arg-type]
    if magic[:6] != npy_format.MAGIC_PREFIX or length is None:
        raise RecordError(
            f"a NumPy file must begin with {npy_format.MAGIC_PREFIX!r} and a version from 1.0 to 3.0, "
            f"got {magic!r} ({where}). Is it another format, or pickled? Save it again with numpy.save."
        )
    prefix = read(stream, struct.calcsize(length), where)
    num_bytes = struct.unpack(length, prefix)[0] if len(prefix) == struct.calcsize(length) else 0
    if num_bytes > _HEADER_MAX_BYTES:
        raise _malformed(f"{num_bytes} bytes of it", where)
    text = read(stream, num_bytes, where)
    if not num_bytes or len(text) < num_bytes:
        raise _malformed("its end within it", where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a header of Python 2 (10L) is as good
            if length == "<H":
                shape, fortran, dtype = npy_format.read_array_header_1_0(
                    io.BytesIO(prefix + text), max_header_size=_HEADER_MAX_BYTES
                )
            else:
                if magic[6] == 3:  # UTF-8, for which NumPy has no public reader: escaped it is version 2's
                    text = text.decode().encode("ascii", "backslashreplace")
                shape, fortran, dtype = npy_format.read_array_header_2_0(
                    io.BytesIO(struct.pack(length, len(text)) + text), max_header_size=4 * _HEADER_MAX_BYTES
                )
    except Exception as error:  # whatever a parser of literals and NumPy's dtypes raise
        raise _malformed(str(*error.args[:1]).partition("\n")[0] or type(error).__name__, where) from None
    if any(type(size) is not int or size < 0 for size in shape) or dtype.subdtype is not None:
        raise _malformed(f"shape {shape} of dtype {dtype}", where)
    return NpyHeader(
        dtype=dtype,
        shape=shape,
        fortran=fortran and len(shape) > 1,
        header_bytes=_MAGIC_BYTES + len(prefix) + num_bytes,
    )


def wrong_length(header: NpyHeader, found: str, where: str) -> RecordError:
    """The error of an array that has not the bytes that its header tells."""
    return RecordError(
        f"a NumPy array must have the {header.total_bytes} bytes that its header tells ({header.dtype} "
        f"{list(header.shape)}), got {found} ({where}). Fetch or save the file again."
    )


def read(stream: Any, size: int, where: str) -> bytes:
    """Reads bytes; fewer only at the end.

    Raises:
        RecordError: the file is damaged.
    """
    try:
        data: bytes = stream.read(size)
    except zip_errors() as error:
        raise unreadable(error, where) from None
    return data


def zip_errors() -> tuple[type[BaseException], ...]:
    """What reading a damaged, encrypted or otherwise unreadable zip raises."""
    return (
        *damaged_errors(), zipfile.BadZipFile, lzma.LZMAError, RuntimeError, NotImplementedError,
        ValueError, struct.error, KeyError,
    )  # fmt: skip


def _malformed(found: str, where: str) -> RecordError:
    return RecordError(
        f"a NumPy file's header must tell dtype, order and a shape of sizes, got {found} ({where}). "
        f"Fetch the file again, or save it again with numpy.save."
    )
