"""Pure arithmetic: which shards a worker reads, how many steps an epoch has.

>>> share(counts=[100, 100, 100], num_workers=2, sharding="file")
((0, 2), (1,))
>>> plan_epoch(counts=[100] * 4, num_workers=2, per_worker_batch_size=30).steps_per_epoch
7
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from tfpipe.errors import UsageError


def share(*, counts: Sequence[int], num_workers: int, sharding: str) -> tuple[tuple[int, ...], ...]:
    """Shares whole shards out to the workers.

    Args:
        counts: records in each shard, in manifest order.
        num_workers: at least 1.
        sharding: "file": shard i goes to worker i mod num_workers, as TensorFlow's FILE
            autosharding does. "per_worker": the largest remaining shard goes to the worker
            with the fewest records, which evens out the sums.

    Returns:
        For each worker the ascending indices of its shards; every shard exactly once.

    Raises:
        UsageError: fewer non-empty shards than workers: a worker would have nothing to do.
    """
    if num_workers < 1:
        raise UsageError(f"num_workers must be >= 1, got {num_workers}.")
    if sharding == "file":
        shares = [list(range(worker, len(counts), num_workers)) for worker in range(num_workers)]
    else:
        shares = [[] for _ in range(num_workers)]
        loads = [(0, 0, worker) for worker in range(num_workers)]  # records, shards, worker
        for index in sorted(range(len(counts)), key=lambda i: (-counts[i], i)):
            records, shards, worker = heapq.heappop(loads)
            shares[worker].append(index)
            heapq.heappush(loads, (records + counts[index], shards + 1, worker))
    for worker, indices in enumerate(shares):
        if not any(counts[index] for index in indices):
            raise UsageError(
                f"every worker must have at least one shard with records, got {len(counts)} shards "
                f"for {num_workers} workers (worker {worker} has none). Convert again with "
                f"--num-shards {num_workers * 4}, or use fewer workers."
            )
    return tuple(tuple(sorted(indices)) for indices in shares)


def split_global_batch(global_batch_size: int, num_workers: int) -> int:
    """The per-worker batch size of a global one.

    Args:
        global_batch_size: records all workers take per step.
        num_workers: at least 1.

    Returns:
        Records one worker takes per step.

    Raises:
        UsageError: the global batch does not divide evenly.
    """
    if global_batch_size < 1 or global_batch_size % num_workers:
        below = global_batch_size // num_workers * num_workers
        choices = [str(b) for b in (below, below + num_workers) if b > 0]
        raise UsageError(
            f"global_batch_size must be a positive multiple of the {num_workers} workers, "
            f"got {global_batch_size}. Use {' or '.join(choices)}."
        )
    return global_batch_size // num_workers


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochPlan:
    """One epoch over all workers.

    Attributes:
        global_batch_size: records all workers take per full step.
        steps_per_epoch: the same on every worker.
        worker_records: records of each worker's shards.
        dropped_records: records of an epoch that no step sees.
    """

    global_batch_size: int
    steps_per_epoch: int
    worker_records: tuple[int, ...]
    dropped_records: int

    def step_records(self) -> list[int]:
        """Records of all workers in each step of the epoch: only the last ones hold fewer."""
        size = self.global_batch_size // len(self.worker_records)
        return [
            sum(min(size, max(0, records - step * size)) for records in self.worker_records)
            for step in range(self.steps_per_epoch)
        ]


def plan_epoch(
    *,
    counts: Sequence[int],
    num_workers: int = 1,
    per_worker_batch_size: int,
    drop_remainder: bool = False,
    sharding: str = "per_worker",
) -> EpochPlan:
    """Plans an epoch's steps.

    With `drop_remainder` all workers stop with the one that has the fewest full batches.
    Without it they stop with the one that has the most; a worker that is done earlier takes
    part with empty (masked) batches, so that every record counts exactly once.

    Args:
        counts: records in each shard, in manifest order.
        num_workers: at least 1.
        per_worker_batch_size: records a worker takes per step.
        drop_remainder: whether partial batches are dropped.
        sharding: see `share`.

    Returns:
        The plan.

    Raises:
        UsageError: a worker would have no shard or no full batch.
    """
    shares = share(counts=counts, num_workers=num_workers, sharding=sharding)
    records = tuple(sum(counts[index] for index in indices) for indices in shares)
    if drop_remainder:
        # Under "file" a worker reads global batches, and each one serves num_workers steps.
        unit = num_workers if sharding == "file" else 1
        steps = min(r // (per_worker_batch_size * unit) for r in records) * unit
        if steps == 0:
            raise UsageError(
                f"every worker must have at least one full batch, got per_worker_batch_size "
                f"{per_worker_batch_size} for {min(records)} records. Use a smaller one, or "
                f"drop_remainder=False."
            )
        dropped = sum(records) - steps * per_worker_batch_size * num_workers
    else:
        steps, dropped = max(-(-r // per_worker_batch_size) for r in records), 0
    return EpochPlan(
        global_batch_size=per_worker_batch_size * num_workers,
        steps_per_epoch=steps,
        worker_records=records,
        dropped_records=dropped,
    )
