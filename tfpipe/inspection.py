"""What a dataset directory holds, for `tfpipe inspect`: from its manifest to JSON, and to tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfpipe.data_quality import data_warnings, is_label
from tfpipe.manifest import Manifest
from tfpipe.schema import Feature

# Columns of the table, in this order, where any feature has one.
_STATISTICS = ("min", "max", "mean", "std", "distinct", "bytes", "length", "NaN", "infinite")


def summarize(manifest: Manifest) -> dict[str, Any]:
    """What `tfpipe inspect --json` writes.

    Args:
        manifest: a loaded `Manifest`.

    Returns:
        Plain JSON values; sizes in bytes.
    """
    splits = {}
    for name, split in manifest.splits.items():
        counts = [shard.num_records for shard in split.shards]
        splits[name] = {
            "num_records": split.num_records,
            "num_shards": len(counts),
            "min_records_per_shard": min(counts, default=0),
            "max_records_per_shard": max(counts, default=0),
            "num_bytes": split.num_bytes,
            "uncompressed_bytes": split.uncompressed_bytes,
        }
    return {
        "directory": str(manifest.directory),
        "compression": manifest.compression,
        "schema": manifest.schema.to_json(),
        "schema_digest": manifest.schema.digest,
        "splits": splits,
        "rejected": {"num_records": manifest.num_rejected},
        "statistics": dict(manifest.statistics),
        "warnings": [
            f"{name} lies in the directory but not in the manifest: it is never read"
            for name in manifest.unlisted_files()
        ]
        + [
            f"{name}: {sum(not s.num_records for s in split.shards)} of {len(split.shards)} shards are empty"
            for name, split in manifest.splits.items()
            if any(not shard.num_records for shard in split.shards)
        ]
        + data_warnings(manifest),
    }


def show(manifest: Manifest, summary: Mapping[str, Any]) -> None:
    """Prints it: splits, features with their statistics, classes with a bar each, warnings.

    Args:
        manifest: of the dataset.
        summary: what `summarize` made of it.
    """
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"[bold]{escape(summary['directory'])}[/]  {manifest.compression or 'no'} compression", end=""
    )
    console.print(f", {manifest.num_rejected:,} records rejected" if manifest.num_rejected else "")
    table = Table("split", "records", "shards", "records a shard", "on disk", "uncompressed")
    for name, split in summary["splits"].items():
        low, high = split["min_records_per_shard"], split["max_records_per_shard"]
        table.add_row(
            escape(name),
            f"{split['num_records']:,}",
            f"{split['num_shards']:,}",
            f"{low:,}" if low == high else f"{low:,} to {high:,}",
            _size(split["num_bytes"]),
            _size(split["uncompressed_bytes"]),
        )
    console.print(table)
    table = Table("feature", "dtype", "shape", "encoding", "nullable", "nulls")
    statistics = _found(summary)
    cells = {name: _columns(found) for name, found in statistics.items()}
    for name, feature in manifest.schema.features.items():
        shape = "×".join("?" if size is None else str(size) for size in feature.shape) or "scalar"
        nulls = cells[name].get("nulls", "")
        table.add_row(
            escape(name), feature.dtype, shape, feature.encoding, "yes" if feature.nullable else "", nulls
        )
    console.print(table)
    keys = [key for key in _STATISTICS if any(key in row for row in cells.values())]
    if keys:
        table = Table("feature", *keys)
        for name, row in cells.items():
            table.add_row(escape(name), *(escape(row.get(key, "")) for key in keys))
        console.print(table)
    for name, feature in manifest.schema.features.items():
        counts = statistics[name].get("counts")
        if counts and is_label(name, feature):
            console.print(_histogram(name, feature, counts))
    for warning in summary["warnings"]:
        console.print(f"[yellow]warning:[/] {escape(warning)}")


def _columns(found: Mapping[str, Any]) -> dict[str, str]:
    """A feature's statistics as cells of the table."""
    cells = {key: _short(found[key]) for key in ("min", "max", "mean", "std", "distinct") if key in found}
    if "distinct_estimate" in found:
        cells["distinct"] = f"~{_short(found['distinct_estimate'])}"
    for key in ("bytes", "length"):  # of text, and of lists
        if f"max_{key}" in found:
            low, high = found.get(f"min_{key}", "?"), found[f"max_{key}"]
            cells[key] = str(low) if low == high else f"{low} to {high}"
    for key, name in (("nulls", "nulls"), ("nan", "NaN"), ("infinite", "infinite")):
        if found.get(key):
            cells[name] = _short(found[key])
    return cells


def _histogram(name: str, feature: Feature, counts: Mapping[str, int]) -> Table:
    """Records of each class, with a bar."""
    table = Table(escape(name), "records", "")
    largest = max(counts.values())
    names = feature.labels or ()
    for value in sorted(counts, key=lambda v: (not v.isdecimal(), int(v) if v.isdecimal() else 0, v)):
        known = value.isdecimal() and int(value) < len(names)
        text = f"{value} {names[int(value)]}" if known else value
        table.add_row(escape(text), f"{counts[value]:,}", "█" * max(1, round(30 * counts[value] / largest)))
    return table


def _found(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The statistics of each feature, {} where there are none."""
    found = {name: summary["statistics"].get(name) for name in summary["schema"]["features"]}
    return {name: row if isinstance(row, Mapping) else {} for name, row in found.items()}


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _short(value: Any, limit: int = 12) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
