"""Beam as documented: ReadFromText, one tf.train.Example a row, WriteToTFRecord.

Run as `python -m benchmarks.convert_naive INPUT OUTPUT_PREFIX`; the twin that the converter is
timed against. In memory and in one process, which is what Beam does by default, and faster
here than its multi-processing mode on short runs.

Source: beam.apache.org, "Apache Beam I/O connectors"; tensorflow.org/tutorials/load_data/tfrecord.
"""

from __future__ import annotations

import csv
import sys

import apache_beam as beam
import tensorflow as tf
from apache_beam.options.pipeline_options import PipelineOptions

from benchmarks.corpus import COLUMNS, NUM_FLOATS, NUM_INTS


def to_example(line: str) -> bytes:
    """One CSV line -> a serialized tf.train.Example."""
    features = {}
    for i, (name, text) in enumerate(zip(COLUMNS, next(csv.reader([line])), strict=True)):
        if i < NUM_FLOATS:
            feature = tf.train.Feature(float_list=tf.train.FloatList(value=[float(text)]))
        elif i < NUM_FLOATS + NUM_INTS or name == "label":
            feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[int(text)]))
        else:
            feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
        features[name] = feature
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def main() -> None:
    source, prefix = sys.argv[1:]
    options = PipelineOptions(["--runner=FnApiRunner"])
    with beam.Pipeline(options=options) as pipeline:
        _ = (
            pipeline
            | "Read" >> beam.io.ReadFromText(source, skip_header_lines=1)
            | "Encode" >> beam.Map(to_example)
            | "Write" >> beam.io.WriteToTFRecord(prefix, file_name_suffix=".tfrecord.gz", num_shards=24)
        )


if __name__ == "__main__":
    main()
