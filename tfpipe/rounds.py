"""The measuring rounds: what each phase of each round took, on every worker.

Comes in: a `Stepper`, an endless distributed dataset. Goes out: `Rounds`, the times of all
workers for `attribution.attribute`. The phases are interleaved (local, synced, real, drain,
local, ...), so that drift of the machine cancels; every worker waits for its peers before
each phase; each timed block of steps is closed by reading a value that depends on it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfpipe.attribution import PHASES
from tfpipe.step import Stepper

# Steps a timed block: more than the batches that may lie ready between pipeline and step, so
# that a burst of ready batches after a hold-up does not pass for a fast step. (In blocks of
# 4 under a 150 ms input on a busy machine, steps of 103 and 203 ms alternated.)
_BLOCK_STEPS = 10
# Batches held beside the pipeline's own prefetch: between a user's map and the model's adapter,
# and by TensorFlow's distributed iterator.
_HELD_BATCHES = 5
# With autotuned buffers nothing says how many batches lie ready; this many steps use them up.
_HELD_BATCHES_AUTOTUNED = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """What the rounds measured, the same on every worker after `gather`.

    Attributes:
        times_s: by phase, float64[workers, rounds, blocks] seconds per step.
        input_s: float64[workers], median wait for a batch per real step.
        examples: float64[workers], records that each worker took out of the pipeline.
        consumed: float64[workers], records that each worker's steps used, counted on device.
        bytes_read: float64[workers], by the worker's process meanwhile; NaN if unknown.
        cpus: float64[workers], cores each worker may use.
        retraces: blocks thrown away because TensorFlow traced a step anew in them.
    """

    times_s: dict[str, np.ndarray]
    input_s: np.ndarray
    examples: np.ndarray
    consumed: np.ndarray
    bytes_read: np.ndarray
    cpus: np.ndarray
    retraces: int


class Gatherer:
    """Collects numbers from all workers, and makes them wait for each other.

    Args:
        strategy: any strategy.
        worker: this worker's index.
        num_workers: in the cluster.
        options: of the all-reduce.
    """

    def __init__(self, strategy: Any, worker: int, num_workers: int, options: Any) -> None:
        self._strategy, self._worker, self._num_workers = strategy, worker, num_workers
        replicas = strategy.num_replicas_in_sync // num_workers

        def total(value: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, value / replicas, options=options)

        self._sum = tf.function(
            lambda value: strategy.experimental_local_results(strategy.run(total, args=(value,)))[0],
            reduce_retracing=True,
        )

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Stacks every worker's array: float64[...] -> float64[workers, ...]."""
        padded = np.zeros((self._num_workers, *values.shape))
        padded[self._worker] = np.nan_to_num(values, nan=-1.0)  # NaN would spread in the sum
        if self._num_workers > 1:
            padded = self._sum(tf.constant(padded)).numpy()
        return np.where(padded == -1.0, np.nan, padded)

    def barrier(self) -> None:
        """Returns when every worker has come here."""
        if self._num_workers > 1:
            self._sum(tf.zeros([1], tf.float64)).numpy()


def measure_rounds(
    stepper: Stepper,
    dataset: Any,
    gatherer: Gatherer,
    *,
    global_batch_size: int,
    prefetch_batches: int,
    steps: int,
    rounds: int,
    warmup: int,
    on_progress: Callable[[str, int, int], None],
) -> Rounds:
    """Goes through the phases `rounds` times and collects what they took.

    Args:
        stepper: the model's steps.
        dataset: endless distributed dataset of full batches.
        gatherer: of the same cluster.
        global_batch_size: records of all workers per step.
        prefetch_batches: of the pipeline; tells how many batches may lie ready when the
            real phase begins. They are used up before it is timed: in twice as many steps, for an
            input that takes twice a step's time makes a new batch while two are used.
        steps: timed steps of each phase in each round.
        rounds: how often.
        warmup: steps of each kind before the first round, not timed.
        on_progress: called with a text, what is done and the total.

    Returns:
        The times of all workers, on every worker.

    Raises:
        tf.errors.OpError: a peer was lost, or a collective took longer than its timeout.
    """
    run = _Run(stepper, dataset, global_batch_size)
    held = prefetch_batches + _HELD_BATCHES if prefetch_batches >= 0 else _HELD_BATCHES_AUTOTUNED
    blocks = max(1, steps // _BLOCK_STEPS)
    bounds = np.linspace(0, steps, blocks + 1).astype(int)
    phases = {
        "local": run.local,
        "synced": run.synced,
        "real": run.real,
        "drain": run.drain,
    }
    total = rounds * len(PHASES)
    on_progress("warming up", 0, total)
    bytes_before = _bytes_read()
    for phase in ("local", "synced", "real"):
        gatherer.barrier()
        phases[phase](max(warmup, 1))

    times_s = {phase: np.full((rounds, blocks), np.nan) for phase in PHASES}
    waits_s: list[float] = []
    retraces = 0
    for index in range(rounds):
        for position, phase in enumerate(PHASES):
            on_progress(f"round {index + 1} of {rounds}: {phase}", index * len(PHASES) + position, total)
            gatherer.barrier()
            # Untimed: uses up batches that lay ready, and lets caches and threads settle.
            phases[phase]({"drain": held, "real": 2 * held}.get(phase, 2))
            gatherer.barrier()
            run.waits_s.clear()
            for block in range(blocks):
                count, traces = int(bounds[block + 1] - bounds[block]), dict(stepper.traces)
                start_s = time.perf_counter()
                phases[phase](count)
                elapsed_s = time.perf_counter() - start_s
                if stepper.traces == traces:
                    times_s[phase][index, block] = elapsed_s / count
                else:
                    retraces += 1
            if phase == "real":
                waits_s += run.waits_s
    on_progress("collecting", total, total)
    return Rounds(
        times_s={phase: gatherer.gather(times_s[phase]) for phase in PHASES},
        input_s=gatherer.gather(np.array(np.median(waits_s))),
        examples=gatherer.gather(np.array(float(run.examples))),
        consumed=gatherer.gather(np.array(float(run.consumed))),
        bytes_read=gatherer.gather(np.array(_bytes_read() - bytes_before)),
        cpus=gatherer.gather(np.array(float(len(os.sched_getaffinity(0))))),
        retraces=int(gatherer.gather(np.array(float(retraces))).sum()),
    )


class _Run:
    """The phases; each runs `count` steps and returns when their results are there."""

    def __init__(self, stepper: Stepper, dataset: Any, global_batch_size: int) -> None:
        self._stepper = stepper
        self._iterator = iter(dataset)
        self._count = tf.constant(global_batch_size, tf.float32)
        self._batch = next(self._iterator)
        self.waits_s: list[float] = []
        self.consumed = 0.0
        self.examples = self._rows(self._batch)

    def local(self, count: int) -> None:
        for _ in range(count):
            loss, _ = self._stepper.local(self._batch, None, self._count)
        loss.numpy()

    def synced(self, count: int) -> None:
        for _ in range(count):
            loss, _ = self._stepper.synced(self._batch, None, self._count)
        loss.numpy()

    def real(self, count: int) -> None:
        consumed = []
        for _ in range(count):
            start_s = time.perf_counter()
            batch = next(self._iterator)
            self.waits_s.append(time.perf_counter() - start_s)
            loss, rows = self._stepper.synced(batch, None, self._count)
            consumed.append(rows)
        loss.numpy()
        rows_consumed = sum(float(rows.numpy()) for rows in consumed)
        self.consumed += rows_consumed
        self.examples += rows_consumed

    def drain(self, count: int) -> None:
        for _ in range(count):
            batch = next(self._iterator)
        self.examples += count * self._rows(batch)

    @staticmethod
    def _rows(batch: Any) -> float:
        """Rows that this worker took, over its replicas; closes the block by reading one value."""
        first = tf.nest.flatten(batch)[0]
        parts = first.values if isinstance(first, tf.distribute.DistributedValues) else (first,)
        rows = 0
        for part in parts:
            rows += int(part.shape[0])
            tf.nest.flatten(part, expand_composites=True)[0][:1].numpy()
        return float(rows)


def _bytes_read() -> float:
    """Bytes this process has read from files so far; NaN where the system does not say."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            return float(dict(line.split(": ") for line in file)["rchar"])
    except (OSError, KeyError, ValueError):
        return float("nan")
