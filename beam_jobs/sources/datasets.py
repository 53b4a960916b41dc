"""Datasets as input: the files that a manifest lists, never a glob, and the features that it declares.

data/mnist            every split of the dataset
data/mnist:test       one of them
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass

from beam_jobs.sources import SourceColumn
from tfpipe.errors import ManifestError, SchemaError, UsageError
from tfpipe.manifest import FILE_NAME, FORMAT, Manifest, Shard, check_finished
from tfpipe.schema import Feature, Schema

# Files of a dataset that hold none of its records.
_BESIDE = (FILE_NAME, "rejected.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """What manifests say of some files.

    Attributes:
        compressions: of each file; None where no manifest tells.
        shards: what each holds, or None.
        schema: of all, if they have a manifest.
        columns: one a feature of the schema.
        splits: of the datasets that the files belong to, in their order.
    """

    compressions: tuple[str | None, ...]
    shards: tuple[Shard | None, ...]
    schema: Schema | None = None
    columns: tuple[SourceColumn, ...] | None = None
    splits: tuple[str, ...] = ()


def manifest_of(directory: str) -> Manifest | None:
    """A directory's manifest, if it has one of ours.

    Raises:
        ManifestError: it has, and it can't be used, or its shards are not as it says.
        SchemaError: its schema is malformed.
    """
    try:
        with open(os.path.join(directory, FILE_NAME), "rb") as file:
            ours = FORMAT.encode() in file.read()
    except OSError:
        return None
    return Manifest.load(directory) if ours else None


def split_of(given: str) -> tuple[str, str]:
    """What an input names: a path and a dataset's split, "" for all.

    Args:
        given: as the user wrote it; `DIR:SPLIT` only where nothing has that name.

    Returns:
        The path, and the split.
    """
    directory, colon, split = given.rpartition(":")
    if colon and split and not os.path.lexists(given) and os.path.isfile(os.path.join(directory, FILE_NAME)):
        return directory, split
    return given, ""


def dataset_files(directory: str, names: Sequence[str], split: str) -> tuple[list[str], list[str]] | None:
    """The files of a dataset.

    Args:
        directory: to look at.
        names: of all files in it.
        split: the one that is wanted; "" for all.

    Returns:
        Paths of the files that its manifest lists, in that order, and names of those that are no part
        of the dataset; None if it has no manifest.

    Raises:
        ManifestError: see `manifest_of`; or no such split.
    """
    manifest = manifest_of(directory)
    if manifest is None:
        if split:
            raise ManifestError(
                f"a split must be one of a dataset with a {FILE_NAME}, got none ({directory})."
            )
        return None
    listed = {shard.name for of_split in manifest.splits.values() for shard in of_split.shards}
    wanted = [manifest.split(split)] if split else manifest.splits.values()
    paths = [os.path.join(directory, shard.name) for of_split in wanted for shard in of_split.shards]
    return paths, [name for name in names if name not in listed and name not in _BESIDE]


def describe(paths: Sequence[str]) -> Described:
    """What the manifests beside the files say.

    Args:
        paths: of TFRecord files.

    Returns:
        It, in the order of the files.

    Raises:
        ManifestError: a manifest can't be used, or does not list a file beside it; or a conversion into
            the files' directory has not finished.
        SchemaError: manifests declare different features.
        UsageError: some files have a manifest, others have none.
    """
    manifests = {
        directory: manifest_of(directory) for directory in dict.fromkeys(map(os.path.dirname, paths))
    }
    found = {directory: manifest for directory, manifest in manifests.items() if manifest is not None}
    for directory in manifests.keys() - found.keys():
        check_finished(directory or ".")
    if not found:
        return Described(compressions=(None,) * len(paths), shards=(None,) * len(paths))
    if loose := [path for path in paths if os.path.dirname(path) not in found]:
        raise UsageError(
            f"input files must be of datasets with a {FILE_NAME} or all without one, got {next(iter(found))} with "
            f"one and {loose[0]}. Convert them apart, or describe the others first: tfpipe index DIR"
        )
    listed = {
        (directory, shard.name): (name, shard)
        for directory, manifest in found.items()
        for name, split in manifest.splits.items()
        for shard in split.shards
    }
    if unlisted := [path for path in paths if os.path.split(path) not in listed]:
        raise ManifestError(
            f"a file beside a {FILE_NAME} must be listed in it, got one that is not ({unlisted[0]}). It is no part "
            f"of that dataset: move it away to convert it."
        )
    schema, units = _common(found)
    splits, shards = zip(*(listed[os.path.split(path)] for path in paths), strict=True)
    return Described(
        splits=tuple(dict.fromkeys(splits)),
        compressions=tuple(found[os.path.dirname(path)].compression for path in paths),
        shards=shards,
        schema=schema,
        columns=tuple(_column(name, feature, units[name]) for name, feature in schema.features.items()),
    )


def _common(manifests: dict[str, Manifest]) -> tuple[Schema, dict[str, str]]:
    """The features of all, nullable if any is, and their units."""
    (first, manifest), *others = manifests.items()
    features, units = dict(manifest.schema.features), _units(manifest)
    for directory, other in others:
        if other.schema.features.keys() != features.keys() or _units(other) != units:
            raise _disagreement(first, directory, sorted(features.keys() ^ other.schema.features.keys()))
        for name, feature in other.schema.features.items():
            nullable = features[name].nullable or feature.nullable
            features[name] = dataclasses.replace(features[name], nullable=nullable)
            if dataclasses.replace(feature, nullable=nullable) != features[name]:
                raise _disagreement(first, directory, [name])
    return Schema(features=features), units


def _units(manifest: Manifest) -> dict[str, str]:
    return {
        name: str((manifest.statistics.get(name) or {}).get("unit", "")) for name in manifest.schema.features
    }


def _disagreement(one: str, other: str, names: Sequence[str]) -> SchemaError:
    what = f"other ones for {', '.join(map(repr, names[:5]))}" if names else "other units"
    return SchemaError(
        f"datasets that become one must have the same features, labels and units, got {what} ({one} and {other}). "
        f"Convert them apart."
    )


def _column(name: str, feature: Feature, unit: str) -> SourceColumn:
    # The shape of what is no raw tensor can be declared otherwise: its values are checked one by one.
    return SourceColumn(
        name=name,
        dtype=feature.dtype,
        shape=feature.shape if feature.encoding == "raw" else None,
        unit=unit,
        labels=feature.labels,
    )
