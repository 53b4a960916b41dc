"""NumPy arrays: every dtype, order and layout; files side by side and in pieces; damage."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import struct
import zipfile

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tfpipe
from beam_jobs import convert
from beam_jobs.layout import build_layout, resolve_columns
from beam_jobs.sources import SourceOptions, Wish, Wishes, npy
from beam_jobs.sources.find import open_source, sniff
from tests.beam_jobs.test_round_trip import IN_MEMORY, in_order, records, run, shas
from tfpipe.errors import RecordError, UsageError

UNICODE = np.array([0x61, 0xDC80, 0x62, 0x110000, 0x1F600], "<u4").view("<U1")


def npy_bytes(array, version=None):
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version, allow_pickle=False)
    return out.getvalue()


def raw_npy(header, data=b"", version=1):
    text = header.encode()
    return (
        b"\x93NUMPY"
        + bytes([version, 0])
        + struct.pack("<H" if version == 1 else "<I", len(text))
        + text
        + data
    )


def header(descr, shape, fortran=False):
    return repr({"descr": descr, "fortran_order": fortran, "shape": shape})


def write_npz(path, *, compressed=False, **arrays):
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    return path


def opened(*paths):
    return open_source([str(path) for path in paths], SourceOptions())[0]


def read_all(source):
    """All records as Python values, with the features that a conversion would infer."""
    splits = source.plan()
    scans = [source.scan(split, Wishes()) for split in splits]
    merged = {}
    for scan in scans:
        assert not scan.bad, scan.bad
        merged = {name: merged[name].merge(s) if name in merged else s for name, s in scan.columns.items()}
    layout, _ = build_layout([], None, resolve_columns(source.columns, merged), merged)
    rows = [
        row for split in splits for batch in source.read(split, layout.wishes()) for row in batch.to_pylist()
    ]
    assert len(rows) == sum(scan.rows for scan in scans)
    return rows, layout.schema.features


def fails(tmp_path, capfd, *inputs, said, code=1):
    arguments = [option for path in inputs for option in ("--input", str(path))]
    assert convert.main([*arguments, "--output", str(tmp_path / "out"), *IN_MEMORY]) == code
    err = capfd.readouterr().err
    assert all(word in err for word in said), err
    assert "Traceback" not in err and not (tmp_path / "out").exists()


ARRAYS = {
    "n": np.arange(40),
    "flag": np.arange(40) % 3 == 0,
    "small": (np.arange(40) * 7).astype(np.uint8),
    "wide": np.arange(40, dtype=">u4") + np.uint32(2**32 - 40),
    "huge": np.arange(40, dtype=np.uint64) + np.uint64(2**64 - 40),
    "half": np.arange(40, dtype=">f2") / np.float16(8),
    "single": np.arange(40, dtype=">f4") / np.float32(3),
    "double": np.arange(40, dtype="<f8") / 3,
    "image": np.arange(40 * 6, dtype=np.uint8).reshape(40, 2, 3),
    "fortran": np.asfortranarray(np.arange(40 * 6, dtype=">i4").reshape(40, 2, 3)),
    "mask": (np.arange(80) % 5 == 1).reshape(40, 2),
    "blob": np.array([bytes([i, 0, 255]) for i in range(40)], "S3"),
    "name": np.array(["ü" * (i % 4) + "\0x😀"[: i % 5] for i in range(40)], ">U8"),
    "names": np.array([[f"a{i}", ""] for i in range(40)], "<U4"),
    "day": np.array(["NaT" if i == 3 else f"1969-12-{i % 31 + 1:02}" for i in range(40)], "M8[D]"),
    "took": np.arange(40).astype(">m8[25ns]"),
    "times": np.arange(80).reshape(40, 2).astype("M8[us]"),
}


def expected(arrays=ARRAYS):
    rows = []
    for i in range(len(arrays["n"])):
        row = {name: array[i].tolist() for name, array in arrays.items() if array.dtype.kind not in "mM"}
        row |= {
            name: array.astype(np.int64)[i].tolist()
            for name, array in arrays.items()
            if array.dtype.kind in "mM"
        }
        rows.append(row)
    if "day" in arrays:
        del rows[3]["day"]
    return rows


@pytest.mark.parametrize("compressed", [False, True], ids=["stored", "deflated"])
def test_every_dtype(tmp_path, compressed, monkeypatch):
    monkeypatch.setattr(npy, "SPLIT_BYTES", 1000)
    monkeypatch.setattr("beam_jobs.sources.SPLIT_BYTES", 1000)
    monkeypatch.setattr(npy, "BATCH_BYTES", 2000)
    path = write_npz(tmp_path / "a.npz", compressed=compressed, **ARRAYS)
    assert len(opened(path).plan()) == (1 if compressed else 8)
    manifest = run(tmp_path, inputs=[path])
    assert {n: (f.dtype, f.shape) for n, f in manifest.schema.features.items()} == {
        "n": ("int64", ()), "flag": ("bool", ()), "small": ("int64", ()), "wide": ("int64", ()),
        "huge": ("uint64", ()), "half": ("float16", ()), "single": ("float32", ()), "double": ("float64", ()),
        "image": ("uint8", (2, 3)), "fortran": ("int32", (2, 3)), "mask": ("bool", (2,)),
        "blob": ("bytes", ()), "name": ("string", ()), "names": ("string", (2,)),
        "day": ("int64", ()), "took": ("int64", ()), "times": ("int64", (2,)),
    }  # fmt: skip
    assert [n for n, f in manifest.schema.features.items() if f.nullable] == ["day"]
    assert {n: s["unit"] for n, s in manifest.statistics.items() if "unit" in s} == {
        "day": "day", "took": "25 ns", "times": "us",
    }  # fmt: skip
    assert manifest.source["format"] == "npz"
    assert in_order(records(manifest), "n") == expected()


def test_a_dataset_of_it_holds_the_arrays(tmp_path):
    kept = {name: ARRAYS[name] for name in ("n", "image", "fortran", "half", "names", "blob", "huge", "mask")}
    manifest = run(tmp_path, inputs=[write_npz(tmp_path / "a.npz", **kept)])
    (batch,) = tfpipe.make_dataset(manifest, tfpipe.PipelineConfig(per_worker_batch_size=40))
    order = np.argsort(batch["n"].numpy())
    for name in ("image", "fortran", "half", "huge", "mask"):
        found = batch[name].numpy()[order]
        assert found.dtype == kept[name].dtype.newbyteorder("=") and (found == kept[name]).all()
    assert [[t.decode() for t in row] for row in batch["names"].numpy()[order]] == kept["names"].tolist()
    assert batch["blob"].numpy()[order].tolist() == kept["blob"].tolist()


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, zstandard.compress],
                         ids=["plain", "gz", "bz2", "zst"])  # fmt: skip
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_files_side_by_side(tmp_path, compress, version, monkeypatch):
    monkeypatch.setattr(npy, "SPLIT_BYTES", 100)
    monkeypatch.setattr("beam_jobs.sources.SPLIT_BYTES", 100)
    for name in ("n", "image", "fortran"):
        (tmp_path / f"{name}.npy{'' if compress is bytes else '.z'}").write_bytes(
            compress(npy_bytes(ARRAYS[name], version))
        )
    if compress is not bytes:
        for path in list(tmp_path.iterdir()):
            path.rename(path.with_suffix(".gz"))
    rows, _ = read_all(opened(tmp_path))
    assert [row["n"] for row in rows] == list(range(40))
    assert [row["image"] for row in rows] == ARRAYS["image"].reshape(40, 6).tolist()
    assert [row["fortran"] for row in rows] == ARRAYS["fortran"].reshape(40, 6).tolist()


@pytest.mark.parametrize("form", ["x-{}.npy", "x_{}.npy", "x-{:05}-of-00012.npy"])
def test_pieces_follow_each_other_by_number(tmp_path, form):
    for i in range(12):
        np.save(tmp_path / form.format(i), np.arange(i * 3, i * 3 + i % 3))
        np.save(tmp_path / form.format(i).replace("x", "y"), np.arange(i * 3, i * 3 + i % 3) * 2.5)
    (tmp_path / "other").mkdir()
    np.save(tmp_path / "other" / "y.npy", np.array([0.0]))
    np.save(tmp_path / "other" / "x.npy", np.array([100]))
    rows, features = read_all(opened(tmp_path))
    wanted = [i * 3 + k for i in range(12) for k in range(i % 3)]
    assert rows == [{"x": x, "y": x * 2.5} for x in wanted] + [{"x": 100, "y": 0.0}]
    assert list(features) == ["x", "y"]


def test_a_structured_array_gives_its_fields(tmp_path):
    inner = np.dtype([("a", ">i2"), ("b", "S2")])
    array = np.zeros(5, np.dtype([("x", "<f4", (2, 2)), ("in", inner, (3,)), ("ü", ">U2")], align=True))
    array["x"] = np.arange(20).reshape(5, 2, 2)
    array["in"]["a"] = np.arange(15).reshape(5, 3)
    array["in"]["b"] = b"\0z"
    array["ü"] = ["a", "ü", "", "😀", "ab"]
    np.save(tmp_path / "records.npy", array)
    rows, features = read_all(opened(tmp_path / "records.npy"))
    assert {n: (f.dtype, f.shape) for n, f in features.items()} == {
        "x": ("float32", (2, 2)), "in.a": ("int16", (3,)), "in.b": ("bytes", (3,)), "ü": ("string", ()),
    }  # fmt: skip
    assert rows == [
        {"x": array["x"][i].ravel().tolist(), "in.a": array["in"]["a"][i].tolist(), "in.b": [b"\0z"] * 3,
         "ü": array["ü"][i].item()}
        for i in range(5)
    ]  # fmt: skip


@pytest.mark.parametrize("compressed", [False, True], ids=["stored", "deflated"])
def test_a_structured_array_in_fortrans_order(tmp_path, compressed, monkeypatch):
    monkeypatch.setattr(npy, "SPLIT_BYTES", 20)
    monkeypatch.setattr("beam_jobs.sources.SPLIT_BYTES", 20)
    array = np.zeros((6, 2), np.dtype([("a", ">i2"), ("b", "S3")]), order="F")
    array["a"], array["b"] = np.arange(12).reshape(6, 2), b"a\0b"
    rows, _ = read_all(opened(write_npz(tmp_path / "a.npz", compressed=compressed, x=array)))
    assert rows == [{"a": [2 * i, 2 * i + 1], "b": [b"a\0b"] * 2} for i in range(6)]


DTYPES = st.one_of(
    hnp.boolean_dtypes(), hnp.integer_dtypes(endianness="?"), hnp.floating_dtypes(sizes=(16, 32, 64), endianness="?"),
    hnp.byte_string_dtypes(max_len=4), hnp.unicode_string_dtypes(max_len=4, endianness="?"),
    hnp.datetime64_dtypes(endianness="?"), hnp.timedelta64_dtypes(endianness="?"),
)  # fmt: skip


@st.composite
def groups(draw):
    rows = draw(st.integers(1, 12))
    arrays = {}
    for name in draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)):
        shape = (rows, *draw(hnp.array_shapes(min_dims=0, max_dims=3, max_side=3)))
        # Half surrogates are refused: another test's.
        dtype = draw(DTYPES)
        values = st.text(st.characters(codec="utf-8"), max_size=dtype.itemsize // 4).map(
            lambda s: s.rstrip("\0")
        )
        array = draw(hnp.arrays(dtype, shape, elements=values if dtype.kind == "U" else None))
        if dtype.kind in "mM" and len(shape) > 1:
            array = array.astype("i8").clip(0).astype(dtype)  # no NaT in a tensor
        arrays[name] = np.asfortranarray(array) if draw(st.booleans()) else array
    return arrays


def plain(array, row):
    value = array[row]
    if array.dtype.kind in "mM":
        if value.ndim == 0 and np.isnat(value):
            return None
        value = value.astype(np.int64)
    value = value.reshape(-1).tolist() if value.ndim else value.item()
    return value


def same(a, b):
    """Equal, NaN and the sign of zero included."""
    return repr(a) == repr(b)


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    arrays=groups(),
    compressed=st.booleans(),
    split_bytes=st.integers(1, 300),
    batch_bytes=st.integers(1, 300),
)
def test_values_of_any_array_come_back_exactly(
    tmp_path, arrays, compressed, split_bytes, batch_bytes, monkeypatch
):
    monkeypatch.setattr(npy, "SPLIT_BYTES", split_bytes)
    monkeypatch.setattr("beam_jobs.sources.SPLIT_BYTES", split_bytes)
    monkeypatch.setattr(npy, "BATCH_BYTES", batch_bytes)
    path = write_npz(tmp_path / "p.npz", compressed=compressed, **arrays)
    rows, features = read_all(opened(path))
    assert len(rows) == len(next(iter(arrays.values())))
    for name, array in arrays.items():
        assert features[name].shape == array.shape[1:]
        for i, row in enumerate(rows):
            assert same(row[name], plain(array, i)), (name, i)
        if array.dtype.kind in "iuf" and array.ndim > 1:
            assert features[name].dtype == array.dtype.newbyteorder("=").name


# What can't be taken --------------------------------------------------------------------------


@pytest.mark.parametrize("array, said", [
    (np.array([1j]), ["complex", "complex128", "array.real"]),
    (np.zeros(2, "V3"), ["void", "|V3"]),
    (np.zeros(2, np.longdouble), ["longer than float64", "float128"]),
    (np.zeros(2, "m8"), ["without a unit", "timedelta64"]),
    (np.zeros((2, 0, 3)), ["at least one value", "[0, 3]"]),
    (np.array(5), ["first axis must count the records", "single value"]),
    (np.zeros((0, 3)), ["at least one record", "none"]),
    (np.zeros(2, [("ok", "i4"), ("in", [("bad", "c8")])]), ["complex", "'in.bad'"]),
])  # fmt: skip
def test_what_has_no_form_is_refused_by_name(tmp_path, capfd, array, said):
    np.save(tmp_path / "x.npy", array)
    fails(tmp_path, capfd, tmp_path / "x.npy", said=[*said, "x.npy"])
    write_npz(tmp_path / "m.npz", x=array)
    fails(tmp_path, capfd, tmp_path / "m.npz", said=[*said, "m.npz"])


@pytest.mark.parametrize("dtype", ["O", [("a", "i4"), ("b", "O")]])
def test_objects_are_refused_and_never_unpickled(tmp_path, capfd, dtype):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    array = np.zeros(1, dtype)
    array[array.dtype.names[1] if array.dtype.names else ...] = Bomb()
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    fails(tmp_path, capfd, tmp_path / "x.npy", said=["objects, which only unpickling", "x.npy"])
    (tmp_path / "y.npy").write_bytes(__import__("pickle").dumps(Bomb()))
    fails(tmp_path, capfd, tmp_path / "y.npy", said=["must begin with", "y.npy"])
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("content, said", [
    (b"\x93NUMPY", ["must begin with", "version"]),
    (b"\x93NUMPY\x04\0" + bytes(100), ["version from 1.0 to 3.0"]),
    (b"\x93NUMPY\x01\0\x10", ["its end within it"]),
    (b"\x93NUMPY\x02\0\xff\xff\xff\xff" + bytes(100), ["4294967295 bytes of it"]),
    (raw_npy("{'descr': '<f8'"), ["header must tell", "EOF in multi-line statement"]),
    (raw_npy("__import__('os').system('true')"), ["header must tell"]),
    (raw_npy("(" * 5000), ["header must tell"]),
    (raw_npy(header("<f9", (1,))), ["header must tell"]),
    (raw_npy(header("2<f4", (1,)), bytes(8)), ["header must tell", "(2,)"]),
    (raw_npy(header("<f8", (-1, -1)), bytes(8)), ["(-1, -1)"]),
    (raw_npy(header("|u1", (True,)), bytes(1)), ["(True,)"]),
    (raw_npy(header("<f8", (2,)), bytes(15)), ["must have the", "[2]"]),
    (raw_npy(header("<f8", (2,)), bytes(17)), ["must have the", "[2]"]),
    (raw_npy(header("<f8", (10**30,)), bytes(17)), ["must have the", str(10**30)]),
    (raw_npy(header("<f8", (1, 10**9)), bytes(17)), ["at most 2147483647 bytes", "[1000000000]"]),
    (raw_npy("{'descr': '\xff\xff', 'x': 1}", version=3), ["header must tell"]),
    (raw_npy(header([], (2,))), ["must have a field"]),
    (raw_npy(header("<U0", (2,))), ["at least one value", "<U0"]),
    (raw_npy(header("|u1", (1,) * 33), b"1"), ["at most 32 dimensions", "got 33"]),
])  # fmt: skip
@pytest.mark.parametrize("zipped", [False, True], ids=["npy", "npz"])
def test_a_damaged_file_is_told(tmp_path, content, said, zipped):
    path = tmp_path / ("x.npz" if zipped else "x.npy")
    path.write_bytes(content)
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", content)
    with pytest.raises(RecordError) as error:
        opened(path)
    assert all(word in str(error.value) for word in [*said, path.name]), error.value


def test_a_python_2_header_is_as_good(tmp_path):
    (tmp_path / "x.npy").write_bytes(
        raw_npy("{'descr': '<i8', 'fortran_order': False, 'shape': (2L,), }\n", struct.pack("<2q", 5, -1))
    )
    assert read_all(opened(tmp_path / "x.npy"))[0] == [{"x": 5}, {"x": -1}]


@pytest.mark.parametrize(
    "array", [np.arange(300), np.asfortranarray(np.arange(600).reshape(300, 2))], ids="CF"
)
@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"\0"], ids=["short", "long"])
def test_a_compressed_file_of_another_length_is_told(tmp_path, array, change):
    (tmp_path / "x.npy.gz").write_bytes(gzip.compress(change(npy_bytes(array))))
    source = opened(tmp_path / "x.npy.gz")
    (split,) = source.plan()
    with pytest.raises(RecordError, match=r"must have the .* got (fewer|more) \(.*x\.npy\.gz\)"):
        source.scan(split, Wishes())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), compressed=st.booleans())
def test_no_flipped_bit_of_a_zip_changes_a_value(tmp_path, data, compressed):
    arrays = {"x": np.arange(30), "y": np.asfortranarray(np.arange(60).reshape(30, 2))}
    path = write_npz(tmp_path / "f.npz", compressed=compressed, **arrays)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        source = open_source([str(path)], SourceOptions(format="npz"))[0]
        rows, _ = read_all(source)
    except (RecordError, UsageError) as error:
        assert "f.npz" in str(error)
    else:
        assert list(map(list, map(dict.values, rows))) == [[i, [2 * i, 2 * i + 1]] for i in range(30)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), compressed=st.booleans())
def test_no_truncated_zip_is_taken(tmp_path, data, compressed):
    path = write_npz(tmp_path / "t.npz", compressed=compressed, x=np.arange(30))
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(1, len(content) - 1))])
    with pytest.raises(RecordError, match=r"t\.npz"):
        open_source([str(path)], SourceOptions(format="npz"))


def test_a_bad_checksum_publishes_nothing(tmp_path, capfd):
    path = write_npz(tmp_path / "a.npz", x=np.arange(1000))
    content = bytearray(path.read_bytes())
    content[content.find(struct.pack("<q", 700))] ^= 1
    path.write_bytes(content)
    fails(tmp_path, capfd, path, said=["checksum", "0x", "a.npz: x.npy"])


def test_a_directory_that_loses_a_member_is_told(tmp_path):
    path = write_npz(tmp_path / "a.npz", x=np.arange(3), y=np.arange(3))
    content = bytearray(path.read_bytes())
    content[content.find(b"PK\1\2") + 32] = 46 + 5  # the length of the first entry's comment
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"got 1 members of 2 \(.*a\.npz\)"):
        opened(path)
    write_npz(path, x=np.arange(3))
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(RecordError, match=r"more data behind its end \(.*a\.npz\)"):
        opened(path)


@pytest.mark.parametrize("members, said", [
    (["x.npy", "readme.txt"], ["array of its own", "'readme.txt'"]),
    (["x.npy", "x.npy"], ["'x.npy' twice"]),
    ([".npy"], ["'.npy'"]),
    ([], ["at least one array"]),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_zip_of_other_things_is_refused(tmp_path, capfd, members, said):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for name in members:
            archive.writestr(name, npy_bytes(np.arange(3)))
    fails(tmp_path, capfd, tmp_path / "x.npz", said=[*said, "x.npz"])


def test_an_encrypted_member_and_a_compressed_zip_are_refused(tmp_path, capfd):
    path = write_npz(tmp_path / "x.npz", x=np.arange(3))
    content = bytearray(path.read_bytes())
    (tmp_path / "y.npz").write_bytes(gzip.compress(bytes(content)))
    fails(tmp_path, capfd, tmp_path / "y.npz", said=["compressed as a whole with gzip", "y.npz"])
    for at in (6, content.find(b"PK\1\2") + 8):
        content[at] |= 1
    path.write_bytes(content)
    fails(tmp_path, capfd, path, said=["encrypted", "x.npz"])


def test_arrays_of_other_lengths_are_refused(tmp_path, capfd):
    write_npz(tmp_path / "a.npz", x=np.arange(3), y=np.arange(4))
    fails(tmp_path, capfd, tmp_path / "a.npz", said=["as many records", "3 in x.npy, 4 in y.npy", "a.npz"])
    (tmp_path / "d").mkdir()
    np.save(tmp_path / "d" / "x.npy", np.arange(3))
    np.save(tmp_path / "d" / "y.npy", np.arange(4))
    fails(tmp_path, capfd, tmp_path / "d", said=["as many records", "3 in", "x.npy", "4 in", "y.npy"])


@pytest.mark.parametrize("files, said", [
    ({"x-0": np.arange(2), "y-0": np.arange(2), "x-1": np.arange(2)}, ["same features", "x-1.npy", "y (int64"]),
    ({"x-0": np.arange(2), "x-1": np.arange(2.0)}, ["same features", "x (float64 [])", "x (int64 [])"]),
    ({"x-0": np.ones((2, 3)), "x-1": np.ones((2, 4))}, ["same features", "[3]", "[4]"]),
    ({"x-0": np.zeros(2, "m8[s]"), "x-1": np.zeros(2, "m8[ms]")}, ["same features", "[] s)", "[] ms)"]),
    ({"x-1": np.arange(2), "x_01": np.arange(2)}, ["a name of its own", "'x'", "x-1.npy", "x_01.npy"]),
    ({"a": np.zeros(2, [("x", "i4")]), "x": np.arange(2)}, ["a name of its own", "'x'", "a.npy", "x.npy"]),
])  # fmt: skip
def test_groups_that_do_not_fit_are_refused(tmp_path, capfd, files, said):
    (tmp_path / "d").mkdir()
    for name, array in files.items():
        np.save(tmp_path / "d" / name, array)
    fails(tmp_path, capfd, tmp_path / "d", said=said)


def test_both_sorts_of_files_are_refused(tmp_path, capfd):
    (tmp_path / "d").mkdir()
    np.save(tmp_path / "d" / "x.npy", np.arange(3))
    write_npz(tmp_path / "d" / "a.npz", x=np.arange(3))
    fails(tmp_path, capfd, tmp_path / "d", said=["all .npy", "x.npy", "a.npz"], code=2)


def test_rows_that_hold_what_their_dtype_does_not_go_aside(tmp_path, capfd):
    times = np.zeros((5, 2), "M8[s]")
    times[4, 1] = "NaT"
    flags = np.frombuffer(b"\0\1\1\2\0", bool)
    path = write_npz(tmp_path / "a.npz", text=UNICODE, flag=flags, t=times, n=np.arange(5))
    manifest = run(tmp_path, "--on-error", "quarantine", "--max-rejected", "4", inputs=[path])
    assert in_order(records(manifest), "n") == [
        {"text": "a", "flag": False, "t": [0, 0], "n": 0}, {"text": "b", "flag": True, "t": [0, 0], "n": 2},
    ]  # fmt: skip
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [row["origin"] for row in rejected] == [f"{path}:{row}" for row in (2, 4, 5)]
    for row, said in zip(
        rejected, ("0xdc80", "0x110000, which is no character", "'t' must hold"), strict=True
    ):
        assert said in row["reason"]


def test_a_column_left_out_is_not_looked_at(tmp_path):
    path = write_npz(tmp_path / "a.npz", text=UNICODE, n=np.arange(5))
    source = opened(path)
    wishes = Wishes(columns={"n": Wish(dtype="int64")}, others=Wish(used=False))
    (split,) = source.plan()
    assert source.scan(split, wishes).rows == 5
    assert [row for batch in source.read(split, wishes) for row in batch.to_pylist()] == [
        {"n": i} for i in range(5)
    ]


def test_content_tells_the_format(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(3))
    (tmp_path / "x.npy").rename(tmp_path / "x.bin")
    write_npz(tmp_path / "y.npz", x=np.arange(3)).rename(tmp_path / "y.bin")
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    assert [sniff(str(tmp_path / name)) for name in ("x.bin", "y.bin", "z.zip")] == ["npz", "npz", None]


def test_the_same_bytes_whatever_the_batches(tmp_path, monkeypatch):
    path = write_npz(tmp_path / "a.npz", **ARRAYS)
    first = run(tmp_path, inputs=[path], output="one")
    monkeypatch.setattr(npy, "BATCH_BYTES", 300)
    second = run(tmp_path, inputs=[path], output="two")
    assert shas(first) == shas(second)
    assert first.schema == second.schema
