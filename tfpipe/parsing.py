"""Schema -> a function that parses a whole batch of serialized tf.train.Examples at once.

Comes in: string[batch]. Goes out: `{feature: tensor[batch, ...]}` in the schema's dtypes.
`tf.io.parse_example` once a batch, then `tf.io.decode_raw` once a raw feature: never an op
a record.

A nullable feature becomes the fill value that the user chose, or it gets a companion
`NAME_present` (bool[batch]) and reads as 0, "" or zeros where it is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfpipe.errors import SchemaError, UsageError
from tfpipe.schema import ITEMSIZE_BYTES, TEXT_DTYPES, Feature, Schema

# decode_raw has no unsigned 32- and 64-bit output: decode as signed, then reinterpret.
_DECODE_AS = {"uint32": tf.int32, "uint64": tf.int64}
_WIRE = {"int64_list": tf.int64, "float_list": tf.float32, "bytes_list": tf.string, "raw": tf.string}


def make_parser(
    schema: Schema, fill_values: Mapping[str, Any] | None = None
) -> Callable[[tf.Tensor], dict[str, tf.Tensor]]:
    """Makes the function that parses a batch.

    Args:
        schema: of every record.
        fill_values: by nullable feature: what stands for a null.

    Returns:
        A function from string[batch] to `{feature: tensor[batch, ...]}`. Features of unknown
        length are RaggedTensors; there null and the empty list both read as an empty row
        (TensorFlow's parser does not tell them apart), and `NAME_present` is False for both.

    Raises:
        UsageError: a fill value for an unknown, non-nullable or variable-length feature, or
            one that its dtype or shape can't hold; or a companion's name is taken.
        SchemaError: a dimension other than the first is unknown.
    """
    fills = _checked_fills(schema, dict(fill_values or {}))
    spec: dict[str, Any] = {}
    for name, feature in schema.features.items():
        if None in feature.shape[1:]:
            raise SchemaError(
                f"only a feature's first dimension may be unknown, got shape {list(feature.shape)} "
                f"(feature {name!r}). Declare the other dimensions with --schema."
            )
        wire = _WIRE[feature.encoding]
        if feature.nullable or None in feature.shape:
            spec[name] = tf.io.RaggedFeature(wire, row_splits_dtype=tf.int64)
        else:
            spec[name] = tf.io.FixedLenFeature(() if feature.encoding == "raw" else feature.shape, wire)

    @tf.autograph.experimental.do_not_convert
    def parse(serialized: tf.Tensor) -> dict[str, tf.Tensor]:
        parsed = tf.io.parse_example(serialized, spec)
        rows = tf.shape(serialized)[0]
        batch: dict[str, tf.Tensor] = {}
        for name, feature in schema.features.items():
            value, present = parsed[name], None
            if None in feature.shape:
                value, present = _ragged(value, feature)
            else:
                if feature.nullable:
                    value, present = _dense(value, feature, fills.get(name))
                if feature.encoding == "raw":
                    value = tf.reshape(_decode_raw(value, feature), (rows, *feature.shape))
                value.set_shape([serialized.shape[0], *feature.shape])
            batch[name] = value
            if feature.nullable and name not in fills:
                batch[f"{name}_present"] = present
        return batch

    return parse


def _decode_raw(value: tf.Tensor, feature: Feature) -> tf.Tensor:
    dtype = tf.dtypes.as_dtype(feature.dtype)
    wire = _DECODE_AS.get(feature.dtype)
    if wire is None:
        return tf.io.decode_raw(value, dtype)
    return tf.bitcast(tf.io.decode_raw(value, wire), dtype)


def _dense(value: tf.RaggedTensor, feature: Feature, fill: np.ndarray | None) -> tuple[tf.Tensor, tf.Tensor]:
    """Puts the fill value where a record has none; -> wire tensor[batch, ...], bool[batch]."""
    size = 1 if feature.encoding == "raw" else feature.num_elements
    lengths = value.row_lengths()
    present = lengths > 0
    tf.debugging.Assert(
        tf.reduce_all(~present | (lengths == size)),
        [f"a present value must have shape {list(feature.shape)}, got lengths", lengths],
    )
    if fill is None:
        fill = np.zeros(feature.shape, object if feature.dtype in TEXT_DTYPES else feature.dtype)
        if feature.dtype in TEXT_DTYPES:
            fill[...] = b""
    if feature.encoding == "raw":
        filler = tf.constant([fill.tobytes()])
    else:
        filler = tf.constant(fill.ravel().tolist(), value.dtype)
    # An absent row takes its elements from the filler, which follows the present rows' values.
    places = tf.range(size, dtype=tf.int64)
    start = tf.where(present, value.row_splits[:-1], value.row_splits[-1])
    pool = tf.concat([value.flat_values, filler], axis=0)
    dense = tf.gather(pool, start[:, None] + places)
    shape = () if feature.encoding == "raw" else feature.shape
    return tf.reshape(dense, (tf.shape(present)[0], *shape)), present


def _ragged(value: tf.RaggedTensor, feature: Feature) -> tuple[tf.RaggedTensor, tf.Tensor]:
    """Rows of differing length; -> RaggedTensor[batch, None, ...], bool[batch]."""
    inner = feature.shape[1:]
    width = int(np.prod(inner, dtype=np.int64))
    lengths = value.row_lengths()
    present = lengths > 0
    flat = value.flat_values
    if feature.encoding == "raw":
        # One value a present record; its number of bytes says how many elements it has.
        sizes = tf.strings.length(flat)
        flat = _decode_raw(tf.strings.reduce_join(flat), feature)
        first = tf.where(present, value.row_splits[:-1], tf.zeros_like(lengths))
        sizes = tf.concat([tf.cast(sizes, tf.int64), tf.zeros([1], tf.int64)], axis=0)
        lengths = tf.where(present, tf.gather(sizes, first), tf.zeros_like(lengths))
        lengths //= ITEMSIZE_BYTES[feature.dtype]
    if inner:
        flat = tf.reshape(flat, (-1, *inner))
        lengths //= width
    return tf.RaggedTensor.from_row_lengths(flat, lengths), present


def _checked_fills(schema: Schema, fill_values: dict[str, Any]) -> dict[str, np.ndarray]:
    fills = {}
    nullable = sorted(name for name, feature in schema.features.items() if feature.nullable)
    for name, value in fill_values.items():
        if name not in nullable:
            raise UsageError(
                f"fill_values must name nullable features ({', '.join(nullable) or 'there are none'}), "
                f"got {name!r}. Leave it out."
            )
        feature = schema.features[name]
        if None in feature.shape:
            raise UsageError(
                f"fill_values can't fill a feature of unknown length, got {name!r}. Leave it out: "
                f"its null reads as an empty row, and {name}_present is False."
            )
        fills[name] = _checked_fill(name, feature, value)
    for name in nullable:
        if name not in fills and f"{name}_present" in schema.features:
            raise UsageError(
                f"the name {name}_present must be free, because {name!r} is nullable, got a feature of "
                f"that name. Give {name!r} a fill value."
            )
    return fills


def _checked_fill(name: str, feature: Feature, value: Any) -> np.ndarray:
    error = UsageError(
        f"the fill value of {name!r} must be one value (or shape {list(feature.shape)}) that "
        f"{feature.dtype} holds exactly, got {value!r}."
    )
    if feature.dtype in TEXT_DTYPES:
        array = np.asarray(value, dtype=object)
        if not all(isinstance(text, (str, bytes)) for text in array.ravel()):
            raise error
        encoded = [text.encode() if isinstance(text, str) else text for text in array.ravel()]
        array = np.array([*encoded, None], dtype=object)[:-1].reshape(array.shape)
    else:
        try:
            given = np.asarray(value)
            with np.errstate(all="ignore"):
                array = given.astype(feature.dtype)
            holds = array == given
        except (TypeError, ValueError, OverflowError):
            raise error from None
        if given.dtype.kind not in "biuf" or (given.dtype.kind == "b") != (feature.dtype == "bool"):
            raise error
        floats = feature.dtype.startswith("float")
        close = np.isclose(array, given, rtol=1e-2) if floats else False  # 0.1 is no float32, but meant so
        if not np.all(holds | (np.isnan(given) & floats if floats else False) | close):
            raise error
    try:
        return np.broadcast_to(array, feature.shape).copy()
    except ValueError:
        raise error from None
