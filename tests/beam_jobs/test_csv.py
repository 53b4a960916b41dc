"""CSV: rows as the csv module reads them, numbers as Python reads them, however the file is cut."""

from __future__ import annotations

import csv
import gzip
import io
import math

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from beam_jobs.plan import Request, merge_scans
from beam_jobs.sources import SourceOptions, Wish, Wishes
from beam_jobs.sources import csv as csv_source
from beam_jobs.sources.find import open_source
from tfpipe.errors import RecordError, UsageError

RANDOM = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


def open_one(path, **options):
    source, _ = open_source([str(path)], SourceOptions(format="csv", **options))
    return source


def by_name(source, *wishes):
    return Wishes(columns={column.name: wish for column, wish in zip(source.columns, wishes, strict=True)})


def read_all(source, *dtypes):
    wishes = by_name(source, *(Wish(dtype=dtype) for dtype in dtypes))
    batches = [batch for split in source.plan() for batch in source.read(split, wishes)]
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def scan_all(source, **wish):
    splits = source.plan()
    scans = [source.scan(split, Wishes(others=Wish(**wish))) for split in splits]
    summaries, rejects = merge_scans(Request(), source, splits, scans)
    assert not rejects
    return list(summaries.values())


# Text that is rich in what CSV gives a meaning to; what surrounds it needs no quotes of its own.
field = st.text(st.sampled_from('ab"";,|\n\t é€😀'), max_size=6) | st.text(
    st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=4
)
table = st.integers(2, 4).flatmap(
    lambda columns: st.lists(st.lists(field, min_size=columns, max_size=columns), min_size=1, max_size=12)
)


@RANDOM
@given(
    rows=table,
    delimiter=st.sampled_from([",", ";", "\t", "|"]),
    ending=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    blank_lines=st.integers(0, 2),
    last_ending=st.booleans(),
    bom=st.booleans(),
    compress=st.booleans(),
    split_bytes=st.sampled_from([1, 7, 40, 1 << 20]),
    block_bytes=st.sampled_from([16, 61, 1 << 20]),
)
def test_rows_are_those_of_the_csv_module(
    tmp_path, monkeypatch, rows, delimiter, ending, quoting, blank_lines, last_ending, bom, compress,
    split_bytes, block_bytes,
):  # fmt: skip
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, delimiter=delimiter, lineterminator=ending, quoting=quoting)
    for row in rows:
        writer.writerow(row)
        buffer.write(ending * blank_lines)
    text = buffer.getvalue()
    if not last_ending:
        text = text.rstrip("\r\n")
    expected = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row]
    data = (b"\xef\xbb\xbf" if bom else b"") + text.encode()
    path = tmp_path / "a.csv"
    path.write_bytes(gzip.compress(data) if compress else data)
    monkeypatch.setattr(csv_source, "SPLIT_BYTES", split_bytes)
    monkeypatch.setattr(csv_source, "BLOCK_BYTES", block_bytes)
    source = open_one(path, header=False, delimiter=delimiter)
    found = read_all(source, *["string"] * len(rows[0]))
    assert [[value or "" for value in row] for row in found] == expected
    # Null is what is empty and not quoted.
    if quoting == csv.QUOTE_ALL:
        assert None not in [value for row in found for value in row]
    else:
        assert all(value != "" for row in found for value in row)


def test_small_blocks_do_split_the_file(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "".join(f'{i},"x\ny"\n' for i in range(100)))
    monkeypatch.setattr(csv_source, "SPLIT_BYTES", 50)
    source = open_one(path)
    splits = source.plan()
    assert len(splits) > 10
    data = path.read_bytes()
    assert [split.start for split in splits[1:]] == [split.stop for split in splits[:-1]]
    # Every split begins with a row, none in a quoted field.
    assert all(data[split.start : split.start + 1].isdigit() for split in splits[1:])
    assert read_all(source, "int64", "string") == [(i, "x\ny") for i in range(100)]


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"], ids=repr)
def test_every_line_ending(tmp_path, ending):
    path = tmp_path / "a.csv"
    path.write_bytes(ending.join(["a,b", "1,x", "", '2,"p\nq\r\nr\rs"', "3,"]).encode())
    assert read_all(open_one(path), "int64", "string") == [(1, "x"), (2, "p\nq\r\nr\rs"), (3, None)]


# Numbers ---------------------------------------------------------------------------------------

digits = st.text("0123456789", min_size=1, max_size=30)
float_text = st.builds(
    lambda sign, whole, part, exponent: f"{sign}{whole.lstrip('0') or '0'}{part}{exponent}",
    st.sampled_from(["", "-", "+"]),
    digits,
    digits.map(lambda text: "." + text) | st.just("."),
    st.just("") | st.integers(-330, 310).map(lambda e: f"e{e}") | st.integers(-40, 40).map(lambda e: f"E{e:+03d}"),
)  # fmt: skip


@RANDOM
@given(texts=st.lists(float_text, min_size=1, max_size=40))
@example(texts=["0.1", "5e-324", "2.2250738585072011e-308", "9007199254740993.0", "1.7976931348623157e308"])
@example(texts=["8.5e22", "9007199254740992e22", "123456789012345678901234567890.5", ".5", "-.5e-3", "-0.0"])
def test_floats_are_those_of_python(tmp_path, texts):
    path = tmp_path / "a.csv"
    expected = [float(text) for text in texts]
    texts = [text for text, value in zip(texts, expected, strict=True) if math.isfinite(value)] or ["1.5"]
    path.write_text("x\n" + "\n".join(texts) + "\n")
    source = open_one(path)
    found = [value for (value,) in read_all(source, "float64")]
    assert [value.hex() for value in found] == [float(text).hex() for text in texts]
    # What the scan infers loses no digit: float32 only where its shortest form is the written number.
    (column,) = scan_all(source)
    assert column.inferred_dtype in ("float32", "float64")
    if column.inferred_dtype == "float32":
        for text, (value,) in zip(texts, read_all(source, "float32"), strict=True):
            assert same_number(text, value)


def same_number(text, value):
    """Whether a float32, rounded to as many digits as the text has, is the text's number."""
    import decimal

    written = decimal.Decimal(text)
    if float(text) == value:
        return True
    digits = len(written.normalize().as_tuple().digits)
    return decimal.Decimal(f"{value:.{digits - 1}e}") == written


@RANDOM
@given(values=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40), gap=st.booleans())
@example(values=[9007199254740993], gap=True)
@example(values=[-(2**63), 2**63 - 1], gap=True)
def test_integers_are_exact_beside_nulls_too(tmp_path, values, gap):
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "".join(f"{value},\n" for value in values) + (",\n" if gap else ""))
    source = open_one(path)
    column, empty = scan_all(source)
    assert column.inferred_dtype == "int64" and empty.inferred_dtype == "string"
    assert (column.lowest, column.highest) == (min(values), max(values))
    assert read_all(source, "int64", "string") == [(v, None) for v in [*values, *([None] if gap else [])]]


INFERRED = [
    (["1", "2"], "int64"),
    (["1", "2.5"], "float32"),
    (["1", "true"], "int64"),
    (["true", "FALSE"], "bool"),
    (["007", "8"], "string"),
    (["00.5"], "string"),
    (["0", "0.5"], "float32"),
    (["+49301234567"], "string"),
    (["9720798423"], "int64"),
    (["9223372036854775807", "-9223372036854775808"], "int64"),
    (["9223372036854775808"], "string"),
    (["-9223372036854775809"], "string"),
    (["16777217.0"], "float64"),
    (["1700000050.5"], "float64"),
    (["0.5", "16777217"], "float64"),
    (["0.5", "9007199254740993"], "string"),
    (["1e400"], "string"),
    (["1", "NA", ""], "int64"),
    (["1", "nan"], "int64"),
    (["1.5", "nan", "-inf"], "float32"),
    (["1", "x"], "string"),
    (["1_000"], "string"),
    (["0x10"], "string"),
    (["١"], "string"),
    (["1e", "-", "."], "string"),
    (["1 2"], "string"),
    (["0.1"], "float32"),
    (["0.123456789"], "float64"),
]


@pytest.mark.parametrize("texts, dtype", INFERRED, ids=[",".join(texts) for texts, _ in INFERRED])
@pytest.mark.parametrize("place", ["first", "last"])
def test_the_narrowest_dtype_that_loses_nothing(tmp_path, monkeypatch, texts, dtype, place):
    # The telling rows come first or last, and in splits of their own.
    monkeypatch.setattr(csv_source, "SPLIT_BYTES", 1)
    filler = ["true"] * 30 if dtype == "bool" else ["5"] * 30
    rows = texts + filler if place == "first" else filler + texts
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "".join(f"{text},1\n" for text in rows))
    source = open_one(path)
    assert len(source.plan()) > 30
    assert scan_all(source)[0].inferred_dtype == dtype
    if dtype == "string":
        assert [x for x, _ in read_all(source, "string", "int64")] == rows


@pytest.mark.parametrize(
    "dtype, text",
    [
        ("int64", "1.5"),
        ("int64", "9223372036854775808"),
        ("int64", "1e30"),
        ("int64", "x"),
        ("uint8", "256"),
        ("uint8", "-1"),
        ("uint64", "-1"),
        ("uint64", "18446744073709551616"),
        ("int8", "128"),
        ("bool", "2"),
        ("bool", "0.5"),
        ("float32", "1e39"),
        ("float32", "-3.5e38"),
        ("float16", "70000"),
        ("float64", "1e400"),
        ("float64", "x"),
    ],
)
def test_a_value_that_its_declared_dtype_cannot_hold_is_named(tmp_path, dtype, text):
    path = tmp_path / "a.csv"
    path.write_text(f"x\n1\n\n{text}\n")
    with pytest.raises(RecordError) as caught:
        scan_all(open_one(path), dtype=dtype)
    message = str(caught.value)
    assert f"column 'x' must hold {dtype}, got '{text}' ({path}:4)" in message
    assert "--schema" in message


@pytest.mark.parametrize(
    "dtype, texts, values",
    [
        ("uint64", ["18446744073709551615", "0", ""], [2**64 - 1, 0, None]),
        ("int8", ["-128", "127", "NA"], [-128, 127, None]),
        ("bool", ["1", "0", "true", "False", ""], [1, 0, 1, 0, None]),
        ("int64", ["5.0", "-3.00", "1e3", "nan"], [5, -3, 1000, None]),
        ("float32", ["inf", "-Infinity", "3.4028234e38"], [math.inf, -math.inf, 3.4028234663852886e38]),
        ("float16", ["65504", "0.5", ""], [65504.0, 0.5, None]),
        ("string", ["007", "NA", ""], ["007", "NA", None]),
        ("bytes", ["x", ""], [b"x", None]),
    ],
)
def test_what_a_declared_dtype_holds(tmp_path, dtype, texts, values):
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "".join(f"{text},1\n" for text in texts))
    source = open_one(path)
    scan_all(source)
    assert [x for x, _ in read_all(source, dtype, "int64")] == values


def test_a_declared_narrowing_is_counted(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x\n0.123456789\n0.5\n\nnan\n2049\n")
    source = open_one(path)
    (split,) = source.plan()
    assert source.scan(split, Wishes(others=Wish(dtype="float32"))).narrowed == {"x": 1}
    assert source.scan(split, Wishes(others=Wish(dtype="float16"))).narrowed == {"x": 2}
    assert source.scan(split, Wishes(others=Wish(dtype="float64"))).narrowed == {}


# Where it went wrong ---------------------------------------------------------------------------


@RANDOM
@given(
    before=st.lists(st.sampled_from(["1,2\n", '3,"a\nb"\n', "\n", '"x""y",\n']), max_size=30),
    bad=st.sampled_from(["1\n", "1,2,3\n", '1,"2"x\n', '1,"2']),
    split_bytes=st.sampled_from([1, 20, 1 << 20]),
    compress=st.booleans(),
)
def test_a_bad_row_is_named_by_its_number_in_the_file(
    tmp_path, monkeypatch, before, bad, split_bytes, compress
):
    monkeypatch.setattr(csv_source, "SPLIT_BYTES", split_bytes)
    data = ("a,b\n" + "".join(before) + bad).encode()
    path = tmp_path / "a.csv"
    path.write_bytes(gzip.compress(data) if compress else data)
    with pytest.raises(RecordError) as caught:
        scan_all(open_one(path))
    # Rows as a spreadsheet counts them: the header, blank lines, a quoted line end within its row.
    assert f"({path}:{len(before) + 2})" in str(caught.value)


def test_the_first_bad_row_counts_and_files_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_source, "SPLIT_BYTES", 1)
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3,4\n")
    (tmp_path / "b.csv").write_text("a,b\n1,2\n3\n4\n")
    source, _ = open_source([str(tmp_path)], SourceOptions())
    with pytest.raises(RecordError, match=r"got 1 \(.*b\.csv:3\)"):
        scan_all(source)


def test_bytes_that_are_no_utf8_are_named_and_may_be_declared(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("x,y\na,1\nM\xfcller,2\n".encode("latin-1"))
    source = open_one(path)
    with pytest.raises(
        RecordError, match=r"'x' must hold UTF-8 text, got 'M\\\\xfcller' \(.*a\.csv:3\).*iconv"
    ):
        scan_all(source)
    assert [x for x, _ in read_all(source, "bytes", "int64")] == [b"a", b"M\xfcller"]


def test_a_row_that_never_ends_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_source, "ROW_MAX_BYTES", 1 << 20)
    monkeypatch.setattr(csv_source, "BLOCK_BYTES", 1 << 18)
    path = tmp_path / "a.csv"
    path.write_text('a,b\n1,2\n3,"' + "x\n" * (1 << 20))
    with pytest.raises(RecordError, match=r"no closing quote \(.*a\.csv:3\)"):
        scan_all(open_one(path))


@pytest.mark.parametrize("delimiter", ["", "ab", '"', "\n", "é"])
def test_a_delimiter_that_is_none_is_refused(tmp_path, delimiter):
    path = tmp_path / "a.csv"
    path.write_text("a\n1\n")
    with pytest.raises(UsageError, match="one ASCII character"):
        open_one(path, delimiter=delimiter)


@pytest.mark.parametrize(
    "header, said", [("a,,c", "column 2 of 3"), ("a,b,a", "columns 1 and 3"), ("é,é", "'é'")]
)
def test_a_header_must_name_each_column_once(tmp_path, header, said):
    path = tmp_path / "a.csv"
    path.write_text(f"{header}\n1,2,3\n")
    with pytest.raises(RecordError, match=said):
        open_one(path)
    assert open_one(path, header=False).columns[0].name == "c0"


def test_batches_are_arrow_of_the_wished_columns_only(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b,c\n1,2,3\n")
    source = open_one(path)
    wishes = by_name(source, Wish(dtype="int8"), Wish(used=False), Wish(dtype="float32"))
    (batch,) = source.read(source.plan()[0], wishes)
    assert batch.schema == pa.schema([("a", pa.int8()), ("c", pa.float32())])
