"""Which files of a directory hold TFRecords, of which split and compression: for `tfpipe.index`.

A file's split is the last of `SPLIT_WORDS` in its name, else "train": `train-00000-of-00010.gz`
and `foo_train.tfrecord-00001-of-00002` are of split "train", `cats-Validation3.tfrecord` of
"validation", `part-r-00000` of "train". With patterns the first that a name matches names its
split, and a file that matches none is left out. So is a file without records, as many writers
leave them: it holds nothing to read. TensorFlow decompresses as it is told, whatever a file's
name says, so names stay as they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from tfpipe.errors import ManifestError, ShardError, UsageError
from tfpipe.manifest import FILE_NAME
from tfpipe.tfrecord import is_tfrecord, sniff_compression

SPLIT_WORDS = ("train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval",
               "evaluation", "holdout")  # fmt: skip
_DATASET_FILES = (FILE_NAME, "rejected.jsonl")


@dataclass(kw_only=True)
class TFRecordFiles:
    """What lies in a directory.

    Attributes:
        files: TFRecord files with their split and compression, in natural order of names.
        unnamed: names among them without a word for a split.
        unmatched: names that no pattern matches.
        empty: names of files without records.
        other: files that are no TFRecords, counted by suffix.
        hidden: how many files' names begin with a dot.
    """

    files: list[tuple[Path, str, str]] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    other: Counter[str] = field(default_factory=Counter)
    hidden: int = 0

    def notices(self) -> list[str]:
        """Sentences that the user should read."""
        lines = []
        if self.unnamed:
            lines.append(
                f"in split 'train', since no split is in their names: {name_some(self.unnamed)}; "
                f"--split NAME=GLOB says otherwise"
            )
        if self.unmatched:
            lines.append(f"left out, since no --split matches: {name_some(self.unmatched)}")
        if self.empty:
            lines.append(f"left out, since without records: {name_some(self.empty)}")
        if self.other or self.hidden:
            lines.append(f"left out, since no TFRecord files: {self.left_out()}")
        return lines

    def left_out(self) -> str:
        """What is no TFRecord file, as one text."""
        parts = [f"{count} {suffix}" for suffix, count in sorted(self.other.items())]
        return ", ".join(parts + ([f"{self.hidden} hidden"] if self.hidden else []))


def find_tfrecord_files(directory: Path, split_patterns: Sequence[tuple[str, str]]) -> TFRecordFiles:
    """Looks at every file of a directory, not at those in directories below it.

    Args:
        directory: to look at.
        split_patterns: a split's name and a pattern (fnmatch) of file names, in order.

    Returns:
        What was found, by first bytes and names.

    Raises:
        UsageError: a pattern is the first to match for no file.
        ShardError: a file can't be read, or is named as TFRecords and begins otherwise.
    """
    found = TFRecordFiles()
    matched = set()
    for path in sorted(directory.iterdir(), key=lambda path: _natural(path.name)):
        name = path.name
        if name in _DATASET_FILES or not (path.is_file() or path.is_symlink()) or path.is_dir():
            continue
        if name.startswith("."):
            found.hidden += 1
            continue
        pair = next((pair for pair in split_patterns if fnmatchcase(name, pair[1])), None)
        if split_patterns and pair is None:
            found.unmatched.append(name)
            continue
        matched.add(pair)
        compression = _compression_of(path)
        if compression is None:
            found.other[path.suffix.lower() or "without a suffix"] += 1
            continue
        if compression == "no record":
            found.empty.append(name)
            continue
        split = pair[0] if pair else _split_in(name)
        if split is None:
            found.unnamed.append(name)
        found.files.append((path, split or "train", compression))
    for pair in split_patterns:
        if pair not in matched:
            raise UsageError(
                f"--split must match a file that none before it matches, got {'='.join(pair)!r} ({directory})."
            )
    return found


def _compression_of(path: Path) -> str | None:
    """The compression of TFRecords, "no record" if there is none, None for any other file."""
    named = ".tfrecord" in path.name.lower()
    try:
        if named and not path.stat().st_size:
            return "no record"
        compression = sniff_compression(path)
        # Other files are compressed too: then the first record tells.
        if compression and not named and not is_tfrecord(path):
            return None
    except OSError as error:
        raise ShardError(f"a file must be readable, got {error.strerror} ({path}).") from None
    if compression is None and named:
        raise ShardError(
            f"a file with .tfrecord in its name must begin with a TFRecord, plain or compressed with gzip "
            f"or zlib, got other bytes ({path}). Restore it from a copy, or move it away."
        )
    return compression


def _split_in(name: str) -> str | None:
    words = [word for word in re.findall("[a-z]+", name.lower()) if word in SPLIT_WORDS]
    return words[-1] if words else None


def _natural(name: str) -> tuple[list[tuple[int, str]], str]:
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts], name


def only_compression(directory: Path, found: TFRecordFiles) -> str:
    """The compression of all files.

    Args:
        directory: named in errors.
        found: its files.

    Returns:
        "GZIP", "ZLIB" or "".

    Raises:
        ManifestError: no TFRecord file, or several compressions.
    """
    if not found.files:
        others = [*found.empty, *found.unmatched]
        got = f"{name_some(others)} without records or split" if others else found.left_out() or "none"
        raise ManifestError(
            f"a directory must hold TFRecord files to be indexed, got {got} ({directory}). "
            f"Files in directories below are not looked at; convert other files with beam_jobs.convert."
        )
    first, _, compression = found.files[0]
    for path, _, other in found.files:
        if other != compression:
            raise ManifestError(
                f"all TFRecord files must have one compression, got {compression or 'none'} ({first.name}) and "
                f"{other or 'none'} ({path.name}) ({directory}). Move the ones into a directory of their "
                f"own, or choose files with --split NAME=GLOB."
            )
    return compression


def name_some(names: Sequence[str], limit: int = 5) -> str:
    """The first names, and how many more there are.

    Args:
        names: of files or features.
        limit: names at most.

    Returns:
        Text for a message.
    """
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
