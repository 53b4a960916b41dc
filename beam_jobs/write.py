"""Pass 2: input splits -> pieces -> shards, verified.

    InputSplit --EncodeSplit--> (shard, Piece) --group by shard--> WriteShard --> (shard, Shard | Failure)

A piece is what one input split holds for one shard. A shard's writer reads its ranges of all of
them, part by part, so that memory stays bounded whatever the shard's size.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import apache_beam as beam
import numpy as np
import pyarrow as pa

from beam_jobs.encode import RECORD_MAX_BYTES, Encoded, RecordTooLong, encode_batch
from beam_jobs.keys import Placer
from beam_jobs.outcome import ALL, Failure, guarded, has_failed, load, save, unfinished
from beam_jobs.pieces import INLINE_BYTES, InlinePieces, Piece, PieceReader, gather
from beam_jobs.plan import Plan, Request, ShardPlan
from beam_jobs.scan import mark
from beam_jobs.sources import InputSplit, Source
from beam_jobs.statistics import DatasetStatistics
from tfpipe.errors import OutputError, RecordError, ShardError
from tfpipe.manifest import Shard, shard_name
from tfpipe.schema import Schema
from tfpipe.tfrecord import WINDOW_BITS, read_shard

SHARDS = "shards"
# ISA-L has levels 0 to 3; zlib's 4 to 9 are smaller and many times slower.
ISAL_MAX_LEVEL = 3
MAX_LEVEL = 9
_CHUNK_BYTES = 1 << 20


class EncodeSplit(beam.DoFn):
    """Encodes an input split into pieces.

    Args:
        request: what the user asked for.
        source: to read.
        staging: the run's own directory.
        inline: whether the pieces' bytes travel through the runner, instead of lying in staging.
    """

    def __init__(self, request: Request, source: Source, staging: str, inline: bool = False) -> None:
        self.request, self.source, self.staging, self.inline = request, source, staging, inline

    @guarded(lambda _, failure: (-1, failure))
    def process(self, split: InputSplit, plan: Plan | Failure) -> Iterator[tuple[int, Piece | Failure]]:
        """InputSplit -> (shard's index in the plan, Piece)."""
        if isinstance(plan, Failure) or has_failed(self.staging):
            return
        piece = Piece(split=split.index)
        expected = int(plan.first_index[split.index + 1] - plan.first_index[split.index])
        starts = np.array([shard.start for shard in plan.shards])
        if self.inline:
            inline = InlinePieces(split.index, starts)
            for places, batch in self._batches(piece, split, plan, expected):
                inline.add(places, batch.offsets, batch.data)
                if inline.num_bytes >= INLINE_BYTES:
                    yield from inline.take()
            yield from inline.take()
            mark(self.staging, "encode", split.index, expected)
            return
        if not piece.is_whole(self.staging, expected):
            self._write(piece, split, plan, expected)
        mark(self.staging, "encode", split.index, expected)
        used: set[int] = set()
        for places, _ in piece.batches(self.staging):
            used.update((np.unique(np.searchsorted(starts, places, side="right")) - 1).tolist())
        for shard in sorted(used):
            yield shard, piece

    def _batches(
        self, piece: Piece, split: InputSplit, plan: Plan, expected: int
    ) -> Iterator[tuple[np.ndarray, Encoded]]:
        """Yields each batch's places, ascending, and its records in that order; leaves the statistics in staging."""
        rows = 0
        statistics = DatasetStatistics(plan.schema)
        placer = Placer(self.request, plan, split.index)
        for batch in self.source.read(split, plan.wishes, plan.rejected.get(split.index, ())):
            features = plan.layout.assemble(batch)
            places = placer.place(features)
            order = np.argsort(places)
            statistics.add(features)
            yield places[order], self._encode(plan, split, features, order, rows)
            rows += batch.num_rows
        if rows != expected:
            raise OutputError(
                f"the input must not change while it is converted, got {rows} records instead of {expected} "
                f"({self.source.origin(split, 1)}). Convert again when nothing writes to it."
            )
        save(self.staging, piece.statistics_name, statistics.to_json())

    def _write(self, piece: Piece, split: InputSplit, plan: Plan, expected: int) -> None:
        """Leaves the pieces of a split in staging."""
        offset = 0
        counts: list[int] = []
        data_path, index_path = piece.data_path(self.staging), piece.index_path(self.staging)
        own = unfinished()  # another worker may be at it: of a run that was killed and is resumed
        with open(f"{data_path}{own}", "wb") as data, open(f"{index_path}{own}", "wb") as index:
            for places, encoded in self._batches(piece, split, plan, expected):
                data.write(encoded.data)
                index.write(places)
                index.write(encoded.offsets + offset)
                offset += len(encoded.data)
                counts.append(len(places))
            index.write(np.array([*counts, len(counts)], np.int64))
        os.replace(f"{data_path}{own}", data_path)
        os.replace(f"{index_path}{own}", index_path)  # last: it says that all is whole

    def _encode(
        self, plan: Plan, split: InputSplit, features: pa.RecordBatch, order: np.ndarray, rows_before: int
    ) -> Encoded:
        try:
            return encode_batch(features, plan.schema, order)
        except RecordTooLong as error:
            number = int(plan.first_index[split.index]) + rows_before + error.row + 1
            path = self.source.origin(split, 1).rpartition(":")[0]
            raise RecordError(
                f"an example must have at most {RECORD_MAX_BYTES} bytes, got {error.num_bytes} for record {number} "
                f"of those kept ({path}). Split it into several, or leave a column out (--schema)."
            ) from None


class WriteShard(beam.DoFn):
    """Writes a shard from its pieces, in its final order, and reads it back.

    Args:
        staging: the run's own directory.
    """

    def __init__(self, staging: str) -> None:
        self.staging = staging

    @guarded(lambda element, failure: (ALL, (element[0], failure)))
    def process(
        self, element: tuple[int, Iterable[Piece | Failure]], plan: Plan | Failure
    ) -> Iterator[tuple[int, tuple[int, Shard | Failure]]]:
        """(shard's index in the plan, its pieces) -> (ALL, (the same, Shard | Failure))."""
        index, pieces = element[0], list(element[1])
        failures = [piece for piece in pieces if isinstance(piece, Failure)]
        if failures:
            yield ALL, (index, failures[0])
        if failures or isinstance(plan, Failure) or has_failed(self.staging):
            return
        shard_plan = plan.shards[index]
        name = shard_name(shard_plan.split, shard_plan.index, shard_plan.num_shards, plan.compression)
        path = Path(self.staging) / SHARDS / name
        ordered = sorted(
            (piece for piece in pieces if isinstance(piece, Piece)), key=lambda piece: piece.split
        )
        written = f"shard-{index}.json"  # there if a run that is resumed got so far
        found = load(self.staging, written)
        if found is not None and path.exists():
            shard = Shard(**found)
        else:
            own = path.with_name(f"{name}{unfinished()}")  # see EncodeSplit
            own.unlink(missing_ok=True)
            shard = write_shard(own, shard_plan, ordered, self.staging, plan.compression, plan.level)
            shard = dataclasses.replace(shard, name=name)
            os.replace(own, path)
        verify_shard(path, shard, plan.compression)
        save(self.staging, written, dataclasses.asdict(shard))
        mark(self.staging, "shard", index, shard.num_records)
        yield ALL, (index, shard)


def merge_statistics(staging: str, schema: Schema, splits: Sequence[InputSplit]) -> dict[str, dict[str, Any]]:
    """What the values of all input splits are like: the manifest's form, one object a feature."""
    merged = DatasetStatistics(schema)
    for split in splits:
        found = load(staging, Piece(split=split.index).statistics_name)
        merged.merge(DatasetStatistics(schema).load(found))
    return merged.describe()


def write_shard(
    path: Path, shard_plan: ShardPlan, pieces: list[Piece], staging: str, compression: str, level: int
) -> Shard:
    """Writes a shard's records in the order of their places.

    Args:
        path: of the new file.
        shard_plan: the places that it holds.
        pieces: of all splits that have some of them.
        staging: where the pieces lie.
        compression: "GZIP", "ZLIB" or "".
        level: of the compression.

    Returns:
        The shard as it was written.

    Raises:
        OutputError: a place has no record, or more than one.
        OSError: the disk.
    """
    readers = [PieceReader(piece, staging) for piece in pieces]
    compressor = make_compressor(compression, level)
    digest = hashlib.sha256()
    num_bytes = uncompressed_bytes = 0
    try:
        with open(path, "xb") as file:
            for start, stop in zip(shard_plan.edges, shard_plan.edges[1:], strict=False):
                data = gather(readers, start, stop)
                uncompressed_bytes += len(data)
                view = memoryview(data)
                for low in range(0, len(view), _CHUNK_BYTES):
                    chunk = view[low : low + _CHUNK_BYTES]
                    num_bytes += _put(file, digest, compressor.compress(chunk) if compressor else chunk)
            if compressor:
                num_bytes += _put(file, digest, compressor.flush())
            file.flush()
            os.fsync(file.fileno())
    finally:
        for reader in readers:
            reader.close()
    return Shard(
        name=path.name,
        num_records=shard_plan.stop - shard_plan.start,
        num_bytes=num_bytes,
        uncompressed_bytes=uncompressed_bytes,
        sha256=digest.hexdigest(),
    )


def verify_shard(path: Path, shard: Shard, compression: str) -> None:
    """Opens a shard again and compares every checksum, the counts and the file's SHA-256.

    Args:
        path: of the file.
        shard: what was written.
        compression: of the file.

    Raises:
        ShardError: the file does not hold what was written.
    """
    content = read_shard(path, compression)
    for key in ("num_records", "num_bytes", "uncompressed_bytes", "sha256"):
        if getattr(content, key) != getattr(shard, key):
            raise ShardError(
                f"a shard must hold what was written to it, got {key} {getattr(content, key)} instead of "
                f"{getattr(shard, key)} ({path}). The disk may be failing: convert again to another one."
            )


def make_compressor(compression: str, level: int) -> Any:
    """A compressor whose output depends on nothing but its input: no time, no name.

    Args:
        compression: "GZIP", "ZLIB" or "".
        level: 0 to 3 through ISA-L, 4 to 9 through zlib.

    Returns:
        An object with compress and flush, or None.
    """
    if not compression:
        return None
    if level > ISAL_MAX_LEVEL:
        return zlib.compressobj(level, zlib.DEFLATED, WINDOW_BITS[compression])
    from isal import isal_zlib

    return isal_zlib.compressobj(level, isal_zlib.DEFLATED, WINDOW_BITS[compression])


def _put(file: BinaryIO, digest: Any, chunk: Any) -> int:
    digest.update(chunk)
    file.write(chunk)
    return len(chunk)
