"""The raw data that benchmarks convert: generated from a fixed seed, the same everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

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
    rng = np.random.default_rng(seed)
    words = np.array([f"{rng.integers(1 << 32):08x}" for _ in range(5000)])
    writer = None
    for start in range(0, num_records, _CHUNK_RECORDS):
        count = min(_CHUNK_RECORDS, num_records - start)
        columns = [
            *(np.round(rng.normal(0, 10, count), 4) for _ in range(NUM_FLOATS)),
            *(rng.integers(0, 10 ** (i % 6 + 1), count) for i in range(NUM_INTS)),
            *(words[rng.integers(len(words), size=count)] for _ in range(NUM_STRINGS)),
            rng.integers(0, 2, count),
        ]
        table = pa.table(dict(zip(COLUMNS, columns, strict=True)))
        if writer is None:
            options = pyarrow.csv.WriteOptions(quoting_style="needed")
            writer = pyarrow.csv.CSVWriter(path, table.schema, write_options=options)
        writer.write_table(table)
    if writer is not None:
        writer.close()
    return path.stat().st_size
