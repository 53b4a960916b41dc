"""The stages of a pipeline, each a function from dataset to dataset; pipeline.py puts them together.

    read: files -> string[batch], shuffled      fill_up: a short batch -> a full one and its mask
    decode: string[batch] -> {feature: tensor[batch, ...]} -> what the user's map makes of it
    finish: prefetch and options

Nothing random lies before the cache. Records move in blocks wherever they can: one element
a record costs more than reading and parsing it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpipe.config import AUTOTUNE, PipelineConfig
from tfpipe.cpus import usable_cpus
from tfpipe.errors import UsageError
from tfpipe.manifest import Manifest
from tfpipe.parsing import make_parser

MapFn = Callable[[Any], Any]
MapFns = MapFn | Sequence[MapFn]

# Our own functions need no AutoGraph, which would double the time to build a dataset.
as_is = tf.autograph.experimental.do_not_convert

# Blocks that a shuffle buffer must hold before the record shuffle works on whole windows (blocks
# in random order, then the rows of a window permuted at once) instead of on single records:
# 19.8 us of CPU a record instead of 23.0 (40 columns, gzip, blocks of 64, one interleaved run).
# With fewer blocks their order would not tell one epoch from the next well enough.
MINIMUM_BLOCKS = 16

# Beyond this a block gains nothing more, and several lie in memory for each open file.
BLOCK_BYTES = 1 << 20


def read(
    manifest: Manifest,
    config: PipelineConfig,
    paths: Sequence[str],
    num_records: int,
    batch_size: int,
    *,
    epoch: int = 0,
    worker: int = 0,
) -> tf.data.Dataset:
    """Reads files into batches of serialized examples, in this epoch's order.

    Args:
        manifest: for the compression.
        config: how to read and shuffle.
        paths: the shards, in manifest order.
        num_records: that they hold together.
        batch_size: records of a batch.
        epoch: mixed into the seed, as is `worker`.
        worker: index of the worker that reads.

    Returns:
        A dataset of string[batch].
    """

    def seed(stage: str) -> int:
        text = f"{config.seed}/{epoch}/{worker}/{stage}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1

    @as_is
    def read_file(path: tf.Tensor) -> tf.data.Dataset:
        records = tf.data.TFRecordDataset(
            path, compression_type=manifest.compression, buffer_size=config.read_buffer_bytes
        )
        return records.batch(block_size)

    block_size = min(config.read_batch_size, _records_within(manifest, BLOCK_BYTES))
    shuffles, caches = config.shuffle_buffer_records > 0, config.cache == "memory"
    files = tf.data.Dataset.from_tensor_slices(list(paths))
    if shuffles and not caches:
        files = files.shuffle(len(paths), seed=seed("files"))
    cycle_length = min(config.cycle_length, len(paths))
    blocks = files.interleave(
        read_file,
        cycle_length=cycle_length,
        block_length=config.block_length,
        num_parallel_calls=min(_parallel_calls(config), cycle_length),
        deterministic=config.deterministic,
    )
    num_blocks = -(-num_records // block_size) + len(paths)  # at most
    if caches:
        blocks = blocks.cache()
        if shuffles:  # in the file shuffle's place, which may not come before a cache
            blocks = blocks.shuffle(num_blocks, seed=seed("blocks"))
    drop = config.drop_remainder
    if not shuffles:
        return blocks.rebatch(batch_size, drop_remainder=drop)
    buffer_size = min(config.shuffle_buffer_records, num_records)
    buffer_blocks = buffer_size // block_size
    if buffer_blocks < MINIMUM_BLOCKS:
        records = blocks.unbatch().shuffle(buffer_size, seed=seed("records"))
        return records.batch(batch_size, drop_remainder=drop)
    if not caches:
        blocks = blocks.shuffle(buffer_blocks, seed=seed("blocks"))
    windows = blocks.rebatch(buffer_size).map(as_is(lambda rows: _permute(rows, seed("records"))))
    # The next window is read while this one is used up: its making must not hold up a step.
    return windows.prefetch(1).rebatch(batch_size, drop_remainder=drop)


def _records_within(manifest: Manifest, num_bytes: int) -> int:
    """How many records of mean size fit into so many bytes; at least 1."""
    splits = manifest.splits.values()
    total = sum(split.uncompressed_bytes for split in splits)
    return max(1, num_bytes * sum(split.num_records for split in splits) // max(1, total))


def _parallel_calls(config: PipelineConfig) -> int:
    return config.num_parallel_calls or usable_cpus()


def _permute(rows: tf.Tensor, seed: int) -> tf.Tensor:
    """Puts a window's rows in random order; string[n] -> string[n].

    Blocks arrive in another order in each epoch, so the window's own rows tell epochs apart:
    a counter or a random dataset beside the files would switch autosharding by files off.
    """
    picked = tf.gather(rows, tf.range(4) * tf.shape(rows)[0] // 4)
    salt = tf.strings.to_hash_bucket_fast(tf.strings.reduce_join(picked), 2**31)
    order = tf.random.experimental.stateless_shuffle(
        tf.range(tf.shape(rows)[0]), seed=tf.stack([salt, tf.constant(seed, tf.int64)])
    )
    return tf.gather(rows, order)


def decode(
    dataset: tf.data.Dataset,
    manifest: Manifest,
    config: PipelineConfig,
    map_fn: MapFns | None,
    *,
    batch_size: int | None = None,
) -> tf.data.Dataset:
    """Parses batches of serialized examples, then maps them.

    Args:
        dataset: string[batch], or (string[batch], float32[batch] mask) where `batch_size` is given.
        manifest: for the schema.
        config: parallelism and fill values.
        map_fn: the user's function, or None; of several each is a stage of its own, which works
            on the next batch while the one after it works on this.
        batch_size: rows of every batch, if a mask travels along.

    Returns:
        A dataset of what `map_fn` makes of `{feature: tensor[batch, ...]}`, with the mask if there is one.

    Raises:
        UsageError: fill values that do not fit, or a map that loses rows of a masked batch.
        SchemaError: a shape that can't be read.
    """
    parse = make_parser(manifest.schema, config.fill_values)
    masked = batch_size is not None
    dataset = dataset.map(
        as_is(lambda rows, mask: (parse(rows), mask)) if masked else parse,
        num_parallel_calls=_parallel_calls(config),
        deterministic=config.deterministic,
    )
    functions = () if map_fn is None else (map_fn,) if callable(map_fn) else tuple(map_fn)
    # None and not 1: exactly one batch at a time, without a thread pool in between.
    calls = None if config.map_num_parallel_calls == 1 else config.map_num_parallel_calls
    for place, function in enumerate(functions):
        if place:
            dataset = dataset.prefetch(1)
        dataset = dataset.map(
            _beside_mask(function) if masked else function,
            num_parallel_calls=calls,
            deterministic=None if calls is None else config.deterministic,
        )
    return _with_all_rows(dataset, batch_size) if functions and masked else dataset


def _beside_mask(function: MapFn) -> Callable[[Any, tf.Tensor], tuple[Any, tf.Tensor]]:
    return lambda batch, mask: (function(batch), mask)


def _with_all_rows(dataset: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
    """Makes sure that a user's map kept the rows that the mask speaks of."""
    found = [spec.shape[0] for spec in tf.nest.flatten(dataset.element_spec[0])]
    if any(rows not in (None, batch_size) for rows in found):
        raise UsageError(
            f"with pad_batches, map_fn must keep the batch's {batch_size} rows, got {found}. "
            f"Keep every row, and give unwanted ones the weight 0."
        )
    if None not in found:
        return dataset

    def check(result: Any, mask: tf.Tensor) -> tuple[Any, tf.Tensor]:
        for tensor in tf.nest.flatten(result):
            if isinstance(tensor, tf.Tensor):
                rows = tf.shape(tensor)[0]
                tf.debugging.assert_equal(rows, batch_size, "with pad_batches, map_fn must keep every row")
        return result, mask

    return dataset.map(as_is(check))


def first_steps(dataset: tf.data.Dataset, steps: int) -> tf.data.Dataset:
    """Keeps the first steps but reads to the end: `take` would leave a cache unfinished.

    Args:
        dataset: of batches.
        steps: batches to keep.

    Returns:
        The first `steps` elements.
    """
    return dataset.enumerate().filter(as_is(lambda i, _: i < steps)).map(as_is(lambda _, batch: batch))


def finish(dataset: tf.data.Dataset, config: PipelineConfig, map_fn: MapFns | None) -> tf.data.Dataset:
    """Adds prefetch and options: FILE autosharding, order, threads.

    Args:
        dataset: of batches.
        config: how far to prefetch, and what is left for TensorFlow to tune.
        map_fn: whether a user's function is part of it.

    Returns:
        The dataset as the user gets it.
    """
    options = tf.data.Options()
    if map_fn is None:
        # Parse calls run side by side already; threads inside each cost more than they bring:
        # 13.6 us of CPU a record instead of 16.1 (40 columns, 2 cores). A user's map may need them.
        options.threading.max_intra_op_parallelism = 1
    options.deterministic = config.deterministic
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    tuned = (config.num_parallel_calls, config.map_num_parallel_calls, config.prefetch_batches)
    options.autotune.enabled = AUTOTUNE in tuned
    if config.prefetch_batches:
        dataset = dataset.prefetch(config.prefetch_batches)
    return dataset.with_options(options)


def fill_up(rows: tf.Tensor, batch_size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Repeats the first row of a short batch until it is full.

    Args:
        rows: string[n], n between 1 and `batch_size`.
        batch_size: rows wanted.

    Returns:
        string[batch_size], and a mask float32[batch_size]: 1 for a record, 0 for a repeat.
    """
    missing = batch_size - tf.shape(rows)[0]
    filled = tf.concat([rows, tf.repeat(rows[:1], missing)], axis=0)
    filled.set_shape([batch_size])
    return filled, tf.cast(tf.range(batch_size) < batch_size - missing, tf.float32)
