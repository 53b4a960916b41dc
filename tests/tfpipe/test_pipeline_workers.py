"""Every record once per epoch over real worker processes, proven by ids."""

import json
from pathlib import Path

import pytest

from tests.helpers import run_workers, write_dataset
from tfpipe.schema import Feature, Schema
from tfpipe.sharding import plan_epoch

COUNTS = [13, 7, 11, 5, 9, 17, 3]
BATCH = 6

SCRIPT = """
import json, os, sys
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
from tfpipe.config import PipelineConfig
from tfpipe.manifest import Manifest
from tfpipe.pipeline import distribute

case = json.loads(sys.argv[2])
assert strategy.num_replicas_in_sync == case["workers"], strategy.num_replicas_in_sync
config = PipelineConfig(
    per_worker_batch_size=6, sharding=case["sharding"], shuffle_buffer_records=32,
    read_batch_size=case["read_batch_size"],
    drop_remainder=case["drop_remainder"], cache=case["cache"], cycle_length=3,
)
manifest = Manifest.load(sys.argv[1])
padded = case["pad_batches"]
dataset = distribute(
    strategy, manifest, config, pad_batches=padded, map_fn=lambda batch: (batch["id"], batch["tags"])
)

@tf.function
def summed(rows):
    return strategy.reduce("SUM", strategy.run(lambda n: n * 1.0, args=(rows,)), axis=None)

epochs = []
for _ in range(3):
    steps = []
    for element in dataset:
        ids, tags = element[0] if padded else element
        ids = strategy.experimental_local_results(ids)[0].numpy().tolist()
        mask = strategy.experimental_local_results(element[1])[0].numpy().tolist() if padded else None
        # One collective a step: hangs unless all workers have the same steps.
        total = float(summed(tf.constant(float(len(ids)))))
        steps.append({"ids": ids, "mask": mask, "total": total})
    epochs.append(steps)
print("RESULT" + json.dumps(epochs))
"""


def run_case(directory: Path, workers: int, **case) -> list[list[list[dict]]]:
    # Blocks of 2 in a buffer of 32: the record shuffle permutes windows; blocks of 4: single records.
    case = {"read_batch_size": 2, "drop_remainder": False, "cache": "none", "pad_batches": False, **case}
    case["workers"] = workers
    outputs = run_workers(SCRIPT, workers, 150, arguments=[str(directory), json.dumps(case)])
    return [json.loads(out.split("RESULT")[1]) for out in outputs]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("workers")
    schema = Schema(features={"id": Feature(dtype="int64"), "tags": Feature(dtype="int64", shape=(None,))})
    records = [{"id": i, "tags": list(range(i % 3))} for i in range(sum(COUNTS))]
    write_dataset(path, schema, records, counts=COUNTS)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("sharding", ["per_worker", "file"])
def test_every_record_exactly_once_in_each_of_three_epochs(directory: Path, workers: int, sharding: str):
    results = run_case(directory, workers, sharding=sharding)
    orders = []
    for epoch in range(3):
        ids = [i for worker in results for step in worker[epoch] for i in step["ids"]]
        assert sorted(ids) == list(range(sum(COUNTS)))
        for worker in results:
            assert all(len(step["ids"]) <= BATCH for step in worker[epoch])
            assert any(step["ids"] for step in worker[epoch])
        orders.append(ids)
    assert orders[0] != orders[1] != orders[2], "epochs must be reshuffled"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_padded_batches_give_equal_steps_and_count_each_record_once(directory: Path, workers: int):
    results = run_case(
        directory, workers, sharding="per_worker", pad_batches=True, cache="memory", read_batch_size=4
    )
    plan = plan_epoch(counts=COUNTS, num_workers=workers, per_worker_batch_size=BATCH)
    for epoch in range(3):
        assert [len(worker[epoch]) for worker in results] == [plan.steps_per_epoch] * workers
        counted = []
        for worker in results:
            for step in worker[epoch]:
                assert len(step["ids"]) == len(step["mask"]) == BATCH
                assert step["total"] == BATCH * workers
                counted += [i for i, weight in zip(step["ids"], step["mask"], strict=True) if weight == 1]
        assert sorted(counted) == list(range(sum(COUNTS)))


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["per_worker", "file"])
def test_drop_remainder_stops_all_workers_at_the_planned_step(directory: Path, sharding: str):
    results = run_case(directory, 2, sharding=sharding, drop_remainder=True)
    plan = plan_epoch(
        counts=COUNTS, num_workers=2, per_worker_batch_size=BATCH, drop_remainder=True, sharding=sharding
    )
    for epoch in range(3):
        assert [len(worker[epoch]) for worker in results] == [plan.steps_per_epoch] * 2
        ids = [i for worker in results for step in worker[epoch] for i in step["ids"]]
        assert len(ids) == len(set(ids)) == sum(COUNTS) - plan.dropped_records


@pytest.mark.slow
def test_a_worker_that_fails_is_shown_with_its_traceback():
    with pytest.raises(AssertionError, match="worker 1 ended with 1") as caught:
        run_workers("import os\nassert '\"index\": 0' in os.environ['TF_CONFIG'], 'not the chief'", 2, 30)
    assert "AssertionError: not the chief" in str(caught.value)


TWO_REPLICAS = """
import sys
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
from tfpipe.config import PipelineConfig
from tfpipe.errors import UsageError
from tfpipe.manifest import Manifest
from tfpipe.pipeline import distribute

manifest = Manifest.load(sys.argv[1])
for sharding, padded in (("per_worker", True), ("per_worker", False), ("file", False)):
    config = PipelineConfig(per_worker_batch_size=6, sharding=sharding)
    ids = []
    steps = 0
    for element in distribute(strategy, manifest, config, pad_batches=padded):
        batch, mask = element if padded else (element, None)
        rows = [r.numpy() for r in strategy.experimental_local_results(batch["id"])]
        assert len(rows) == 2 and all(len(r) <= 3 for r in rows), rows
        if padded:
            masks = [m.numpy() for m in strategy.experimental_local_results(mask)]
            assert all(len(r) == 3 for r in rows)
            rows = [r[m == 1] for r, m in zip(rows, masks)]
        ids += [int(i) for r in rows for i in r]
        steps += 1
    assert sorted(ids) == list(range(65)), (sharding, padded, sorted(ids))
    assert steps == 11, steps
try:
    distribute(strategy, manifest, PipelineConfig(per_worker_batch_size=7))
except UsageError as error:
    assert "multiple of the 2 replicas of each worker, got 7. Use 8." in str(error)
print("done")
"""


@pytest.mark.slow
def test_a_worker_with_two_replicas_divides_its_batch(directory: Path):
    (out,) = run_workers(TWO_REPLICAS, 1, 120, arguments=[str(directory)])
    assert out.splitlines()[-1] == "done"
