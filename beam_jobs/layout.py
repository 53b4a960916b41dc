"""Which source columns make which feature: packs, the inferred or declared schema (pure).

    >>> parse_pack("image=p0..p63:8x8")
    Pack(name='image', columns=('p0', ..., 'p63'), shape=(8, 8))

Numeric columns that are packed become one tensor feature, always `raw`: integers in the
narrowest of uint8, int16, int32, int64 that holds them all, other numbers as float32 where no
value loses a digit, else float64.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from beam_jobs.sources import SourceColumn, Wish
from beam_jobs.sources.csv_kernels import BOOL
from beam_jobs.sources.summary import INTEGER_DTYPES, ColumnSummary
from tfpipe.errors import SchemaError, UsageError
from tfpipe.schema import TEXT_DTYPES, Feature, Schema

_RANGE = re.compile(r"(.*?)(\d+)\.\.(.*?)(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """Columns that become one tensor feature."""

    name: str
    columns: tuple[str, ...]
    shape: tuple[int, ...]


def parse_pack(text: str) -> Pack:
    """Reads `NAME=COLUMNS[:SHAPE]`: ranges (`p0..p63`) and names, separated by commas; `8x8`.

    Args:
        text: as the user wrote it.

    Returns:
        The pack; its shape is one dimension where none is given.

    Raises:
        UsageError: another form, an empty range, a column twice, or a shape that does not fit.
    """
    name, equals, rest = text.partition("=")
    match = re.fullmatch(r"(.*):(\d+(?:x\d+)*)", rest)
    listed, shape_text = match.groups() if match else (rest, "")
    if not name or not equals or not listed:
        raise UsageError(
            f"--pack must have the form NAME=COLUMNS[:SHAPE], e.g. image=p0..p63:8x8, got {text!r}."
        )
    columns: list[str] = []
    for part in listed.split(","):
        if not (ranged := _RANGE.fullmatch(part)):
            columns.append(part)
            continue
        prefix, first, last_prefix, last = ranged.groups()
        if prefix != last_prefix or int(first) > int(last):
            raise UsageError(f"a range of columns must rise under one prefix, like p0..p63, got {part!r}.")
        width = len(first) if first.startswith("0") and len(first) == len(last) else 0
        columns += [f"{prefix}{i:0{width}d}" for i in range(int(first), int(last) + 1)]
    if (
        doubled := {column for column in columns if columns.count(column) > 1}
        if len(set(columns)) < len(columns)
        else ()
    ):
        raise UsageError(f"--pack must name each column once, got {min(doubled)!r} twice ({text!r}).")
    shape = tuple(int(size) for size in shape_text.split("x")) if shape_text else (len(columns),)
    if math.prod(shape) != len(columns):
        raise UsageError(
            f"--pack's shape must hold its {len(columns)} columns, got {shape_text} = {math.prod(shape)} ({text!r})."
        )
    return Pack(name=name, columns=tuple(columns), shape=shape)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The features and the source columns that make them.

    Attributes:
        schema: of the final features.
        columns: the source columns of each feature.
        packed: names of the features made by --pack.
    """

    schema: Schema
    columns: Mapping[str, tuple[str, ...]]
    packed: frozenset[str]

    def wishes(self, columns: Sequence[SourceColumn]) -> list[Wish]:
        """What to read of each source column."""
        feature_of = {column: name for name, names in self.columns.items() for column in names}
        result = []
        for column in columns:
            name = feature_of.get(column.name)
            if name is None:
                result.append(Wish(used=False))
                continue
            feature = self.schema.features[name]
            packed = name in self.packed
            result.append(Wish(dtype=feature.dtype, required=packed or not feature.nullable, numeric=packed))
        return result

    def assemble(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Turns a batch of source columns into one of features."""
        arrays = []
        for name, columns in self.columns.items():
            if name not in self.packed:
                arrays.append(batch.column(columns[0]))
                continue
            feature = self.schema.features[name]
            values = np.empty(
                (batch.num_rows, len(columns)), "uint8" if feature.dtype == "bool" else feature.dtype
            )
            for i, column in enumerate(columns):
                values[:, i] = batch.column(column).to_numpy(zero_copy_only=False)
            arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), len(columns)))
        return pa.RecordBatch.from_arrays(arrays, names=list(self.columns))

    def statistics(
        self, columns: Sequence[SourceColumn], summaries: Sequence[ColumnSummary]
    ) -> dict[str, dict[str, Any]]:
        """The manifest's statistics, one object a feature."""
        by_name = {column.name: (column, summary) for column, summary in zip(columns, summaries, strict=True)}
        result = {}
        for name, names in self.columns.items():
            merged = ColumnSummary()
            for column in names:
                merged = merged.merge(by_name[column][1])
            result[name] = merged.statistics(self.schema.features[name].dtype)
            if unit := by_name[names[0]][0].unit:
                result[name]["unit"] = unit
        return result


def scan_wishes(
    packs: Sequence[Pack], declared: Schema | None, columns: Sequence[SourceColumn]
) -> list[Wish]:
    """What the scan must check of each source column.

    Args:
        packs: as asked for.
        declared: schema, or None.
        columns: of the source.

    Returns:
        One wish a column.

    Raises:
        UsageError: a pack names a column that is not there or in another pack, or is named as a column is.
        SchemaError: the declared schema and the columns disagree.
    """
    layout_columns = _feature_columns(packs, columns)
    if declared is None:
        packed = {column for pack in packs for column in pack.columns}
        return [Wish(required=column.name in packed, numeric=column.name in packed) for column in columns]
    return _declared_layout(packs, declared, columns, layout_columns).wishes(columns)


def build_layout(
    packs: Sequence[Pack],
    declared: Schema | None,
    columns: Sequence[SourceColumn],
    summaries: Sequence[ColumnSummary],
) -> tuple[Layout, list[str]]:
    """Decides the features.

    Args:
        packs: as asked for.
        declared: schema, or None to infer it.
        columns: of the source.
        summaries: of all records, one a column.

    Returns:
        The layout, and sentences that the user should read.

    Raises:
        UsageError: see `scan_wishes`.
        SchemaError: see `scan_wishes`.
    """
    feature_columns = _feature_columns(packs, columns)
    if declared is not None:
        layout = _declared_layout(packs, declared, columns, feature_columns)
        used = {column for names in layout.columns.values() for column in names}
        left_out = [column.name for column in columns if column.name not in used]
        return layout, [
            f"left out, since not in the declared schema: {', '.join(left_out)}"
        ] if left_out else []
    by_name = {column.name: (column, summary) for column, summary in zip(columns, summaries, strict=True)}
    shapes = {pack.name: pack.shape for pack in packs}
    features, notices = {}, []
    for name, names in feature_columns.items():
        if name in shapes:
            merged = ColumnSummary()
            for column in names:
                merged = merged.merge(by_name[column][1])
            features[name] = Feature(dtype=_packed_dtype(merged), shape=shapes[name], encoding="raw")
            continue
        column, summary = by_name[name]
        dtype = summary.inferred_dtype
        features[name] = Feature(dtype=dtype, shape=column.shape, nullable=summary.nulls(dtype) > 0)
        if summary.counts[BOOL] and not summary.dtype and dtype not in ("bool", "string"):
            notices.append(f"{name}: true and false stand beside numbers and become 1 and 0")
    layout = Layout(schema=Schema(features=features), columns=feature_columns, packed=frozenset(shapes))
    return layout, notices


def _packed_dtype(summary: ColumnSummary) -> str:
    dtype = summary.inferred_dtype
    if dtype in INTEGER_DTYPES or dtype == "bool":
        return "uint64" if dtype == "uint64" else summary.narrowest_integer
    return dtype if dtype in ("float32", "float64") else "float64"


def _feature_columns(packs: Sequence[Pack], columns: Sequence[SourceColumn]) -> dict[str, tuple[str, ...]]:
    """The source columns of each feature, in the source's order, a pack where its first column stands."""
    by_name = {column.name: column for column in columns}
    owner: dict[str, Pack] = {}
    for pack in packs:
        for name in pack.columns:
            if name not in by_name:
                known = ", ".join(list(by_name)[:8]) + (", ..." if len(by_name) > 8 else "")
                raise UsageError(
                    f"--pack {pack.name} must name columns of the input, got {name!r}; there are {known}."
                )
            if name in owner:
                raise UsageError(
                    f"a column must be packed once, got {name!r} in {owner[name].name} and {pack.name}."
                )
            column = by_name[name]
            if column.shape or column.dtype in TEXT_DTYPES:
                raise UsageError(
                    f"--pack {pack.name} must name columns of numbers, got {name!r} ({column.dtype})."
                )
            owner[name] = pack
    result: dict[str, tuple[str, ...]] = {}
    for column in columns:
        pack_here = owner.get(column.name)
        name = pack_here.name if pack_here else column.name
        taken = [p for p in packs if p.name == column.name and p is not pack_here]
        if taken and not pack_here:
            raise UsageError(
                f"--pack must make a feature of a new name, got {column.name!r}, which is also a column."
            )
        result.setdefault(name, pack_here.columns if pack_here else (column.name,))
    if len({pack.name for pack in packs}) < len(packs):
        raise UsageError(f"--pack must make each feature once, got {', '.join(pack.name for pack in packs)}.")
    return result


def _declared_layout(
    packs: Sequence[Pack],
    declared: Schema,
    columns: Sequence[SourceColumn],
    feature_columns: Mapping[str, tuple[str, ...]],
) -> Layout:
    shapes: dict[str, tuple[int, ...]] = {column.name: column.shape for column in columns}
    shapes |= {pack.name: pack.shape for pack in packs}
    packed = frozenset(pack.name for pack in packs)
    for name, feature in declared.features.items():
        if name not in feature_columns:
            known = ", ".join(list(feature_columns)[:8]) + (", ..." if len(feature_columns) > 8 else "")
            raise SchemaError(
                f"every declared feature must be a column or a pack, got {name!r}; there are {known}. "
                f"Correct the name in --schema, or add --pack {name}=COLUMNS."
            )
        if feature.shape != shapes[name]:
            raise SchemaError(
                f"feature {name!r} must have the shape of its source {list(shapes[name])}, "
                f"got {list(feature.shape)} declared. Correct it, or pack columns: --pack {name}=COLUMNS:SHAPE."
            )
        if name in packed and feature.dtype in TEXT_DTYPES:
            raise SchemaError(
                f"packed feature {name!r} must hold numbers, got dtype {feature.dtype} declared."
            )
        if feature.shape and feature.encoding not in ("raw", "bytes_list"):
            raise SchemaError(
                f"tensor feature {name!r} must have encoding raw, got {feature.encoding} declared."
            )
        if name in packed and feature.nullable:
            raise SchemaError(
                f"packed feature {name!r} can't be nullable. Leave columns with nulls unpacked."
            )
    return Layout(
        schema=declared,
        columns={name: feature_columns[name] for name in declared.features},
        packed=packed & frozenset(declared.features),
    )
