"""Models to measure with; any `module:function` of the same form serves as well.

A model function returns `(model, loss, optimizer)`: a Keras model (Keras 3 or tf_keras), a
loss (a Keras loss, or a function of labels and predictions that gives one value an example)
and a Keras optimizer. It may carry a function `prepare(features, label)` that turns a
parsed batch into the `(x, y)` that the model takes; it runs inside the input pipeline,
after the user's own map.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfpipe.errors import UsageError


def mnist_cnn() -> tuple[Any, Any, Any]:
    """Builds the small CNN of TensorFlow's multi-worker tutorial: 2,770,634 parameters.

    Returns:
        Model of float32[batch, 28, 28, 1] -> logits float32[batch, 10], loss, optimizer.

    Raises:
        ImportError: never; Keras comes with TensorFlow.

    Source: tensorflow.org/tutorials/distribute/multi_worker_with_keras.
    """
    keras = tf.keras
    model = keras.Sequential([
        keras.layers.Input(shape=(28, 28, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
    ])  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, loss, keras.optimizers.SGD(learning_rate=0.01)


def prepare_image(features: dict[str, tf.Tensor], label: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Brings a batch's one image feature to 28x28x1, each image standardized.

    Args:
        features: one of them an image [batch, height, width] or [batch, height, width, 1].
        label: the feature that holds the class.

    Returns:
        float32[batch, 28, 28, 1] and the label, int64[batch].

    Raises:
        UsageError: no label of that name, or not exactly one image of known size.
    """
    if label not in features:
        raise UsageError(
            f"label must be one of the features {', '.join(sorted(features))}, got {label!r}. "
            f"Name it with --label."
        )
    images = {
        name: value
        for name, value in features.items()
        if name != label and (value.shape.rank == 3 or (value.shape.rank == 4 and value.shape[3] == 1))
    }
    if len(images) != 1:
        raise UsageError(
            f"this model must be given exactly one image feature of shape [height, width] or "
            f"[height, width, 1], got {len(images)} among {', '.join(sorted(features))}. "
            f"Pack pixel columns with --pack, or name another --model."
        )
    (image,) = images.values()
    if image.shape.rank == 3:
        image = image[..., tf.newaxis]
    image = tf.cast(image, tf.float32)
    if tuple(image.shape[1:3]) != (28, 28):
        image = tf.image.resize(image, (28, 28))
    return tf.image.per_image_standardization(image), features[label]


mnist_cnn.prepare = prepare_image  # type: ignore[attr-defined]
