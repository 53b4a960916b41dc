"""Batches from small datasets: every record once, nulls, dtypes, every option has an effect."""

import dataclasses
import itertools
import math
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import write_dataset
from tfpipe import pipeline, stages
from tfpipe.config import PipelineConfig
from tfpipe.errors import ManifestError, SchemaError, UsageError
from tfpipe.pipeline import assert_file_autosharding, distribute, make_dataset, num_input_workers
from tfpipe.schema import ITEMSIZE_BYTES, Feature, Schema
from tfpipe.sharding import plan_epoch

IDS = Schema(features={"id": Feature(dtype="int64")})


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("ids"), IDS, [{"id": i} for i in range(200)], 7)


def config(**options) -> PipelineConfig:
    return PipelineConfig(**{"per_worker_batch_size": 16, **options})


def read_ids(dataset) -> list[int]:
    return [int(i) for batch in dataset for i in batch["id"]]


# Blocks of 4 in a buffer of 64 records permute windows; blocks of 32 shuffle single records.
@pytest.mark.parametrize("read_batch_size", [4, 32])
@pytest.mark.parametrize("cache", ["none", "memory"])
@pytest.mark.parametrize("buffer", [0, 64, 1000])
def test_each_epoch_holds_every_record_once_in_a_new_order(ids, read_batch_size, cache, buffer):
    options = config(read_batch_size=read_batch_size, cache=cache, shuffle_buffer_records=buffer)
    dataset = make_dataset(ids, options)
    epochs = [read_ids(dataset) for _ in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(200))
    assert len(set(map(tuple, epochs))) == (3 if buffer else 1)
    assert [read_ids(make_dataset(ids, options)) for _ in range(1)] == epochs[:1], "same seed, same order"
    assert read_ids(dataset.repeat(2).take(2 * len(dataset)))[:200] != list(range(200)) or not buffer


def test_blocks_of_large_records_are_bounded_in_bytes(tmp_path):
    schema = Schema(features={"id": Feature(dtype="int64"), "big": Feature(dtype="uint8", shape=(300_000,))})
    records = [{"id": i, "big": np.zeros(300_000)} for i in range(10)]
    manifest = write_dataset(tmp_path, schema, records, 1)
    assert stages._records_within(manifest, stages.BLOCK_BYTES) == 3
    options = config(read_batch_size=512, shuffle_buffer_records=4)
    assert sorted(read_ids(make_dataset(manifest, options))) == list(range(10))


def test_seed_and_epoch_choose_the_order(ids):
    orders = [read_ids(make_dataset(ids, config(seed=s), epoch=e)) for s in (0, 1) for e in (0, 1)]
    assert len(set(map(tuple, orders))) == 4


def test_permuted_windows_mix_records_of_a_single_file(tmp_path):
    manifest = write_dataset(tmp_path, IDS, [{"id": i} for i in range(400)], 1)
    order = read_ids(make_dataset(manifest, config(read_batch_size=4, shuffle_buffer_records=128)))
    neighbours = sum(abs(a - b) == 1 for a, b in itertools.pairwise(order))
    assert sorted(order) == list(range(400)) and neighbours < 40


def test_batches_are_global_and_the_dataset_knows_its_length(ids):
    dataset = make_dataset(ids, config(), num_workers=3)
    assert [len(batch["id"]) for batch in dataset] == [48, 48, 48, 48, 8]
    assert len(make_dataset(ids, config())) == 13
    assert len(make_dataset(ids, config(drop_remainder=True))) == 12
    assert make_dataset(ids, config(drop_remainder=True)).element_spec["id"].shape == [16]


def test_an_epoch_that_ends_early_is_an_error(ids):
    split = ids.splits["train"]
    more = dataclasses.replace(split.shards[0], num_records=split.shards[0].num_records + 20)
    lying = dataclasses.replace(
        ids, splits={"train": dataclasses.replace(split, shards=(more, *split.shards[1:]))}
    )
    with pytest.raises(tf.errors.FailedPreconditionError, match="expected to contain 14"):
        read_ids(make_dataset(lying, config()))


def test_what_cannot_be_built_says_why(ids, tmp_path):
    with pytest.raises(UsageError, match=r"got a batch of 201 for 200 records.*smaller per_worker_batch"):
        make_dataset(ids, config(per_worker_batch_size=201, drop_remainder=True))
    assert [len(b["id"]) for b in make_dataset(ids, config(per_worker_batch_size=201))] == [200]
    with pytest.raises(UsageError, match=r"got 7 shards for 8 workers.*--num-shards 32"):
        make_dataset(ids, config(), num_workers=8)
    with pytest.raises(UsageError, match=r"num_workers must be >= 1, got 0"):
        make_dataset(ids, config(), num_workers=0)
    with pytest.raises(ManifestError, match="split must be one of train, got 'test'"):
        make_dataset(ids, config(), "test")
    empty = write_dataset(tmp_path, IDS, [], 1)
    with pytest.raises(ManifestError, match="at least one record, got 0"):
        make_dataset(empty, config())


SCALARS = {f"s_{dtype}": Feature(dtype=dtype) for dtype in ITEMSIZE_BYTES}
TENSORS = {f"t_{dtype}": Feature(dtype=dtype, shape=(2, 3)) for dtype in ITEMSIZE_BYTES}
LISTED = {
    "i": Feature(dtype="int64", shape=(2,), encoding="int64_list"),
    "f": Feature(dtype="float32", shape=(2, 2), encoding="float_list"),
    "text": Feature(dtype="string"),
    "words": Feature(dtype="bytes", shape=(2,)),
    "nothing": Feature(dtype="uint8", shape=(0,)),
}


def values_of(feature: Feature, row: int):
    """Extreme values of the dtype, another for each row."""
    if feature.dtype in ("string", "bytes"):
        array = np.empty(feature.shape, object)
        array[...] = f"ä{row}".encode()
        return array if feature.shape else array.item()
    dtype = np.dtype(feature.dtype)
    if dtype.kind == "b":
        return np.full(feature.shape, row % 2 == 0)
    info = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    return np.full(feature.shape, (info.max, info.min, 0, 1)[row % 4], dtype)


@pytest.mark.parametrize("nullable", [False, True])
def test_every_dtype_comes_back_exactly(tmp_path, nullable):
    features = {**SCALARS, **TENSORS, **LISTED}
    features = {name: dataclasses.replace(f, nullable=nullable) for name, f in features.items()}
    rows = [{name: values_of(f, row) for name, f in features.items()} for row in range(5)]
    if nullable:
        features.pop("nothing"), rows.append({})
    manifest = write_dataset(tmp_path, Schema(features=features), rows, 1)
    dataset = make_dataset(manifest, config(shuffle_buffer_records=0, read_batch_size=2))
    (batch,) = list(dataset)
    for name, feature in features.items():
        assert batch[name].dtype == ("string" if feature.dtype == "bytes" else feature.dtype)
        assert batch[name].shape == (len(rows), *feature.shape)
        assert dataset.element_spec[name].shape.as_list() == [None, *feature.shape]
        expected = [values_of(feature, row) for row in range(5)]
        np.testing.assert_array_equal(batch[name][:5].numpy(), np.array(expected), err_msg=name)
        if nullable:
            assert batch[f"{name}_present"].numpy().tolist() == [True] * 5 + [False]
            assert not any(np.ravel(batch[name][5].numpy()).tolist()), name


def test_a_null_is_never_confused_with_zero(tmp_path):
    features = {
        "i": Feature(dtype="int64", nullable=True),
        "t": Feature(dtype="string", nullable=True),
        "d": Feature(dtype="float64", shape=(2,), nullable=True),
    }
    rows = [{"i": 0, "t": "", "d": [0, 0]}, {}, {"i": 3, "t": "x", "d": [1, 2]}]
    manifest = write_dataset(tmp_path, Schema(features=features), rows, 1)
    plain = config(shuffle_buffer_records=0)
    (batch,) = list(make_dataset(manifest, plain))
    for name in features:
        assert batch[f"{name}_present"].numpy().tolist() == [True, False, True]
    assert batch["i"].numpy().tolist() == [0, 0, 3]
    fills = {"i": -1, "t": "none", "d": math.nan}
    (batch,) = list(make_dataset(manifest, dataclasses.replace(plain, fill_values=fills)))
    assert batch["i"].numpy().tolist() == [0, -1, 3]
    assert batch["t"].numpy().tolist() == [b"", b"none", b"x"]
    np.testing.assert_array_equal(batch["d"].numpy(), [[0, 0], [math.nan] * 2, [1, 2]])
    assert set(batch) == set(features)
    (batch,) = list(make_dataset(manifest, dataclasses.replace(plain, fill_values={"d": [5, 6]})))
    np.testing.assert_array_equal(batch["d"].numpy(), [[0, 0], [5, 6], [1, 2]])


def test_all_nulls_and_a_present_value_of_the_wrong_length(tmp_path):
    schema = Schema(features={"i": Feature(dtype="int64", nullable=True), "id": Feature(dtype="int64")})
    manifest = write_dataset(tmp_path / "nulls", schema, [{"id": 0}, {"id": 1}], 1)
    (batch,) = list(make_dataset(manifest, config()))
    assert batch["i_present"].numpy().tolist() == [False, False]
    wrong = write_dataset(tmp_path / "wrong", schema, [{"id": 0, "i": [1, 2]}], 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must have shape"):
        list(make_dataset(wrong, config()))


@pytest.mark.parametrize("dtype", ["int64", "float32", "float64", "uint64", "bool", "string"])
def test_features_of_unknown_length_are_ragged(tmp_path, dtype):
    features = {
        "x": Feature(dtype=dtype, shape=(None,)),
        "y": Feature(dtype=dtype, shape=(None, 2), nullable=True),
        "id": Feature(dtype="int64"),
    }
    zero, one = ("a", "b") if dtype == "string" else (0, 1)
    x = [[one, zero, one], [], [one], []]
    y = [[[one, zero]], None, [[one, one], [zero, zero]], None]
    rows = [{"x": x[i], "y": y[i], "id": i} for i in range(4)]
    manifest = write_dataset(tmp_path, Schema(features=features), rows, 2)
    (batch,) = list(make_dataset(manifest, config(shuffle_buffer_records=0, cycle_length=1)))

    def wire(value):
        if isinstance(value, list):
            return [wire(item) for item in value]
        return value.encode() if dtype == "string" else value

    assert isinstance(batch["x"], tf.RaggedTensor)
    assert batch["x"].dtype == dtype
    assert batch["x"].to_list() == wire(x)
    assert batch["y"].to_list() == wire([row or [] for row in y])
    assert batch["y_present"].numpy().tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("fill_values", "message"),
    [
        ({"nope": 0}, r"must name nullable features \(n, t, u\), got 'nope'"),
        ({"id": 0}, "got 'id'"),
        ({"n": 1.5}, r"that int8 holds exactly, got 1.5"),
        ({"n": 300}, "got 300"),
        ({"n": "1"}, "got '1'"),
        ({"n": [1, 2]}, r"got \[1, 2\]"),
        ({"t": 3}, "that string holds exactly, got 3"),
        ({"u": 0}, "can't fill a feature of unknown length, got 'u'"),
    ],
)
def test_fill_values_that_do_not_fit(tmp_path, fill_values, message):
    features = {
        "id": Feature(dtype="int64"),
        "n": Feature(dtype="int8", nullable=True),
        "t": Feature(dtype="string", nullable=True),
        "u": Feature(dtype="int64", shape=(None,), nullable=True),
    }
    manifest = write_dataset(tmp_path, Schema(features=features), [{"id": 1, "u": [1]}], 1)
    with pytest.raises(UsageError, match=message):
        make_dataset(manifest, config(fill_values=fill_values))


def test_names_and_shapes_that_cannot_be_read(tmp_path):
    taken = {"a": Feature(dtype="int64", nullable=True), "a_present": Feature(dtype="int64")}
    manifest = write_dataset(tmp_path / "a", Schema(features=taken), [{"a_present": 1}], 1)
    with pytest.raises(UsageError, match=r"name a_present must be free.*Give 'a' a fill value"):
        make_dataset(manifest, config())
    assert next(iter(make_dataset(manifest, config(fill_values={"a": 7}))))["a"].numpy() == [7]
    odd = Schema(features={"a": Feature(dtype="uint8", shape=(2, None))})
    manifest = write_dataset(tmp_path / "b", odd, [{"a": [[1], [2]]}], 1)
    with pytest.raises(SchemaError, match=r"first dimension may be unknown, got shape \[2, None\]"):
        make_dataset(manifest, config())


def test_the_map_sees_one_batch_at_a_time_by_default(ids):
    seen = []

    def spy(batch):
        def note(rows):
            seen.append(len(rows))
            return rows

        return batch["id"], tf.py_function(note, [batch["id"]], tf.int64)

    assert sum(len(x) for x, _ in make_dataset(ids, config(), map_fn=spy)) == 200
    assert sorted(seen) == [8] + [16] * 12


CHANGES = {
    "per_worker_batch_size": 32,
    "drop_remainder": True,
    "sharding": "file",
    "shuffle_buffer_records": 0,
    "seed": 1,
    "cycle_length": 2,
    "block_length": 3,
    "num_parallel_calls": 1,
    "read_batch_size": 8,
    "read_buffer_bytes": 4096,
    "cache": "memory",
    "map_num_parallel_calls": 2,
    "prefetch_batches": 5,
    "fill_values": {"x": 1},
    "deterministic": False,
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(PipelineConfig)])
def test_every_field_changes_the_graph(tmp_path, field, monkeypatch):
    schema = Schema(features={"id": Feature(dtype="int64"), "x": Feature(dtype="int64", nullable=True)})
    manifest = write_dataset(tmp_path, schema, [{"id": i} for i in range(40)], 4)
    base = PipelineConfig(per_worker_batch_size=16)

    def graph(options):
        if field == "sharding":  # which of the strategy's two ways is taken
            taken = []
            strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
            for way in ("experimental_distribute_dataset", "distribute_datasets_from_function"):
                monkeypatch.setattr(strategy, way, lambda _, way=way: taken.append(way))
            distribute(strategy, manifest, options)
            return taken
        dataset = make_dataset(manifest, options, map_fn=lambda batch: batch)
        options = dataset.options()
        return (
            dataset._as_serialized_graph().numpy() if field != "deterministic" else None,
            options.deterministic,
        )

    assert getattr(base, field) != CHANGES[field]
    assert graph(base) != graph(dataclasses.replace(base, **{field: CHANGES[field]}))


def test_file_autosharding_is_asserted(ids):
    file_policy = tf.data.Options()
    file_policy.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    assert_file_autosharding(make_dataset(ids, config(read_batch_size=4, shuffle_buffer_records=64)))
    assert_file_autosharding(make_dataset(ids, config(cache="memory")).repeat())
    records = tf.data.TFRecordDataset(ids.paths("train"), "GZIP")
    assert_file_autosharding(records.with_options(file_policy))
    with pytest.raises(UsageError, match=r"FILE must be in force, got AUTO\. Set options"):
        assert_file_autosharding(records)
    files = tf.data.Dataset.from_tensor_slices(ids.paths("train")).map(tf.io.read_file)
    with pytest.raises(UsageError, match=r"unshardable source.*Read them with tf\.data\.TFRecordDataset"):
        assert_file_autosharding(files.with_options(file_policy))


@pytest.mark.parametrize("sharding", ["per_worker", "file"])
def test_under_a_strategy_of_one_worker(ids, sharding):
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    assert num_input_workers(strategy) == num_input_workers(tf.distribute.get_strategy()) == 1
    dataset = distribute(strategy, ids, config(sharding=sharding))
    epochs = [read_ids(dataset) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(200)) and epochs[0] != epochs[1]
    endless = iter(distribute(strategy, ids, config(sharding=sharding), repeat=True))
    epochs = [read_ids(itertools.islice(endless, 13)) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(200)) and epochs[0] != epochs[1]


def masked(element):
    (first, _), mask = element
    return first.numpy()[mask.numpy() == 1].tolist()


def test_padding_keeps_any_nest_and_counts_each_record_once(tmp_path):
    schema = Schema(features={"id": Feature(dtype="int64"), "r": Feature(dtype="float64", shape=(None,))})
    rows = [{"id": i, "r": [i] * (i % 3)} for i in range(37)]
    manifest = write_dataset(tmp_path, schema, rows, 4)

    def to_pair(batch):
        return batch["id"], {"deep": (batch["r"], tf.one_hot(batch["id"], 3))}

    dataset = distribute(tf.distribute.get_strategy(), manifest, config(), map_fn=to_pair, pad_batches=True)
    elements = list(dataset)
    assert len(elements) == plan_epoch(counts=[37], per_worker_batch_size=16).steps_per_epoch == 3
    assert sorted(itertools.chain(*map(masked, elements))) == list(range(37))
    for (first, rest), mask in elements:
        assert first.shape == mask.shape == (16,) and mask.dtype == tf.float32
        assert rest["deep"][0].shape[0] == 16 and rest["deep"][1].shape == (16, 3)


def test_a_map_that_loses_rows_is_refused_under_padding(ids):
    def fewer(batch):
        return batch["id"][:3]

    with pytest.raises(UsageError, match=r"keep the batch's 16 rows, got \[3\]"):
        distribute(tf.distribute.get_strategy(), ids, config(), map_fn=fewer, pad_batches=True)

    def filtered(batch):
        return tf.boolean_mask(batch["id"], batch["id"] % 2 == 0)

    with pytest.raises(tf.errors.InvalidArgumentError, match="map_fn must keep every row"):
        list(distribute(tf.distribute.get_strategy(), ids, config(), map_fn=filtered, pad_batches=True))


def test_padding_in_file_mode_is_refused(ids):
    with pytest.raises(UsageError, match=r'autosharding hides.*Use sharding="per_worker"'):
        distribute(tf.distribute.get_strategy(), ids, config(sharding="file"), pad_batches=True)


def test_a_cut_epoch_still_completes_its_cache(tmp_path):
    manifest = write_dataset(tmp_path, IDS, [{"id": i} for i in range(40)], counts=[26, 14])
    options = config(per_worker_batch_size=4, drop_remainder=True, cache="memory", shuffle_buffer_records=0)
    plan = plan_epoch(counts=[26, 14], num_workers=2, per_worker_batch_size=4, drop_remainder=True)
    dataset = pipeline._worker_dataset(manifest, options, "train", (0,), plan, 1, None, False, (0, 0))
    assert len(dataset) == 3
    assert read_ids(dataset) == list(range(12))
    for path in manifest.paths("train"):
        tf.io.gfile.remove(path)
    assert read_ids(dataset) == list(range(12)), "the second epoch must come from the cache"


def test_several_maps_overlap_and_apply_in_order(tmp_path):
    """Each map is a stage of its own: two of 50 ms take 50 ms a batch together, not 100."""
    schema = Schema(features={"x": Feature(dtype="int64")})
    manifest = write_dataset(tmp_path, schema, [{"x": i} for i in range(20)], 2)
    config = PipelineConfig(per_worker_batch_size=1, shuffle_buffer_records=0)
    order = []

    def slow(name):
        def note(x):
            order.append((name, int(x[0])))
            time.sleep(0.05)
            return x

        return lambda batch: {"x": tf.ensure_shape(tf.numpy_function(note, [batch["x"]], tf.int64), [None])}

    dataset = make_dataset(manifest, config, map_fn=[slow("first"), slow("second")])
    start_s = time.monotonic()
    found = [int(batch["x"][0]) for batch in dataset]
    elapsed_s = time.monotonic() - start_s
    assert found == list(range(20))
    assert [x for name, x in order if name == "second"] == list(range(20))
    assert elapsed_s < 20 * 0.1 - 0.3, "the maps took turns"
