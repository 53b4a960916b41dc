"""What the features' values are like: counted while they are written, merged in the order of the input.

    statistics = DatasetStatistics(schema)
    statistics.add(batch)                 # Arrow record batch of features
    statistics.merge(those of the next input split)
    statistics.describe()                 # the manifest's form

Counts, extremes and the number of distinct values below the sketch's size are exact. Mean and
standard deviation are merged as they are, not as sums of squares, which cancel. The result does not
depend on who counted what, since input splits and batches don't.

Source: Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance" (merging);
Bar-Yossef et al. 2002, Beyer et al. 2007 (distinct values from the k smallest hashes: standard error
1 / sqrt(k - 2)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from beam_jobs.encode import text_buffers
from beam_jobs.hashing import hash_array
from beam_jobs.kernels import kernel
from beam_jobs.sources.fit import is_list, list_lengths
from tfpipe.schema import TEXT_DTYPES, Feature, Schema

# Hashes kept of a feature, and of all together: 512 make an estimate's standard error 4.4 %, 64 12.7 %.
SKETCH_MAX, SKETCH_MIN, SKETCHES_MAX = 512, 64, 100_000
# A feature with more distinct values than this, or with longer ones, is hardly one of classes.
CLASSES_MAX, CLASS_NAME_MAX = 100, 100
_SAMPLE = 1000


@kernel
def _count_bytes(values, counts):
    """Adds how often each value of uint8[] occurs to int64[256]."""
    for i in range(len(values)):
        counts[values[i]] += 1


@dataclass(kw_only=True)
class FeatureStatistics:
    """Of one feature. Of a tensor or a list: of the numbers in it.

    Attributes:
        sketch_size: hashes to keep.
        rows: records.
        nulls: records without a value.
        lowest: of the finite numbers, exact; None if there is none. Of text: of its bytes.
        highest: likewise.
        finite: how many there are.
        mean: theirs.
        squares: sum of the squared distances from the mean.
        nan: how many.
        infinite: how many.
        lengths: lowest and highest number of values in a list whose length differs.
        values: in all lists.
        sketch: uint64[], the lowest hashes of the values of a scalar, ascending, each once.
        counts: of each value of a scalar; None once there are too many.
    """

    sketch_size: int
    rows: int = 0
    nulls: int = 0
    lowest: Any = None
    highest: Any = None
    finite: int = 0
    mean: float = 0.0
    squares: float = 0.0
    nan: int = 0
    infinite: int = 0
    lengths: list[int] | None = None
    values: int = 0
    sketch: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    counts: dict[Any, int] | None = field(default_factory=dict)

    def add(self, array: pa.Array, feature: Feature) -> None:
        """Takes the values of some records into account."""
        self.rows += len(array)
        self.nulls += array.null_count
        if array.null_count == len(array):
            return
        present = array.drop_null() if array.null_count else array
        if is_list(present.type):
            if feature.num_elements is None:
                sizes = list_lengths(present)
                self._add_lengths([int(sizes.min()), int(sizes.max())], int(sizes.sum()))
            present = present.flatten()
        if feature.dtype in TEXT_DTYPES:
            self._add_texts(present, scalar=feature.shape == ())
        elif len(present):
            self._add_numbers(present, scalar=feature.shape == ())
        if feature.shape == () and feature.dtype != "bytes":
            self._add_counts(present, feature)
        else:
            self.counts = None

    def merge(self, other: FeatureStatistics) -> None:
        """Takes the records that follow into account."""
        for name in ("rows", "nulls", "nan", "infinite"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.lengths is not None:
            self._add_lengths(other.lengths, other.values)
        if other.finite:
            self._add_moments(other.lowest, other.highest, other.finite, other.mean, other.squares)
        self._add_hashes(other.sketch)
        if self.counts is not None:
            self._merge_counts(other.counts)

    def describe(self, feature: Feature) -> dict[str, Any]:
        """The manifest's form: plain values, in a stable order."""
        result: dict[str, Any] = {"nulls": self.nulls}
        text = feature.dtype in TEXT_DTYPES
        if self.finite:
            names = ("min_bytes", "max_bytes", "mean_bytes") if text else ("min", "max", "mean")
            result |= dict(zip(names, (self.lowest, self.highest, self.mean), strict=True))
            if not text:
                result["std"] = math.sqrt(self.squares / self.finite)
            # Beyond the largest float there is no number to tell.
            result = {k: v for k, v in result.items() if not isinstance(v, float) or math.isfinite(v)}
        if self.lengths is not None:
            low, high = self.lengths
            result |= {
                "min_length": low,
                "max_length": high,
                "mean_length": self.values / (self.rows - self.nulls),
            }
        for name in ("nan", "infinite"):
            if getattr(self, name):
                result[name] = getattr(self, name)
        if feature.shape == ():
            if len(self.sketch) < self.sketch_size:
                result["distinct"] = len(self.sketch)
            else:
                result["distinct_estimate"] = round((self.sketch_size - 1) / (int(self.sketch[-1]) / 2.0**64))
        if self.counts:
            order = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
            result["counts"] = {_key(value): count for value, count in order}
        return result

    def _add_texts(self, texts: pa.Array, *, scalar: bool) -> None:
        if not len(texts):
            return
        sizes = np.diff(text_buffers(texts)[0])
        self._add_moments(int(sizes.min()), int(sizes.max()), len(sizes), float(sizes.mean()), 0.0)
        if scalar:
            self._add_hashes(hash_array(texts))

    def _add_numbers(self, array: pa.Array, *, scalar: bool) -> None:
        if pa.types.is_boolean(array.type):
            array = array.cast(pa.uint8())
        values = array.to_numpy(zero_copy_only=False)
        if values.dtype == np.uint8 and len(values) > 256:
            counts = np.zeros(256, np.int64)
            _count_bytes(values, counts)
            kinds = np.flatnonzero(counts)
            mean = float((kinds * counts[kinds]).sum() / len(values))
            squares = float(((kinds - mean) ** 2 * counts[kinds]).sum())
            self._add_moments(int(kinds[0]), int(kinds[-1]), len(values), mean, squares)
            values = kinds.astype(np.uint8)  # what is left to tell of them does not depend on how many
        elif values.dtype.kind == "f":
            good = np.isfinite(values)
            if not good.all():
                nan = int(np.isnan(values).sum())
                self.nan += nan
                self.infinite += len(values) - int(good.sum()) - nan
                values = values[~np.isnan(values)]
                self._add_values(values[np.isfinite(values)])
            else:
                self._add_values(values)
        else:
            self._add_values(values)
        if scalar:
            self._add_hashes(hash_array(pa.array(values)))

    def _add_values(self, values: np.ndarray) -> None:
        if not len(values):
            return
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(values.mean(dtype=np.float64))
            squares = float(np.square(np.subtract(values, mean, dtype=np.float64)).sum())
        self._add_moments(values.min().item(), values.max().item(), len(values), mean, squares)

    def _add_moments(self, low: Any, high: Any, count: int, mean: float, squares: float) -> None:
        self.lowest = low if self.lowest is None else min(self.lowest, low)
        self.highest = high if self.highest is None else max(self.highest, high)
        total = self.finite + count
        distance = mean - self.mean
        self.mean += distance * count / total
        self.squares += squares + distance * distance * self.finite * count / total
        self.finite = total

    def _add_lengths(self, lengths: list[int], values: int) -> None:
        low, high = self.lengths or lengths
        self.lengths = [min(low, lengths[0]), max(high, lengths[1])]
        self.values += values

    def _add_hashes(self, hashes: np.ndarray) -> None:
        if len(self.sketch) == self.sketch_size:
            hashes = hashes[hashes < self.sketch[-1]]
        if len(hashes):
            self.sketch = np.union1d(self.sketch, hashes)[: self.sketch_size]

    def _add_counts(self, array: pa.Array, feature: Feature) -> None:
        if self.counts is None or not len(array):
            return
        if feature.dtype.startswith("float") or len(array[:_SAMPLE].unique()) > CLASSES_MAX:
            self.counts = None
            return
        found = array.value_counts()
        values = found.field("values").to_pylist()
        if len(values) > CLASSES_MAX or any(isinstance(v, str) and len(v) > CLASS_NAME_MAX for v in values):
            self.counts = None
            return
        self._merge_counts(dict(zip(values, found.field("counts").to_pylist(), strict=True)))

    def _merge_counts(self, other: dict[Any, int] | None) -> None:
        assert self.counts is not None
        merged = dict(self.counts)
        for value, count in (other or {}).items():
            merged[value] = merged.get(value, 0) + count
        self.counts = None if other is None or len(merged) > CLASSES_MAX else merged

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a file."""
        counts = None if self.counts is None else list(self.counts.items())
        return vars(self) | {"sketch": self.sketch.tolist(), "counts": counts}

    @classmethod
    def from_json(cls, obj: dict[str, Any]) -> FeatureStatistics:
        """What `to_json` gave."""
        counts = None if obj["counts"] is None else {value: count for value, count in obj["counts"]}
        return cls(**obj | {"sketch": np.array(obj["sketch"], np.uint64), "counts": counts})


class DatasetStatistics:
    """Of all features.

    Args:
        schema: of the examples.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        size = min(SKETCH_MAX, max(SKETCH_MIN, SKETCHES_MAX // len(schema.features)))
        self.features = {name: FeatureStatistics(sketch_size=size) for name in schema.features}

    def add(self, batch: pa.RecordBatch) -> None:
        """Takes some records into account: one column a feature, in the dtype that the schema names."""
        for name, feature in self.schema.features.items():
            self.features[name].add(batch.column(name), feature)

    def merge(self, other: DatasetStatistics) -> None:
        """Takes the records that follow into account."""
        for name, statistics in self.features.items():
            statistics.merge(other.features[name])

    def describe(self) -> dict[str, dict[str, Any]]:
        """The manifest's form, one object a feature."""
        return {name: self.features[name].describe(feature) for name, feature in self.schema.features.items()}

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {name: statistics.to_json() for name, statistics in self.features.items()}

    def load(self, obj: dict[str, Any]) -> DatasetStatistics:
        """Takes what `to_json` gave for its own."""
        self.features = {name: FeatureStatistics.from_json(found) for name, found in obj.items()}
        return self


def _key(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
