"""Manifest + config -> tf.data.Dataset of batches; the same under a tf.distribute strategy.

Comes in: a dataset directory's manifest and a `PipelineConfig`. Goes out: a finite dataset,
one epoch long, of `{feature: tensor[batch, ...]}`. In this order:

    shard files in manifest order -> (worker's share) -> file shuffle
        -> parallel interleave of batched reads -> [cache] -> record shuffle -> batch
        -> batched parse (parsing.py) -> user map -> prefetch

The stages themselves are in stages.py.

    manifest = Manifest.load("data/mnist")
    for batch in make_dataset(manifest, PipelineConfig(per_worker_batch_size=64)):
        batch["image"]  # uint8[64, 28, 28]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpipe.config import PipelineConfig
from tfpipe.errors import ManifestError, UsageError
from tfpipe.manifest import Manifest, Split
from tfpipe.sharding import EpochPlan, plan_epoch, share
from tfpipe.stages import MapFns, as_is, decode, fill_up, finish, first_steps, read


def make_dataset(
    manifest: Manifest,
    config: PipelineConfig,
    split: str = "train",
    *,
    num_workers: int = 1,
    map_fn: MapFns | None = None,
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
        map_fn: applied to every parsed batch; several functions one after the other, each a
            stage of its own.
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
    dataset = _global_batches(manifest, config, split, num_workers, map_fn, epoch)
    return finish(dataset, config, map_fn)


def distribute(
    strategy: tf.distribute.Strategy,
    manifest: Manifest,
    config: PipelineConfig,
    split: str = "train",
    *,
    map_fn: MapFns | None = None,
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
        map_fn: applied to every parsed batch; see `make_dataset`.
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
        dataset = _global_batches(manifest, config, split, num_workers, map_fn, epoch)
        if config.drop_remainder:
            dataset = dataset.take(plan.steps_per_epoch // num_workers)
        dataset = finish(dataset.repeat() if repeat else dataset, config, map_fn)
        assert_file_autosharding(dataset)
        return strategy.experimental_distribute_dataset(dataset)

    shares = share(counts=counts, num_workers=num_workers, sharding="per_worker")

    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        if context.num_input_pipelines != num_workers:
            raise UsageError(
                f"the strategy must have one input pipeline a worker, got {context.num_input_pipelines} "
                f"for {num_workers} workers. Use MultiWorkerMirroredStrategy."
            )
        worker = context.input_pipeline_id
        dataset = _worker_dataset(
            manifest, config, split, shares[worker], plan, replicas, map_fn, pad_batches, (epoch, worker)
        )
        return finish(dataset.repeat() if repeat else dataset, config, map_fn)

    return strategy.distribute_datasets_from_function(dataset_fn)


def _global_batches(
    manifest: Manifest,
    config: PipelineConfig,
    split: str,
    num_workers: int,
    map_fn: MapFns | None,
    epoch: int,
) -> tf.data.Dataset:
    """One epoch of global batches."""
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
    dataset = read(manifest, config, manifest.paths(split), found.num_records, batch_size, epoch=epoch)
    dataset = decode(dataset, manifest, config, map_fn)
    if num_workers == 1:
        # An epoch that ends early is an error, not a shorter epoch. (Under autosharding each
        # worker sees its part of these batches.)
        full, rest = divmod(found.num_records, batch_size)
        steps = full + (rest > 0 and not config.drop_remainder)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
    return dataset


def _worker_dataset(
    manifest: Manifest,
    config: PipelineConfig,
    split: str,
    indices: Sequence[int],
    plan: EpochPlan,
    replicas: int,
    map_fn: MapFns | None,
    pad_batches: bool,
    seed: tuple[int, int],
) -> tf.data.Dataset:
    """One worker's epoch of one-replica batches."""
    shards = [manifest.split(split).shards[index] for index in indices]
    paths = [manifest.paths(split)[index] for index in indices]
    num_records = sum(shard.num_records for shard in shards)
    batch_size = config.per_worker_batch_size // replicas
    steps = plan.steps_per_epoch * replicas
    dataset = read(manifest, config, paths, num_records, batch_size, epoch=seed[0], worker=seed[1])
    batches = num_records // batch_size if config.drop_remainder else -(-num_records // batch_size)
    if batches > steps:  # only with drop_remainder: all workers stop together
        dataset, batches = first_steps(dataset, steps), steps
    if pad_batches:
        dataset = dataset.map(as_is(lambda rows: fill_up(rows, batch_size)))
        if batches < steps:
            first = next(path for path, shard in zip(paths, shards, strict=True) if shard.num_records)
            empty = tf.data.TFRecordDataset(first, manifest.compression).take(1).repeat(batch_size)
            empty = empty.batch(batch_size, drop_remainder=True).repeat(steps - batches)
            dataset = dataset.concatenate(empty.map(as_is(lambda rows: (rows, tf.zeros([batch_size])))))
            batches = steps
    dataset = decode(dataset, manifest, config, map_fn, batch_size=batch_size if pad_batches else None)
    return dataset.apply(tf.data.experimental.assert_cardinality(batches))


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
