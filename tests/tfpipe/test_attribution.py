"""The parts must add up, and the verdict must name the true cause or none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfpipe.attribution import PARTS, PHASES, advise, attribute, headline
from tfpipe.errors import MeasurementError


def make_times(
    *, compute_s=(0.010, 0.010), exchange_s=0.005, input_s=0.0, drain_s=0.001, noise=0.01, rounds=5, seed=0
):
    """Times of a cluster whose truth is known, with relative noise."""
    rng = np.random.default_rng(seed)
    compute = np.array(compute_s)[:, None, None]
    synced = compute.max() + exchange_s
    levels = {
        "local": compute,
        "synced": np.full_like(compute, synced),
        "real": np.full_like(compute, synced + input_s),
        "drain": np.full_like(compute, drain_s),
    }
    shape = (len(compute_s), rounds, 5)
    return {phase: level * (1 + noise * rng.standard_normal(shape)) for phase, level in levels.items()}


MS = 1e-3
KNOWN = [
    # truth                                                              verdict
    (dict(compute_s=(0.010, 0.010), exchange_s=0.040), "communication_bound"),
    (dict(compute_s=(0.050, 0.050), exchange_s=0.004), "compute_bound"),
    (dict(compute_s=(0.010, 0.010), exchange_s=0.005, input_s=0.060), "input_bound"),
    (dict(compute_s=(0.010, 0.010, 0.050), exchange_s=0.004), "imbalance_bound"),
    (dict(compute_s=(0.020, 0.020), exchange_s=0.020), "inconclusive"),
]


@pytest.mark.parametrize("truth, verdict", KNOWN)
def test_verdict_of_known_truth(truth, verdict):
    assert attribute(make_times(**truth)).verdict == verdict


def test_parts_of_known_truth():
    found = attribute(make_times(compute_s=(0.010, 0.010, 0.016), exchange_s=0.030, input_s=0.020))
    truth = {"compute": 10, "imbalance": 6, "communication": 30, "input": 20}
    assert {p: found.parts[p].median / MS for p in PARTS} == pytest.approx(truth, abs=1.0)
    assert found.step.median == pytest.approx(0.066, abs=1 * MS)
    assert found.slowest_compute_worker == 2
    for part in PARTS:
        estimate = found.parts[part]
        assert estimate.low <= truth[part] * MS <= estimate.high
        assert estimate.samples == 25


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_a_worker_alone_is_no_communication(seed):
    """Its local and synced steps are the same step; few samples often tell two of them apart."""
    times = make_times(compute_s=(0.010,), exchange_s=0.0, noise=0.2, rounds=2, seed=seed)
    found = attribute(times, exchanges=False)
    for part in ("communication", "imbalance"):
        assert (found.parts[part].median, found.parts[part].high) == (0, 0)
    assert found.worker_wait_s == (0,)
    both = np.concatenate([times["local"], times["synced"]], axis=2)
    assert found.worker_compute_s == (pytest.approx(np.median(both)),)


@given(
    compute_ms=st.lists(st.floats(1, 50), min_size=1, max_size=4),
    exchange_ms=st.floats(0, 50),
    input_ms=st.floats(0, 50),
    noise=st.floats(0, 0.3),
    seed=st.integers(0, 99),
)
def test_parts_add_up_to_the_step_and_are_never_negative(compute_ms, exchange_ms, input_ms, noise, seed):
    found = attribute(
        make_times(
            compute_s=[c * MS for c in compute_ms],
            exchange_s=exchange_ms * MS,
            input_s=input_ms * MS,
            noise=noise,
            seed=seed,
        )
    )
    assert sum(found.parts[part].median for part in PARTS) == pytest.approx(found.step.median)
    assert all(found.parts[part].median >= 0 for part in PARTS)
    assert all(found.parts[p].low <= found.parts[p].median <= found.parts[p].high for p in PARTS)


@pytest.mark.parametrize("seed", range(20))
def test_parts_that_are_not_there_are_zero_in_most_runs(seed):
    found = attribute(make_times(exchange_s=0.030, input_s=0.0, noise=0.05, seed=seed))
    assert found.parts["input"].median < 1 * MS
    assert found.parts["imbalance"].median < 1 * MS


def test_noise_that_hides_the_answer_is_inconclusive():
    truth = dict(compute_s=(0.020, 0.020), exchange_s=0.030, input_s=0.0, noise=0.5)
    assert attribute(make_times(**truth)).verdict == "inconclusive"


def test_late_input_of_one_worker_is_input_and_names_the_worker():
    # Peers of the late worker wait in the all-reduce: their own input wait is short.
    found = attribute(make_times(exchange_s=0.010, input_s=0.100))
    assert found.verdict == "input_bound"
    assert "worker 1's input" in headline(found, worker_input_s=(0.001, 0.110))
    assert "worker" not in headline(found, worker_input_s=(0.108, 0.110))


def test_slow_compute_of_one_worker_names_it():
    found = attribute(make_times(compute_s=(0.010, 0.060, 0.010), exchange_s=0.005))
    assert "worker 1" in headline(found, worker_input_s=(0.0, 0.0, 0.0))
    assert found.parts["communication"].median == pytest.approx(0.005, abs=1 * MS)


def test_one_worker_has_no_communication():
    found = attribute(make_times(compute_s=(0.020,), exchange_s=0.0))
    assert found.verdict == "compute_bound"
    assert found.parts["communication"].median == 0.0


def test_blocks_thrown_away_do_not_count():
    times = make_times(exchange_s=0.030)
    times["real"][:, 0, :2] = np.nan
    found = attribute(times)
    assert found.step.samples == 23
    assert np.isfinite(found.step.median)


def test_drain_is_the_slowest_workers():
    times = make_times()
    times["drain"][1] *= 20
    assert attribute(times).drain_s == pytest.approx(0.020, rel=0.05)


@pytest.mark.parametrize("phase", PHASES)
def test_missing_phase_is_refused(phase):
    times = make_times()
    del times[phase]
    with pytest.raises(MeasurementError, match=f"got none of {phase}"):
        attribute(times)


def test_phase_without_a_usable_block_is_refused():
    times = make_times()
    times["synced"][1] = np.nan
    with pytest.raises(MeasurementError, match=r"synced, worker 1.*Measure more rounds"):
        attribute(times)


def advice_for(**truth):
    settings = dict(num_workers=len(truth["compute_s"]), per_worker_batch_size=64, map_is_serial=False)
    settings["map_is_serial"] = truth.pop("map_is_serial", False)
    return advise(attribute(make_times(**truth)), **settings)


def test_advice_promises_what_the_parts_allow():
    (advice, *_) = advice_for(compute_s=(0.010, 0.010), input_s=0.085, map_is_serial=True)
    assert "map_num_parallel_calls=-1" in advice["change"]
    assert advice["expected_step_s"] == pytest.approx(0.015, rel=0.1)
    assert advice["expected_speedup"] == pytest.approx(100 / 15, rel=0.1)


def test_advice_to_stay_on_one_machine_only_where_it_is_faster():
    slow_network = advice_for(compute_s=(0.010, 0.010), exchange_s=0.100)
    assert any("--workers 1" in item["change"] for item in slow_network)
    fast_network = advice_for(compute_s=(0.010, 0.010), exchange_s=0.002)
    assert not any("--workers 1" in item["change"] for item in fast_network)


def test_advice_comes_by_gain_and_promises_one():
    gains = [a["expected_speedup"] for a in advice_for(compute_s=(0.010, 0.040), exchange_s=0.1, input_s=0.1)]
    assert len(gains) >= 3
    assert gains == sorted(gains, reverse=True)
    assert min(gains) > 1


def test_no_advice_where_nothing_would_help():
    assert advice_for(compute_s=(0.050,), exchange_s=0.0) == []
