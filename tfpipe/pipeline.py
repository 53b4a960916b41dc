"""Manifest + config -> tf.data.Dataset of batches; the same under a tf.distribute strategy.

Comes in: a dataset directory's manifest and a `PipelineConfig`. Goes out: a finite dataset,
one epoch long, of `{feature: tensor[batch, ...]}`. In this order:

    shard files in manifest order -> (worker's share) -> file shuffle
        -> parallel interleave of batched reads -> [cache] -> record shuffle -> batch
        -> batched parse (parsing.py) -> user map -> prefetch

Nothing random lies before the cache. Records move in blocks wherever they can: one element
a record costs more than reading and parsing it.

    manifest = Manifest.load("data/mnist")
    for batch in make_dataset(manifest, PipelineConfig(per_worker_batch_size=64)):
        batch["image"]  # uint8[64, 28, 28]
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpipe.config import PipelineConfig
from tfpipe.errors import ManifestError, UsageError
from tfpipe.manifest import Manifest, Split
from tfpipe.parsing import make_parser
from tfpipe.sharding import EpochPlan, plan_epoch, share

MapFn = Callable[[Any], Any]

# Our own functions need no AutoGraph, which would double the time to build a dataset.
_as_is = tf.autograph.experimental.do_not_convert

# Blocks that a shuffle buffer must hold before the record shuffle works on whole windows (blocks
# in random order, then the rows of a window permuted at once) instead of on single records:
# 16 us of CPU a record instead of 24 on 40 columns, gzip. With fewer blocks their order
# would not tell one epoch from the next well enough.
MINIMUM_BLOCKS = 16


def make_dataset(
    manifest: Manifest,
    config: PipelineConfig,
    split: str = "train",
    *,
    num_workers: int = 1,
    map_fn: MapFn | None = None,
    epoch: int = 0,
) -> tf.data.Dataset:
    """Builds one epoch of batches.

    Each iteration is an epoch of its own: iterating again (or `.repeat()`) reshuffles. The
    same seed and epoch give the same order, in every process. AutoShardPolicy.FILE is set,
    so that `strategy.experimental_distribute_dataset` shares out whole files.

    Args:
        manifest: of the dataset directory, from `Manifest.load`.
        config: how records become batches.
        split: the split's name.
        num_workers: of the strategy that will share the dataset out by files; the batch is the
            global one, `per_worker_batch_size * num_workers`. 1 for one process.
        map_fn: applied to every parsed batch.
        epoch: mixed into the seed; a run that resumes at epoch 3 passes 3.

    Returns:
        A finite dataset of `{feature: tensor[batch, ...]}`, or of what `map_fn` returns. A
        nullable feature without a fill value has a companion `NAME_present` (bool[batch]).
        A feature of unknown length is a RaggedTensor.

    Raises:
        UsageError: no full batch although `drop_remainder` asks for one; fewer shards than
            workers; a fill value that does not fit.
        ManifestError: no such split, or it holds no record.
    """
    if num_workers < 1:
        raise UsageError(f"num_workers must be >= 1, got {num_workers}.")
    found = _split_with_records(manifest, split)
    counts = [shard.num_records for shard in found.shards]
    if num_workers > 1:
        share(counts=counts, num_workers=num_workers, sharding="file")
    batch_size = config.per_worker_batch_size * num_workers
    if config.drop_remainder and found.num_records < batch_size:
        raise UsageError(
            f"a batch must fit into the split when drop_remainder is set, got a batch of {batch_size} "
            f"for {found.num_records} records ({manifest.directory}: {split}). Use a smaller "
            f"per_worker_batch_size, or drop_remainder=False."
        )
    dataset = _read(manifest, config, manifest.paths(split), found.num_records, batch_size, epoch=epoch)
    dataset = _decode(dataset, manifest, config, map_fn)
    if num_workers == 1:
        # An epoch that ends early is an error, not a shorter epoch. (Under autosharding each
        # worker sees its part of these batches.)
        full, rest = divmod(found.num_records, batch_size)
        steps = full + (rest > 0 and not config.drop_remainder)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
    return _finish(dataset, config, map_fn)


def distribute(
    strategy: tf.distribute.Strategy,
    manifest: Manifest,
    config: PipelineConfig,
    split: str = "train",
    *,
    map_fn: MapFn | None = None,
    repeat: bool = False,
    pad_batches: bool = False,
    epoch: int = 0,
) -> Any:
    """Puts the pipeline under a strategy; every record goes to exactly one worker per epoch.

    `config.sharding` chooses one of two ways, which are never mixed:

    - "per_worker": each worker builds its own pipeline over its share of the files (evened
      out by the manifest's counts). `map_fn` sees one replica's batches.
    - "file": one pipeline of global batches; TensorFlow gives each worker every n-th file
      (AutoShardPolicy.FILE, checked to be in force) and cuts each global batch into n steps
      after `map_fn`, so one call of `map_fn` serves n steps: it runs in bursts, on batches n
      times as large.

    Without `pad_batches` workers may have different numbers of steps in an epoch; iterate
    with `for batch in distributed`, which asks all workers before each step, or use `repeat`
    and count steps. With `drop_remainder` all workers stop with the one that has the fewest
    full batches.

    Args:
        strategy: any strategy; MultiWorkerMirroredStrategy must be made before other ops run.
        manifest: of the dataset directory.
        config: how records become batches.
        split: the split's name.
        map_fn: applied to every parsed batch.
        repeat: whether the dataset is endless, each epoch in a new order.
        pad_batches: makes every batch exactly `per_worker_batch_size` rows and all workers'
            epochs `plan_epoch(...).steps_per_epoch` steps. Elements become `(batch, mask)`,
            mask float32[batch]: 1 for a record, 0 for a row that repeats another record only
            to fill up. Rows are filled up before parsing, so that `map_fn` may return anything.
        epoch: mixed into the seed.

    Returns:
        A distributed dataset; per step each worker gets `per_worker_batch_size` records,
        divided among its replicas.

    Raises:
        UsageError: fewer shards with records than workers, a batch that does not divide by a
            worker's replicas, no full batch with `drop_remainder`, or `pad_batches` in "file" mode.
        ManifestError: no such split, or it holds no record.
    """
    num_workers = num_input_workers(strategy)
    replicas = strategy.num_replicas_in_sync // num_workers
    if config.per_worker_batch_size % replicas:
        raise UsageError(
            f"per_worker_batch_size must be a multiple of the {replicas} replicas of each worker, "
            f"got {config.per_worker_batch_size}. Use "
            f"{-(-config.per_worker_batch_size // replicas) * replicas}."
        )
    counts = [shard.num_records for shard in _split_with_records(manifest, split).shards]
    # Said before anything runs, with the number of shards to convert to.
    plan = plan_epoch(
        counts=counts,
        num_workers=num_workers,
        per_worker_batch_size=config.per_worker_batch_size,
        drop_remainder=config.drop_remainder,
        sharding=config.sharding,
    )
    if config.sharding == "file":
        if pad_batches:
            raise UsageError(
                "pad_batches needs each worker's own record count, which autosharding hides, got "
                'sharding="file". Use sharding="per_worker".'
            )
        dataset = make_dataset(manifest, config, split, num_workers=num_workers, map_fn=map_fn, epoch=epoch)
        if config.drop_remainder:
            dataset = dataset.take(plan.steps_per_epoch // num_workers)
        dataset = _finish(dataset.repeat() if repeat else dataset, config, map_fn)
        assert_file_autosharding(dataset)
        return strategy.experimental_distribute_dataset(dataset)

    shares = share(counts=counts, num_workers=num_workers, sharding="per_worker")

    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        worker = context.input_pipeline_id
        dataset = _worker_dataset(
            manifest, config, split, shares[worker], plan, replicas, map_fn, pad_batches, (epoch, worker)
        )
        return _finish(dataset.repeat() if repeat else dataset, config, map_fn)

    return strategy.distribute_datasets_from_function(dataset_fn)


def _worker_dataset(
    manifest: Manifest,
    config: PipelineConfig,
    split: str,
    indices: Sequence[int],
    plan: EpochPlan,
    replicas: int,
    map_fn: MapFn | None,
    pad_batches: bool,
    seed: tuple[int, int],
) -> tf.data.Dataset:
    """One worker's epoch of one-replica batches."""
    shards = [manifest.split(split).shards[index] for index in indices]
    paths = [manifest.paths(split)[index] for index in indices]
    num_records = sum(shard.num_records for shard in shards)
    batch_size = config.per_worker_batch_size // replicas
    steps = plan.steps_per_epoch * replicas
    dataset = _read(manifest, config, paths, num_records, batch_size, epoch=seed[0], worker=seed[1])
    batches = num_records // batch_size if config.drop_remainder else -(-num_records // batch_size)
    if batches > steps:  # only with drop_remainder: all workers stop together
        dataset, batches = _take(dataset, steps), steps
    if pad_batches:
        dataset = dataset.map(_as_is(lambda rows: _fill_up(rows, batch_size)))
        if batches < steps:
            first = next(path for path, shard in zip(paths, shards, strict=True) if shard.num_records)
            empty = tf.data.TFRecordDataset(first, manifest.compression).take(1).repeat(batch_size)
            empty = empty.batch(batch_size, drop_remainder=True).repeat(steps - batches)
            dataset = dataset.concatenate(empty.map(_as_is(lambda rows: (rows, tf.zeros([batch_size])))))
            batches = steps
    dataset = _decode(dataset, manifest, config, map_fn, batch_size=batch_size if pad_batches else None)
    return dataset.apply(tf.data.experimental.assert_cardinality(batches))


def _fill_up(rows: tf.Tensor, batch_size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Repeats the first row of a short batch until it is full; string[n] -> string[b], float32[b]."""
    missing = batch_size - tf.shape(rows)[0]
    filled = tf.concat([rows, tf.repeat(rows[:1], missing)], axis=0)
    filled.set_shape([batch_size])
    return filled, tf.cast(tf.range(batch_size) < batch_size - missing, tf.float32)


def num_input_workers(strategy: tf.distribute.Strategy) -> int:
    """How many workers read input under a strategy.

    Args:
        strategy: any strategy.

    Returns:
        The cluster's chief and workers; 1 without a cluster.
    """
    resolver = strategy.cluster_resolver
    if resolver is None:
        return 1
    cluster = resolver.cluster_spec().as_dict()
    return max(1, sum(len(cluster.get(job, ())) for job in ("chief", "worker")))


def assert_file_autosharding(dataset: tf.data.Dataset) -> None:
    """Makes sure that TensorFlow will share a dataset out by whole files, or fail loudly.

    Under AUTO, TensorFlow falls back to DATA with no more than a log line when it finds no
    files in the graph: every worker then reads and decodes everything.

    Args:
        dataset: what will be given to `strategy.experimental_distribute_dataset`.

    Raises:
        UsageError: another policy is in force, or TensorFlow can't find the files in the graph.

    Source: tensorflow/core/grappler/optimizers/data/auto_shard.cc.
    """
    policy = dataset.options().experimental_distribute.auto_shard_policy
    file_policy = tf.data.experimental.AutoShardPolicy.FILE
    if policy != file_policy:
        raise UsageError(
            f"AutoShardPolicy.FILE must be in force, got {policy.name}. Set "
            f"options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE "
            f"and apply it with dataset.with_options(options)."
        )
    try:
        # The rewrite that the strategy will do, for one of two workers; nothing is read.
        tf.raw_ops.AutoShardDataset(
            input_dataset=tf.data.experimental.to_variant(dataset),
            num_workers=2,
            index=0,
            output_types=[tf.string],
            output_shapes=[tf.TensorShape([])],
            auto_shard_policy=file_policy.value,
        )
    except tf.errors.NotFoundError as error:
        raise UsageError(
            f"TensorFlow must find the files in the dataset's graph to share them out, got: "
            f"{_first_sentence(error)}. Read them with tf.data.TFRecordDataset or another file dataset, "
            f'not in a generator or a map; or share them out yourself (sharding="per_worker").'
        ) from None


def _first_sentence(error: tf.errors.OpError) -> str:
    text = str(error.message).split("}}")[-1].strip()
    return text.split("\n")[0].split(": name:")[0].split(": goo.gle")[0].split(". Consider")[0][:160]


def _split_with_records(manifest: Manifest, name: str) -> Split:
    split = manifest.split(name)
    if not split.num_records:
        raise ManifestError(
            f"a split must hold at least one record, got 0 in {len(split.shards)} shards "
            f"({manifest.directory}: {name}). Convert again with another --split."
        )
    return split


def _read(
    manifest: Manifest,
    config: PipelineConfig,
    paths: Sequence[str],
    num_records: int,
    batch_size: int,
    *,
    epoch: int = 0,
    worker: int = 0,
) -> tf.data.Dataset:
    """Batches of serialized examples, string[batch], in this epoch's order."""

    def seed(stage: str) -> int:
        text = f"{config.seed}/{epoch}/{worker}/{stage}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1

    @_as_is
    def read_file(path: tf.Tensor) -> tf.data.Dataset:
        records = tf.data.TFRecordDataset(
            path, compression_type=manifest.compression, buffer_size=config.read_buffer_bytes
        )
        return records.batch(config.read_batch_size)

    shuffles, caches = config.shuffle_buffer_records > 0, config.cache == "memory"
    files = tf.data.Dataset.from_tensor_slices(list(paths))
    if shuffles and not caches:
        files = files.shuffle(len(paths), seed=seed("files"))
    cycle_length = min(config.cycle_length, len(paths))
    blocks = files.interleave(
        read_file,
        cycle_length=cycle_length,
        block_length=config.block_length,
        num_parallel_calls=min(config.num_parallel_calls, cycle_length),
        deterministic=config.deterministic,
    )
    num_blocks = -(-num_records // config.read_batch_size) + len(paths)  # at most
    if caches:
        blocks = blocks.cache()
        if shuffles:  # in the file shuffle's place, which may not come before a cache
            blocks = blocks.shuffle(num_blocks, seed=seed("blocks"))
    drop = config.drop_remainder
    if not shuffles:
        return blocks.rebatch(batch_size, drop_remainder=drop)
    buffer_size = min(config.shuffle_buffer_records, num_records)
    buffer_blocks = buffer_size // config.read_batch_size
    if buffer_blocks < MINIMUM_BLOCKS:
        records = blocks.unbatch().shuffle(buffer_size, seed=seed("records"))
        return records.batch(batch_size, drop_remainder=drop)
    if not caches:
        blocks = blocks.shuffle(buffer_blocks, seed=seed("blocks"))
    windows = blocks.rebatch(buffer_size).map(_as_is(lambda rows: _permute(rows, seed("records"))))
    return windows.rebatch(batch_size, drop_remainder=drop)


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


def _decode(
    dataset: tf.data.Dataset,
    manifest: Manifest,
    config: PipelineConfig,
    map_fn: MapFn | None,
    *,
    batch_size: int | None = None,
) -> tf.data.Dataset:
    """Parses batches of serialized examples (with a mask where `batch_size` is given), then maps them."""
    parse = make_parser(manifest.schema, config.fill_values)
    masked = batch_size is not None
    dataset = dataset.map(
        _as_is(lambda rows, mask: (parse(rows), mask)) if masked else parse,
        num_parallel_calls=config.num_parallel_calls,
        deterministic=config.deterministic,
    )
    if map_fn is None:
        return dataset

    # None and not 1: exactly one batch at a time, without a thread pool in between.
    calls = None if config.map_num_parallel_calls == 1 else config.map_num_parallel_calls
    dataset = dataset.map(
        (lambda batch, mask: (map_fn(batch), mask)) if masked else map_fn,
        num_parallel_calls=calls,
        deterministic=None if calls is None else config.deterministic,
    )
    return _with_all_rows(dataset, batch_size) if masked else dataset


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

    return dataset.map(_as_is(check))


def _take(dataset: tf.data.Dataset, steps: int) -> tf.data.Dataset:
    """The first steps, reading to the end all the same: `take` would leave a cache unfinished."""
    return dataset.enumerate().filter(_as_is(lambda i, _: i < steps)).map(_as_is(lambda _, batch: batch))


def _finish(dataset: tf.data.Dataset, config: PipelineConfig, map_fn: MapFn | None) -> tf.data.Dataset:
    options = tf.data.Options()
    if map_fn is None:
        # Parse calls run side by side already; threads inside each cost more than they bring:
        # 13.6 us of CPU a record instead of 16 (40 columns, 2 cores). A user's map may need them.
        options.threading.max_intra_op_parallelism = 1
    options.deterministic = config.deterministic
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    if config.prefetch_batches:
        dataset = dataset.prefetch(config.prefetch_batches)
    return dataset.with_options(options)
