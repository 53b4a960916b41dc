"""Records of NumPy's arrays as they lie in their files; values are read, never unpickled.

An array whose bytes lie in a file as they are is read at any place; one that is compressed is read
from its beginning, and laid out on disk first if it is in Fortran's order.
"""

from __future__ import annotations

import tempfile
import zipfile
import zlib
from typing import Any

import numpy as np

from beam_jobs.sources.compressed import open_bytes, unreadable
from beam_jobs.sources.npy_files import NpyArray
from beam_jobs.sources.npy_header import read, wrong_length, zip_errors
from tfpipe.errors import RecordError

_CHUNK_BYTES = 1 << 20


def open_zip(path: str) -> zipfile.ZipFile:
    """Opens a zip whose headers have been read before.

    Raises:
        RecordError: it has changed since then.
    """
    try:
        return zipfile.ZipFile(path)
    except zip_errors() as error:
        raise unreadable(error, path) from None


def check_sum(array: NpyArray, path: str) -> None:
    """Compares a stored member with the zip's checksum, which reading by place passes over.

    Args:
        array: a member that is not compressed.
        path: of its file.

    Raises:
        RecordError: it is damaged.
    """
    found, left = 0, array.header.total_bytes
    with open(path, "rb") as file:
        file.seek(array.start)
        while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
            found, left = zlib.crc32(chunk, found), left - len(chunk)
    if left or found != array.crc:
        raise RecordError(
            f"an array must have the checksum that the .npz file has for it, got {found:#010x} instead of "
            f"{array.crc:#010x} ({path}: {array.member}). The file is damaged: fetch or save it again."
        )


class RecordReader:
    """Reads an array's records, forward.

    Args:
        array: to read.
        path: of its file.
        start: the first record; 0 for what is compressed.
        archive: the array's zip, if it is in one.
    """

    def __init__(self, array: NpyArray, path: str, start: int, archive: zipfile.ZipFile | None) -> None:
        self.array, self.at = array, start
        self._path = path
        self._where = f"{path}: {array.member}" if array.member else path
        self._stream: Any = None
        self._laid_out: Any = None
        if array.start < 0:
            try:
                self._stream = archive.open(array.member) if archive else open_bytes(path)
            except zip_errors() as error:
                raise unreadable(error, self._where) from None
            read(self._stream, array.header.header_bytes, self._where)
            if array.header.fortran:
                self._lay_out()

    def __enter__(self) -> RecordReader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._stream, self._laid_out):
            if file is not None:
                file.close()

    def read(self, count: int) -> np.ndarray:
        """The next records, [count, ...] in the array's own dtype.

        Raises:
            RecordError: the file is damaged, or shorter than it was.
        """
        header = self.array.header
        start, self.at = self.at, self.at + count
        if header.fortran:
            file, offset = self._laid_out, 0
            if file is None:
                file, offset = self._path, self.array.start + header.header_bytes
            try:
                mapped = np.memmap(file, header.dtype, "r", offset, header.shape, "F")
            except ValueError:
                raise wrong_length(header, "fewer", self._where) from None
            return np.array(mapped[start : self.at], order="C", subok=False)
        wanted = count * self.array.record_bytes
        if self._stream is not None:
            data = read(self._stream, wanted, self._where)
        else:
            with open(self._path, "rb") as plain:
                plain.seek(self.array.start + header.header_bytes + start * self.array.record_bytes)
                data = read(plain, wanted, self._where)
        if len(data) != wanted:
            raise wrong_length(header, "fewer", self._where)
        return np.frombuffer(data, header.dtype).reshape(count, *header.shape[1:])

    def check_end(self) -> None:
        """Makes sure that nothing follows the last record; a zip's checksum is compared on the way.

        Raises:
            RecordError: something does, or the file is damaged.
        """
        if self._stream is not None and read(self._stream, 1, self._where):
            raise wrong_length(self.array.header, "more", self._where)

    def _lay_out(self) -> None:
        """Decompresses the values to disk: every record has a bit of all parts of them."""
        header = self.array.header
        self._laid_out = tempfile.TemporaryFile()  # noqa: SIM115, closed by __exit__
        left = header.total_bytes - header.header_bytes
        while left:
            chunk = read(self._stream, min(left, _CHUNK_BYTES), self._where)
            if not chunk:
                raise wrong_length(header, "fewer", self._where)
            self._laid_out.write(chunk)
            left -= len(chunk)
        self._laid_out.flush()
