"""Text lines: every line is a record of one feature, `text`, without its end (LF or CRLF).

An empty line is a record like any other. A line that is no UTF-8 is refused, unless the declared
schema has dtype "bytes" for `text`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from beam_jobs.sources import InputFile, InputSplit, SourceColumn, SourceOptions, Wishes
from beam_jobs.sources.bad_rows import BadRow
from beam_jobs.sources.text import decode, line_batches, line_splits, read_head
from beam_jobs.sources.typed import Batch, TypedSource

NAME = "text"


@dataclass(frozen=True, kw_only=True)
class LineSource(TypedSource):
    """Files of text lines."""

    files: tuple[InputFile, ...]
    columns: tuple[SourceColumn, ...] = (SourceColumn(name=NAME, dtype="string"),)
    format: str = "text"

    def plan(self) -> list[InputSplit]:
        """Plans the splits; see `Source`."""
        return line_splits(self.files)

    def origin(self, split: InputSplit, row: int) -> str:
        """Names a line; see `Source`."""
        return f"{self.files[split.file].path}:{row}"

    def batches(self, split: InputSplit, wishes: Wishes) -> Iterator[Batch]:
        """Yields a split batch by batch; see `TypedSource`."""
        any_bytes = wishes.of(NAME).dtype == "bytes"
        last = 0
        for lines in line_batches(self.files[split.file], split):
            if isinstance(lines, BadRow):
                yield Batch(columns={}, numbers=np.empty(0, np.int64), last=lines.row, bad=[lines])
                return
            numbers = np.arange(last + 1, last + len(lines) + 1)
            last += len(lines)
            bad: list[BadRow] = []
            if not any_bytes and not _is_utf8(lines):
                texts = [decode(line, int(number)) for line, number in zip(lines, numbers, strict=True)]
                bad = [text for text in texts if isinstance(text, BadRow)]
                kept = [i for i, text in enumerate(texts) if not isinstance(text, BadRow)]
                lines, numbers = [lines[i] for i in kept], numbers[kept]
            array = pa.array(lines, pa.binary())
            if not any_bytes:
                array = array.cast(pa.string())
            yield Batch(columns={NAME: array}, numbers=numbers, last=last, bad=bad)


def open_lines(files: Sequence[InputFile], options: SourceOptions) -> LineSource:
    """Opens files of text lines.

    Args:
        files: non-empty files.
        options: not used.

    Returns:
        The source.

    Raises:
        RecordError: a file is damaged, or no text.
    """
    for file in files:
        read_head(file.path, 1)
    return LineSource(files=tuple(files))


def _is_utf8(lines: Sequence[bytes]) -> bool:
    try:
        b"\n".join(lines).decode()
    except UnicodeDecodeError:
        return False
    return True
