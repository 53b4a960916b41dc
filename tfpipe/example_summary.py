"""What all records of TFRecord files hold: counts that merge, and the schema that follows from them.

    >>> summary = ExampleSummary()
    >>> for index, payload in enumerate(ShardReader("a.tfrecord", "")):
    ...     summary.add(payload, Place("a.tfrecord", index))
    >>> summary.infer()[0].features["label"]
    Feature(dtype='int64', shape=(), encoding='int64_list', nullable=False, labels=None)

Numbers are looked at many at a time, so that a record costs little more than its parsing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfpipe.errors import SchemaError
from tfpipe.examples import Place, Values, decode_numbers, parse_example
from tfpipe.schema import TEXT_DTYPES, Feature, Schema

# Encoded numbers of one feature that wait for the next look at many of them at once.
_PENDING_BYTES = 16 << 10
_NUMBER_DTYPES = {"float_list": "float32", "int64_list": "int64"}


@dataclass(slots=True)
class Range:
    """Sizes seen: the lowest, the highest, where each first was, the divisor of all, their sum."""

    low: int = sys.maxsize
    high: int = -1
    low_at: Place | None = None
    high_at: Place | None = None
    divisor: int = 0
    total: int = 0

    def add(self, size: int, place: Place) -> None:
        """Takes one size into account."""
        if size < self.low:
            self.low, self.low_at = size, place
        if size > self.high:
            self.high, self.high_at = size, place
        self.divisor = math.gcd(self.divisor, size)
        self.total += size

    def merge(self, other: Range) -> None:
        """Takes the sizes of what follows into account."""
        if other.low < self.low:
            self.low, self.low_at = other.low, other.low_at
        if other.high > self.high:
            self.high, self.high_at = other.high, other.high_at
        self.divisor = math.gcd(self.divisor, other.divisor)
        self.total += other.total


@dataclass(slots=True)
class FeatureSummary:
    """What all records hold of one feature.

    Attributes:
        kind: of its list.
        first: the first record that has it.
        records: that have it, be its list empty or not.
        empty: records whose list is empty.
        counts: values of a record, where there are any.
        lengths: bytes of a value of a bytes_list.
        opaque: the first record with a value that is not UTF-8 text.
        low: the lowest finite number; int or float as the kind is.
        high: the highest finite number.
        finite: how many of them.
        total: their sum.
        nan: how many.
        infinite: how many.
    """

    kind: str
    first: Place
    records: int = 0
    empty: int = 0
    counts: Range = field(default_factory=Range)
    lengths: Range = field(default_factory=Range)
    opaque: Place | None = None
    low: float = math.inf
    high: float = -math.inf
    finite: int = 0
    total: float = 0.0
    nan: int = 0
    infinite: int = 0
    _pending: bytearray = field(default_factory=bytearray)

    def add(self, values: Values, place: Place) -> None:
        """Takes one record's list, which is of this kind, into account."""
        self.records += 1
        if not values.count:
            self.empty += 1
            return
        self.counts.add(values.count, place)
        for chunk in values.chunks:
            if self.kind != "bytes_list":
                self._pending += chunk
                continue
            self.lengths.add(len(chunk), place)
            if self.opaque is None and not chunk.isascii():
                try:
                    chunk.decode()
                except UnicodeDecodeError:
                    self.opaque = place
        if len(self._pending) >= _PENDING_BYTES:
            self.settle()

    def settle(self) -> None:
        """Takes the numbers that wait into account."""
        if not self._pending:
            return
        values = decode_numbers(self.kind, self._pending)
        self._pending = bytearray()
        if self.kind == "float_list" and not (good := np.isfinite(values)).all():
            nan = int(np.isnan(values).sum())
            self.nan += nan
            self.infinite += len(values) - int(good.sum()) - nan
            values = values[good]
        if len(values):
            self.low = min(self.low, values.min().item())
            self.high = max(self.high, values.max().item())
            self.finite += len(values)
            self.total += float(values.sum(dtype=np.float64))

    def merge(self, other: FeatureSummary) -> None:
        """Takes the records that follow into account; both are of one kind."""
        self.settle()
        other.settle()
        for name in ("records", "empty", "finite", "total", "nan", "infinite"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.counts.merge(other.counts)
        self.lengths.merge(other.lengths)
        self.opaque = self.opaque or other.opaque
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    def absent(self, feature: Feature, num_records: int) -> int:
        """Records that have no value of the feature.

        An empty list is a value where lengths differ: unless the feature is raw, whose one value
        is the whole tensor.
        """
        empty_is_null = feature.encoding == "raw" or None not in feature.shape
        return num_records - self.records + (self.empty if empty_is_null else 0)

    def infer(self, num_records: int) -> Feature:
        """The feature that takes every record as it is."""
        if self.kind == "bytes_list":
            dtype = "string" if self.opaque is None else "bytes"
        else:
            dtype = _NUMBER_DTYPES[self.kind]
        low, high = self.counts.low, self.counts.high
        shape: tuple[int | None, ...] = () if low == high == 1 else (low if low == high else None,)
        feature = Feature(dtype=dtype, shape=shape, encoding=self.kind)
        nullable = self.absent(feature, num_records) > 0
        return Feature(dtype=dtype, shape=shape, encoding=self.kind, nullable=nullable)

    def statistics(self, feature: Feature, num_records: int) -> dict[str, Any]:
        """The manifest's form: nulls; min, max, mean of finite numbers, or lengths of text."""
        self.settle()
        result: dict[str, Any] = {"nulls": self.absent(feature, num_records)}
        if feature.dtype in TEXT_DTYPES:
            result["max_bytes"] = max(self.lengths.high, 0)
            result["mean_bytes"] = self.lengths.total / max(self.counts.total, 1)
        elif self.finite:
            result |= {"min": self.low, "max": self.high, "mean": self.total / self.finite}
        if self.nan:
            result["nan"] = self.nan
        if self.infinite:
            result["infinite"] = self.infinite
        return result


class ExampleSummary:
    """What all records hold, feature by feature.

    Args:
        only: the features to look at; None for all.

    Attributes:
        num_records: seen.
        features: by name, where any record has it.
        ignored: names of features that were seen but not asked for.
        bare_records: records without a feature.
        other_fields: records that hold more than an Example's features.
    """

    def __init__(self, only: Collection[str] | None = None) -> None:
        self.only = only
        self.num_records = 0
        self.features: dict[str, FeatureSummary] = {}
        self.ignored: set[str] = set()
        self.bare_records = 0
        self.other_fields = 0

    def add(self, payload: bytes, place: Place) -> None:
        """Takes one record into account.

        Args:
            payload: a serialized tf.train.Example.
            place: where it lies, for errors.

        Raises:
            RecordError: it is none.
            SchemaError: a feature has a list of another kind than in an earlier record.
        """
        example = parse_example(payload, place)
        self.num_records += 1
        self.bare_records += not example.features
        self.other_fields += example.other_fields
        for name, values in example.features.items():
            if self.only is not None and name not in self.only:
                self.ignored.add(name)
            elif values.kind:  # a feature that names no list is read as an absent one
                summary = self.features.get(name)
                if summary is None:
                    summary = self.features[name] = FeatureSummary(values.kind, place)
                elif summary.kind != values.kind:
                    raise _disagreement(name, summary.kind, summary.first, values.kind, place)
                summary.add(values, place)

    def merge(self, other: ExampleSummary) -> None:
        """Takes the records that follow these into account.

        Args:
            other: their summary; not to be used any more.

        Raises:
            SchemaError: a feature has lists of different kinds.
        """
        self.num_records += other.num_records
        self.ignored |= other.ignored
        self.bare_records += other.bare_records
        self.other_fields += other.other_fields
        for name, theirs in other.features.items():
            ours = self.features.setdefault(name, theirs)
            if ours.kind != theirs.kind:
                raise _disagreement(name, ours.kind, ours.first, theirs.kind, theirs.first)
            if ours is not theirs:
                ours.merge(theirs)

    def infer(self) -> tuple[Schema, list[str]]:
        """The schema that takes every record as it is, features by name.

        Returns:
            The schema, and sentences that the user should read.

        Raises:
            SchemaError: no record has a value that could be a feature.
        """
        valued = {name: found for name, found in sorted(self.features.items()) if name and found.counts.total}
        if not valued:
            raise SchemaError(
                f"a record must have a feature with a value, got none in {self.num_records} records"
                + (
                    " (they hold other fields, as a tf.train.SequenceExample does)"
                    if self.other_fields
                    else ""
                )
            )
        notices = []
        if left_out := sorted(self.features.keys() - valued.keys()):
            names = ", ".join(map(repr, left_out))
            notices.append(f"left out, since no record has a value of them, or for want of a name: {names}")
        for name, found in valued.items():
            if found.opaque and found.counts.high == 1 and found.lengths.low == found.lengths.high > 1:
                notices.append(
                    f"{name}: every value has {found.lengths.low} bytes and is no text; if they are a "
                    f"tensor's, declare its dtype and shape with --schema"
                )
        features = {name: found.infer(self.num_records) for name, found in valued.items()}
        return Schema(features=features), notices

    def statistics(self, schema: Schema) -> dict[str, dict[str, Any]]:
        """The manifest's statistics.

        Args:
            schema: of the records.

        Returns:
            One object a feature.
        """
        return {
            name: self.features[name].statistics(feature, self.num_records)
            if name in self.features
            else {"nulls": self.num_records}
            for name, feature in schema.features.items()
        }


def _disagreement(name: str, kind: str, place: Place, other_kind: str, other_place: Place) -> SchemaError:
    return SchemaError(
        f"a feature must have lists of one kind, got {kind} ({place}) and {other_kind} ({other_place}) "
        f"in feature {name!r}. Write the records again, or declare only other features with --schema."
    )
