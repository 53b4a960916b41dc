"""What one worker does: join the cluster, build, measure, train, evaluate.

Comes in: a dataset directory, the configurations, and who takes part. Goes out: the
measurement (the result contract's object), the same on every worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfpipe import attribution
from tfpipe.cluster import Cluster
from tfpipe.config import PipelineConfig, TrainerConfig
from tfpipe.errors import ClusterError
from tfpipe.launcher import send_event
from tfpipe.manifest import Manifest
from tfpipe.pipeline import distribute, num_input_workers
from tfpipe.rounds import Gatherer, Rounds, measure_rounds
from tfpipe.sharding import plan_epoch
from tfpipe.step import Stepper, load_function

EVAL_SPLITS = ("test", "validation", "val", "eval")


def train_and_measure(
    data: str,
    split: str,
    pipeline: PipelineConfig,
    trainer: TrainerConfig,
    *,
    cluster: Cluster | None,
    wait_for_peers: Callable[[], None],
) -> dict[str, Any]:
    """Measures, and trains where asked to.

    Args:
        data: the dataset directory.
        split: measured and trained on.
        pipeline: how records become batches.
        trainer: what to run.
        cluster: who takes part, as TF_CONFIG says; None for one worker alone.
        wait_for_peers: called right before TensorFlow would wait for them without limit.

    Returns:
        The result contract's object.

    Raises:
        TfpipeError: anything that the user can mend.
        tf.errors.OpError: a peer was lost while running.
    """
    # What can be refused is refused before peers are waited for.
    manifest = Manifest.load(data)
    model_fn = load_function(trainer.model, "--model")
    map_fn = _input_maps(trainer, model_fn)
    num_workers, worker = (cluster.num_workers, cluster.index) if cluster else (1, 0)

    send_event("progress", text="waiting for all workers", done=0, total=0)
    wait_for_peers()
    strategy, options = _make_strategy(cluster, trainer)
    send_event("started")
    send_event("progress", text="building model and pipeline", done=0, total=0)
    stepper = Stepper(strategy, model_fn, label=trainer.label, options=options)
    # Full batches only, so that every measured step does the same work.
    full = dataclasses.replace(pipeline, drop_remainder=True)
    dataset = distribute(strategy, manifest, full, split, map_fn=map_fn, repeat=True)
    gatherer = Gatherer(strategy, worker, num_workers, options)
    initial = stepper.build(next(iter(dataset)))
    rounds = measure_rounds(
        stepper,
        dataset,
        gatherer,
        global_batch_size=pipeline.per_worker_batch_size * num_workers,
        prefetch_batches=pipeline.prefetch_batches,
        steps=trainer.steps,
        rounds=trainer.rounds,
        warmup=trainer.warmup,
        on_progress=lambda text, done, total: send_event("progress", text=text, done=done, total=total),
    )
    result = _result(rounds, stepper, pipeline, trainer, manifest, split, num_workers, strategy)
    if trainer.epochs:
        stepper.restore(initial)  # measuring has moved the weights, apart on each worker
        result["training"] = _train(stepper, strategy, gatherer, manifest, split, pipeline, trainer, map_fn)
    # Nobody leaves while another still needs it. Who comes out of the barrier first may be
    # gone before its last bytes have reached a peer: that peer has its result already.
    with contextlib.suppress(tf.errors.OpError):
        gatherer.barrier()
    return result


def _input_maps(trainer: TrainerConfig, model_fn: Callable[..., Any]) -> list[Callable[[Any], Any]]:
    """The user's map, then the model's own adapter: stages of the input pipeline that overlap."""
    maps = [load_function(trainer.map, "--map")] if trainer.map else []
    if (prepare := getattr(model_fn, "prepare", None)) is not None:
        maps.append(lambda batch: prepare(batch, trainer.label) if isinstance(batch, dict) else batch)
    return maps


def _make_strategy(cluster: Cluster | None, trainer: TrainerConfig) -> tuple[Any, Any]:
    """Joins the cluster; refuses to go on with fewer replicas than it names."""
    if cluster is None:
        gpus = tf.config.list_logical_devices("GPU")
        return tf.distribute.MirroredStrategy() if len(gpus) > 1 else tf.distribute.get_strategy(), None
    gpus = tf.config.list_physical_devices("GPU")
    implementation = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(
        # Without a GPU there is only RING; with some, TensorFlow chooses.
        implementation=implementation.AUTO if gpus else implementation.RING,
        timeout_seconds=float(trainer.collective_timeout_s),
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    expected = cluster.num_workers * max(1, len(gpus))
    if strategy.num_replicas_in_sync != expected:
        raise ClusterError(
            f"the strategy must have {expected} replicas in sync, got {strategy.num_replicas_in_sync}: "
            f"the workers would train apart. Give every worker the same TF_CONFIG and as many GPUs."
        )
    return strategy, options


def _result(
    rounds: Rounds,
    stepper: Stepper,
    pipeline: PipelineConfig,
    trainer: TrainerConfig,
    manifest: Manifest,
    split: str,
    num_workers: int,
    strategy: Any,
) -> dict[str, Any]:
    found = attribution.attribute(rounds.times_s, exchanges=strategy.num_replicas_in_sync > 1)
    global_batch_size = pipeline.per_worker_batch_size * num_workers
    input_s = tuple(rounds.input_s.tolist())
    bytes_read = [None if np.isnan(b) else int(b) for b in rounds.bytes_read]
    return {
        "format": "tfpipe-measurement",
        "format_version": 1,
        "verdict": found.verdict,
        "headline": attribution.headline(found, worker_input_s=input_s),
        "num_workers": num_workers,
        "replicas_in_sync": strategy.num_replicas_in_sync,
        "per_worker_batch_size": pipeline.per_worker_batch_size,
        "global_batch_size": global_batch_size,
        "step_s": dataclasses.asdict(found.step),
        "parts_s": {part: dataclasses.asdict(found.parts[part]) for part in attribution.PARTS},
        "examples_per_s": global_batch_size / found.step.median,
        "examples_consumed": int(rounds.consumed.sum()),
        "input_capacity_examples_per_s": global_batch_size / found.drain_s,
        "workers": [
            {
                "index": index,
                "input_s": input_s[index],
                "compute_s": found.worker_compute_s[index],
                "wait_s": found.worker_wait_s[index],
                "examples": int(rounds.examples[index]),
                "bytes_read": bytes_read[index],
                "cpus": int(rounds.cpus[index]),
            }
            for index in range(num_workers)
        ],
        "network": {
            "gradient_bytes": stepper.gradient_bytes,
            # A ring all-reduce sends each byte 2 (n - 1) / n times from every worker.
            "bytes_per_step": round(2 * (num_workers - 1) / num_workers * stepper.gradient_bytes),
            "latency_s": None,
            "bandwidth_bytes_per_s": None,
        },
        "versus_one_worker": None,
        "advice": attribution.advise(
            found,
            num_workers=num_workers,
            per_worker_batch_size=pipeline.per_worker_batch_size,
            map_is_serial=bool(trainer.map) and pipeline.map_num_parallel_calls == 1,
        ),
        "pipeline": pipeline.to_json(),
        "trainer": trainer.to_json(),
        "environment": {
            "tensorflow": tf.__version__,
            "keras": _keras_version(),
            "numpy": np.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpu_count": os.cpu_count(),
            "strategy": type(strategy).__name__,
            "reducer": "none",
            "split": split,
            "schema_digest": manifest.schema.digest,
            "blocks_excluded_for_retraces": rounds.retraces,
        },
        "training": None,
    }


def _keras_version() -> str:
    """Of the generation in use: tf_keras hides its own behind tf.keras."""
    module = sys.modules[tf.keras.Model.__module__.partition(".")[0]]
    return f"{module.__name__} {module.__version__}"


def _train(
    stepper: Stepper,
    strategy: Any,
    gatherer: Gatherer,
    manifest: Manifest,
    split: str,
    pipeline: PipelineConfig,
    trainer: TrainerConfig,
    map_fn: Any,
) -> dict[str, Any]:
    """Trains from the initial weights, every record once an epoch, and evaluates."""
    start_s = time.perf_counter()
    batches, step_records = _epochs(strategy, manifest, split, pipeline, map_fn)
    for epoch in range(trainer.epochs):
        parts = [
            stepper.synced(*next(batches), tf.constant(records, tf.float32))[0] * records
            for records in step_records
        ]
        # Each worker's loss is its part of the global mean.
        loss = float(gatherer.gather(tf.add_n(parts).numpy()).sum()) / sum(step_records)
        text = f"epoch {epoch + 1} of {trainer.epochs}: loss {loss:.4f}"
        send_event("progress", text=text, done=epoch + 1, total=trainer.epochs)
    training = {
        "epochs": trainer.epochs,
        "steps": trainer.epochs * len(step_records),
        "train_s": time.perf_counter() - start_s,
        "final_loss": loss,
    }
    eval_split = next((name for name in EVAL_SPLITS if name in manifest.splits and name != split), None)
    return {**training, **_evaluate(stepper, strategy, gatherer, manifest, eval_split, pipeline, map_fn)}


def _evaluate(
    stepper: Stepper,
    strategy: Any,
    gatherer: Gatherer,
    manifest: Manifest,
    split: str | None,
    pipeline: PipelineConfig,
    map_fn: Any,
) -> dict[str, Any]:
    """Evaluates on every record of the split exactly once; all None without a split."""
    if split is None:
        return {"eval_split": None, "eval_loss": None, "eval_accuracy": None, "eval_examples": None}
    in_order = dataclasses.replace(pipeline, shuffle_buffer_records=0, drop_remainder=False)
    batches, step_records = _epochs(strategy, manifest, split, in_order, map_fn)
    totals = sum(stepper.evaluate(*next(batches)).numpy().astype(float) for _ in step_records)
    loss, right, examples = gatherer.gather(totals).sum(axis=0)
    return {
        "eval_split": split,
        "eval_loss": loss / examples,
        "eval_accuracy": right / examples if stepper.classifies else None,
        "eval_examples": int(examples),
    }


def _epochs(
    strategy: Any, manifest: Manifest, split: str, pipeline: PipelineConfig, map_fn: Any
) -> tuple[Iterator[Any], list[int]]:
    """Endless (batch, mask) steps, and the records in each step of an epoch.

    The number of steps is known and the same on every worker, so that no worker has to ask
    its peers before each step whether they have another batch.
    """
    step_records = plan_epoch(
        counts=[shard.num_records for shard in manifest.split(split).shards],
        num_workers=num_input_workers(strategy),
        per_worker_batch_size=pipeline.per_worker_batch_size,
        drop_remainder=pipeline.drop_remainder,
    ).step_records()
    dataset = distribute(strategy, manifest, pipeline, split, map_fn=map_fn, repeat=True, pad_batches=True)
    return iter(dataset), step_records
