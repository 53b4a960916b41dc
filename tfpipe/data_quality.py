"""What a dataset's statistics warn of: said after a conversion and by `tfpipe inspect` (pure).

    >>> for warning in data_warnings(Manifest.load("data/mnist")):
    ...     print(warning)

A label is an int64 feature with named classes, or a scalar feature whose name is one of `LABEL_NAMES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tfpipe.manifest import Manifest
from tfpipe.schema import Feature

LABEL_NAMES = ("label", "labels", "target", "y", "class")
# The largest class over the smallest from which on plain accuracy and random batches mislead. A rule of
# thumb: a batch of 256 then holds a class of ten with its fair share 3 times or less.
SKEW_FACTOR = 10


def data_warnings(manifest: Manifest) -> list[str]:
    """Finds what is likely to spoil training.

    Args:
        manifest: with the statistics of a conversion; without some of them, less is told.

    Returns:
        One sentence a finding, features in the schema's order.

    Raises:
        Nothing.
    """
    num_records = sum(split.num_records for split in manifest.splits.values())
    found = []
    for name, feature in manifest.schema.features.items():
        statistics = manifest.statistics.get(name)
        if isinstance(statistics, Mapping):
            found += [f"{name}: {text}" for text in _of_feature(name, feature, statistics, num_records)]
    return found


def is_label(name: str, feature: Feature) -> bool:
    """Whether a feature is what is to be learned, as far as its classes or its name tell."""
    return feature.shape == () and (feature.labels is not None or name.lower() in LABEL_NAMES)


def _of_feature(
    name: str, feature: Feature, statistics: Mapping[str, Any], num_records: int
) -> Iterator[str]:
    nulls = statistics.get("nulls", 0)
    if nulls and nulls == num_records:
        yield "every value is missing"
        return
    label = is_label(name, feature)
    if label and nulls:
        yield f"{nulls:,} of {num_records:,} records have no label; fill or drop them, they are no class 0"
    for kind, what in (("nan", "NaN"), ("infinite", "infinite")):
        if count := statistics.get(kind):
            yield f"{count:,} values are {what}; one of them in a batch makes the loss NaN"
    constant = statistics.get("distinct") == 1 and not (nulls or statistics.get("nan"))
    if constant and num_records > 1:
        yield "every record has the same value, so nothing can be learned from it"
    elif label and isinstance(statistics.get("counts"), Mapping):
        yield from _of_classes(feature, statistics["counts"])


def _of_classes(feature: Feature, counts: Mapping[str, int]) -> Iterator[str]:
    names = feature.labels or ()
    unseen = [names[i] for i in range(len(names)) if str(i) not in counts]
    if unseen:
        shown = ", ".join(unseen[:5]) + (f" and {len(unseen) - 5} more" if len(unseen) > 5 else "")
        yield f"no record is of class {shown}"

    def named(key: str) -> str:
        return names[int(key)] if key.isdecimal() and int(key) < len(names) else key

    largest, smallest = max(counts, key=lambda k: counts[k]), min(counts, key=lambda k: counts[k])
    if counts[largest] >= SKEW_FACTOR * counts[smallest]:
        yield (
            f"classes are uneven: {counts[largest]:,} records of {named(largest)}, {counts[smallest]:,} of "
            f"{named(smallest)}; weigh the loss by class, and look at each class's accuracy"
        )
