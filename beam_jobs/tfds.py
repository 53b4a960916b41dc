"""`--tfds-metadata`: what `tfds.builder_from_directory` needs to open a dataset: files beside the manifest.

    dataset_info.json    names, versions, records and bytes of each split, how its shards are named
    features.json        each feature's class, dtype, shape and encoding
    FEATURE.labels.txt   names of its classes, one a line

TensorFlow Datasets reads uncompressed TFRecords only, and has no absent values.

Source: tensorflow_datasets/core/proto/{dataset_info,feature}.proto, 4.9.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tfpipe.errors import SchemaError
from tfpipe.manifest import Manifest
from tfpipe.schema import TEXT_DTYPES, Feature, Schema

FILES = ("dataset_info.json", "features.json")
_VERSION = "1.0.0"
_MODULE = "tensorflow_datasets.core.features"


def describe_features(schema: Schema) -> dict[str, Any]:
    """The features as TFDS names them.

    Args:
        schema: of the examples.

    Returns:
        What `features.json` holds.

    Raises:
        SchemaError: a feature has no form that TFDS reads.
    """
    features = {name: _feature(name, feature) for name, feature in schema.features.items()}
    return {
        "pythonClassName": f"{_MODULE}.features_dict.FeaturesDict",
        "featuresDict": {"features": features},
    }


def metadata_files(schema: Schema) -> list[str]:
    """The names of the files that `write_metadata` writes."""
    return [*FILES, *(f"{name}.labels.txt" for name, feature in schema.features.items() if feature.labels)]


def write_metadata(directory: str, manifest: Manifest, name: str) -> None:
    """Writes the files.

    Args:
        directory: where to.
        manifest: of the dataset, uncompressed.
        name: of the dataset; what TFDS does not take in a name becomes an underscore.

    Raises:
        SchemaError: a feature has no form that TFDS reads.
        OSError: the disk.
    """
    content = {
        FILES[0]: {
            "name": re.sub(r"\W", "_", name, flags=re.ASCII).strip("_").lower() or "dataset",
            "version": _VERSION,
            "fileFormat": "tfrecord",
            "splits": [
                {
                    "name": key,
                    "shardLengths": [str(shard.num_records) for shard in split.shards],
                    "numBytes": str(split.num_bytes),
                    "filepathTemplate": "{SPLIT}-{SHARD_X_OF_Y}.{FILEFORMAT}",
                }
                for key, split in manifest.splits.items()
            ],
        },
        FILES[1]: describe_features(manifest.schema),
    }
    for key, feature in manifest.schema.features.items():
        if feature.labels:
            text = "".join(f"{label}\n" for label in feature.labels)
            (Path(directory) / f"{key}.labels.txt").write_text(text, encoding="utf-8")
    for file, obj in content.items():
        (Path(directory) / file).write_text(
            json.dumps(obj, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def _feature(name: str, feature: Feature) -> dict[str, Any]:
    if feature.nullable:
        raise SchemaError(
            f"--tfds-metadata must come with values in every record, got nulls in {name!r}. Fill them in, leave "
            f"the feature out (--schema), or leave the option out."
        )
    if feature.labels:
        if (
            any(label != label.strip() or len(label.splitlines()) != 1 for label in feature.labels)
            or "/" in name
        ):
            raise SchemaError(
                f"--tfds-metadata keeps class names one a line in {name}.labels.txt, got a line break, a slash, or blanks around "
                f"them. Rename the class or the feature, or leave the option out."
            )
        label = {"numClasses": str(len(feature.labels))}
        return {"pythonClassName": f"{_MODULE}.class_label_feature.ClassLabel", "classLabel": label}
    if feature.shape == (None,) and feature.encoding != "raw":
        inner = _tensor(feature.dtype, (), "none")
        return {
            "pythonClassName": f"{_MODULE}.sequence_feature.Sequence",
            "sequence": {"feature": inner, "length": "-1"},
        }
    if None in feature.shape:
        raise SchemaError(
            f"--tfds-metadata must come with tensors of one shape, got {list(feature.shape)} for {name!r}. Leave the "
            f"feature out (--schema), or leave the option out."
        )
    return _tensor(feature.dtype, feature.shape, "bytes" if feature.encoding == "raw" else "none")


def _tensor(dtype: str, shape: tuple[int | None, ...], encoding: str) -> dict[str, Any]:
    tensor = {
        "shape": {"dimensions": [str(size) for size in shape]} if shape else {},
        "dtype": "string" if dtype in TEXT_DTYPES else dtype,
        "encoding": encoding,
    }
    if dtype == "string" and not shape:
        return {"pythonClassName": f"{_MODULE}.text_feature.Text", "text": {}}
    return {"pythonClassName": f"{_MODULE}.tensor_feature.Tensor", "tensor": tensor}
