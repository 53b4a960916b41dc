"""The raw data that benchmarks convert: generated from a fixed seed, the same everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

NUM_FLOATS, NUM_INTS, NUM_STRINGS = 13, 20, 6
COLUMNS = (
    *(f"f{i}" for i in range(NUM_FLOATS)),
    *(f"i{i}" for i in range(NUM_INTS)),
    *(f"s{i}" for i in range(NUM_STRINGS)),
    "label",
)
_CHUNK_RECORDS = 100_000


def write_csv(path: Path, num_records: int, *, seed: int = 0) -> int:
    """Writes click-log-like CSV: 13 floats, 20 integers, 6 strings and a label a row.

    Args:
        path: of the new file.
        num_records: rows below the header.
        seed: of the values.

    Returns:
        The file's size in bytes.

    Raises:
        OSError: the file can't be written.
    """
    writer = None
    for table in tables(num_records, seed=seed):
        if writer is None:
            options = pyarrow.csv.WriteOptions(quoting_style="needed")
            writer = pyarrow.csv.CSVWriter(path, table.schema, write_options=options)
        writer.write_table(table)
    if writer is not None:
        writer.close()
    return path.stat().st_size


def write_parquet(path: Path, num_records: int, *, seed: int = 0) -> int:
    """Writes the same rows as Parquet, as pyarrow does by default; see `write_csv`."""
    writer = None
    for table in tables(num_records, seed=seed):
        writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()
    return path.stat().st_size


def tables(num_records: int, *, seed: int = 0) -> Iterator[pa.Table]:
    """Yields the rows that `write_csv` writes, a part at a time."""
    rng = np.random.default_rng(seed)
    words = np.array([f"{rng.integers(1 << 32):08x}" for _ in range(5000)])
    for start in range(0, num_records, _CHUNK_RECORDS):
        count = min(_CHUNK_RECORDS, num_records - start)
        columns = [
            *(np.round(rng.normal(0, 10, count), 4) for _ in range(NUM_FLOATS)),
            *(rng.integers(0, 10 ** (i % 6 + 1), count) for i in range(NUM_INTS)),
            *(words[rng.integers(len(words), size=count)] for _ in range(NUM_STRINGS)),
            rng.integers(0, 2, count),
        ]
        yield pa.table(dict(zip(COLUMNS, columns, strict=True)))


def write_jpegs(directory: Path, num_images: int, *, num_classes: int = 10, seed: int = 0) -> int:
    """Writes JPEGs of 256x256 in class folders: smooth noise, about as large as photographs are.

    Args:
        directory: of the class folders; made.
        num_images: over all classes.
        num_classes: folders.
        seed: of the pixels.

    Returns:
        The files' size in bytes.
    """
    from PIL import Image

    rng = np.random.default_rng(seed)
    total = 0
    for number in range(num_images):
        folder = directory / f"class-{number % num_classes}"
        folder.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (48, 48, 3), np.uint8))
        path = folder / f"{number:06d}.jpg"
        coarse.resize((256, 256), Image.Resampling.BICUBIC).save(path, quality=90)
        total += path.stat().st_size
    return total
