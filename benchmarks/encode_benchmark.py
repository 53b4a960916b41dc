"""Arrow columns to framed examples: the encoder against tf.train.Example a row, in one process.

    python -m pytest -o addopts="" benchmarks/encode_benchmark.py

Both sides end with the bytes of a TFRecord file: length and checksums included.
"""

from __future__ import annotations

import statistics
import time

import pyarrow as pa
import pytest
import tensorflow as tf

from beam_jobs.encode import encode_batch
from benchmarks.convert_naive import to_example
from benchmarks.corpus import COLUMNS, NUM_FLOATS, NUM_INTS, tables
from tfpipe.schema import Feature, Schema
from tfpipe.tfrecord import frame

NUM_RECORDS, NAIVE_RECORDS = 100_000, 5_000
ROUNDS = 7
MINIMUM_RATIO = 25.0


def dtype_of(number: int) -> str:
    if number < NUM_FLOATS:
        return "float32"
    return "int64" if number < NUM_FLOATS + NUM_INTS or COLUMNS[number] == "label" else "string"


@pytest.mark.benchmark(group="encode")
@pytest.mark.timeout(600)
def test_forty_columns(benchmark):
    schema = Schema(features={name: Feature(dtype=dtype_of(i)) for i, name in enumerate(COLUMNS)})
    (table,) = tables(NUM_RECORDS)
    kinds = {"float32": pa.float32(), "int64": pa.int64(), "string": pa.string()}
    batch = table.cast(pa.schema([(name, kinds[f.dtype]) for name, f in schema.features.items()]))
    batches = batch.combine_chunks().to_batches(max_chunksize=1 << 14)
    rows = list(zip(*(batch[name].slice(0, NAIVE_RECORDS).to_pylist() for name in COLUMNS), strict=True))
    lines = [",".join(map(str, row)) for row in rows]
    tuned_s, naive_s = [], []

    def tuned() -> int:
        start_s = time.perf_counter()
        size = sum(len(encode_batch(part, schema).data) for part in batches)
        tuned_s.append(time.perf_counter() - start_s)
        return size

    def naive() -> None:
        """Before each round; parsing a line is not the encoder's work, so examples are made from values."""
        start_s = time.perf_counter()
        framed = [frame(example_of(row)) for row in rows]
        naive_s.append(time.perf_counter() - start_s)
        assert len(framed) == NAIVE_RECORDS

    size = benchmark.pedantic(tuned, setup=naive, rounds=ROUNDS, warmup_rounds=1)
    first = encode_batch(batches[0].slice(0, 1), schema).data.tobytes()
    parsed = tf.train.Example.FromString(first[12:-4])
    assert parsed == tf.train.Example.FromString(to_example(lines[0]))
    tuned_rate = NUM_RECORDS / statistics.median(tuned_s[1:])
    naive_rate = NAIVE_RECORDS / statistics.median(naive_s[1:])
    benchmark.extra_info.update(
        records=NUM_RECORDS, encoded_bytes=size, tuned_records_per_s=round(tuned_rate),
        naive_records_per_s=round(naive_rate), ratio=round(tuned_rate / naive_rate, 1), minimum_ratio=MINIMUM_RATIO,
    )  # fmt: skip
    print(f"\nencoder {tuned_rate:,.0f} records/s, tf.train.Example {naive_rate:,.0f}: "
          f"{tuned_rate / naive_rate:.1f}x")  # fmt: skip
    assert tuned_rate >= MINIMUM_RATIO * naive_rate


def example_of(row: tuple) -> bytes:
    """One row's values -> a serialized tf.train.Example."""
    features = {}
    for name, value in zip(COLUMNS, row, strict=True):
        if isinstance(value, float):
            feature = tf.train.Feature(float_list=tf.train.FloatList(value=[value]))
        elif isinstance(value, int):
            feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
        else:
            feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[value.encode()]))
        features[name] = feature
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
