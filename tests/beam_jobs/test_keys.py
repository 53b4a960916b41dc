"""--split-by: equal keys stay together, whatever else changes; every record is somewhere once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_jobs import convert
from beam_jobs.hashing import hash_array
from tests.beam_jobs.test_round_trip import IN_MEMORY, records, run

SPLITS = ["--split", "train=0.7", "--split", "val=0.2", "--split", "test=0.1"]


# Another hash would move the keys of everybody's datasets to other splits.
GOLDEN_TEXTS = [16294208416658607535, 3192869556412685456, 13361088886662278326]
GOLDEN_INTEGERS = [16294208416658607535, 16490336266968443936, 2296115805719413641]


def write(path, rows, users=60):
    path.write_text("id,user,x\n" + "".join(f"{i},u{i * 7919 % users},{i / 4}\n" for i in range(rows)))
    return path


def split_of_users(manifest):
    found = {}
    for split in manifest.splits:
        for row in records(manifest, split):
            found.setdefault(row["user"], set()).add(split)
    assert all(len(splits) == 1 for splits in found.values())
    return {user: splits.pop() for user, splits in found.items()}


@pytest.mark.parametrize("shuffle", [[], ["--no-shuffle"]], ids=["shuffled", "in order"])
def test_equal_keys_stay_together_and_nothing_is_lost(tmp_path, monkeypatch, shuffle):
    monkeypatch.setattr("beam_jobs.sources.csv.SPLIT_BYTES", 3000)
    source = write(tmp_path / "a.csv", 2000)
    manifest = run(tmp_path, *SPLITS, "--split-by", "user", *shuffle, inputs=[source])
    where = split_of_users(manifest)
    assert len(where) == 60 and set(where.values()) == {"train", "val", "test"}
    found = {split: [row["id"] for row in records(manifest, split)] for split in manifest.splits}
    assert sorted(number for ids in found.values() for number in ids) == list(range(2000))
    assert all((ids == sorted(ids)) == bool(shuffle) for ids in found.values())
    assert manifest.source["split_by"] == "user"
    for split in manifest.splits.values():
        counts = [shard.num_records for shard in split.shards]
        assert max(counts) - min(counts) <= 1


def test_more_data_of_the_same_keys_goes_the_same_way(tmp_path):
    few = run(tmp_path, *SPLITS, "--split-by", "user", inputs=[write(tmp_path / "a.csv", 600)], output="few")
    more = run(
        tmp_path, *SPLITS, "--split-by", "user", "--num-shards", "2", inputs=[write(tmp_path / "b.csv", 3000, 90)],
        output="more",
    )  # fmt: skip
    before, after = split_of_users(few), split_of_users(more)
    assert before.items() <= after.items()
    other = run(
        tmp_path, *SPLITS, "--split-by", "user", "--seed", "5", inputs=[tmp_path / "a.csv"], output="other"
    )
    assert split_of_users(other) != before


def test_the_fractions_hold_about(tmp_path):
    rows = 20_000
    (tmp_path / "a.csv").write_text("id\n" + "".join(f"{i}\n" for i in range(rows)))
    manifest = run(tmp_path, *SPLITS, "--split-by", "id", inputs=[tmp_path / "a.csv"])
    for name, fraction in (("train", 0.7), ("val", 0.2), ("test", 0.1)):
        assert manifest.splits[name].num_records / rows == pytest.approx(fraction, abs=0.015)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ([*SPLITS, "--split-by", "nobody"], 2, "there are id, user, x"),
        ([*SPLITS, "--split-by", "image", "--pack", "image=x,id"], 2, "a tensor; there are user"),
        (["--split-by", "user"], 2, "must come with two splits or more"),
        ([*SPLITS, "--split-by", "hole"], 1, "got 20 without 'hole'"),
        ([*SPLITS, "--split-by", "same"], 2, "no value of 'same' falls into it"),
    ],
)
def test_what_can_be_no_key_is_refused(tmp_path, capfd, options, code, said):
    header = "id,user,x" + (",hole" if "hole" in options else "") + (",same" if "same" in options else "")
    tail = (
        (lambda i: "," + ("" if i % 2 else "h"))
        if "hole" in options
        else (lambda i: ",1" if "same" in options else "")
    )
    (tmp_path / "a.csv").write_text(header + "\n" + "".join(f"{i},u{i},{i}{tail(i)}\n" for i in range(40)))
    arguments = ["--input", str(tmp_path / "a.csv"), "--output", str(tmp_path / "out"), *options, *IN_MEMORY]
    assert convert.main(arguments) == code
    err = capfd.readouterr().err
    assert said in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


@given(st.lists(st.text(max_size=20)), st.integers(0, 2**64 - 1))
def test_equal_values_have_equal_hashes_and_others_do_not(values, seed):
    hashes = hash_array(pa.array(values, pa.string()), seed)
    assert len(set(hashes.tolist())) == len(set(values))
    assert dict(zip(values, hashes.tolist(), strict=True)) == {
        v: int(hash_array(pa.array([v], pa.binary()), seed)[0]) for v in values
    }


def test_hashes_are_the_same_in_every_release():
    assert hash_array(pa.array(["", "user-17", "x" * 9])).tolist() == GOLDEN_TEXTS
    assert hash_array(pa.array([0, -1, 2**40])).tolist() == GOLDEN_INTEGERS
    assert hash_array(pa.array([0, -1, 2**40]), 3).tolist() != GOLDEN_INTEGERS
    floats = hash_array(pa.array([0.0, -0.0, float("nan"), -float("nan")]))
    assert floats[0] == floats[1] and floats[2] == floats[3]
    assert np.array_equal(hash_array(pa.array([5], pa.uint8())), hash_array(pa.array([5], pa.int64())))
    with pytest.raises(ValueError, match="1 nulls"):
        hash_array(pa.array([None, 1]))
