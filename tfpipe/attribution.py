"""Step times of all workers -> where a step's time goes, the verdict, advice.

Comes in: per-step times of four phases, each `float64[workers, rounds, blocks]` seconds,
measured in interleaved rounds:

    local    one batch repeated, gradients not exchanged     compute
    synced   one batch repeated, gradients exchanged         + communication + imbalance
    real     the real pipeline, gradients exchanged          + input
    drain    the real pipeline, no step                      what the input alone delivers

Goes out: parts that follow the step's critical path and add up to the real step. A worker
that is late because of its input shows as input, one whose compute is slow as imbalance,
and neither as communication, though all its peers wait for it in the all-reduce.

Pure NumPy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfpipe.errors import MeasurementError

PHASES = ("local", "synced", "real", "drain")
PARTS = ("input", "compute", "communication", "imbalance")
VERDICTS = {part: f"{part}_bound" for part in PARTS}
RESAMPLES = 2000
CONFIDENCE_FRACTION = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A median with its interval, in seconds per step."""

    median: float
    low: float
    high: float
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribution:
    """Where a step's time goes.

    Attributes:
        step: the real step.
        parts: by name of `PARTS`; their medians add up to the step's.
        verdict: "{part}_bound" of the largest part, or "inconclusive".
        worker_compute_s: each worker's local step.
        worker_wait_s: each worker's synced step less its local one: exchange and waiting.
        drain_s: per step, of the slowest worker's input alone.
        slowest_compute_worker: whose local step is longest.
    """

    step: Estimate
    parts: Mapping[str, Estimate]
    verdict: str
    worker_compute_s: tuple[float, ...]
    worker_wait_s: tuple[float, ...]
    drain_s: float
    slowest_compute_worker: int


def attribute(times_s: Mapping[str, np.ndarray], *, exchanges: bool = True, seed: int = 0) -> Attribution:
    """Splits the real step into its parts.

    The levels local <= slowest local <= synced <= real are medians over rounds and blocks;
    each part is a difference between neighbours. A part whose interval includes zero is
    zero, and its difference goes to the part below, so that the parts always add up.

    Args:
        times_s: by phase, float64[workers, rounds, blocks] seconds per step; NaN where a
            block was thrown away (a retrace, say).
        exchanges: whether there is another replica to exchange gradients with. If not, local and
            synced are one and the same step: noise between them is not communication.
        seed: of the bootstrap.

    Returns:
        The attribution.

    Raises:
        MeasurementError: a phase is missing, or has no block left.

    Source: percentile bootstrap of the median, resampling rounds and then blocks within
        them, so that drift between rounds widens the interval (Davison and Hinkley,
        "Bootstrap Methods and their Application", 1997, section 3.8).
    """
    _check(times_s)
    if not exchanges:
        alone = np.concatenate([times_s["local"], times_s["synced"]], axis=2)
        times_s = {**times_s, "local": alone, "synced": alone}
    samples = int(np.isfinite(times_s["real"]).all(axis=0).sum())
    observed = _levels(times_s, slowest=None)
    slowest = int(observed["slowest"][0])
    boot = _levels(_resample(times_s, seed), slowest=slowest)
    step = _estimate(observed["real"], boot["real"], samples)

    # From the top of the step downwards: what is not significant joins the level below.
    parts = dict.fromkeys(PARTS, Estimate(median=0.0, low=0.0, high=0.0, samples=samples))
    upper, upper_boot = observed["real"], boot["real"]
    below = {"input": "synced", "communication": "slowest_local", "imbalance": "local"}
    for part, level in below.items() if exchanges else [("input", "synced")]:
        difference, difference_boot = upper - observed[level], upper_boot - boot[level]
        estimate = _estimate(difference, difference_boot, samples)
        if estimate.low <= 0.0 or estimate.median <= 0.0:
            parts[part] = Estimate(median=0.0, low=0.0, high=max(estimate.high, 0.0), samples=samples)
        else:
            parts[part] = estimate
            upper, upper_boot = observed[level], boot[level]
    parts["compute"] = _estimate(upper, upper_boot, samples)

    worker_compute = _median(times_s["local"])
    return Attribution(
        step=step,
        parts={part: parts[part] for part in PARTS},
        verdict=_verdict(parts),
        worker_compute_s=tuple(worker_compute.tolist()),
        worker_wait_s=tuple(np.maximum(_median(times_s["synced"]) - worker_compute, 0.0).tolist()),
        drain_s=float(_median(times_s["drain"]).max()),
        slowest_compute_worker=slowest,
    )


def headline(attribution: Attribution, *, worker_input_s: tuple[float, ...]) -> str:
    """Says the verdict in one sentence, naming a worker where one stands out.

    Args:
        attribution: the parts.
        worker_input_s: each worker's own wait for its next batch, per step.

    Returns:
        One sentence.

    Raises:
        KeyError: never; every verdict has its sentence.
    """
    step_ms = attribution.step.median * 1e3

    def of_step(part: str) -> str:
        value = attribution.parts[part].median
        return f"{value * 1e3:.1f} of {step_ms:.1f} ms a step ({value / attribution.step.median:.0%})"

    workers = len(worker_input_s)
    if attribution.verdict == "input_bound":
        late = int(np.argmax(worker_input_s))
        peers_s = np.delete(worker_input_s, late)
        # Peers of one late worker find their next batch waiting for them.
        alone = workers > 1 and worker_input_s[late] > 2 * peers_s.max()
        who = f"worker {late}'s input" if alone else "input"
        return f"Input-bound: the step waits for {who}, {of_step('input')}."
    if attribution.verdict == "communication_bound":
        return (
            f"Communication-bound: exchanging gradients between {workers} workers takes "
            f"{of_step('communication')}."
        )
    if attribution.verdict == "imbalance_bound":
        return (
            f"Imbalance-bound: the workers wait for worker {attribution.slowest_compute_worker}'s "
            f"slower compute, {of_step('imbalance')}."
        )
    if attribution.verdict == "compute_bound":
        return f"Compute-bound: the model itself takes {of_step('compute')}."
    first = max(PARTS, key=lambda part: attribution.parts[part].median)
    others = [part for part in PARTS if part != first]
    second = max(others, key=lambda part: attribution.parts[part].high)

    def interval(part: str) -> str:
        estimate = attribution.parts[part]
        return f"{part} {estimate.low * 1e3:.1f} to {estimate.high * 1e3:.1f}"

    return (
        f"Inconclusive: of {step_ms:.1f} ms a step, {interval(first)} ms and {interval(second)} ms "
        f"can't be told apart; measure more rounds on a quieter machine."
    )


def advise(
    attribution: Attribution, *, num_workers: int, per_worker_batch_size: int, map_is_serial: bool
) -> list[dict[str, Any]]:
    """Lists what would make the step faster, the largest gain first.

    Expected values are bounds from the measured parts: input hidden entirely, or compute
    that grows with the batch while the exchange does not.

    Args:
        attribution: the parts.
        num_workers: in the cluster.
        per_worker_batch_size: records a worker takes per step.
        map_is_serial: whether a user's map works on one batch at a time.

    Returns:
        Objects with change, expected_step_s, expected_speedup (at equal samples), why.

    Raises:
        KeyError: never; every part is there.
    """
    step_s = attribution.step.median
    part_s = {part: attribution.parts[part].median for part in PARTS}
    advice = []

    def add(change: str, expected_step_s: float, samples_ratio: float, why: str) -> None:
        speedup = step_s * samples_ratio / expected_step_s
        if speedup > 1.02:  # less than the interval of a usual run
            advice.append({
                "change": change,
                "expected_step_s": expected_step_s,
                "expected_speedup": speedup,
                "why": why,
            })  # fmt: skip

    hidden = step_s - part_s["input"]
    if map_is_serial:
        add(
            "work on several batches at a time: map_num_parallel_calls=-1 in the pipeline configuration",
            hidden, 1.0, "the map works on one batch at a time; the gain is the most that hiding it can give",
        )  # fmt: skip
    elif part_s["input"]:
        add(
            'read ahead and keep records in memory: cache="memory", prefetch_batches=-1',
            hidden, 1.0, "the gain is the most that hiding the input can give",
        )  # fmt: skip
    if num_workers > 1 and part_s["communication"]:
        factor = 4
        add(
            f"--per-worker-batch-size {per_worker_batch_size * factor}, the learning rate scaled to match",
            step_s + (factor - 1) * (part_s["compute"] + part_s["imbalance"] + part_s["input"]),
            factor,
            "the exchange costs the same whatever the batch; the gain counts equal samples",
        )  # fmt: skip
        alone = part_s["compute"] + part_s["input"]
        if alone * num_workers < step_s:
            add(
                "--workers 1: one machine is faster for this model and batch",
                alone, 1 / num_workers, "without an exchange; the gain counts equal samples",
            )  # fmt: skip
    if part_s["imbalance"]:
        add(
            f"give worker {attribution.slowest_compute_worker} the same free cores as its peers",
            step_s - part_s["imbalance"], 1.0, "every step waits for the slowest worker's compute",
        )  # fmt: skip
    return sorted(advice, key=lambda item: -item["expected_speedup"])


def estimate_to_json(estimate: Estimate) -> dict[str, Any]:
    """The result's form of an estimate."""
    return dataclasses.asdict(estimate)


def _verdict(parts: Mapping[str, Estimate]) -> str:
    first = max(PARTS, key=lambda part: parts[part].median)
    # Also a part that counts as zero may in truth be as large as its interval reaches.
    if any(parts[part].high >= parts[first].low for part in PARTS if part != first):
        return "inconclusive"
    return VERDICTS[first]


def _levels(times_s: Mapping[str, np.ndarray], slowest: int | None) -> dict[str, np.ndarray]:
    """Medians of each level; arrays [..., workers, rounds, blocks] become [...] (or [1] observed).

    Which worker is slowest is decided once, from the observed times: a maximum taken anew
    in each resample would turn noise into imbalance.
    """
    local = np.atleast_2d(_median(times_s["local"]))
    if slowest is None:
        slowest = int(np.argmax(local[0]))
    return {
        "local": np.median(local, axis=-1),
        "slowest_local": local[..., slowest],
        # In lock-step all workers see the same step; the median drops one's late start.
        "synced": np.median(np.atleast_2d(_median(times_s["synced"])), axis=-1),
        "real": np.median(np.atleast_2d(_median(times_s["real"])), axis=-1),
        "slowest": np.array([slowest]),
    }


def _median(times_s: np.ndarray) -> np.ndarray:
    return np.nanmedian(times_s, axis=(-2, -1))


def _resample(times_s: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Draws rounds, then blocks within them: [RESAMPLES, workers, rounds, blocks] a phase.

    All workers, and the phases of one round, are drawn together: what disturbed one
    disturbed them all.
    """
    rng = np.random.default_rng(seed)
    _, rounds, _ = times_s["real"].shape
    round_index = rng.integers(rounds, size=(RESAMPLES, rounds, 1))
    resampled = {}
    for phase in PHASES:
        blocks = times_s[phase].shape[2]
        block_index = rng.integers(blocks, size=(RESAMPLES, rounds, blocks))
        # Indexing [workers, rounds, blocks] by two arrays gives [workers, RESAMPLES, rounds, blocks].
        resampled[phase] = np.moveaxis(times_s[phase][:, round_index, block_index], 0, 1)
    return resampled


def _estimate(observed: np.ndarray, boot: np.ndarray, samples: int) -> Estimate:
    tail = (1 - CONFIDENCE_FRACTION) / 2
    low, high = np.nanquantile(boot, [tail, 1 - tail])
    median = float(observed[0])
    return Estimate(
        median=median, low=min(float(low), median), high=max(float(high), median), samples=samples
    )


def _check(times_s: Mapping[str, np.ndarray]) -> None:
    for phase in PHASES:
        if phase not in times_s:
            raise MeasurementError(f"all phases {', '.join(PHASES)} must be measured, got none of {phase}.")
        usable = np.isfinite(times_s[phase]).any(axis=(1, 2))
        if not usable.all():
            worker = int(np.argmin(usable))
            raise MeasurementError(
                f"every worker must have at least one usable block in every phase, got none "
                f"({phase}, worker {worker}). Measure more rounds, and keep batch shapes constant."
            )
