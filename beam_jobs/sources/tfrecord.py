"""TFRecords of tf.train.Examples, to be sharded, shuffled, split or compressed anew.

    int64_list | float_list                int64 | float32
    bytes_list                             string where every value of all records is UTF-8 text, else bytes
    bytes_list, declared as numbers        a raw tensor: little-endian bytes, taken as they are
    lists of one length | of several       a scalar or tensor | a tensor of unknown length
    no feature, or one without a kind      no value, never 0; so is an empty list, but where lengths differ

Files that a dataset's manifest lists (`beam_jobs.sources.datasets`) are checked against it, and their
features, labels and units stay as it says. Each file may be plain, gzip or zlib, told by its content.
A record that is no Example can be left out; damage can't, since nothing tells what it hides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from beam_jobs.sources import SPLIT_BYTES, InputFile, InputSplit, SourceColumn, SourceOptions, Wish, Wishes
from beam_jobs.sources.bad_rows import RAW_CHARACTERS, BadRow
from beam_jobs.sources.compressed import compression_of
from beam_jobs.sources.datasets import describe
from beam_jobs.sources.example_columns import KINDS, Form, column, parse
from beam_jobs.sources.example_kernels import KIND, ROW, walk_frames
from beam_jobs.sources.fit import dtype_of, is_list, list_lengths
from beam_jobs.sources.summary import ColumnSummary, kinds_differ
from beam_jobs.sources.typed import Batch, TypedSource
from tfpipe.errors import RecordError, SchemaError, ShardError
from tfpipe.manifest import Shard
from tfpipe.schema import TEXT_DTYPES, Schema
from tfpipe.tfrecord import HEADER_BYTES, ShardReader, sniff_compression

BATCH_BYTES = 4 << 20
BATCH_ROWS = 1 << 13  # a record costs something in each column, though it has nothing there
_RAW_BYTES = RAW_CHARACTERS // 2
_NO_EXAMPLE = "Write it again, or keep its file apart: other messages can't be read."
_OTHER_FORM = "Write the record again, or declare the feature as it is (--schema)."
_CHECKED = ("num_records", "num_bytes", "uncompressed_bytes", "sha256")


@dataclass(frozen=True, kw_only=True)
class TfrecordSource(TypedSource):
    """TFRecord files, of datasets or not.

    Attributes:
        files: with records.
        compressions: of each file: "GZIP", "ZLIB" or "".
        shards: what each file must hold, or None where no manifest lists it.
        schema: that their manifest declares, if there is one.
        columns: one a feature of the schema; None without one.
        splits: of the datasets that are read.
    """

    files: tuple[InputFile, ...]
    compressions: tuple[str, ...]
    shards: tuple[Shard | None, ...]
    schema: Schema | None = None
    columns: tuple[SourceColumn, ...] | None = None
    splits: tuple[str, ...] = ()
    format: str = "tfrecord"

    def notices(self) -> list[str]:
        """Tells of splits that become one: what a model is tested on must not be trained on."""
        if len(self.splits) < 2:
            return []
        return [
            f"splits {', '.join(self.splits)} are read together and shared out anew; to keep them apart convert "
            f"each by itself: --input DIR:{self.splits[0]}"
        ]

    def plan(self) -> list[InputSplit]:
        """Plans the splits; see `Source`. A file that is compressed, or to be checked whole, is one."""
        splits: list[InputSplit] = []
        for index, (file, compression, shard) in enumerate(
            zip(self.files, self.compressions, self.shards, strict=True)
        ):
            start, rows, stop = 0, 0, -1
            if not compression and shard is None and file.num_bytes > SPLIT_BYTES:
                data = np.memmap(file.path, np.uint8, "r")
                stop, records, damaged = walk_frames(data, start, SPLIT_BYTES)
                while stop < len(data) and not damaged:  # what is damaged is found again by who reads it
                    splits.append(InputSplit(
                        index=len(splits), file=index, start=start, stop=stop, rows_before=rows
                    ))  # fmt: skip
                    start, rows = stop, rows + records
                    stop, records, damaged = walk_frames(data, start, SPLIT_BYTES)
            splits.append(InputSplit(index=len(splits), file=index, start=start, stop=-1, rows_before=rows))
        return splits

    def origin(self, split: InputSplit, row: int) -> str:
        """Names a record, the first is 1; see `Source`."""
        return f"{self.files[split.file].path}:{row}"

    def batches(self, split: InputSplit, wishes: Wishes) -> Iterator[Batch]:
        """Yields a split batch by batch; see `TypedSource`."""
        path, shard = self.files[split.file].path, self.shards[split.file]
        reader = ShardReader(
            path, self.compressions[split.file],
            start=split.start, stop=split.stop, records_before=split.rows_before,
        )  # fmt: skip
        payloads: list[bytes] = []
        num_bytes = done = 0
        for payload in reader:
            if payloads and (num_bytes + len(payload) > BATCH_BYTES or len(payloads) == BATCH_ROWS):
                yield self._batch(payloads, split, done, wishes)
                done += len(payloads)
                payloads, num_bytes = [], 0
            payloads.append(payload)
            num_bytes += len(payload)
        if payloads:
            yield self._batch(payloads, split, done, wishes)
        if shard is not None:
            for key in _CHECKED:
                must, found = getattr(shard, key), getattr(reader.content, key)
                if must != found:
                    raise ShardError(
                        f"a shard must have the {key} {must} that its manifest names, got {found} ({path}). "
                        f"Restore the file from a copy, or convert its source again."
                    )

    def _batch(self, payloads: Sequence[bytes], split: InputSplit, done: int, wishes: Wishes) -> Batch:
        parsed = parse(payloads)
        faults = {row: (problem, _NO_EXAMPLE) for row, problem in parsed.faults.items()}
        columns, kinds = {}, {}
        for name, lines in parsed.features.items():
            wish = wishes.of(name)
            if not wish.used:
                continue
            places = {
                KINDS[
                    line[KIND]
                ]: f"{self.origin(split, split.rows_before + done + line[ROW] + 1)}: feature {name!r}"
                for line in lines[np.unique(lines[:, KIND], return_index=True)[1]].tolist()
            }
            if len(places) > 1:
                first, second = list(places.items())[:2]
                raise kinds_differ(first, second)
            if not name:
                raise SchemaError(
                    f"a feature must have a name, got one without ({places.popitem()[1]}). Declare the features to "
                    f"take (--schema)."
                )
            kind, place = places.popitem()
            form = self._form(name, kind, wish)
            kinds[name] = ("raw" if form.raw else kind, place)
            columns[name], wrong = column(parsed, name, form)
            for row, (must, found) in wrong.items():
                faults.setdefault(row, (f"feature {name!r} must hold {must}, got {found}", _OTHER_FORM))
        numbers = np.arange(done + 1, done + len(payloads) + 1)
        batch = Batch(columns=columns, numbers=numbers, last=done + len(payloads), kinds=kinds)
        if faults:
            batch = batch.without([done + row + 1 for row in faults])
            batch.bad = [
                BadRow(
                    row=done + row + 1, problem=problem, remedy=remedy, raw=payloads[row][:_RAW_BYTES].hex()
                )
                for row, (problem, remedy) in sorted(faults.items())
            ]
        return batch

    def _form(self, name: str, kind: str, wish: Wish) -> Form:
        feature = self.schema.features.get(name) if self.schema else None
        if feature is not None and feature.encoding == "raw":
            return Form(raw=feature.dtype, shape=feature.shape)
        if kind == "bytes_list" and wish.dtype not in ("", *TEXT_DTYPES):
            return Form(raw=wish.dtype, shape=wish.shape)
        return Form(shape=wish.shape, text=wish.dtype != "bytes")

    def _summarize(self, batch: Batch, name: str, known: dict[str, SourceColumn]) -> ColumnSummary:
        array = batch.columns.get(name)
        if array is None:
            return ColumnSummary.absent(batch.rows)
        kind, first = batch.kinds[name]
        if name in known or not is_list(array.type):
            summary = super()._summarize(batch, name, known)
        else:  # an empty list may yet be a value: all records tell
            lengths = list_lengths(array)
            sizes = lengths[lengths > 0]
            summary = self.summarize(SourceColumn(name=name, dtype=dtype_of(array.type)), array.flatten())
            summary.counts += ColumnSummary.absent(batch.rows - len(sizes)).counts
            summary.empty_lists = batch.rows - len(sizes) - array.null_count
            if len(sizes):
                summary.shape = (int(sizes[0]) if sizes.min() == sizes.max() else None,)
        summary.kind, summary.first = kind, first
        return summary


def open_tfrecord(files: Sequence[InputFile], options: SourceOptions) -> TfrecordSource:
    """Opens TFRecord files, of datasets with a manifest or without.

    Args:
        files: non-empty files.
        options: not used.

    Returns:
        The source.

    Raises:
        ManifestError: a manifest beside the files can't be used, or does not list one of them.
        RecordError: a file is no TFRecord file.
        SchemaError: the files' manifests declare different features.
        UsageError: some files have a manifest and others have none.
    """
    described = describe([file.path for file in files])
    compressions = [
        _sniffed(file) if compression is None else compression
        for file, compression in zip(files, described.compressions, strict=True)
    ]
    return TfrecordSource(
        files=tuple(files),
        compressions=tuple(compressions),
        shards=described.shards,
        schema=described.schema,
        columns=described.columns,
        splits=described.splits,
    )


def _sniffed(file: InputFile) -> str:
    compression = sniff_compression(file.path)
    if compression is None:
        with open(file.path, "rb") as stream:
            head = stream.read(HEADER_BYTES)
        found = compression_of(head) or f"{head.hex(' ')}"
        raise RecordError(
            f"a TFRecord file must begin with a record, plain or compressed with gzip or zlib, got {found} "
            f"({file.path}). Restore it from a copy; or is it another format? See --format."
        )
    return compression
