"""Two workers given the same global batches as one must reach the same weights."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import run_workers
from tfpipe.errors import UsageError

# What each worker does; sys.argv: file for worker 0's weights, optimizer.
SCRIPT = """
import json, os, sys
import numpy as np, tensorflow as tf
from tfpipe.models import mnist_cnn
from tfpipe.step import Stepper

config = json.loads(os.environ["TF_CONFIG"])
workers, index = len(config["cluster"]["worker"]), config["task"]["index"]
if workers == 1:
    del os.environ["TF_CONFIG"]
    strategy = tf.distribute.get_strategy()
else:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
assert strategy.num_replicas_in_sync == workers

def model_fn():
    model, loss, _ = mnist_cnn()
    return model, loss, getattr(tf.keras.optimizers, sys.argv[2])(0.01)

stepper = Stepper(strategy, model_fn)
rng = np.random.default_rng(0)
batches = []
# Full batches, then one in which the last worker has next to nothing.
for step, rows in enumerate([48, 48, 48, 48, 33]):
    x = rng.standard_normal((48, 28, 28, 1)).astype("float32")
    y = rng.integers(0, 10, 48)
    mask = (np.arange(48) < rows).astype("float32")
    share = slice(index * 48 // workers, (index + 1) * 48 // workers)
    batches.append(((tf.constant(x[share]), tf.constant(y[share])), tf.constant(mask[share]), rows))
stepper.build(batches[0][0])
for batch, mask, rows in batches:
    loss, taken = stepper.synced(batch, mask, tf.constant(float(rows)))
    loss.numpy()
if index == 0:
    np.savez(sys.argv[1], *[v.numpy() for v in stepper.model.variables])
    print(tf.keras.optimizers.SGD.__module__)
"""


def weights_after(tmp_path, num_workers, optimizer, legacy):
    file = tmp_path / f"{num_workers}-{optimizer}-{legacy}.npz"
    outputs = run_workers(
        SCRIPT,
        num_workers,
        180,
        arguments=[str(file), optimizer],
        environment={"TF_USE_LEGACY_KERAS": str(int(legacy))},
    )
    assert ("tf_keras" in outputs[0]) == legacy, "the Keras generation that was asked for"
    with np.load(file) as arrays:
        return [arrays[name] for name in arrays.files]


@pytest.mark.slow
@pytest.mark.parametrize("legacy", [False, True], ids=["keras3", "tf_keras"])
# Plain SGD shows a gradient summed twice or averaged; Adam would hide that, but not other faults.
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_two_workers_reach_the_weights_of_one(tmp_path, optimizer, legacy):
    one = weights_after(tmp_path, 1, optimizer, legacy)
    two = weights_after(tmp_path, 2, optimizer, legacy)
    assert len(one) == len(two) >= 6
    for alone, together in zip(one, two, strict=True):
        np.testing.assert_allclose(together, alone, atol=1e-5)


@pytest.fixture(scope="module")
def tf():
    return pytest.importorskip("tensorflow")


def small_model(tf, loss=None):
    def model_fn():
        keras = tf.keras
        model = keras.Sequential([keras.layers.Input(shape=(4,)), keras.layers.Dense(3)])
        chosen = loss if loss is not None else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return model, chosen, keras.optimizers.SGD(0.1)

    return model_fn


def make_stepper(tf, **kwargs):
    from tfpipe.step import Stepper

    return Stepper(tf.distribute.get_strategy(), small_model(tf, **kwargs))


def make_batch(tf, rows=6):
    rng = np.random.default_rng(1)
    return (
        tf.constant(rng.standard_normal((rows, 4)), tf.float32),
        tf.constant(rng.integers(0, 3, rows), tf.int64),
    )


def weights(stepper):
    return [variable.numpy() for variable in stepper.model.variables]


def test_masked_rows_leave_no_trace(tf):
    x, y = make_batch(tf)
    masked, short = make_stepper(tf), make_stepper(tf)
    padded = (tf.concat([x[:4], 99 * tf.ones([2, 4])], 0), y)
    masked.build(padded)
    short.build(padded)
    _, rows = masked.synced(padded, tf.constant([1.0, 1, 1, 1, 0, 0]), tf.constant(4.0))
    short.synced((x[:4], y[:4]), None, tf.constant(4.0))
    assert rows.numpy() == 4
    for a, b in zip(weights(masked), weights(short), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_local_and_synced_do_the_same_to_one_worker(tf):
    batch = make_batch(tf)
    local, synced = make_stepper(tf), make_stepper(tf)
    before = local.build(batch)
    synced.build(batch)
    local.local(batch, None, tf.constant(6.0))
    synced.synced(batch, None, tf.constant(6.0))
    assert not np.array_equal(before[0], weights(local)[0]), "a step that changes nothing measures nothing"
    for a, b in zip(weights(local), weights(synced), strict=True):
        np.testing.assert_array_equal(a, b)


def test_restore_undoes_steps(tf):
    batch = make_batch(tf)
    stepper = make_stepper(tf)
    before = stepper.build(batch)
    stepper.local(batch, None, tf.constant(6.0))
    stepper.restore(before)
    np.testing.assert_array_equal(weights(stepper)[0], before[0])


@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "none"])
def test_every_reduction_of_a_keras_loss_means_the_mean(tf, reduction):
    batch = make_batch(tf)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    stepper, plain = make_stepper(tf, loss=loss), make_stepper(tf)
    stepper.build(batch)
    plain.build(batch)
    got, _ = stepper.local(batch, None, tf.constant(6.0))
    expected, _ = plain.local(batch, None, tf.constant(6.0))
    assert got.numpy() == pytest.approx(expected.numpy())


def test_a_new_shape_is_seen_as_a_retrace(tf):
    stepper = make_stepper(tf)
    stepper.build(make_batch(tf))
    stepper.local(make_batch(tf), None, tf.constant(6.0))
    assert stepper.traces["local"] == 1
    stepper.local(make_batch(tf, rows=5), None, tf.constant(5.0))
    assert stepper.traces["local"] == 2


def test_evaluation_counts_records_not_padding(tf):
    x, _ = make_batch(tf)
    stepper = make_stepper(tf)
    stepper.build((x, tf.zeros([6], tf.int64)))
    answers = tf.argmax(stepper.model(x), -1)
    y = tf.concat([answers[:3], answers[3:] + 1], 0)
    _, right, examples = stepper.evaluate((x, y), tf.constant([1.0, 1, 1, 1, 0, 0])).numpy()
    assert (right, examples) == (3, 4)
    assert stepper.classifies


def test_gradient_bytes(tf):
    stepper = make_stepper(tf)
    assert stepper.gradient_bytes == (4 * 3 + 3) * 4


def test_a_loss_that_is_a_scalar_is_refused(tf):
    stepper = make_stepper(tf, loss=lambda y, output: tf.reduce_mean(output))
    stepper.build(make_batch(tf))
    # While tracing, TensorFlow wraps errors in its own; the worker process unwraps them.
    with pytest.raises(Exception, match="one value a record, got a scalar"):
        stepper.local(make_batch(tf), None, tf.constant(6.0))


def test_a_batch_without_the_label_is_refused(tf):
    stepper = make_stepper(tf)
    stepper.build(make_batch(tf))
    with pytest.raises(Exception, match=r"one of the features x, got 'label'.*--label"):
        stepper.local({"x": tf.zeros([2, 4])}, None, tf.constant(2.0))


def test_a_dict_of_one_input_and_a_label_fits_the_model(tf):
    x, y = make_batch(tf)
    stepper = make_stepper(tf)
    stepper.build((x, y))
    _, rows = stepper.local({"pixels": x, "label": y}, None, tf.constant(6.0))
    assert rows.numpy() == 6


@pytest.mark.parametrize(
    "reference, message",
    [
        ("no_colon", "form module:function, got 'no_colon'"),
        ("no.such.module:f", "can be imported, got 'no.such.module'"),
        ("tfpipe.models:nothing", "a function in tfpipe.models, got 'nothing'"),
    ],
)
def test_a_function_that_is_not_there_is_refused(reference, message):
    from tfpipe.step import load_function

    with pytest.raises(UsageError, match=message):
        load_function(reference, "--model")
