"""The dataset directory: what it holds, written last, checked when read.

    data/mnist/
      manifest.json                        its presence is the commit
      train-00000-of-00024.tfrecord.gz

Comes in: a directory that the converter published. Goes out: a `Manifest`, from which
every reader takes its shard names (never from a glob).

    >>> manifest = Manifest.load("data/mnist")
    >>> manifest.splits["train"].num_records
    60000
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfpipe.errors import ManifestError, ShardError
from tfpipe.schema import Schema
from tfpipe.tfrecord import SUFFIXES, read_shard

FORMAT = "tfpipe-dataset"
FORMAT_VERSION = 1
FILE_NAME = "manifest.json"
INDEX_FORMAT = "index"  # the source's format where the shards are somebody else's files, by their own names
# Where the converter works, in the output directory, until all is whole.
STAGING_PREFIX = ".staging-"
SPLIT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SHARD_NAME = re.compile(r"(?P<split>.+)-(?P<index>\d{5,})-of-(?P<total>\d{5,})\.tfrecord(\.gz|\.zlib)?")


def shard_name(split: str, index: int, num_shards: int, compression: str) -> str:
    """The exact file name of one shard.

    Args:
        split: the split's name.
        index: from 0.
        num_shards: of the split.
        compression: "GZIP", "ZLIB" or "".

    Returns:
        `{split}-{index:05d}-of-{num_shards:05d}.tfrecord[.gz|.zlib]`.

    Raises:
        KeyError: the compression is none of the three.
    """
    return f"{split}-{index:05d}-of-{num_shards:05d}.tfrecord{SUFFIXES[compression]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file of a split.

    Attributes:
        name: its exact file name inside the dataset directory.
        num_records: records it holds.
        num_bytes: its size on disk.
        uncompressed_bytes: size of all its framed records.
        sha256: of the file on disk, hexadecimal.
    """

    name: str
    num_records: int
    num_bytes: int
    uncompressed_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """A named part of the dataset: its shards in order."""

    shards: tuple[Shard, ...]

    @property
    def num_records(self) -> int:
        return sum(shard.num_records for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def uncompressed_bytes(self) -> int:
        return sum(shard.uncompressed_bytes for shard in self.shards)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that a reader needs to know about a dataset directory.

    Attributes:
        schema: the features of every example.
        splits: by name.
        compression: "GZIP", "ZLIB" or "", for every shard.
        num_rejected: source records that were refused and counted.
        statistics: per feature, as the scan found them.
        source: what was read: files, sizes, format.
        shuffle_seed: of the permutation that placed the records; None if none was asked for.
        created_by: versions of what wrote the dataset.
        directory: where it was loaded from.
    """

    schema: Schema
    splits: Mapping[str, Split]
    compression: str = "GZIP"
    num_rejected: int = 0
    statistics: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    shuffle_seed: int | None = None
    created_by: Mapping[str, Any] = field(default_factory=dict)
    directory: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """The contract's form, in stable key order and without timestamps."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "compression": self.compression,
            "schema": self.schema.to_json(),
            "splits": {
                name: {
                    "num_records": split.num_records,
                    "shards": [dataclasses.asdict(shard) for shard in split.shards],
                }
                for name, split in self.splits.items()
            },
            "rejected": {"num_records": self.num_rejected},
            "statistics": dict(self.statistics),
            "source": dict(self.source),
            "shuffle": {"seed": self.shuffle_seed},
            "created_by": dict(self.created_by),
        }

    @classmethod
    def from_json(cls, obj: Any, *, where: str, directory: Path | None = None) -> Manifest:
        """Reads the contract's form.

        Args:
            obj: the parsed JSON.
            where: named in errors: the file it came from.
            directory: where the shards lie.

        Returns:
            The manifest; its shards are not looked at.

        Raises:
            ManifestError: another format or version, or a field that is missing or wrong.
            SchemaError: the schema in it is malformed.
        """
        if not isinstance(obj, Mapping) or obj.get("format") != FORMAT:
            found = obj.get("format") if isinstance(obj, Mapping) else type(obj).__name__
            raise ManifestError(f'"format" must be "{FORMAT}", got {found!r} ({where}).')
        if obj.get("format_version") != FORMAT_VERSION:
            raise ManifestError(
                f'"format_version" must be {FORMAT_VERSION}, got {obj.get("format_version")!r} '
                f"({where}). Convert the source again, or use the release of tfpipe that wrote it."
            )
        schema = Schema.from_json(obj.get("schema"), where=where)
        try:
            compression = obj["compression"]
            if compression not in SUFFIXES:
                raise ManifestError(
                    f'"compression" must be "GZIP", "ZLIB" or "", got {compression!r} ({where}).'
                )
            any_name = obj["source"].get("format") == INDEX_FORMAT
            splits = {
                name: _split_from_json(name, split, None if any_name else compression, where)
                for name, split in obj["splits"].items()
            }
            if not splits:
                raise ManifestError(f"a manifest must name at least one split, got none ({where}).")
            names = [shard.name for split in splits.values() for shard in split.shards]
            if doubled := sorted({name for name in names if names.count(name) > 1} if any_name else ()):
                raise ManifestError(f"each shard must be named once, got {doubled[0]!r} twice ({where}).")
            return cls(
                schema=schema,
                splits=splits,
                compression=compression,
                num_rejected=int(obj["rejected"]["num_records"]),
                statistics=obj["statistics"],
                source=obj["source"],
                shuffle_seed=obj["shuffle"]["seed"],
                created_by=obj["created_by"],
                directory=directory,
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ManifestError(
                f"a manifest must have every field of format version {FORMAT_VERSION}, "
                f"got {type(error).__name__}: {error} ({where})."
            ) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, check_files: bool = True) -> Manifest:
        """Loads a dataset's manifest and checks that its shards are there.

        Args:
            path: the dataset directory, or the manifest file in it.
            check_files: whether every shard must be there with its size; `verify` finds that
                out by itself, for all shards.

        Returns:
            The manifest; with `check_files` every shard it names exists with the size it names.

        Raises:
            ManifestError: no manifest (says what was found instead), another version, or
                shards missing or of another size.
            SchemaError: the schema in it is malformed.
        """
        file = Path(path)
        if file.name != FILE_NAME:
            file = file / FILE_NAME
        try:
            text = file.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            raise ManifestError(_describe_absence(file.parent)) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ManifestError(f"a manifest must be readable, got {error} ({file}).") from None
        try:
            obj = json.loads(text)
        except ValueError as error:
            raise ManifestError(f"a manifest must be JSON, got {error} ({file}).") from None
        manifest = cls.from_json(obj, where=str(file), directory=file.parent)
        if check_files:
            manifest._check_shards_exist()
        return manifest

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes `manifest.json` atomically: temporary file, fsync, rename.

        Args:
            directory: the dataset directory; every shard already lies in it.

        Returns:
            The manifest's path.

        Raises:
            OSError: the directory can't be written.
        """
        target = Path(directory) / FILE_NAME
        handle, temporary = tempfile.mkstemp(prefix=".manifest-", dir=directory)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(self.to_json(), file, indent=1, ensure_ascii=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
        return target

    def paths(self, split: str) -> list[str]:
        """The shards' full paths in manifest order.

        Args:
            split: the split's name.

        Returns:
            One path a shard.

        Raises:
            ManifestError: no such split, or the manifest was not loaded from a directory.
        """
        if self.directory is None:
            raise ManifestError("a manifest must be loaded from a directory to name its shards' paths.")
        return [str(self.directory / shard.name) for shard in self.split(split).shards]

    def split(self, name: str) -> Split:
        """The split of that name.

        Raises:
            ManifestError: no such split; names those that exist.
        """
        try:
            return self.splits[name]
        except KeyError:
            raise ManifestError(
                f"split must be one of {', '.join(sorted(self.splits))}, got {name!r} ({self.directory})."
            ) from None

    def unlisted_files(self) -> list[str]:
        """Files that look like shards but that the manifest does not name: never read, worth a warning."""
        if self.directory is None:
            return []
        listed = {shard.name for split in self.splits.values() for shard in split.shards}
        return sorted(
            entry.name
            for entry in os.scandir(self.directory)
            if ".tfrecord" in entry.name and entry.name not in listed
        )

    def verify(self, on_shard: Callable[[Shard], None] | None = None) -> list[str]:
        """Reads every shard from end to end and compares it with the manifest.

        Args:
            on_shard: called after each shard, for a progress bar.

        Returns:
            One sentence a fault, empty if the dataset is whole: each shard's size, SHA-256,
            number of records and every record's checksum.

        Raises:
            ManifestError: the manifest was not loaded from a directory.
        """
        faults = []
        for name in self.splits:
            for path, shard in zip(self.paths(name), self.splits[name].shards, strict=True):
                try:
                    content = read_shard(path, self.compression)
                except ShardError as error:
                    faults.append(str(error))
                else:
                    faults += [
                        f"{key} must be {getattr(shard, key)}, got {getattr(content, key)} ({path})."
                        for key in ("num_records", "num_bytes", "uncompressed_bytes", "sha256")
                        if getattr(shard, key) != getattr(content, key)
                    ]
                if on_shard is not None:
                    on_shard(shard)
        return faults

    def _check_shards_exist(self) -> None:
        for name in self.splits:
            for path, shard in zip(self.paths(name), self.splits[name].shards, strict=True):
                try:
                    found = os.stat(path).st_size
                except OSError as error:
                    raise ShardError(
                        f"every shard in the manifest must be there, got {error.strerror} ({path}). "
                        f"Restore the file or convert the source again."
                    ) from None
                if found != shard.num_bytes:
                    raise ShardError(
                        f"a shard must have the {shard.num_bytes} bytes that the manifest names, "
                        f"got {found} ({path}). Restore the file or convert the source again."
                    )


def _split_from_json(name: str, obj: Mapping[str, Any], compression: str | None, where: str) -> Split:
    """Reads a split; without a compression its shards may have any name of a file in the directory."""
    shards = []
    for index, entry in enumerate(obj["shards"]):
        shard = Shard(**entry)
        if compression is None:
            plain = isinstance(shard.name, str) and not re.search(r"[/\\\0]", shard.name)
            expected = (
                shard.name if plain and shard.name not in ("", ".", "..") else "a file in the directory"
            )
        else:
            expected = shard_name(name, index, len(obj["shards"]), compression)
        if shard.name != expected:
            raise ManifestError(
                f"shard {index} of split {name!r} must be named {expected}, got {shard.name!r} ({where})."
            )
        for key in ("num_records", "num_bytes", "uncompressed_bytes"):
            value = getattr(shard, key)
            if not isinstance(value, int) or value < 0:
                raise ManifestError(
                    f"{key} must be a non-negative integer, got {value!r} ({where}: {shard.name})."
                )
        shards.append(shard)
    split = Split(shards=tuple(shards))
    if split.num_records != obj["num_records"]:
        raise ManifestError(
            f"num_records of split {name!r} must be its shards' sum {split.num_records}, "
            f"got {obj['num_records']!r} ({where})."
        )
    return split


def check_finished(directory: str | os.PathLike[str]) -> None:
    """Makes sure that no conversion into a directory is at work, or was left unfinished.

    Args:
        directory: of files without a manifest.

    Raises:
        ManifestError: one is.
    """
    if staging := sorted(name for name in os.listdir(directory) if name.startswith(STAGING_PREFIX)):
        raise ManifestError(
            f"a directory must hold finished files, got a conversion that did not finish "
            f"({os.path.join(directory, staging[0])}). Run it again, or remove what it left."
        )


def _describe_absence(directory: Path) -> str:
    if not directory.exists():
        return f"a dataset directory must exist, got none ({directory}). Convert it with beam_jobs.convert."
    if not directory.is_dir():
        return f"a dataset must be a directory with a {FILE_NAME}, got a file ({directory})."
    names = sorted(entry.name for entry in os.scandir(directory))
    shards = [name for name in names if _SHARD_NAME.fullmatch(name)]
    staging = [name for name in names if name.startswith(STAGING_PREFIX)]
    if staging or shards:
        found = ", ".join((staging + shards)[:3])
        return (
            f"a dataset must have a {FILE_NAME} (it is written last), got {len(names)} other files "
            f"({directory}: {found}). The conversion did not finish: run it again into an empty directory."
        )
    found = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "an empty directory"
    remedy = "Convert it with beam_jobs.convert."
    if any(".tfrecord" in name for name in names):
        remedy = f"Describe the TFRecord files with: tfpipe index {directory}"
    return f"a dataset must have a {FILE_NAME}, got {found} ({directory}). {remedy}"
