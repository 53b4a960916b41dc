"""Bad input: a clear message, the exit code, nothing published, nothing of the user's touched."""

from __future__ import annotations

import gzip
import json
import os
import signal
import struct
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from beam_jobs import convert
from tests.helpers import REPOSITORY
from tfpipe.errors import ManifestError
from tfpipe.manifest import Manifest

IN_MEMORY = ["--direct_running_mode", "in_memory"]


def idx(*shape, values):
    return struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape) + bytes(values)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


SCHEMA = {"features": {"a": {"dtype": "int64"}, "b": {"dtype": "float32"}}}
# A name, the input's files, further options, exit code, what the message must say.
CASES = [
    ("missing", {}, [], 2, ["no such file", "a.csv"]),
    ("empty", {"a.csv": ""}, [], 1, ["empty file", "a.csv"]),
    ("header only", {"a.csv": "a,b\n"}, [], 1, ["at least one record"]),
    ("short row", {"a.csv": "a,b\n1,2\n3\n4,5\n"}, [], 1, ["2 fields, got 1", "a.csv:3"]),
    ("long row", {"a.csv": "a,b\n1,2\n3,4,5\n"}, [], 1, ["2 fields, got 3", "a.csv:3"]),
    ("text after a quote", {"a.csv": 'a,b\n1,"2"x\n'}, [], 1, ["a.csv:2", "quote"]),
    ("quote without end", {"a.csv": 'a,b\n1,"2\n3,4\n'}, [], 1, ["a.csv:2", "closed"]),
    (
        "not of the schema",
        {"a.csv": "a,b\n1,2.5\nx,3.5\n"},
        ["--schema"],
        1,
        ["a.csv:3", "'a'", "int64", "x"],
    ),
    ("null not in the schema", {"a.csv": "a,b\n1,2.5\n,3.5\n"}, ["--schema"], 1, ["a.csv:3", "'a'"]),
    ("columns named twice", {"a.csv": "a,a\n1,2\n"}, [], 1, ["must differ", "'a'"]),
    ("UTF-16", {"a.csv": "a,b\n1,2\n".encode("utf-16-le")}, [], 1, ["UTF-8", "UTF-16", "iconv"]),
    ("truncated gzip", {"a.csv": gzip.compress(b"a,b\n" + b"1,2\n" * 9999)[:-20]}, [], 1, ["a.csv"]),
    (
        "other columns",
        {"a.csv/x.csv": "a,b\n1,2\n", "a.csv/y.csv": "a,c\n1,2\n"},
        [],
        1,
        ["y.csv", "columns"],
    ),
    ("null in a pack", {"a.csv": "a,b\n1,2\n3,\n"}, ["--pack", "t=a,b"], 1, ["a.csv:3", "'b'"]),
    ("text in a pack", {"a.csv": "a,b\n1,2\n3,x\n"}, ["--pack", "t=a,b"], 1, ["a.csv:3", "'b'", "x"]),
    ("pack of nothing", {"a.csv": "a,b\n1,2\n"}, ["--pack", "t=a,z"], 2, ["'z'"]),
    ("pack's shape", {"a.csv": "a,b\n1,2\n"}, ["--pack", "t=a,b:3"], 2, ["2 columns"]),
    ("no such option", {"a.csv": "a,b\n1,2\n"}, ["--shardz", "3"], 2, ["--shardz"]),
    ("no shard", {"a.csv": "a,b\n1,2\n"}, ["--num-shards", "0"], 2, ["0"]),
    ("fractions", {"a.csv": "a,b\n1,2\n"}, ["--split", "train=0.5"], 2, ["0.5"]),
    ("shorter IDX", {"a.csv": idx(3, 2, 2, values=range(11))}, [], 1, ["28 bytes", "fewer", "a.csv"]),
    ("longer IDX", {"a.csv": idx(3, 2, 2, values=range(13))}, [], 1, ["28 bytes", "more"]),
    ("shorter gzipped IDX", {"a.csv": gzip.compress(idx(3, 2, 2, values=range(11)))}, [], 1, ["fewer"]),
    ("longer gzipped IDX", {"a.csv": gzip.compress(idx(3, 2, 2, values=range(13)))}, [], 1, ["more"]),
    (
        "pair of other lengths",
        {
            "a.csv/t-images-idx3-ubyte": idx(2, 2, 2, values=range(8)),
            "a.csv/t-labels-idx1-ubyte": idx(3, values=range(3)),
        },
        [],
        1,
        ["as many records", "t-images", "t-labels"],
    ),
    ("damaged Parquet", {"a.csv": b"PAR1" + b"x" * 40}, [], 1, ["Parquet", "a.csv"]),
]


@pytest.mark.parametrize(
    "files, options, code, said", [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_bad_input_is_refused(tmp_path, capfd, files, options, code, said):
    for name, content in files.items():
        write(tmp_path / "in" / name, content)
    if options == ["--schema"]:
        options = ["--schema", str(write(tmp_path / "schema.json", json.dumps(SCHEMA)))]
    output = tmp_path / "out"
    arguments = ["--input", str(tmp_path / "in" / "a.csv"), "--output", str(output), *options, *IN_MEMORY]
    try:
        assert convert.main(arguments) == code
    except SystemExit as error:  # argparse's own
        assert error.code == code
    err = capfd.readouterr().err
    for text in said:
        assert text in err
    assert "Traceback" not in err
    assert not output.exists()
    for name, content in files.items():
        assert (tmp_path / "in" / name).read_bytes() == (
            content if isinstance(content, bytes) else content.encode()
        )


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.struct([("x", pa.int64())])),
        pa.map_(pa.string(), pa.int64()),
        pa.null(),
    ],
    ids=str,
)
def test_a_type_without_a_lossless_form_is_refused_by_its_column(tmp_path, capfd, kind):
    pq.write_table(pa.table({"good": [1], "odd": pa.nulls(1, kind)}), tmp_path / "a.parquet")
    output = tmp_path / "out"
    assert convert.main(["--input", str(tmp_path / "a.parquet"), "--output", str(output), *IN_MEMORY]) == 1
    assert "column 'odd'" in capfd.readouterr().err
    assert not output.exists()


def test_a_directory_that_holds_something_stays_as_it_is(tmp_path, capfd):
    source = write(tmp_path / "a.csv", "a\n1\n")
    mine = write(tmp_path / "out" / "mine.txt", "keep")
    assert convert.main(["--input", str(source), "--output", str(mine.parent), *IN_MEMORY]) == 1
    assert "mine.txt" in capfd.readouterr().err
    assert [p.name for p in mine.parent.iterdir()] == ["mine.txt"]
    assert mine.read_text() == "keep"


def test_an_empty_directory_of_the_users_stays_after_a_failure(tmp_path):
    source = write(tmp_path / "a.csv", "a,b\n1\n")
    output = tmp_path / "out"
    output.mkdir()
    assert convert.main(["--input", str(source), "--output", str(output), *IN_MEMORY]) == 1
    assert list(output.iterdir()) == []


def test_a_pattern_that_matches_nothing_is_refused(tmp_path, capfd):
    assert convert.main(["--input", str(tmp_path / "*.csv"), "--output", str(tmp_path / "out")]) == 2
    assert "matches nothing" in capfd.readouterr().err


def test_a_file_named_twice_would_double_its_records(tmp_path, capfd):
    source = write(tmp_path / "a.csv", "a\n1\n")
    arguments = [
        "--input",
        str(source),
        "--input",
        str(tmp_path / "*.csv"),
        "--output",
        str(tmp_path / "out"),
    ]
    assert convert.main(arguments) == 2
    assert "twice" in capfd.readouterr().err


def start(source, output, *options):
    return subprocess.Popen(
        [sys.executable, "-m", "beam_jobs.convert", "--input", source, "--output", output, *options],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_a_failure_in_a_worker_process_is_told_without_a_traceback(tmp_path):
    rows = "".join(f"{i},{i}\n" for i in range(1000))
    source = write(tmp_path / "a.csv", f"a,b\n{rows}7\n")
    process = start(source, tmp_path / "out", "--direct_num_workers", "2")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "a.csv:1002" in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_killed_run_leaves_no_dataset_and_the_next_one_says_what_it_finds(tmp_path, capfd):
    rows = "".join(f"{i},{i * 0.5}\n" for i in range(400_000))
    source, output = write(tmp_path / "a.csv", f"a,b\n{rows}"), tmp_path / "out"
    process = start(source, output)
    deadline = time.monotonic() + 120
    while not list(output.glob(".staging-*/*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert list(output.glob(".staging-*"))
    with pytest.raises(ManifestError, match="did not finish"):
        Manifest.load(output)
    assert convert.main(["--input", str(source), "--output", str(output), *IN_MEMORY]) == 1
    assert ".staging-" in capfd.readouterr().err


@pytest.mark.slow
def test_of_two_converters_on_one_output_the_second_is_refused(tmp_path):
    rows = "".join(f"{i},{i * 0.5}\n" for i in range(300_000))
    source, output = write(tmp_path / "a.csv", f"a,b\n{rows}"), tmp_path / "out"
    both = [start(source, output), start(source, output)]
    errors = [process.communicate(timeout=200)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], errors
    manifest = Manifest.load(output)
    assert manifest.splits["train"].num_records == 300_000
    assert manifest.verify() == []
