"""Which source columns make which feature: packs, the inferred or declared schema (pure).

    >>> parse_pack("image=p0..p63:8x8")
    Pack(name='image', columns=('p0', ..., 'p63'), shape=(8, 8))

Numeric columns that are packed become one tensor feature, always `raw`: integers in the
narrowest of uint8, int16, int32, int64 that holds them all, other numbers as float32 where no
value loses a digit, else float64.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from beam_jobs.sources import SourceColumn, Wish, Wishes
from beam_jobs.sources.csv_kernels import BIG, BOOL, FLOAT, INT, NAN, TEXT
from beam_jobs.sources.summary import INTEGER_DTYPES, MIXED, MIXED_DTYPE, ColumnSummary
from tfpipe.errors import SchemaError, UsageError
from tfpipe.schema import TEXT_DTYPES, Feature, Schema

_NUMBERS = (INT, BIG, FLOAT, NAN)
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

    def wishes(self) -> Wishes:
        """What to read of the source."""
        wishes = {}
        for name, columns in self.columns.items():
            feature, packed = self.schema.features[name], name in self.packed
            shape = () if packed else feature.shape
            for column in columns:
                wishes[column] = Wish(
                    dtype=feature.dtype, shape=shape, required=packed or not feature.nullable, numeric=packed
                )
        return Wishes(columns=wishes, others=Wish(used=False))

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


def feature_summaries(
    columns: Mapping[str, tuple[str, ...]], summaries: Mapping[str, ColumnSummary]
) -> dict[str, ColumnSummary]:
    """One summary a feature.

    Args:
        columns: the source columns of each feature.
        summaries: one a source column.

    Returns:
        Of the values of all its columns.
    """
    result = {}
    for name, names in columns.items():
        result[name] = summaries[names[0]]
        for column in names[1:]:
            result[name] = dataclasses.replace(result[name], kind="").merge(summaries[column])
    return result


def scan_wishes(
    packs: Sequence[Pack], declared: Schema | None, columns: Sequence[SourceColumn] | None
) -> Wishes:
    """What the scan must check of the source.

    Args:
        packs: as asked for.
        declared: schema, or None.
        columns: of the source, or None where only its records tell.

    Returns:
        What is wanted of each column.

    Raises:
        UsageError: a pack names a column that is not there or in another pack, or is named as a column is.
        SchemaError: the declared schema and the columns disagree.
    """
    if columns is None:  # as if it had what is asked for: the plan will tell
        columns = [
            SourceColumn(name=name, shape=None)
            for name in dict.fromkeys([
                *(column for pack in packs for column in pack.columns),
                *(declared.features.keys() - {pack.name for pack in packs} if declared else ()),
            ])
        ]  # fmt: skip
    feature_columns = _feature_columns(packs, columns)
    if declared is not None:
        return _declared_layout(packs, declared, columns, feature_columns).wishes()
    numbers = Wish(shape=(), required=True, numeric=True)
    return Wishes(columns={column: numbers for pack in packs for column in pack.columns})


def resolve_columns(
    columns: Sequence[SourceColumn] | None, summaries: Mapping[str, ColumnSummary]
) -> list[SourceColumn]:
    """The source's columns, with the shapes that the scan found where only it can tell.

    Args:
        columns: of the source, or None where only its records tell.
        summaries: of all records, by column.

    Returns:
        Each column; no shape is None.

    Raises:
        SchemaError: a column holds what no one feature can.
    """
    known = {column.name: column for column in columns or ()}
    resolved = []
    for name in known or summaries:
        column = known.get(name) or SourceColumn(name=name, shape=None)
        summary = summaries.get(name, ColumnSummary())
        if summary.quoted and summary.counts[TEXT] and summary.counts[list(_NUMBERS)].any():
            raise SchemaError(
                f"a column must hold text or numbers throughout, got both in {name!r}. Convert one into the "
                f'other in the input, or declare dtype "string" for numbers and text (--schema).'
            )
        if summary.dtype == MIXED_DTYPE:
            raise SchemaError(
                f"a column must hold values of one dtype throughout, got several in {name!r}. Convert them to "
                f"one in the input, or declare one that holds them all (--schema)."
            )
        shape = column.shape
        if shape is None:
            # Without a value only a type tells, and only of lists is it known before their shape.
            shape = summary.shape if summary.shape is not None else (None,) if column.dtype else ()
            if shape == MIXED:
                raise SchemaError(
                    f"a column must hold single values throughout, or lists of one depth, got both in {name!r}. "
                    f"Make each a list, or leave the column out (--schema)."
                )
            if None in shape[1:]:
                raise SchemaError(
                    f"only a feature's first dimension may differ between records, got {list(shape)} for "
                    f"{name!r}. Fill the inner lists up to one length."
                )
            if shape[:1] == (0,):  # nothing but empty lists so far: hardly a length that is meant
                shape = (None, *shape[1:])
        resolved.append(dataclasses.replace(column, shape=shape))
    return resolved


def build_layout(
    packs: Sequence[Pack],
    declared: Schema | None,
    columns: Sequence[SourceColumn],
    summaries: Mapping[str, ColumnSummary],
) -> tuple[Layout, list[str]]:
    """Decides the features.

    Args:
        packs: as asked for.
        declared: schema, or None to infer it.
        columns: of the source, resolved.
        summaries: of all records, by column.

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
    shapes = {pack.name: pack.shape for pack in packs}
    by_name = {column.name: column for column in columns}
    features, notices = {}, []
    for name, summary in feature_summaries(feature_columns, summaries).items():
        if name in shapes:
            features[name] = Feature(dtype=_packed_dtype(summary), shape=shapes[name], encoding="raw")
            continue
        dtype = summary.inferred_dtype
        features[name] = Feature(
            dtype=dtype, shape=by_name[name].shape or (), nullable=summary.nulls(dtype) > 0,
            labels=by_name[name].labels, encoding=summary.kind,
        )  # fmt: skip
        if summary.counts[BOOL] and not summary.dtype and dtype not in ("bool", "string"):
            notices.append(f"{name}: true and false stand beside numbers and become 1 and 0")
    schema = Schema(features=features)
    return Layout(schema=schema, columns=feature_columns, packed=frozenset(shapes)), notices


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
                what = "lists" if column.shape else column.dtype
                raise UsageError(f"--pack {pack.name} must name columns of numbers, got {name!r} ({what}).")
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
    shapes: dict[str, tuple[int | None, ...] | None] = {column.name: column.shape for column in columns}
    shapes |= {pack.name: pack.shape for pack in packs}
    packed = frozenset(pack.name for pack in packs)
    for name, feature in declared.features.items():
        if name not in feature_columns:
            known = ", ".join(list(feature_columns)[:8]) + (", ..." if len(feature_columns) > 8 else "")
            raise SchemaError(
                f"every declared feature must be a column or a pack, got {name!r}; there are {known}. "
                f"Correct the name in --schema, or add --pack {name}=COLUMNS."
            )
        found = shapes[name]
        if found is not None and not _can_be(found, feature.shape):
            raise SchemaError(
                f"feature {name!r} must have the shape of its source {list(found)}, "
                f"got {list(feature.shape)} declared. Correct it, or pack columns: --pack {name}=COLUMNS:SHAPE."
            )
        if name in packed and feature.dtype in TEXT_DTYPES:
            raise SchemaError(
                f"packed feature {name!r} must hold numbers, got dtype {feature.dtype} declared."
            )
        if name in packed and feature.encoding != "raw":
            raise SchemaError(
                f"packed feature {name!r} must have encoding raw, got {feature.encoding} declared."
            )
        if None in feature.shape[1:]:
            raise SchemaError(
                f"only a feature's first dimension may be unknown, got {list(feature.shape)} declared for {name!r}."
            )
        if name in packed and feature.nullable:
            raise SchemaError(
                f"packed feature {name!r} can't be nullable. Leave columns with nulls unpacked."
            )
    labels = {column.name: column.labels for column in columns if column.labels is not None}
    features = {
        name: _with_labels(name, feature, labels[name]) if name in labels and name not in packed else feature
        for name, feature in declared.features.items()
    }
    return Layout(
        schema=Schema(features=features),
        columns={name: feature_columns[name] for name in declared.features},
        packed=packed & frozenset(declared.features),
    )


def _with_labels(name: str, feature: Feature, labels: tuple[str, ...]) -> Feature:
    """A declared feature with its source's class names."""
    if feature.dtype != "int64" or feature.labels not in (None, labels):
        found = (
            f"labels {_listed(feature.labels)}" if feature.labels is not None else f"dtype {feature.dtype}"
        )
        raise SchemaError(
            f"feature {name!r} must be an int64 with the labels of its source, {_listed(labels)}, got {found} "
            f"declared. Leave the labels out of --schema; to number classes as another dataset does, "
            f"give --labels-from."
        )
    return dataclasses.replace(feature, labels=labels)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _can_be(found: tuple[int | None, ...], declared: tuple[int | None, ...]) -> bool:
    """Whether values of the shape found can have the one declared; their values were checked by the scan."""
    return len(found) == len(declared) and all(
        b is None or a is None or a == b for a, b in zip(found, declared, strict=True)
    )
