"""Pieces: what input splits hold for shards, and how a shard's writer reads them.

    EncodeSplit --Piece--> group by shard --> PieceReader --gather--> records in their places

A piece is one of two forms. As a *file range* its bytes don't travel through the runner: they lie in
the run's staging directory, one data file a split, records sorted by their place, and an index beside
it. That is the way on the local runner, whose GroupByKey holds all in memory. *Inline* its bytes travel
through the GroupByKey: the way on an engine that spills to disk, with workers on several machines.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from beam_jobs.encode_kernels import place_records
from beam_jobs.outcome import load
from tfpipe.errors import OutputError

# Encoded bytes of a split that are kept before their inline pieces are sent: a piece's size, times the shards.
INLINE_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What one input split, or a part of it, holds for one shard.

    Attributes:
        split: the input split's index.
        places: where its records go, ascending (int64[n]); None for a file range.
        offsets: of each record in `data`, and its end (int64[n + 1]).
        data: the records, framed, one after the other.
    """

    split: int
    places: np.ndarray | None = None
    offsets: np.ndarray | None = None
    data: bytes = b""

    def data_path(self, staging: str) -> Path:
        """The records, batch by batch, each sorted by place."""
        return Path(staging) / f"pieces-{self.split:05d}.data"

    def index_path(self, staging: str) -> Path:
        """int64: per batch of n records their n places and n + 1 file offsets; then every n; then how many."""
        return Path(staging) / f"pieces-{self.split:05d}.index"

    @property
    def statistics_name(self) -> str:
        """The file in staging that holds what its values are like."""
        return f"statistics-{self.split}.json"

    def batches(self, staging: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per batch its places and offsets (int64[n], int64[n + 1])."""
        if self.places is not None and self.offsets is not None:
            return [(self.places, self.offsets)]
        index = np.memmap(self.index_path(staging), np.int64, "r")
        num_batches = int(index[-1])
        found = []
        at = 0
        for rows in index[-1 - num_batches : -1].tolist():
            found.append((index[at : at + rows], index[at + rows : at + 2 * rows + 1]))
            at += 2 * rows + 1
        return found

    def is_whole(self, staging: str, num_records: int) -> bool:
        """Whether an earlier run left it with that many records, and nothing was lost of it since."""
        data, index = self.data_path(staging), self.index_path(staging)
        if (
            not data.exists()
            or load(staging, self.statistics_name) is None
            or not index.exists()
            or index.stat().st_size % 8
            or not index.stat().st_size
        ):
            return False
        batches = self.batches(staging)
        rows = sum(len(places) for places, _ in batches)
        # Not on the disk before its name is: after a loss of power there may be anything in it.
        if any(len(offsets) != len(places) + 1 for places, offsets in batches):
            return False
        num_bytes = int(batches[-1][1][-1]) if batches else 0
        return rows == num_records and data.stat().st_size == num_bytes


class InlinePieces:
    """Collects encoded batches of an input split and cuts them into inline pieces.

    Args:
        split: the input split's index.
        starts: the first place of each shard, ascending (int64[]).
    """

    def __init__(self, split: int, starts: np.ndarray) -> None:
        self.split, self.starts = split, starts
        self._clear()

    def add(self, places: np.ndarray, offsets: np.ndarray, data: bytes) -> None:
        """Takes a batch: its places, ascending, and its records' offsets in its bytes."""
        self.places.append(places)
        self.lengths.append(np.diff(offsets))
        self.data.append(data)
        self.num_bytes += len(data)

    def take(self) -> Iterator[tuple[int, Piece]]:
        """Yields (shard's index, Piece) of all that was collected, and forgets it."""
        if not self.places:
            return
        places, lengths = np.concatenate(self.places), np.concatenate(self.lengths)
        order = np.argsort(places, kind="stable")
        slots = np.empty(len(order), np.int64)
        slots[order] = np.arange(len(order))
        out, ends = _reorder(np.frombuffer(b"".join(self.data), np.uint8), lengths, slots)
        places = places[order]
        self._clear()
        shards = np.searchsorted(self.starts, places, side="right") - 1
        edges = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(shards)]
        for low, high in itertools.pairwise(edges):
            yield (
                int(shards[low]),
                Piece(
                    split=self.split,
                    places=places[low:high].copy(),
                    offsets=ends[low : high + 1] - ends[low],
                    data=out[ends[low] : ends[high]].tobytes(),
                ),
            )

    def _clear(self) -> None:
        self.places: list[np.ndarray] = []
        self.lengths: list[np.ndarray] = []
        self.data: list[bytes] = []
        self.num_bytes = 0


class PieceReader:
    """Reads ranges of places from a piece.

    Args:
        piece: of either form.
        staging: the run's own directory.
    """

    def __init__(self, piece: Piece, staging: str) -> None:
        self.batches = piece.batches(staging)
        self.data = memoryview(piece.data)
        self.path = piece.data_path(staging)
        self.file = os.open(self.path, os.O_RDONLY) if piece.places is None else -1

    def ranges(self, start: int, stop: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Yields (places, lengths, file offset) of each batch's records in [start, stop)."""
        for places, offsets in self.batches:
            low, high = np.searchsorted(places, (start, stop))
            if low < high:
                yield np.array(places[low:high]), np.diff(offsets[low : high + 1]), int(offsets[low])

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fills the buffer from that offset on."""
        if self.file < 0:
            buffer[:] = self.data[offset : offset + len(buffer)]
            return
        while buffer:
            count = os.preadv(self.file, [buffer], offset)
            if not count:
                raise OutputError(
                    f"a staging file must keep what was written, got its end at {offset} ({self.path})."
                )
            buffer, offset = buffer[count:], offset + count

    def close(self) -> None:
        """Closes its file, if it has one."""
        if self.file >= 0:
            os.close(self.file)


def gather(readers: Sequence[PieceReader], start: int, stop: int) -> np.ndarray:
    """Reads the records of the places [start, stop).

    Args:
        readers: of all pieces that may have some of them.
        start: first place.
        stop: behind the last one.

    Returns:
        The records, framed, in the order of their places (uint8[]).

    Raises:
        OutputError: a place has no record, or more than one; or staging is not what was written.
    """
    found = [(reader, *found) for reader in readers for found in reader.ranges(start, stop)]
    slots = np.concatenate([places for _, places, _, _ in found] or [np.empty(0, np.int64)]) - start
    lengths = np.concatenate([lengths for _, _, lengths, _ in found] or [np.empty(0, np.int64)])
    if len(slots) != stop - start or (np.bincount(slots, minlength=stop - start) != 1).any():
        raise OutputError(
            f"every place must get exactly one record, got {len(slots)} for places {start} to {stop - 1}. "
            f"Nothing was published: convert again."
        )
    raw = np.empty(int(lengths.sum()), np.uint8)
    at = 0
    for reader, _, range_lengths, offset in found:
        size = int(range_lengths.sum())
        reader.read_into(memoryview(raw)[at : at + size], offset)
        at += size
    return _reorder(raw, lengths, slots)[0]


def _reorder(raw: np.ndarray, lengths: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Moves each record of `raw` to its slot: the bytes (uint8[]), and where each starts (int64[n + 1])."""
    by_slot = np.empty(len(slots), np.int64)
    by_slot[slots] = lengths
    ends = np.concatenate(([0], np.cumsum(by_slot)))
    out = np.empty_like(raw)
    place_records(raw, np.concatenate(([0], np.cumsum(lengths))), slots, out, ends)
    return out, ends
