"""JSONL: nested, ragged, mixed; exact numbers; and text lines."""

from __future__ import annotations

import bz2
import gzip
import json

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beam_jobs import convert
from beam_jobs.sources import SourceOptions, Wish, Wishes, text
from beam_jobs.sources.find import open_source
from tests.beam_jobs.test_round_trip import IN_MEMORY, in_order, records, run

NESTED = [
    {"id": 1, "s": "ü", "big": 9007199254740993, "f": 0.5, "o": {"a": 1, "b": {"c": "x"}}, "l": [1, 2], "m": [[1, 2], [3, 4]]},
    {"id": 2, "s": "007", "big": -1, "f": 0.1, "o": {"a": 2}, "l": [], "m": [[5, 6]], "flag": True},
    {"id": 3, "s": None, "big": 0, "f": 3, "o": {}, "l": [7], "m": [], "flag": False},
]  # fmt: skip


def write(path, rows, compress=bytes):
    path.write_bytes(compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def dtypes(manifest):
    return {name: (f.dtype, f.shape, f.nullable) for name, f in manifest.schema.features.items()}


@pytest.mark.parametrize(
    "compress", [bytes, gzip.compress, bz2.compress, zstandard.compress], ids=["plain", "gz", "bz2", "zst"]
)
def test_objects_lists_and_nulls(tmp_path, compress):
    manifest = run(tmp_path, inputs=[write(tmp_path / "a.jsonl", NESTED, compress)])
    assert dtypes(manifest) == {
        "id": ("int64", (), False), "s": ("string", (), True), "big": ("int64", (), False),
        "f": ("float32", (), False), "o.a": ("int64", (), True), "o.b.c": ("string", (), True),
        "l": ("int64", (None,), False), "m": ("int64", (None, 2), False), "flag": ("bool", (), True),
    }  # fmt: skip
    assert in_order(records(manifest), "id") == [
        {"id": 1, "s": "ü", "big": 9007199254740993, "f": 0.5, "o.a": 1, "o.b.c": "x", "l": [1, 2], "m": [[1, 2], [3, 4]]},
        {"id": 2, "s": "007", "big": -1, "f": pytest.approx(0.1), "o.a": 2, "l": [], "m": [[5, 6]], "flag": True},
        {"id": 3, "big": 0, "f": 3.0, "l": [7], "m": [], "flag": False},
    ]  # fmt: skip


@pytest.mark.parametrize("written, dtype, value", [
    ("18446744073709551616", "string", "18446744073709551616"),
    ("16777217.5", "float64", 16777217.5),
    ("0.12345678901", "float64", 0.12345678901),
    ("1e400", "string", "1e400"),
    ("NaN", "float32", None),
    ("-0", "float32", -0.0),
    ("1.0", "float32", 1.0),
    ("true", "bool", True),
    ('"1"', "string", "1"),
])  # fmt: skip
def test_a_number_keeps_every_digit(tmp_path, written, dtype, value):
    (tmp_path / "a.jsonl").write_text(f'{{"x": {written}}}\n')
    manifest = run(tmp_path, inputs=[tmp_path / "a.jsonl"])
    assert manifest.schema.features["x"].dtype == dtype
    (record,) = records(manifest)
    assert record["x"] != record["x"] if value is None else record["x"] == value


def test_a_big_integer_beside_fractions_is_text_throughout(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 9007199254740993}\n{"x": 0.50}\n{"x": 7}\n')
    manifest = run(tmp_path, "--no-shuffle", inputs=[tmp_path / "a.jsonl"])
    assert [row["x"] for row in records(manifest)] == ["9007199254740993", "0.50", "7"]


def test_a_declared_schema_takes_numbers_as_text_and_leaves_columns_out(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"x": 1.50, "y": {"z": 1}}\n{"x": "a", "y": [1]}\n{"x": true, "w": 300}\n'
    )
    (tmp_path / "s.json").write_text(json.dumps({"features": {"x": {"dtype": "string"}}}))
    manifest = run(
        tmp_path, "--no-shuffle", "--schema", str(tmp_path / "s.json"), inputs=[tmp_path / "a.jsonl"]
    )
    assert [row["x"] for row in records(manifest)] == ["1.50", "a", "true"]


def test_packed_keys_become_a_tensor(tmp_path):
    rows = [{"y": i, "p0": i, "p1": 2.5, "p2": True} for i in range(5)]
    manifest = run(tmp_path, "--pack", "p=p0..p2", inputs=[write(tmp_path / "a.jsonl", rows)])
    assert in_order(records(manifest), "y")[3] == {"y": 3, "p": [3.0, 2.5, 1.0]}


BAD = {
    "no JSON": ('{"x": 1', ["a.jsonl:2", "one JSON object"]),
    "no object": ("[1]", ["a.jsonl:2", "a list"]),
    "key twice": ('{"x": 1, "x": 2}', ["a.jsonl:2", "'x' twice"]),
    "key twice, nested": ('{"a.b": 1, "a": {"b": 2}}', ["a.jsonl:2", "'a.b' twice"]),
    "object in a list": ('{"x": [{"y": 1}]}', ["a.jsonl:2", "'x'", "an object in a list"]),
    "mixed list": ('{"x": [1, "a"]}', ["a.jsonl:2", "'x'", "text or numbers"]),
    "null in a list": ('{"x": [1, null]}', ["a.jsonl:2", "'x'", "every place"]),
    "half a surrogate": ('{"x": "\\ud800"}', ["a.jsonl:2", "surrogate"]),
    "too deep": ('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", ["a.jsonl:2", "nested too deeply"]),
    "no UTF-8": (b'{"x": "\xff"}', ["a.jsonl:2", "UTF-8"]),
    "text beside numbers": ('{"x": 1}\n{"x": "a"}', ["'x'", "text or numbers"]),
    "lists beside values": ('{"x": 1}\n{"x": [1]}', ["'x'", "single values"]),
}


@pytest.mark.parametrize("line, said", BAD.values(), ids=BAD.keys())
def test_what_is_no_record_is_refused_or_goes_aside(tmp_path, capfd, line, said):
    line = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "a.jsonl").write_bytes(b'{"z": 1}\n' + line + b'\n{"z": 2}\n')
    arguments = ["--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out"), *IN_MEMORY]
    assert convert.main(arguments) == 1
    err = capfd.readouterr().err
    assert all(word in err for word in said) and "Traceback" not in err, err
    if b"\n" in line:  # two rows, neither of them bad by itself
        return
    assert convert.main([*arguments, "--on-error", "quarantine", "--max-rejected", "1"]) == 0
    (reject,) = map(json.loads, (tmp_path / "out" / "rejected.jsonl").read_text().splitlines())
    assert reject["origin"].endswith("a.jsonl:2") and reject["raw"]


def test_an_array_of_records_is_no_jsonl(tmp_path, capfd):
    (tmp_path / "a.jsonl").write_text('[{"x": 1}]')
    assert convert.main(["--input", str(tmp_path), "--output", str(tmp_path / "out")]) == 1
    assert "jq -c" in capfd.readouterr().err


LINES = {
    "unix": ("ä\n\nb \n", ["ä", "", "b "]),
    "no end": ("a\nb", ["a", "b"]),
    "windows": ("a\r\n\r\nb\r\n", ["a", "", "b"]),
    "mark": ("\ufeffa\n", ["a"]),
}


@pytest.mark.parametrize("content, lines", LINES.values(), ids=LINES.keys())
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_lines_of_text(tmp_path, content, lines, encoding):
    if encoding == "utf-16":
        content = content.removeprefix("\ufeff")  # the encoding puts one there
    (tmp_path / "a.txt").write_bytes(content.encode(encoding))
    manifest = run(tmp_path, "--no-shuffle", inputs=[tmp_path / "a.txt"])
    assert [row["text"] for row in records(manifest)] == lines


def test_a_line_that_is_no_text_goes_aside_or_is_taken_as_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\n\xff\nb\n")
    manifest = run(
        tmp_path,
        "--no-shuffle",
        "--on-error",
        "quarantine",
        "--max-rejected",
        "1",
        inputs=[tmp_path / "a.txt"],
    )
    assert [row["text"] for row in records(manifest)] == ["a", "b"]
    (tmp_path / "s.json").write_text(json.dumps({"features": {"text": {"dtype": "bytes"}}}))
    options = ["--no-shuffle", "--schema", str(tmp_path / "s.json")]
    manifest = run(tmp_path, *options, inputs=[tmp_path / "a.txt"], output="bytes")
    assert [row["text"] for row in records(manifest)] == [b"a", b"\xff", b"b"]


json_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.dictionaries(st.sampled_from("abcd"), json_value, max_size=4), min_size=1, max_size=8),
    split_bytes=st.integers(1, 100),
    block_bytes=st.integers(1, 100),
)
def test_every_line_is_read_or_refused_once_however_the_file_is_cut(
    tmp_path, rows, split_bytes, block_bytes, monkeypatch
):
    monkeypatch.setattr(text, "SPLIT_BYTES", split_bytes)
    monkeypatch.setattr(text.chunks, "__defaults__", (block_bytes,))
    source, _ = open_source([str(write(tmp_path / "p.jsonl", rows))], SourceOptions())
    seen, at = [], 0
    for split in source.plan():
        scan = source.scan(split, Wishes(), max_rejected=100)
        bad = [row.row for row in scan.bad]
        read = [
            int(number) + at
            for batch in source.batches(split, Wishes())
            for number in batch.without(bad).numbers
        ]
        assert len(read) == scan.rows
        seen += sorted([*read, *(row + at for row in bad)])
        at += scan.source_rows
    assert seen == list(range(1, len(rows) + 1))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.fixed_dictionaries({
            "i": st.none() | st.integers(-(2**63), 2**63 - 1),
            "f": st.none() | st.floats(allow_nan=False) | st.integers(-(2**53), 2**53),
            "s": st.none() | st.text(st.characters(codec="utf-8"), max_size=9),
            "b": st.none() | st.booleans(),
            "l": st.none() | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
        }), min_size=1, max_size=12,
    ),
)  # fmt: skip
def test_values_are_what_the_json_module_reads(tmp_path, rows):
    source, _ = open_source([str(write(tmp_path / "v.jsonl", rows))], SourceOptions())
    (split,) = source.plan()
    wishes = Wishes(
        columns={
            "i": Wish(dtype="int64"), "f": Wish(dtype="float64"), "s": Wish(dtype="string"),
            "b": Wish(dtype="bool"), "l": Wish(dtype="int64", shape=(None,)),
        }
    )  # fmt: skip
    found = [row for batch in source.read(split, wishes) for row in batch.to_pylist()]
    assert found == [{**row, "f": None if row["f"] is None else float(row["f"])} for row in rows]


def test_a_column_of_nothing_but_empty_lists_is_a_column(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1, "tags": []}\n{"a": 2}\n')
    manifest = run(tmp_path, inputs=[tmp_path / "a.jsonl"])
    assert manifest.schema.features["tags"].shape == (None,)
    assert [row["a"] for row in in_order(records(manifest), "a")] == [1, 2]


def test_an_integer_beyond_every_dtype_is_kept_as_it_is_written(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"d": -1}\n{"d": 18446744073709551616}\n')
    manifest = run(tmp_path, inputs=[tmp_path / "a.jsonl"])
    assert sorted(row["d"] for row in records(manifest)) == ["-1", "18446744073709551616"]
