"""The classes of images: the folders that they lie in, numbered by code point or as another dataset does.

Comes in: files with the directory that the input named. Goes out: the names of the classes, the
number of each being its place; none where all images lie directly in that directory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from beam_jobs.sources import ImageOptions, InputFile
from tfpipe.errors import RecordError, SchemaError, UsageError
from tfpipe.manifest import Manifest

SHOWN_CLASSES = 10


def relative_path(file: InputFile) -> str:
    """A file's path below the directory that the input named, with "/" between its parts."""
    return file.path[len(file.root) :].lstrip("/")


def class_name(file: InputFile) -> str:
    """The folder of a file, below the directory that the input named; "" for none."""
    return os.path.dirname(relative_path(file))


def check_names(files: Sequence[InputFile]) -> None:
    """Makes sure that every path can become text.

    Raises:
        RecordError: one is no UTF-8.
    """
    for file in files:
        try:
            file.path.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(file.path).decode("utf-8", "backslashreplace")
            raise RecordError(
                f"an image's path must be UTF-8, since it becomes the feature `path`, got {shown!r}. Rename it."
            ) from None


def find_classes(files: Sequence[InputFile], how: ImageOptions) -> tuple[str, ...]:
    """Finds the classes.

    Args:
        files: in order.
        how: the classes are to be numbered.

    Returns:
        Their names, by number; none where the files lie in no folders.

    Raises:
        RecordError: a class is unknown, or some files lie in folders and others do not.
        UsageError: numbers are asked for where there are no classes.
        ManifestError: the dataset whose numbers are asked for can't be read.
        SchemaError: it has none.
    """
    examples: dict[str, str] = {}
    for file in files:
        examples.setdefault(class_name(file), file.path)
    if "" in examples and len(examples) > 1:
        inside = next(path for name, path in examples.items() if name)
        raise RecordError(
            f"all images must lie in class folders, or none, got {examples['']} beside {inside}. "
            f"Move the first kind into folders, or convert them apart."
        )
    known = _known_classes(how.labels_from) if how.labels_from else tuple(sorted(examples))
    if "" in examples:
        if how.labels_from:
            raise UsageError(
                f"--labels-from must come with images in class folders, got none ({examples['']}). "
                f"Name the folder above as --input, or leave the option out."
            )
        return ()
    for name in sorted(examples.keys() - set(known)):
        shown = ", ".join(known[:SHOWN_CLASSES]) + (", ..." if len(known) > SHOWN_CLASSES else "")
        raise RecordError(
            f"every class must be known to --labels-from {how.labels_from}, got {name!r} "
            f"({os.path.dirname(examples[name])}); there are {shown}. Rename the folder, or leave it out."
        )
    return known


def _known_classes(path: str) -> tuple[str, ...]:
    schema = Manifest.load(path, check_files=False).schema
    named = {name: feature.labels for name, feature in schema.features.items() if feature.labels}
    labels = named.get("label") or (next(iter(named.values())) if len(named) == 1 else None)
    if not labels or len(set(labels)) < len(labels):
        raise SchemaError(
            f"--labels-from must name a dataset whose feature `label` has labels, each once, got "
            f"{', '.join(f'{name} ({feature.dtype})' for name, feature in schema.features.items())} ({path}). "
            f"Name the one made of the training images."
        )
    return labels
