"""Models and maps as a user would write them, named on the trainer's command line in tests."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import tensorflow as tf

from tfpipe.models import mnist_cnn, prepare_image

DELAY_S, STEP_S = 0.15, 0.04
_one_at_a_time = threading.Lock()


def _sleep(label: np.ndarray) -> np.ndarray:
    with _one_at_a_time:
        time.sleep(DELAY_S)
    return label


def slow_map(features: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Takes 150 ms a batch, one batch at a time."""
    label = tf.numpy_function(_sleep, [features["label"]], tf.int64)
    label.set_shape(features["label"].shape)
    return {**features, "label": label}


def slow_map_on_worker_1(features: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """The same, on worker 1 alone."""
    return slow_map(features) if '"index": 1' in os.environ["TF_CONFIG"] else features


def failing_map(features: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    raise RuntimeError("the user's own mistake")


def long_computing_model() -> tuple[Any, Any, Any]:
    """About ten times the original model's work, and a fraction of its parameters."""
    keras = tf.keras
    model = keras.Sequential([
        keras.layers.Input(shape=(28, 28, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Conv2D(64, 3, activation="relu"),
        keras.layers.Conv2D(64, 3, activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(10),
    ])  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, loss, keras.optimizers.SGD(learning_rate=0.01)


long_computing_model.prepare = prepare_image  # type: ignore[attr-defined]


def resting_model() -> tuple[Any, Any, Any]:
    """A step of 40 ms that leaves the core to the input, as on an accelerator; few parameters."""
    keras = tf.keras
    model = keras.Sequential([
        keras.layers.Input(shape=(28, 28, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ])  # fmt: skip

    def rest(scores: np.ndarray) -> np.ndarray:
        time.sleep(STEP_S)
        return np.zeros((), np.float32)

    def loss(label: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
        losses = keras.losses.sparse_categorical_crossentropy(label, scores, from_logits=True)
        return losses + tf.stop_gradient(tf.ensure_shape(tf.numpy_function(rest, [scores], tf.float32), []))

    return model, loss, keras.optimizers.SGD(learning_rate=0.01)


resting_model.prepare = prepare_image  # type: ignore[attr-defined]


def dying_model() -> tuple[Any, Any, Any]:
    """Worker 1 is killed as if by the kernel."""
    if '"index": 1' in os.environ["TF_CONFIG"]:
        os.kill(os.getpid(), 9)
    return mnist_cnn()


dying_model.prepare = prepare_image  # type: ignore[attr-defined]


def not_a_model() -> int:
    return 42
