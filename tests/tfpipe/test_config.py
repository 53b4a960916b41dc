import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfpipe.config import PipelineConfig, TrainerConfig
from tfpipe.errors import UsageError

small = st.integers(1, 10_000)
pipelines = st.builds(
    PipelineConfig,
    per_worker_batch_size=small,
    drop_remainder=st.booleans(),
    sharding=st.sampled_from(["per_worker", "file"]),
    shuffle_buffer_records=st.integers(0, 10_000),
    seed=st.integers(0, 2**40),
    num_parallel_calls=st.just(-1) | small,
    cache=st.sampled_from(["none", "memory"]),
    prefetch_batches=st.integers(-1, 9),
    fill_values=st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.integers())),
    deterministic=st.booleans(),
)


@given(pipelines)
def test_json_round_trip(config):
    assert PipelineConfig.from_json(json.loads(json.dumps(config.to_json())), where="x") == config


def test_values_are_frozen_and_varied_by_replace():
    config = PipelineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    assert dataclasses.replace(config, seed=1).seed == 1


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (
            PipelineConfig,
            {"per_worker_batch_size": 0},
            "_batch_size must be an integer >= 1, got 0",
        ),
        (PipelineConfig, {"per_worker_batch_size": True}, "got True"),
        (PipelineConfig, {"seed": 1.0}, "seed must be an integer >= 0, got 1.0"),
        (PipelineConfig, {"sharding": "auto"}, "sharding must be one of per_worker, file, got 'auto'"),
        (PipelineConfig, {"cache": "disk"}, "cache must be one of none, memory, got 'disk'"),
        (PipelineConfig, {"map_num_parallel_calls": 0}, "integer >= 1 or -1, got 0"),
        (PipelineConfig, {"prefetch_batches": -2}, "integer >= 0 or -1, got -2"),
        (PipelineConfig, {"fill_values": [1]}, r"must map feature names to values, got \[1\]"),
        (PipelineConfig, {"drop_remainder": 1}, "drop_remainder must be true or false, got 1"),
        (PipelineConfig, {"deterministic": "no"}, "deterministic must be true or false, got 'no'"),
        (TrainerConfig, {"steps": 0}, "steps must be an integer >= 1, got 0"),
        (TrainerConfig, {"warmup": -1}, "warmup must be an integer >= 0, got -1"),
    ],
)
def test_values_out_of_range(cls, options, message):
    with pytest.raises(UsageError, match=message):
        cls(**options)
    with pytest.raises(UsageError, match=rf"{message}.*\(c\.json\)"):
        cls.from_json(options, where="c.json")


def test_files(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"seed": 3}')
    assert PipelineConfig.load(path) == PipelineConfig(seed=3)
    path.write_text('{"sede": 3}')
    with pytest.raises(UsageError, match=r"keys must be among .*seed.*got sede \(.*c\.json\)"):
        PipelineConfig.load(path)
    path.write_text("[1]")
    with pytest.raises(UsageError, match="must be a JSON object, got list"):
        PipelineConfig.load(path)
    path.write_text("{")
    with pytest.raises(UsageError, match=r"readable JSON file, got .*c\.json"):
        PipelineConfig.load(path)
    with pytest.raises(UsageError, match="No such file"):
        PipelineConfig.load(tmp_path / "nope.json")
