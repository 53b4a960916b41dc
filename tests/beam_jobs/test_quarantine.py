"""Rows that can't be taken: all of them in rejected.jsonl, all others in the dataset, or nothing published."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beam_jobs import convert
from beam_jobs.plan import Request, merge_scans
from beam_jobs.sources import SourceOptions, Wish, Wishes
from beam_jobs.sources import csv as csv_source
from beam_jobs.sources.find import open_source
from tfpipe.manifest import Manifest

IN_MEMORY = ["--direct_running_mode", "in_memory"]
DECLARED = {"features": {"n": {"dtype": "int64"}, "t": {"dtype": "string"}}}


def run(tmp_path, source, *options, schema=DECLARED):
    declared = tmp_path / "schema.json"
    declared.write_text(json.dumps(schema))
    output = tmp_path / "out"
    code = convert.main([
        "--input", str(source), "--output", str(output), "--schema", str(declared), *options, *IN_MEMORY,
    ])  # fmt: skip
    return code, output


def rejected(output):
    return [json.loads(line) for line in (output / "rejected.jsonl").read_text().splitlines()]


def test_bad_rows_of_every_kind_go_aside_with_origin_reason_and_text(tmp_path, capfd):
    source = tmp_path / "a.csv"
    source.write_text('n,t\n1,a\nx,"b ""c"""\n\n2,d\n3\n4,"e"f\n5,g,h\n,i\n6,j\n')
    code, output = run(tmp_path, source, "--on-error", "quarantine", "--max-rejected", "5")
    assert code == 0
    out = capfd.readouterr().out
    assert "WARNING: 5 of 8 rows were left out" in out and "rejected.jsonl" in out
    assert out.splitlines()[-1] == f"wrote 3 records in 3 shards to {output} (5 rejected)"
    manifest = Manifest.load(output)
    assert manifest.verify() == [] and manifest.num_rejected == 5
    found = rejected(output)
    assert [row["origin"] for row in found] == [f"{source}:{row}" for row in (3, 6, 7, 8, 9)]
    assert [row["raw"] for row in found] == ['x,"b ""c"""', "3", '4,"e"f', "5,g,h", ",i"]
    for row, said in zip(found, ("'n' must hold int64, got 'x'", "2 fields, got 1", "closing quote",
                                 "2 fields, got 3", "'n' must hold a value"), strict=True):  # fmt: skip
        assert said in row["reason"]


@pytest.mark.parametrize("options, said", [
    (["--on-error", "quarantine", "--max-rejected", "4"], ["at most 4 rows", "got 5", "a.csv:9"]),
    (["--on-error", "quarantine", "--max-rejected", "62%"], ["at most 62% of 8", "got 5"]),
    ([], ["a.csv:3", "'n'", "int64", "'x'"]),
])  # fmt: skip
def test_more_than_allowed_publishes_nothing(tmp_path, capfd, options, said):
    source = tmp_path / "a.csv"
    source.write_text('n,t\n1,a\nx,"b ""c"""\n\n2,d\n3\n4,"e"f\n5,g,h\n,i\n6,j\n')
    code, output = run(tmp_path, source, *options)
    assert code == 1 and not output.exists()
    err = capfd.readouterr().err
    assert all(text in err for text in said), err


def test_a_percentage_allows_as_many(tmp_path):
    source = tmp_path / "a.csv"
    source.write_text("n,t\n" + "".join(f"{'x' if i % 4 == 0 else i},a\n" for i in range(100)))
    code, output = run(tmp_path, source, "--on-error", "quarantine", "--max-rejected", "25%")
    assert code == 0 and len(rejected(output)) == 25


def test_a_quote_without_end_is_no_row_to_leave_out(tmp_path, capfd):
    source = tmp_path / "a.csv"
    source.write_text('n,t\n1,a\n2,"b\n3,c\n4,d\n')
    code, output = run(tmp_path, source, "--on-error", "quarantine", "--max-rejected", "50%")
    assert code == 1 and not output.exists()
    err = capfd.readouterr().err
    assert "a.csv:3" in err and "closed" in err


@pytest.mark.parametrize("options, said", [
    (["--on-error", "quarantine"], "--max-rejected"),
    (["--max-rejected", "3"], "--on-error quarantine"),
    (["--on-error", "quarantine", "--max-rejected", "many"], "'many'"),
    (["--on-error", "quarantine", "--max-rejected", "0"], "'0'"),
    (["--on-error", "quarantine", "--max-rejected", "101%"], "'101%'"),
    (["--on-error", "quarantine", "--max-rejected", "100001"], "'100001'"),
])  # fmt: skip
def test_wrong_usage(tmp_path, capfd, options, said):
    source = tmp_path / "a.csv"
    source.write_text("n,t\n1,a\n")
    code, output = run(tmp_path, source, *options)
    assert code == 2 and not output.exists()
    assert said in capfd.readouterr().err


def test_typed_values_that_do_not_fit_are_left_out_one_by_one(tmp_path):
    source = tmp_path / "a.parquet"
    numbers = [None if i % 7 == 3 else 2**40 if i % 11 == 5 else i for i in range(300)]
    table = pa.table({"n": pa.array(numbers, pa.int64()), "t": [str(i) for i in range(300)]})
    pq.write_table(table, source, row_group_size=50)
    schema = {"features": {"n": {"dtype": "int32"}, "t": {"dtype": "string"}}}
    code, output = run(tmp_path, source, "--on-error", "quarantine", "--max-rejected", "80", schema=schema)
    assert code == 0
    bad = [i for i, number in enumerate(numbers) if number is None or number > 2**31]
    assert [row["origin"] for row in rejected(output)] == [f"{source}:{i + 1}" for i in bad]
    assert json.loads(rejected(output)[0]["raw"]) == {"n": None, "t": "3"}
    assert Manifest.load(output).splits["train"].num_records == 300 - len(bad)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.sampled_from(["1,a", "2,b", "x,c", "3", "4,d,e", '5,"f"g', ""]), min_size=1, max_size=40),
    split_bytes=st.integers(1, 60),
    block_bytes=st.sampled_from([16, 61, 1 << 20]),
)  # fmt: skip
def test_good_and_bad_rows_are_told_apart_however_the_file_is_cut(
    tmp_path, rows, split_bytes, block_bytes, monkeypatch
):
    monkeypatch.setattr(csv_source, "SPLIT_BYTES", split_bytes)
    monkeypatch.setattr(csv_source, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "p.csv"
    path.write_text("n,t\n" + "".join(row + "\n" for row in rows))
    source, _ = open_source([str(path)], SourceOptions(format="csv"))
    wishes = Wishes(columns={"n": Wish(dtype="int64"), "t": Wish(dtype="string")})
    splits = source.plan()
    good = [row for row in rows if row in ("1,a", "2,b")]
    scans = [source.scan(split, wishes, 99) for split in splits]
    if good:
        _, rejects = merge_scans(Request(max_rejected=99), source, splits, scans)
        expected = [(f"{path}:{i}", row) for i, row in enumerate(rows, 2) if row and row not in good]
        assert [(reject.origin, reject.raw) for reject in rejects] == expected
        left_out = {split.index: [r.row for r in rejects if r.split == split.index] for split in splits}
        read = [
            row
            for split in splits
            for batch in source.read(split, wishes, np.array(left_out[split.index], np.int64))
            for row in batch.to_pylist()
        ]
        assert [f"{row['n']},{row['t']}" for row in read] == good
