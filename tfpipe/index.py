"""Describes TFRecord files that somebody else made, where they lie: writes only their manifest.

    tfpipe index DIR

Comes in: a directory of TFRecord files of tf.train.Examples, by whatever names, plain, gzip or
zlib. Every record is read and checked. Goes out: `manifest.json` beside them, with the schema
that takes every record, so that all other commands work on the directory.

`tfpipe.index_files` says which files are of which split.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tfpipe import __version__
from tfpipe.errors import ManifestError, OutputError, SchemaError, ShardError, UsageError
from tfpipe.example_summary import ExampleSummary, FeatureSummary, Range
from tfpipe.examples import Place
from tfpipe.index_files import find_tfrecord_files, name_some, only_compression
from tfpipe.manifest import FILE_NAME, INDEX_FORMAT, Manifest, Shard, Split
from tfpipe.schema import ITEMSIZE_BYTES, Feature, Schema
from tfpipe.tfrecord import ShardReader

_SPLIT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PROGRESS_RECORDS = 10_000


def index(
    directory: str | os.PathLike[str],
    *,
    split_patterns: Sequence[tuple[str, str]] = (),
    schema: Schema | None = None,
    overwrite: bool = False,
    on_progress: Callable[[str, int, int], None] = lambda text, done, total: None,
    on_notice: Callable[[str], None] = lambda text: None,
) -> Manifest:
    """Reads all TFRecord files of a directory and writes their manifest.

    Args:
        directory: with the files; those in directories below it are not looked at.
        split_patterns: a split's name and a pattern (fnmatch) of file names, in order.
        schema: declared features, checked against every record; others are left out. None infers all.
        overwrite: whether a manifest that is there already is replaced.
        on_progress: called with a text, the files done and all files.
        on_notice: called with each sentence that the user should read.

    Returns:
        The manifest, loaded from the directory.

    Raises:
        UsageError: a split's name or pattern is wrong, or a pattern matches no file.
        ManifestError: no TFRecord files, a manifest that is there already, an unfinished
            conversion, or files of different compressions.
        ShardError: a file is damaged or can't be read; names file, record and offset.
        RecordError: a record is no tf.train.Example.
        SchemaError: records disagree with each other or with the declared schema.
        OutputError: the manifest can't be written.
    """
    directory = Path(directory)
    _check_directory(directory, overwrite)
    found = find_tfrecord_files(directory, split_patterns)
    compression = only_compression(directory, found)
    summary = ExampleSummary(only=None if schema is None else schema.features.keys())
    splits: dict[str, list[Shard]] = {}
    for done, (path, split, _) in enumerate(found.files):
        shard, part = _read(
            path, compression, summary.only, partial(_tell, on_progress, done, len(found.files))
        )
        summary.merge(part)
        if shard.num_records:
            splits.setdefault(split, []).append(shard)
        else:
            found.empty.append(shard.name)
    shards = [shard for of_split in splits.values() for shard in of_split]
    on_progress(f"read {summary.num_records:,} records", len(found.files), len(found.files))
    if not shards:
        raise ManifestError(
            f"a dataset must hold a record, got none in {name_some(found.empty)} ({directory})."
        )
    schema, notices = _decide_schema(schema, summary, directory)
    source: dict[str, Any] = {
        "format": INDEX_FORMAT,
        "files": [{"name": shard.name, "num_bytes": shard.num_bytes} for shard in shards],
    }
    if found.other:
        source["ignored_files"] = dict(sorted(found.other.items()))
    manifest = Manifest(
        schema=schema,
        splits={
            name: Split(shards=tuple(splits[name]))
            for name in sorted(splits, key=lambda name: (name != "train", name))
        },
        compression=compression,
        statistics=summary.statistics(schema),
        source=source,
        shuffle_seed=None,
        created_by={"tfpipe": __version__},
    )
    for text in found.notices() + notices:
        on_notice(text)
    try:
        manifest.save(directory)
    except OSError as error:
        raise OutputError(f"{FILE_NAME} must be writable, got {error.strerror} ({directory}).") from None
    return Manifest.load(directory)


def parse_split_patterns(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Reads `NAME=GLOB` arguments; a name may have several patterns.

    Raises:
        UsageError: another form.
    """
    patterns = []
    for text in texts:
        name, _, pattern = text.partition("=")
        if not _SPLIT_NAME.fullmatch(name) or not pattern or "/" in pattern:
            raise UsageError(
                f"--split must have the form NAME=GLOB, like test='*-eval-*', with a pattern of file names, "
                f"got {text!r}."
            )
        patterns.append((name, pattern))
    return tuple(patterns)


def read_schema(path: str | os.PathLike[str]) -> Schema:
    """Reads a declared schema.

    Raises:
        UsageError: the file can't be read.
        SchemaError: no JSON, or no schema.
    """
    try:
        obj = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--schema must name a readable file, got {error.strerror} ({path}).") from None
    except ValueError as error:
        raise SchemaError(f"a schema must be JSON, got {error} ({path}).") from None
    return Schema.from_json(obj, where=str(path))


def _check_directory(directory: Path, overwrite: bool) -> None:
    if not directory.is_dir():
        found = "a file" if directory.exists() else "none"
        raise ManifestError(f"a directory of TFRecord files must exist, got {found} ({directory}).")
    if not overwrite and (directory / FILE_NAME).exists():
        raise ManifestError(
            f"a directory must have no {FILE_NAME} yet, got one ({directory}). Add --overwrite to replace it."
        )
    if staging := sorted(directory.glob(".staging-*")):
        raise ManifestError(
            f"a directory must hold finished files, got a conversion that did not finish "
            f"({directory}: {staging[0].name}). Run the conversion again, or remove what it left."
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise OutputError(f"a directory must be writable to get its {FILE_NAME}, got none ({directory}).")


def _tell(on_progress: Callable[[str, int, int], None], done: int, total: int, text: str) -> None:
    on_progress(text, done, total)


def _read(
    path: Path, compression: str, only: Any, on_progress: Callable[[str], None]
) -> tuple[Shard, ExampleSummary]:
    summary = ExampleSummary(only)
    reader = ShardReader(path, compression)
    file = str(path)
    try:
        for number, payload in enumerate(reader):
            if number % _PROGRESS_RECORDS == 0:
                on_progress(f"{path.name}: {number:,} records" if number else path.name)
            summary.add(payload, Place(file, number))
    except OSError as error:
        raise ShardError(f"a file must be readable, got {error.strerror} ({path}).") from None
    assert reader.content is not None
    return Shard(name=path.name, **dataclasses.asdict(reader.content)), summary


def _decide_schema(
    declared: Schema | None, summary: ExampleSummary, directory: Path
) -> tuple[Schema, list[str]]:
    """The schema, and sentences that the user should read."""
    notices: list[str] = []
    if declared is None:
        try:
            declared, notices = summary.infer()
        except SchemaError as error:
            raise SchemaError(f"{error} ({directory}).") from None
    else:
        for name, feature in declared.features.items():
            if fault := _misfit(feature, summary.features.get(name), summary):
                must, got = fault
                raise SchemaError(
                    f"declared feature {name!r} must {must}, got {got} ({directory}). Correct it in --schema."
                )
        if summary.ignored:
            notices.append(
                f"left out, since not in the declared schema: {name_some(sorted(summary.ignored))}"
            )
    if summary.bare_records:
        notices.append(f"{summary.bare_records:,} of {summary.num_records:,} records have no feature at all")
    if summary.other_fields:
        notices.append(
            f"{summary.other_fields:,} of {summary.num_records:,} records hold more than features, as a "
            f"tf.train.SequenceExample does: the rest is never read"
        )
    return declared, notices


def _misfit(
    feature: Feature, found: FeatureSummary | None, summary: ExampleSummary
) -> tuple[str, str] | None:
    """What must hold of a declared feature and what was found instead, if they differ."""
    if found is None or not found.counts.total:
        known = name_some(sorted(summary.features.keys() | summary.ignored))
        return "have a value in a record", f"none; the records have {known}"
    if None in feature.shape[1:]:
        return "have no unknown dimension but the first", f"shape {list(feature.shape)}"
    raw = feature.encoding == "raw"
    if found.kind != ("bytes_list" if raw else feature.encoding):
        return f"have the encoding of its lists, {found.kind}", f"{feature.encoding}; see {found.first}"
    if (absent := found.absent(feature, summary.num_records)) and not feature.nullable:
        return "be nullable", f"{absent:,} of {summary.num_records:,} records without it"
    inner = math.prod(size for size in feature.shape[1:] if size is not None)
    if raw:
        itemsize = ITEMSIZE_BYTES[feature.dtype]
        return _size_misfit(found.counts, 1, 1, "value") or _size_misfit(
            found.lengths, feature.decoded_bytes, inner * itemsize, "byte"
        )
    if fault := _size_misfit(found.counts, feature.num_elements, inner, "value"):
        return fault
    if feature.dtype == "string" and found.opaque is not None:
        return "be UTF-8 text", f"other bytes in {found.opaque}; declare bytes"
    if feature.labels is not None:
        found.settle()
        if not 0 <= found.low <= found.high < len(feature.labels):
            return f"count its {len(feature.labels)} labels from 0", f"{found.low} to {found.high}"
    return None


def _size_misfit(found: Range, size: int | None, multiple: int, unit: str) -> tuple[str, str] | None:
    if size is None:
        if found.divisor % max(multiple, 1):
            return (
                f"have a multiple of {multiple} {unit}s",
                f"{found.low} to {found.high}; see {found.low_at}",
            )
    elif not found.low == found.high == size:
        got, place = (found.high, found.high_at) if found.low == size else (found.low, found.low_at)
        return f"have {size} {unit}{'s' * (size != 1)}", f"{got} in {place}"
    return None
