"""What a dataset's examples hold: features, their types, shapes and encodings.

Comes in: a JSON object (from a manifest or a declared schema file) or plain arguments.
Goes out: an immutable `Schema`, from which the converter encodes and the pipeline parses.

    >>> schema = Schema(features={"image": Feature(dtype="uint8", shape=(28, 28)),
    ...                           "label": Feature(dtype="int64")})
    >>> schema.features["image"].encoding
    'raw'

Pure Python: a Beam worker and a training worker both import it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfpipe.errors import SchemaError, UsageError

# Bytes of one element. `string` is UTF-8 text, `bytes` is opaque; both are tf.string.
ITEMSIZE_BYTES = {
    "bool": 1,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
TEXT_DTYPES = ("string", "bytes")
DTYPES = (*ITEMSIZE_BYTES, *TEXT_DTYPES)
ENCODINGS = ("raw", "int64_list", "float_list", "bytes_list")


def default_encoding(dtype: str, shape: tuple[int | None, ...]) -> str:
    """Chooses how a feature travels in a tf.train.Example.

    Tensors and dtypes without a list of their own go as `raw` (little-endian C-order
    bytes): lossless for every dtype, and decoded by one `tf.io.decode_raw` a batch.

    Args:
        dtype: one of `DTYPES`.
        shape: of one record; None for an unknown dimension.

    Returns:
        One of `ENCODINGS`.

    Raises:
        SchemaError: never; an unknown dtype is refused by `Feature`.
    """
    if dtype in TEXT_DTYPES:
        return "bytes_list"
    if shape in ((), (None,)):
        return {"int64": "int64_list", "float32": "float_list"}.get(dtype, "raw")
    return "raw"


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """One feature of every example.

    Attributes:
        dtype: one of `DTYPES`; what the batch holds after decoding.
        shape: of one record, () for a scalar; None for an unknown dimension.
        encoding: how it travels; default by `default_encoding`.
        nullable: whether some records may lack it (a null is an absent feature, never 0).
        labels: names of the classes 0..n-1 that an int64 feature counts.
    """

    dtype: str
    shape: tuple[int | None, ...] = ()
    encoding: str = ""
    nullable: bool = False
    labels: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise SchemaError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")
        for size in self.shape:
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
                raise SchemaError(f"shape must hold non-negative integers or null, got {list(self.shape)}.")
        if not self.encoding:
            object.__setattr__(self, "encoding", default_encoding(self.dtype, self.shape))
        fits = {
            "raw": self.dtype not in TEXT_DTYPES,
            "int64_list": self.dtype == "int64",
            "float_list": self.dtype == "float32",
            "bytes_list": self.dtype in TEXT_DTYPES,
        }
        if not fits.get(self.encoding, False):
            raise SchemaError(
                f"encoding must be one of {', '.join(ENCODINGS)} and hold dtype {self.dtype}, "
                f"got {self.encoding!r}. Leave it out to get "
                f"{default_encoding(self.dtype, self.shape)!r}."
            )
        if self.labels is not None and self.dtype != "int64":
            raise SchemaError(f"labels name the classes of an int64 feature, got dtype {self.dtype}.")

    @property
    def num_elements(self) -> int | None:
        """Elements a record holds; None where a dimension is unknown."""
        return None if None in self.shape else math.prod(self.shape)  # type: ignore[arg-type]

    @property
    def decoded_bytes(self) -> int | None:
        """Bytes of one decoded record; None where size differs between records."""
        if self.num_elements is None or self.dtype in TEXT_DTYPES:
            return None
        return self.num_elements * ITEMSIZE_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """The manifest's form of this feature."""
        obj: dict[str, Any] = {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "encoding": self.encoding,
            "nullable": self.nullable,
        }
        if self.labels is not None:
            obj["labels"] = list(self.labels)
        return obj

    @classmethod
    def from_json(cls, obj: Any, *, where: str) -> Feature:
        """Reads the manifest's form of a feature.

        Args:
            obj: a JSON object; only `dtype` is required.
            where: named in the error: file and feature.

        Returns:
            The feature.

        Raises:
            SchemaError: a key is unknown or a value does not fit.
        """
        if not isinstance(obj, Mapping) or "dtype" not in obj:
            raise SchemaError(f'a feature must be an object with a "dtype", got {obj!r} ({where}).')
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(obj) - known):
            raise SchemaError(
                f"a feature's keys must be among {', '.join(sorted(known))}, "
                f"got {', '.join(unknown)} ({where})."
            )
        shape, nullable, labels = obj.get("shape", []), obj.get("nullable", False), obj.get("labels")
        if not isinstance(shape, list):
            raise SchemaError(f"shape must be a list, got {shape!r} ({where}).")
        if not isinstance(nullable, bool):
            raise SchemaError(f"nullable must be true or false, got {nullable!r} ({where}).")
        if labels is not None and not (
            isinstance(labels, list) and all(isinstance(label, str) for label in labels)
        ):
            raise SchemaError(f"labels must be a list of strings, got {labels!r} ({where}).")
        try:
            return cls(
                dtype=obj["dtype"],
                shape=tuple(shape),
                encoding=obj.get("encoding") or "",
                nullable=nullable,
                labels=None if labels is None else tuple(labels),
            )
        except SchemaError as error:
            raise SchemaError(f"{error} ({where})") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """The features of every example of a dataset, in the source's column order."""

    features: Mapping[str, Feature]

    def __post_init__(self) -> None:
        if not self.features:
            raise SchemaError("a schema must have at least one feature, got none.")
        for name in self.features:
            if not isinstance(name, str) or not name:
                raise SchemaError(f"a feature's name must be a non-empty string, got {name!r}.")

    def to_json(self) -> dict[str, Any]:
        """The manifest's form: `{"features": {NAME: {...}}}`."""
        return {"features": {name: feature.to_json() for name, feature in self.features.items()}}

    @classmethod
    def from_json(cls, obj: Any, *, where: str) -> Schema:
        """Reads the manifest's form.

        Args:
            obj: `{"features": {NAME: {"dtype": ...}}}`.
            where: named in errors: the file it came from.

        Returns:
            The schema.

        Raises:
            SchemaError: malformed; names file, feature and key.
        """
        if (
            not isinstance(obj, Mapping)
            or set(obj) != {"features"}
            or not isinstance(obj["features"], Mapping)
        ):
            raise SchemaError(
                f'a schema must have the form {{"features": {{NAME: {{"dtype": ...}}}}}}, '
                f"got {_shorten(obj)} ({where})."
            )
        return cls(
            features={
                name: Feature.from_json(feature, where=f"{where}: feature {name!r}")
                for name, feature in obj["features"].items()
            }
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the schema, the same for any column order (hexadecimal)."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    @property
    def decoded_bytes(self) -> int | None:
        """Bytes of one decoded record; None where that differs between records."""
        sizes = [feature.decoded_bytes for feature in self.features.values()]
        return None if None in sizes else sum(sizes)  # type: ignore[arg-type]


def _shorten(obj: Any, limit: int = 80) -> str:
    text = repr(obj)
    return text if len(text) <= limit else text[:limit] + "..."


def read_schema(path: str | os.PathLike[str]) -> Schema:
    """Reads a declared schema.

    Args:
        path: of a JSON file in the manifest's form.

    Returns:
        The schema.

    Raises:
        UsageError: the file can't be read.
        SchemaError: no JSON, or no schema.
    """
    try:
        obj = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--schema must name a readable file, got {error.strerror} ({path}).") from None
    except ValueError as error:
        raise SchemaError(f"a schema must be JSON, got {error} ({path}).") from None
    return Schema.from_json(obj, where=str(path))
