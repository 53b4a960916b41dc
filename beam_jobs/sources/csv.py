"""CSV: quote-aware splits of one file, parsed by compiled loops, exact to the digit.

    plan    one sequential look at each plain file for row starts near the split targets;
            quotes are tracked from the first byte, so no split begins inside a field
    scan    fields -> counts of what they are (`csv_columns.scan_column`)
    read    fields -> Arrow arrays in the dtypes that the scan found to fit

RFC 4180 with LF, CRLF or CR, in UTF-8, or in UTF-16 with a byte order mark, compressed or not (a
file that is compressed or UTF-16 is one split). Rows are numbered as a spreadsheet does: the
header is row 1. TSV is the same with a tab between fields.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from beam_jobs.sources import (
    SPLIT_BYTES,
    FileSource,
    InputFile,
    InputSplit,
    SourceColumn,
    SourceOptions,
    Wishes,
)
from beam_jobs.sources import csv_kernels as k
from beam_jobs.sources.bad_rows import RAW_CHARACTERS, BadRow, BadRows, Misfit, accept
from beam_jobs.sources.csv_values import ColumnReader, TokenBatch
from beam_jobs.sources.summary import SplitScan
from beam_jobs.sources.text import BOM, chunks, is_plain, read_head
from tfpipe.errors import RecordError, UsageError

BLOCK_BYTES = 8 << 20
# The longest row; a quoted field that is never closed would otherwise read the whole file.
ROW_MAX_BYTES = 256 << 20
HEADER_MAX_BYTES = 16 << 20
# Fields that one batch holds: 32 MiB of starts and ends.
BATCH_FIELDS = 4 << 20
BATCH_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class CsvSource(FileSource):
    """CSV files with the same columns."""

    files: tuple[InputFile, ...]
    columns: tuple[SourceColumn, ...]
    header: bool
    delimiter: int
    format: str = "csv"

    def plan(self) -> list[InputSplit]:
        """Plans the splits; see `Source`."""
        splits: list[InputSplit] = []
        for index, file in enumerate(self.files):
            bounds = [0, -1]
            if is_plain(file):
                starts = find_row_starts(file.path, delimiter=self.delimiter, split_bytes=SPLIT_BYTES)
                bounds = [0, *(start for start in starts if start < file.num_bytes), file.num_bytes]
            for start, stop in itertools.pairwise(bounds):
                splits.append(InputSplit(index=len(splits), file=index, start=start, stop=stop))
        return splits

    def scan(self, split: InputSplit, wishes: Wishes, max_rejected: int = 0) -> SplitScan:
        """Counts a split's fields; see `Source`."""
        names = [column.name for column in self.columns]
        reader = ColumnReader(names, [wishes.of(name) for name in names])
        scan = SplitScan(index=split.index)
        info = _start()
        with BadRows(scan, max_rejected) as bad:
            for found in self._batches(split, info):
                if isinstance(found, BadRow):
                    bad.add(found)
                else:
                    accept(found, reader.scan, lambda part, misfit: bad.add(_misfit_row(part, misfit)))
        scan.rows, scan.source_rows = reader.rows, int(info[0]) - 1
        scan.columns = dict(zip(names, reader.summaries, strict=True))
        scan.narrowed = {names[i]: count for i, count in enumerate(reader.narrowed) if count}
        return scan

    def read(
        self, split: InputSplit, wishes: Wishes, rejected: Sequence[int] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Yields a split's records; see `Source`."""
        names = [column.name for column in self.columns]
        reader = ColumnReader(names, [wishes.of(name) for name in names])
        used = [name for name in names if wishes.of(name).used]
        for found in self._batches(split, _start()):
            if isinstance(found, BadRow):
                if found.row not in rejected:
                    raise RecordError(f"{found.problem} ({self.origin(split, found.row)}). {found.remedy}")
                continue
            batch = found.without(rejected)
            if batch.rows:
                yield pa.RecordBatch.from_arrays(reader.read(batch), names=used)

    def origin(self, split: InputSplit, row: int) -> str:
        """Names a row; see `Source`."""
        return f"{self.files[split.file].path}:{row}"

    def _batches(self, split: InputSplit, info: np.ndarray) -> Iterator[TokenBatch | BadRow]:
        """Tokenizes a split block by block; what is left of a row goes before the next block.

        `info` tells how far it came: `csv_kernels.tokenize`.
        """
        rows = max(16, min(BATCH_ROWS, BATCH_FIELDS // len(self.columns)))
        starts = np.empty((len(self.columns), rows), np.int32)
        ends = np.empty_like(starts)
        numbers, lines = np.empty(rows, np.int64), np.empty(rows, np.int64)
        header = self.header and split.start == 0
        pos = size = 0
        buf = np.empty(0, np.uint8)
        for chunk, final in chunks(self.files[split.file], split, BLOCK_BYTES):
            buf = np.concatenate((buf[pos:size], np.frombuffer(chunk, np.uint8)))
            pos, size = 0, len(buf)
            if size > ROW_MAX_BYTES:
                yield _describe(k.UNTERMINATED, info, buf[:RAW_CHARACTERS], len(self.columns))
                return
            while True:
                begin = pos
                count, pos, code = k.tokenize(
                    buf, pos, size, final, self.delimiter, starts, ends, numbers, lines, info
                )
                first = int(header and count > 0)
                header = header and not count
                if count > first:
                    yield TokenBatch(
                        buf=buf,
                        starts=starts[:, first:count],
                        ends=ends[:, first:count],
                        numbers=numbers[first:count],
                        rows=count - first,
                        first_byte=begin,
                        last_byte=pos,
                    )
                if code != k.OK:
                    end = _row_end(buf[:size], int(info[3])) if code == k.AFTER_QUOTE else int(info[3])
                    if end < 0 and not final:
                        break  # its end is in a block to come
                    end = size if end < 0 else end
                    yield _describe(code, info, buf[pos:end], len(self.columns))
                    if code == k.UNTERMINATED:
                        return
                    info[:2] += 1
                    pos = end
                elif count < rows:
                    break


def _start() -> np.ndarray:
    """What `csv_kernels.tokenize` counts on from: the first row, on the first line."""
    return np.array([1, 1, 0, 0], np.int64)


def _row_end(buf: np.ndarray, start: int) -> int:
    """Where the row after a stray quote ends, as if no more of its fields were quoted; -1 if not here."""
    line_ends = np.flatnonzero((buf[start:] == k.LF) | (buf[start:] == k.CR))
    if not len(line_ends):
        return -1
    end = start + int(line_ends[0])
    if buf[end] == k.LF:
        return end + 1
    if end + 1 == len(buf):
        return -1
    return end + (2 if buf[end + 1] == k.LF else 1)


def _describe(code: int, info: np.ndarray, text: np.ndarray, num_columns: int) -> BadRow:
    """Describes what is no row: its number and its fields as `tokenize` left them in `info`."""
    raw = text[: 4 * RAW_CHARACTERS].tobytes().decode(errors="replace").rstrip("\r\n")[:RAW_CHARACTERS]
    row = int(info[0])
    if code == k.RAGGED:
        return BadRow(
            row=row,
            problem=f"every row must have {num_columns} fields, got {info[2]}",
            remedy="Correct the row; a field that holds the delimiter must be quoted (see --delimiter).",
            raw=raw,
        )
    if code == k.AFTER_QUOTE:
        return BadRow(
            row=row,
            problem="a closing quote must end its field, got text after it",
            remedy='Double the quotes inside a quoted field ("").',
            raw=raw,
        )
    return BadRow(
        row=row,
        problem=f"a quoted field must be closed within {ROW_MAX_BYTES >> 20} MiB, got no closing quote",
        remedy="Close it, or double the quote if it is part of the text.",
        raw=raw,
        fatal=True,  # all that follows is inside the quote
    )


def _misfit_row(batch: TokenBatch, misfit: Misfit) -> BadRow:
    """Describes the one row of a batch."""
    return BadRow(
        row=int(batch.numbers[0]),
        problem=f"column {misfit.column!r} must hold {misfit.expected}, got {misfit.found}",
        remedy=misfit.remedy,
        raw=batch.raw(0),
    )


def find_row_starts(path: str, *, delimiter: int, split_bytes: int) -> list[int]:
    """Finds where splits of a plain CSV file can begin: rows' starts, one near each target.

    Quotes are tracked from the file's first byte; chunks without a quote are skipped over.

    Args:
        path: the file.
        delimiter: between fields.
        split_bytes: the least size of a split.

    Returns:
        Ascending offsets, without 0; the last may be the file's size.
    """
    starts: list[int] = []
    state, base, target = k.FIELD_START, 0, split_bytes
    out = np.empty(BLOCK_BYTES // split_bytes + 2, np.int64)
    with open(path, "rb") as file:
        if file.read(len(BOM)) == BOM:
            base = len(BOM)
        file.seek(base)
        while chunk := file.read(BLOCK_BYTES):
            if state in (k.FIELD_START, k.PLAIN) and b'"' not in chunk:
                while (at := chunk.find(b"\n", max(target - base - 1, 0))) >= 0:
                    starts.append(base + at + 1)
                    target = starts[-1] + split_bytes
                state = k.FIELD_START if chunk[-1] in (delimiter, k.LF, k.CR) else k.PLAIN
            else:
                found, state, target = k.row_starts(
                    np.frombuffer(chunk, np.uint8),
                    len(chunk),
                    delimiter,
                    state,
                    base,
                    split_bytes,
                    target,
                    out,
                )
                starts += out[:found].tolist()
            base += len(chunk)
    return starts


def open_csv(files: Sequence[InputFile], options: SourceOptions) -> CsvSource:
    """Opens CSV files with one header, or with as many fields in the first row of each.

    Args:
        files: non-empty files.
        options: header and delimiter.

    Returns:
        The source.

    Raises:
        RecordError: a header is malformed or differs between files, or a file is no UTF-8.
        UsageError: the delimiter is no single ASCII character.
    """
    usual = "\t" if options.format == "tsv" else ","
    delimiter = {"\\t": "\t", "tab": "\t", None: usual}.get(options.delimiter, options.delimiter)
    if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
        raise UsageError(
            f"--delimiter must be one ASCII character other than a quote or a line end, "
            f"got {options.delimiter!r}. For a tab write '\\t'."
        )
    names: list[str] | None = None
    for file in files:
        row = read_first_row(file.path, delimiter)
        if not options.header:
            row = [f"c{i}" for i in range(len(row))]
        elif names is None:
            _check_header(row, file.path)
        if names is not None and row != names:
            raise RecordError(
                f"all files must have the columns of the first, {_shorten(names)} ({files[0].path}), "
                f"got {_shorten(row)} ({file.path}). Convert them apart, or give them one header."
            )
        names = row
    return CsvSource(
        files=tuple(files),
        columns=tuple(SourceColumn(name=name) for name in names or ()),
        header=options.header,
        delimiter=ord(delimiter),
        format=options.format,
    )


def read_first_row(path: str, delimiter: str) -> list[str]:
    """Reads a CSV file's first row that is not blank.

    Args:
        path: the file, compressed or not.
        delimiter: between fields.

    Returns:
        Its fields.

    Raises:
        RecordError: no row, a row without end, or another encoding than UTF-8.
    """
    head = read_head(path, HEADER_MAX_BYTES)
    content = head.lstrip(b"\r\n")
    data = np.frombuffer(content, np.uint8)
    out = np.empty(1, np.int64)
    # A target of 1 and then none: the end of the first row.
    end = len(content)
    for size in (1 << 16, len(content)):
        size = min(size, len(content))
        found, _, _ = k.row_starts(data, size, ord(delimiter), k.FIELD_START, 0, 1 << 60, 1, out)
        if found:
            end = int(out[0])
            break
    try:
        rows = list(csv.reader(io.StringIO(content[:end].decode(), newline=""), delimiter=delimiter))
    except UnicodeDecodeError:
        raise RecordError(
            f"a CSV file must be UTF-8 text, got other bytes in its first row ({path}). "
            f"Convert it first: iconv -t UTF-8."
        ) from None
    except csv.Error as error:
        raise RecordError(f"a CSV file's first row must be readable, got {error} ({path}).") from None
    if not rows:
        raise RecordError(f"a CSV file must have at least one row, got none ({path}). Leave it out.")
    return rows[0]


def _check_header(names: list[str], path: str) -> None:
    for i, name in enumerate(names):
        if not name.strip():
            raise RecordError(
                f"every column must have a name, got none for column {i + 1} of {len(names)} ({path}:1). "
                f"Name it, or use --no-header if the first row is data."
            )
        if name in names[:i]:
            raise RecordError(
                f"column names must differ, got {name!r} for columns {names.index(name) + 1} and {i + 1} "
                f"({path}:1). Rename one, or use --no-header if the first row is data."
            )


def _shorten(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f", ... ({len(names)} columns)" if len(names) > limit else "")
