"""Describes TFRecord files that somebody else made, where they lie: writes only their manifest.

    tfpipe index DIR

Comes in: a directory of TFRecord files of tf.train.Examples, by whatever names, plain, gzip or
zlib. Every record is read and checked. Goes out: `manifest.json` beside them, with the schema
that takes every record, so that all other commands work on the directory. Of a manifest that was
there, what it alone knew stays where it still holds.

`tfpipe.index_files` says which files are of which split, `tfpipe.index_read` reads them, and
`tfpipe.index_schema` decides the features.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfpipe import __version__
from tfpipe.errors import ManifestError, OutputError, SchemaError, UsageError
from tfpipe.example_summary import ExampleSummary
from tfpipe.index_files import find_tfrecord_files, name_some, only_compression
from tfpipe.index_read import read_files
from tfpipe.index_schema import check_declared, infer_schema, remarks, unfit
from tfpipe.manifest import FILE_NAME, INDEX_FORMAT, SPLIT_NAME, Manifest, Shard, Split, check_finished
from tfpipe.schema import Schema


def index(
    directory: str | os.PathLike[str],
    *,
    split_patterns: Sequence[tuple[str, str]] = (),
    schema: Schema | None = None,
    overwrite: bool = False,
    num_processes: int = 1,
    on_progress: Callable[[str, int, int], None] = lambda text, done, total: None,
    on_notice: Callable[[str], None] = lambda text: None,
) -> Manifest:
    """Reads all TFRecord files of a directory and writes their manifest.

    Args:
        directory: with the files; those in directories below it are not looked at.
        split_patterns: a split's name and a pattern (fnmatch) of file names, in order.
        schema: declared features, checked against every record; others are left out. None takes those of a
            manifest that is there already, if they fit every record, else infers all.
        overwrite: whether a manifest that is there already is replaced.
        num_processes: that read files; see `tfpipe.index_read.read_files`.
        on_progress: called with a text, the files done and all files.
        on_notice: called with each sentence that the user should read.

    Returns:
        The manifest, loaded from the directory.

    Raises:
        UsageError: a split's name or pattern is wrong, or a pattern matches no file.
        ManifestError: no TFRecord files, a manifest that is there already, an check_finished
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
    only = None if schema is None else schema.features.keys()
    summary = ExampleSummary(only)
    splits: dict[str, list[Shard]] = {}
    paths = [path for path, _, _ in found.files]
    parts = read_files(paths, compression, only and tuple(only), num_processes, on_progress)
    for (_, split, _), (shard, part) in zip(found.files, parts, strict=True):
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
    old, notices = _old_manifest(directory)
    kept = False
    if old is not None and schema is None:
        if fault := unfit(old.schema, summary):
            notices.append(
                f"inferred anew, since the schema of the manifest that was there fits no more: {fault}"
            )
        else:
            schema, kept = old.schema, True
    if schema is None:
        schema, of_schema = infer_schema(summary, directory)
        notices += of_schema
    elif not kept:
        check_declared(schema, summary, directory)
    notices += remarks(schema, summary)
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
    if old is not None:
        manifest, notice = _keep_of(old, manifest, kept)
        notices += notice
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
        if not SPLIT_NAME.fullmatch(name) or not pattern or "/" in pattern:
            raise UsageError(
                f"--split must have the form NAME=GLOB, like test='*-eval-*', with a pattern of file names, "
                f"got {text!r}."
            )
        patterns.append((name, pattern))
    return tuple(patterns)


def _check_directory(directory: Path, overwrite: bool) -> None:
    if not directory.is_dir():
        found = "a file" if directory.exists() else "none"
        raise ManifestError(f"a directory of TFRecord files must exist, got {found} ({directory}).")
    if not overwrite and (directory / FILE_NAME).exists():
        raise ManifestError(
            f"a directory must have no {FILE_NAME} yet, got one ({directory}). Add --overwrite to replace it."
        )
    check_finished(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise OutputError(f"a directory must be writable to get its {FILE_NAME}, got none ({directory}).")


def _old_manifest(directory: Path) -> tuple[Manifest | None, list[str]]:
    """The manifest that is there already, if it can be used, and sentences that the user should read."""
    if not (directory / FILE_NAME).exists():
        return None, []
    try:
        return Manifest.load(directory, check_files=False), []
    except (ManifestError, SchemaError) as error:
        return None, [f"nothing was kept of the manifest that was there: {error}"]


def _keep_of(old: Manifest, new: Manifest, schema_kept: bool) -> tuple[Manifest, list[str]]:
    """The new manifest with what only the old one knew and still holds, and a sentence on it."""
    same_shards = dict(old.splits) == dict(new.splits)
    kept = ["schema"] if schema_kept else []
    if same_shards:
        kept += ["source", "seed"]
        new = dataclasses.replace(
            new, splits=old.splits, num_rejected=old.num_rejected, source=old.source,
            shuffle_seed=old.shuffle_seed, created_by=old.created_by,
        )  # fmt: skip
    if not kept:
        return new, []
    keys = ("unit", "narrowed") if same_shards else ("unit",)
    statistics = {
        name: found | {key: value for key, value in (old.statistics.get(name) or {}).items() if key in keys}
        for name, found in new.statistics.items()
    }
    notice = f"kept of the manifest that was there, since it still holds: {', '.join(kept)}"
    if schema_kept:
        notice += "; --schema FILE declares another schema"
    return dataclasses.replace(new, statistics=statistics), [notice]
