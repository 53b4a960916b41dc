"""The features of TFRecords that somebody else made: inferred, declared, or as before; for `tfpipe.index`."""

from __future__ import annotations

import math
from pathlib import Path

from tfpipe.errors import SchemaError
from tfpipe.example_summary import ExampleSummary, FeatureSummary, Range
from tfpipe.index_files import name_some
from tfpipe.schema import ITEMSIZE_BYTES, Feature, Schema


def infer_schema(summary: ExampleSummary, directory: Path) -> tuple[Schema, list[str]]:
    """The schema that takes every record as it is.

    Args:
        summary: of all records.
        directory: named in errors.

    Returns:
        The schema, and sentences that the user should read.

    Raises:
        SchemaError: no record has a value.
    """
    try:
        return summary.infer()
    except SchemaError as error:
        raise SchemaError(f"{error} ({directory}).") from None


def check_declared(declared: Schema, summary: ExampleSummary, directory: Path) -> None:
    """Makes sure that every record is as declared.

    Args:
        declared: by the user.
        summary: of all records.
        directory: named in errors.

    Raises:
        SchemaError: a feature is otherwise in some record.
    """
    for name, feature in declared.features.items():
        if fault := _misfit(feature, summary.features.get(name), summary):
            must, got = fault
            raise SchemaError(
                f"declared feature {name!r} must {must}, got {got} ({directory}). Correct it in --schema."
            )


def unfit(schema: Schema, summary: ExampleSummary) -> str:
    """Tells whether records are as an earlier manifest says.

    Args:
        schema: of the manifest.
        summary: of all records.

    Returns:
        What must hold and was found otherwise; "" if all is as it says.
    """
    for name, feature in schema.features.items():
        found = summary.features.get(name)
        if found is not None and found.counts.total:
            fault = _misfit(feature, found, summary)
        else:  # it may have had no value then either
            absent = summary.num_records if found is None else found.absent(feature, summary.num_records)
            fault = (
                ("be nullable", f"{absent:,} records without it") if absent and not feature.nullable else None
            )
        if fault:
            return f"feature {name!r} must {fault[0]}, got {fault[1]}"
    return ""


def remarks(schema: Schema, summary: ExampleSummary) -> list[str]:
    """What the records hold beside the schema.

    Args:
        schema: that was decided.
        summary: of all records.

    Returns:
        Sentences that the user should read.
    """
    notices = []
    valued = {name for name, found in summary.features.items() if name and found.counts.total}
    if left_out := sorted((summary.ignored | valued) - schema.features.keys()):
        notices.append(f"left out, since not in the declared schema: {name_some(left_out)}")
    if summary.bare_records:
        notices.append(f"{summary.bare_records:,} of {summary.num_records:,} records have no feature at all")
    if summary.other_fields:
        notices.append(
            f"{summary.other_fields:,} of {summary.num_records:,} records hold more than features, as a "
            f"tf.train.SequenceExample does: the rest is never read"
        )
    return notices


def _misfit(
    feature: Feature, found: FeatureSummary | None, summary: ExampleSummary
) -> tuple[str, str] | None:
    """What must hold of a declared feature and what was found instead, if they differ."""
    if found is None or not found.counts.total:
        known = name_some(sorted(summary.features.keys() | summary.ignored))
        return "have a value in a record", f"none; the records have {known}"
    if None in feature.shape[1:]:
        return "have no unknown dimension but the first", f"shape {list(feature.shape)}"
    raw = feature.encoding == "raw"
    if found.kind != ("bytes_list" if raw else feature.encoding):
        return f"have the encoding of its lists, {found.kind}", f"{feature.encoding}; see {found.first}"
    if (absent := found.absent(feature, summary.num_records)) and not feature.nullable:
        return "be nullable", f"{absent:,} of {summary.num_records:,} records without it"
    inner = math.prod(size for size in feature.shape[1:] if size is not None)
    if raw:
        itemsize = ITEMSIZE_BYTES[feature.dtype]
        return _size_misfit(found.counts, 1, 1, "value") or _size_misfit(
            found.lengths, feature.decoded_bytes, inner * itemsize, "byte"
        )
    if fault := _size_misfit(found.counts, feature.num_elements, inner, "value"):
        return fault
    if feature.dtype == "string" and found.opaque is not None:
        return "be UTF-8 text", f"other bytes in {found.opaque}; declare bytes"
    if feature.labels is not None:
        found.settle()
        if not 0 <= found.low <= found.high < len(feature.labels):
            return f"count its {len(feature.labels)} labels from 0", f"{found.low} to {found.high}"
    return None


def _size_misfit(found: Range, size: int | None, multiple: int, unit: str) -> tuple[str, str] | None:
    if size is None:
        if found.divisor % max(multiple, 1):
            return (
                f"have a multiple of {multiple} {unit}s",
                f"{found.low} to {found.high}; see {found.low_at}",
            )
    elif not found.low == found.high == size:
        got, place = (found.high, found.high_at) if found.low == size else (found.low, found.low_at)
        return f"have {size} {unit}{'s' * (size != 1)}", f"{got} in {place}"
    return None
