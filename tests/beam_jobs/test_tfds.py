"""--tfds-metadata: TensorFlow Datasets reads every value that tfpipe reads."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from beam_jobs import convert
from tests.beam_jobs.test_round_trip import IN_MEMORY, records, run


def write(path):
    rows = [
        {"id": i, "f": i / 3, "h": i / 4, "flag": i % 2 == 0, "name": f"n{i}", "tags": list(range(i % 3 + 1)), "pair": [i / 7, 1.5]}
        for i in range(50)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_tfds_reads_what_was_written(tmp_path):
    tfds = pytest.importorskip(
        "tensorflow_datasets", reason="only installed beside the newest TensorFlow (make env-latest)"
    )
    manifest = run(
        tmp_path, "--tfds-metadata", "--split", "train=0.8", "--split", "test=0.2", "--num-shards", "3",
        inputs=[write(tmp_path / "a.jsonl")], output="my data",
    )  # fmt: skip
    builder = tfds.builder_from_directory(str(tmp_path / "my data"))
    assert builder.name == "my_data"
    for split in ("train", "test"):
        assert builder.info.splits[split].num_examples == manifest.splits[split].num_records
        found = {int(row["id"]): row for row in tfds.as_numpy(builder.as_dataset(split=split))}
        expected = {row["id"]: row for row in records(manifest, split)}
        assert found.keys() == expected.keys()
        for key, row in expected.items():
            for name, value in row.items():
                value = value.encode() if isinstance(value, str) else value
                assert np.array_equal(found[key][name], value), name


def test_tfds_reads_images_with_their_classes(tmp_path):
    tfds = pytest.importorskip(
        "tensorflow_datasets", reason="only installed beside the newest TensorFlow (make env-latest)"
    )
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / "raw" / name).mkdir(parents=True)
        for i in range(3):
            Image.new("L", (4, 3), 40 * i).save(tmp_path / "raw" / name / f"{i}.png")
    run(tmp_path, "--tfds-metadata", "--image-as", "raw", inputs=[tmp_path / "raw"])
    builder = tfds.builder_from_directory(str(tmp_path / "out"))
    assert builder.info.features["label"].names == ["cat", "dog"]
    rows = list(tfds.as_numpy(builder.as_dataset(split="train")))
    assert sorted((row["path"].decode(), int(row["label"]), int(row["image"].max())) for row in rows) == [
        (f"{name}/{i}.png", label, 40 * i) for label, name in enumerate(("cat", "dog")) for i in range(3)
    ]
    assert rows[0]["image"].shape == (3, 4, 1)


def test_the_files_come_and_go_with_the_dataset(tmp_path):
    source = write(tmp_path / "a.jsonl")
    manifest = run(tmp_path, "--tfds-metadata", inputs=[source])
    assert manifest.compression == ""
    assert {"dataset_info.json", "features.json"} < set(os.listdir(tmp_path / "out"))
    assert manifest.source["other_files"] == ["dataset_info.json", "features.json"]
    info = json.loads((tmp_path / "out" / "dataset_info.json").read_text())
    assert sum(map(int, info["splits"][0]["shardLengths"])) == 50
    run(tmp_path, "--overwrite", inputs=[source])
    assert not {"dataset_info.json", "features.json"} & set(os.listdir(tmp_path / "out"))


@pytest.mark.parametrize(
    ("text", "options", "code", "said"),
    [
        ('{"a": 1}\n{"a": null}\n', [], 1, "got nulls in 'a'"),
        ('{"a": [[1.5]]}\n{"a": [[1.0], [2.0]]}\n', [], 1, "tensors of one shape, got [None, 1] for 'a'"),
        ('{"a": 1}\n', ["--compression", "gzip"], 2, "must come with --compression none"),
    ],
)
def test_what_tfds_cannot_read_is_refused(tmp_path, capfd, text, options, code, said):
    (tmp_path / "a.jsonl").write_text(text)
    arguments = [
        "--input",
        str(tmp_path / "a.jsonl"),
        "--output",
        str(tmp_path / "out"),
        "--tfds-metadata",
        *options,
    ]
    assert convert.main([*arguments, *IN_MEMORY]) == code
    assert said in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
