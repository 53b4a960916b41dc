"""One training step under a strategy, with the gradient exchange in our hands.

Comes in: a strategy and a model function. Goes out: a `Stepper` whose `local` and `synced`
steps do the same arithmetic on the same variables and differ only in the exchange, so that
their difference is the exchange. Works with Keras 3 and with tf_keras.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfpipe.errors import UsageError


class Stepper:
    """Runs training steps of one model under one strategy.

    Args:
        strategy: any strategy; the model's variables are made under its scope.
        model_fn: returns (model, loss, optimizer).
        label: names the label among a batch's features, where the batch is a dict.
        options: of the gradient all-reduce (implementation, timeout).
        seed: of the initial weights, the same on every worker.

    Raises:
        UsageError: `model_fn` returns something else.

    Attributes:
        model: the Keras model.
        gradient_bytes: that one step exchanges.
        traces: by step, how often TensorFlow has traced it: more than once is a retrace.
        classifies: whether accuracy has a meaning; known after the first `evaluate`.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        model_fn: Callable[[], tuple[Any, Any, Any]],
        *,
        label: str = "label",
        options: tf.distribute.experimental.CommunicationOptions | None = None,
        seed: int = 0,
    ) -> None:
        self._strategy = strategy
        self._label = label
        self._options = options
        self.traces: dict[str, int] = {}
        self.classifies = False
        with strategy.scope():
            tf.keras.utils.set_random_seed(seed)
            built = model_fn()
            if not isinstance(built, tuple) or len(built) != 3:
                raise UsageError(
                    f"a model function must return (model, loss, optimizer), got {type(built).__name__}."
                )
            self.model, self._loss, self.optimizer = built
            self._apply = _applier(self.optimizer)
        self.local = self._compile("local", exchange=False)
        self.synced = self._compile("synced", exchange=True)
        self.evaluate = tf.function(self._evaluate)

    @property
    def gradient_bytes(self) -> int:
        return sum(_num_bytes(variable) for variable in self.model.trainable_variables)

    def build(self, batch: Any) -> list[Any]:
        """Creates what only a first batch can shape: a subclassed model's variables.

        Args:
            batch: a distributed batch, (x, y) or a dict.

        Returns:
            A copy of every variable of model and optimizer (NumPy arrays), for `restore`.

        Raises:
            UsageError: the batch does not fit the model.
        """
        with self._strategy.scope():
            if not self.model.built:
                self._strategy.run(lambda b: self.model(self._split(b)[0], training=False), args=(batch,))
            # Keras 3 refuses to build twice; tf_keras does not mind, its legacy optimizers can't.
            if hasattr(self.optimizer, "build") and not getattr(self.optimizer, "built", False):
                self.optimizer.build(self.model.trainable_variables)
        return [variable.numpy() for variable in self._variables()]

    def restore(self, values: list[Any]) -> None:
        """Puts back what `build` copied.

        Args:
            values: from `build` of this stepper.

        Raises:
            ValueError: of another stepper: number or shapes differ.
        """
        with self._strategy.scope():
            for variable, value in zip(self._variables(), values, strict=True):
                variable.assign(value)

    def _variables(self) -> list[Any]:
        of_optimizer = self.optimizer.variables
        if callable(of_optimizer):  # legacy tf_keras optimizers
            of_optimizer = of_optimizer()
        return [*self.model.variables, *of_optimizer]

    def _compile(self, name: str, *, exchange: bool) -> Callable[..., Any]:
        self.traces[name] = 0

        def step(batch: Any, mask: Any, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            self.traces[name] += 1
            args = (batch, count) if mask is None else (batch, count, mask)

            def replica_step(batch: Any, count: Any, mask: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
                return self._replica_step(batch, mask, count, exchange=exchange)

            loss, rows = self._strategy.run(replica_step, args=args)
            local = self._strategy.experimental_local_results
            return tf.add_n(local(loss)), tf.add_n(local(rows))

        return tf.function(step)

    def _replica_step(
        self, batch: Any, mask: tf.Tensor | None, count: tf.Tensor, *, exchange: bool
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns this replica's part of the loss and its rows.

        `count` is the global number of records of the step, so that partial batches weigh
        each record the same on every worker.
        """
        x, y = self._split(batch)
        with tf.GradientTape() as tape:
            losses = self._losses(y, self.model(x, training=True))
            if mask is not None:
                losses *= mask
            loss = tf.reduce_sum(losses) / count
            if self.model.losses:
                loss += tf.add_n(self.model.losses) / self._strategy.num_replicas_in_sync
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, variables)
        if exchange and self._strategy.num_replicas_in_sync > 1:
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients, options=self._options)
        self._apply(gradients, variables)
        rows = tf.cast(tf.shape(losses)[0], tf.float32) if mask is None else tf.reduce_sum(mask)
        return loss, rows

    def _evaluate(self, batch: Any, mask: Any) -> tf.Tensor:
        """Returns float32[3] of this worker: summed loss, right answers, records."""

        def replica_evaluate(batch: Any, mask: tf.Tensor) -> tf.Tensor:
            x, y = self._split(batch)
            output = self.model(x, training=False)
            losses = self._losses(y, output)
            right = tf.zeros_like(mask)
            # Accuracy has a meaning with integer labels and one score a class.
            self.classifies = y.dtype.is_integer and output.shape.rank == 2 and (output.shape[-1] or 0) > 1
            if self.classifies:
                right = tf.cast(tf.argmax(output, -1) == tf.cast(tf.reshape(y, [-1]), tf.int64), tf.float32)
            return tf.stack([tf.reduce_sum(losses * mask), tf.reduce_sum(right * mask), tf.reduce_sum(mask)])

        return tf.add_n(
            self._strategy.experimental_local_results(
                self._strategy.run(replica_evaluate, args=(batch, mask))
            )
        )

    def _losses(self, y: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
        """One loss a record, float32[batch], whatever reduction the loss object was given.

        `Loss.call` is the loss before its reduction, in Keras 3 and in tf_keras.
        """
        losses = self._loss.call(y, output) if hasattr(self._loss, "call") else self._loss(y, output)
        losses = tf.convert_to_tensor(losses)
        if losses.shape.rank == 0:
            raise UsageError(
                "a loss function must give one value a record, got a scalar. Return it before the mean, "
                "or use a Keras loss."
            )
        return tf.cast(tf.reduce_mean(tf.reshape(losses, [tf.shape(losses)[0], -1]), axis=1), tf.float32)

    def _split(self, batch: Any) -> tuple[Any, tf.Tensor]:
        if isinstance(batch, tuple):
            if len(batch) != 2:
                raise UsageError(f"a batch must be (x, y) or a dict, got a tuple of {len(batch)}.")
            return batch
        if self._label not in batch:
            raise UsageError(
                f"label must be one of the features {', '.join(sorted(batch))}, got {self._label!r}. "
                f"Name it with --label."
            )
        inputs = {name: value for name, value in batch.items() if name != self._label}
        return (next(iter(inputs.values())) if len(inputs) == 1 else inputs), batch[self._label]


def load_function(reference: str, option: str) -> Callable[..., Any]:
    """Imports what `module:function` names.

    Args:
        reference: `module:function`; the module is importable from the working directory.
        option: named in the error, "--model" say.

    Returns:
        The function.

    Raises:
        UsageError: not of that form, no such module, no such function in it.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise UsageError(f"{option} must have the form module:function, got {reference!r}.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the user's module is there, and its own import fails: show where
        raise UsageError(
            f"{option} must name a module that can be imported, got {module_name!r}. Run from the "
            f"directory that holds it, or set PYTHONPATH."
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{option} must name a function in {module_name}, got {name!r}.")
    return function


def _applier(optimizer: Any) -> Callable[[Any, Any], None]:
    """Applies gradients that are reduced already: no optimizer may reduce them once more."""
    if hasattr(optimizer, "_backend_update_step"):  # Keras 3
        # No public switch: the TensorFlow backend sums over replicas inside the update. A
        # test that compares two workers' weights with one's guards this.
        optimizer._all_reduce_sum_gradients = lambda grads_and_vars: list(grads_and_vars)
        return lambda gradients, variables: optimizer.apply(gradients, variables)
    if hasattr(optimizer, "aggregate_gradients"):  # tf_keras
        return lambda gradients, variables: optimizer.apply_gradients(
            zip(gradients, variables, strict=True), skip_gradients_aggregation=True
        )
    return lambda gradients, variables: optimizer.apply_gradients(  # tf_keras.optimizers.legacy
        zip(gradients, variables, strict=True), experimental_aggregate_gradients=False
    )


def _num_bytes(variable: Any) -> int:
    dtype = tf.as_dtype(variable.dtype)
    return int(tf.TensorShape(variable.shape).num_elements()) * dtype.size
