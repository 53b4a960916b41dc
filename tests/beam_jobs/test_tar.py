"""WebDataset's tar archives: every kind of member, splits between records, damage."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import tarfile

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import tfpipe
from beam_jobs import convert
from beam_jobs.layout import resolve_columns
from beam_jobs.plan import Request, merge_scans
from beam_jobs.sources import SourceOptions, Wish, Wishes, tar
from beam_jobs.sources.find import open_source, sniff
from tests.beam_jobs.test_round_trip import IN_MEMORY, in_order, records, run, shas
from tfpipe.errors import RecordError, SchemaError


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def pack(members, form=tarfile.USTAR_FORMAT):
    """An archive of (name, bytes), or of TarInfo as they are."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return out.getvalue()


def link(name, kind):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "elsewhere"
    return info


def write(path, members, compress=bytes, form=tarfile.USTAR_FORMAT):
    path.write_bytes(compress(pack(members, form)))
    return path


def opened(path):
    return open_source([str(path)], SourceOptions())[0]


def read_all(path):
    """The features of every record as its members' bytes, by splits."""
    source = open_source([str(path)], SourceOptions(format="webdataset"))[0]
    rows = []
    for split in source.plan():
        found = [batch for batch in source.batches(split, Wishes())]
        rows += [row for batch in found for row in [dict(zip(batch.columns, values, strict=True)) for values in
                 zip(*(array.to_pylist() for array in batch.columns.values()), strict=True)]]  # fmt: skip
        assert source.scan(split, Wishes(), 0).rows == sum(batch.rows for batch in found)
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def told(path):
    """The error that a conversion would end with."""
    try:
        source = opened(path)
        bad = [row for split in source.plan() for row in source.scan(split, Wishes()).bad]
    except RecordError as error:
        return str(error)
    return f"{bad[0].problem} ({bad[0].origin}). {bad[0].remedy}"


def fails(tmp_path, capfd, path, *options, said, code=1):
    arguments = ["--input", str(path), "--output", str(tmp_path / "out"), *options, *IN_MEMORY]
    assert convert.main(arguments) == code
    err = capfd.readouterr().err
    assert all(word in err for word in said), err
    assert "Traceback" not in err and not (tmp_path / "out").exists()


def sample(i):
    members = [
        (f"train/{i:04}.JPG", bytes([255, 0, i])),
        (f"train/{i:04}.cls", b" %d\n" % (i - 20)),
        (f"train/{i:04}.seg.png", b"png"),
        (f"train/{i:04}.npy", npy(np.full((2, 3), i, ">i2"))),
        (f"train/{i:04}.boxes.npy", npy(np.asfortranarray(np.arange(i % 3 * 4.0).reshape(i % 3, 4)))),
        (f"train/{i:04}.score.npy", npy(np.float32(i / 8))),
        (
            f"train/{i:04}.json",
            json.dumps({"a": {"b": 2**60 + i}, "f": i / 4, "l": [1] * (i % 2), "s": "ü"}).encode(),
        ),
    ]
    return members + ([(f"train/{i:04}.txt", f"ü{i}\n".encode())] if i % 4 else [])


def wanted(i):
    row = {
        "key": f"train/{i:04}", "jpg": bytes([255, 0, i]), "cls": i - 20, "seg.png": b"png",
        "npy": [[i] * 3] * 2, "boxes.npy": np.arange(i % 3 * 4.0).reshape(i % 3, 4).tolist(), "score.npy": i / 8,
        "json.a.b": 2**60 + i, "json.f": i / 4, "json.l": [1] * (i % 2), "json.s": "ü",
    }  # fmt: skip
    return row | ({"txt": f"ü{i}\n"} if i % 4 else {})


SAMPLES = [member for i in range(40) for member in sample(i)]


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, zstandard.compress],
                         ids=["plain", "gz", "bz2", "zst"])  # fmt: skip
def test_every_kind_of_member(tmp_path, compress, monkeypatch):
    monkeypatch.setattr(tar, "SPLIT_BYTES", 20_000)
    path = write(tmp_path / "a.tar", SAMPLES, compress)
    assert len(opened(path).plan()) == (14 if compress is bytes else 1)
    manifest = run(tmp_path, inputs=[path])
    assert manifest.source["format"] == "webdataset"
    assert {n: (f.dtype, f.shape, f.nullable) for n, f in manifest.schema.features.items()} == {
        "key": ("string", (), False), "jpg": ("bytes", (), False), "cls": ("int64", (), False),
        "seg.png": ("bytes", (), False), "npy": ("int16", (2, 3), False),
        "boxes.npy": ("float64", (None, 4), False), "score.npy": ("float32", (), False),
        "json.a.b": ("int64", (), False), "json.f": ("float32", (), False), "json.l": ("int64", (None,), False),
        "json.s": ("string", (), False), "txt": ("string", (), True),
    }  # fmt: skip
    assert in_order(records(manifest), "cls") == [wanted(i) for i in range(40)]


def test_a_dataset_of_it_holds_the_records(tmp_path):
    manifest = run(tmp_path, inputs=[write(tmp_path / "a.tar", SAMPLES)])
    (batch,) = tfpipe.make_dataset(manifest, tfpipe.PipelineConfig(per_worker_batch_size=40))
    order = np.argsort(batch["cls"].numpy())
    assert [key.decode() for key in batch["key"].numpy()[order]] == [f"train/{i:04}" for i in range(40)]
    assert batch["npy"].numpy()[order].tolist() == [wanted(i)["npy"] for i in range(40)]
    assert [batch["boxes.npy"][i].numpy().tolist() for i in order] == [
        wanted(i)["boxes.npy"] for i in range(40)
    ]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_of_every_form(tmp_path, form):
    long = "d" * 90 + "/" + "e" * 90 + "/" + "x" * (5 if form == tarfile.USTAR_FORMAT else 150)
    umlaut = "ü/a" if form == tarfile.PAX_FORMAT else "u/a"
    names = [f"{long}.bin", "./b.bin", "plain.BIN", f"{umlaut}.b.in"]
    path = write(tmp_path / "a.tar", [(name, name.encode()) for name in names], form=form)
    assert read_all(path) == [
        {"key": long, "bin": names[0].encode()},
        {"key": "./b", "bin": b"./b.bin"},
        {"key": "plain", "bin": b"plain.BIN"},
        {"key": umlaut, "b.in": names[3].encode()},
    ]


def test_sizes_in_base_256_and_in_pax_headers(tmp_path, monkeypatch):
    content = bytearray(pack([("a.bin", b"abc"), ("b.bin", b"d")]))
    content[124:136] = b"\x80" + (3).to_bytes(11, "big")
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    (tmp_path / "a.tar").write_bytes(content)
    assert read_all(tmp_path / "a.tar") == [{"key": "a", "bin": b"abc"}, {"key": "b", "bin": b"d"}]
    info = tarfile.TarInfo("x.bin")
    info.pax_headers = {"size": "3", "comment": "c"}
    header = info.tobuf(tarfile.PAX_FORMAT)  # whose own field says 0
    (tmp_path / "b.tar").write_bytes(header + b"abc".ljust(512, b"\0") + bytes(1024))
    assert read_all(tmp_path / "b.tar") == [{"key": "x", "bin": b"abc"}]


def test_what_archivers_put_beside_the_data_is_left_out(tmp_path, capfd):
    directory = link("d", tarfile.DIRTYPE)
    global_header = tarfile.TarInfo.create_pax_global_header({"comment": "x"})
    members = [
        ("__MACOSX/._a.jpg", b"x"), (".DS_Store", b"x"), ("__meta__.json", b"x"), (".hidden/a.jpg", b"x"),
        directory, ("d/a.jpg", b"1"), ("d/._a.jpg", b"x"), directory, ("d/a.cls", b"1"), ("d/b.jpg", b"2"), directory,
    ]  # fmt: skip
    path = tmp_path / "a.tar"
    path.write_bytes(global_header + pack(members))
    assert read_all(path) == [{"key": "d/a", "jpg": b"1", "cls": 1}, {"key": "d/b", "jpg": b"2"}]
    run(tmp_path, inputs=[path])
    assert "hidden or begun with __: 5 members" in capfd.readouterr().out


NAMES = st.text("ab.", min_size=1, max_size=4)
CONTENTS = st.binary(max_size=1500)


def model(members):
    """WebDataset's rule, for members without a fault."""
    rows = []
    for name, content in members:
        directory, slash, base = name.rpartition("/")
        key, _, feature = base.partition(".")
        key = directory + slash + key
        if not rows or rows[-1]["key"] != key:
            rows.append({"key": key})
        rows[-1][feature.lower()] = content
    return rows


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    samples=st.lists(
        st.dictionaries(st.sampled_from(["jpg", "PNG", "a.b", "B.a", "bin"]), CONTENTS, min_size=1, max_size=4),
        min_size=1, max_size=8,
    ),
    split_bytes=st.integers(1, 5000),
    batch_bytes=st.integers(1, 3000),
    form=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    deep=st.booleans(),
    compressed=st.booleans(),
)  # fmt: skip
def test_records_are_webdatasets_however_the_archive_is_split(
    tmp_path, samples, split_bytes, batch_bytes, form, deep, compressed, monkeypatch
):
    monkeypatch.setattr(tar, "SPLIT_BYTES", split_bytes)
    monkeypatch.setattr(tar, "BATCH_BYTES", batch_bytes)
    directory = "d/" * 60 if deep else ""
    members = [
        (f"{directory}{i}.{ext}", content) for i, s in enumerate(samples) for ext, content in s.items()
    ]
    path = write(tmp_path / "p.tar", members, gzip.compress if compressed else bytes, form)
    assert read_all(path) == model(members)


CONTENT = pack([(f"{i}.{ext}", bytes([i]) * (i * 100)) for i in range(8) for ext in ("a", "b")])
END = len(CONTENT.rstrip(b"\0")) + -len(CONTENT.rstrip(b"\0")) % 512


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(512, len(CONTENT) - 1), compressed=st.booleans())
@example(cut=END, compressed=False)
@example(cut=END + 511, compressed=True)
@example(cut=END - 512, compressed=False)
def test_a_truncated_archive_is_never_taken_for_a_shorter_one(tmp_path, cut, compressed):
    path = tmp_path / "a.tar"
    path.write_bytes((gzip.compress if compressed else bytes)(CONTENT[:cut]))
    if cut >= END + 512:  # the mark of the end is there
        assert len(read_all(path)) == 8
    else:
        with pytest.raises(RecordError, match=r"truncated.*") as error:
            read_all(path)
        assert f"{path}: byte " in str(error.value)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_of_a_header_is_told_with_its_place(tmp_path, data):
    headers = [at for at in range(0, END, 512) if CONTENT[at + 257 : at + 262] == b"ustar"]
    header = data.draw(st.sampled_from(headers))
    content = bytearray(CONTENT)
    content[header + data.draw(st.integers(0, 511))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    try:
        rows = read_all(path)
    except RecordError as error:
        assert f"({path}: byte {header})" in str(error)
    else:  # a checksum that is written in another way
        assert rows == [
            {"key": f"{i}", "a": bytes([i]) * (i * 100), "b": bytes([i]) * (i * 100)} for i in range(8)
        ]


@pytest.mark.parametrize("change, said", [
    (lambda c: c + CONTENT, ["more data behind its end", f"byte {len(CONTENT)}"]),
    (lambda c: c + b"x", ["more data behind its end"]),
    (lambda c: bytes(512) + c, ["more data behind its end", "byte 512"]),
    (lambda c: b"x" + c[1:], ["checksum"]),
    (lambda c: c[:124] + b"\xff" * 12 + c[136:], ["checksum"]),
])  # fmt: skip
@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gz"])
def test_what_is_no_whole_archive_is_told(tmp_path, change, said, compress):
    path = tmp_path / "a.tar"
    path.write_bytes(compress(change(CONTENT)))
    assert all(word in told(path) for word in ["must be whole", f"({path}: byte ", *said]), told(path)


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gz"])
def test_no_quarantine_goes_on_behind_damage(tmp_path, capfd, compress):
    (tmp_path / "a.tar").write_bytes(compress(CONTENT + CONTENT))
    options = ["--on-error", "quarantine", "--max-rejected", "9"]
    fails(tmp_path, capfd, tmp_path / "a.tar", *options, said=["more data behind its end", "a.tar"])


def test_a_malformed_pax_header_is_told(tmp_path):
    info = tarfile.TarInfo("ü.bin")
    header = info.tobuf(tarfile.PAX_FORMAT)
    at = header.find(b" path=")
    (tmp_path / "a.tar").write_bytes(header[: at - 1] + b"x" + header[at:] + bytes(1024))
    with pytest.raises(RecordError, match=r"LENGTH KEY=VALUE \(.*a\.tar: byte 0\)"):
        opened(tmp_path / "a.tar")


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gz"])
def test_a_key_that_returns_is_told_with_both_places(tmp_path, compress):
    path = write(tmp_path / "a.tar", [("a.x", b"1"), ("b.x", b"2"), ("c.x", b"3"), ("b.y", b"4")], compress)
    assert f"'b' at byte 1024 and again at byte 3072 ({path})" in told(path)


def test_keys_that_share_a_hash_are_two(tmp_path, monkeypatch):
    monkeypatch.setattr(tar, "_hash", lambda key: 7)
    path = write(tmp_path / "a.tar", [("a.x", b"1"), ("b.x", b"2")])
    assert read_all(path) == [{"key": "a", "x": b"1"}, {"key": "b", "x": b"2"}]


def test_two_archives_may_have_the_same_keys(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.tar", [("0.txt", name.encode()), ("1.txt", name.encode())])
    manifest = run(tmp_path, "--no-shuffle", inputs=[tmp_path])
    assert [(row["key"], row["txt"]) for row in records(manifest)] == [
        ("0", "a"), ("1", "a"), ("0", "b"), ("1", "b"),
    ]  # fmt: skip


FAULTS = {
    "cls": ([("x.cls", b"7a")], ["'cls' must hold an int64", "b'7a'"]),
    "zeros": ([("x.cls", b"007")], ["without leading zeros", "b'007'"]),
    "big": ([("x.id", b"9223372036854775808")], ["'id' must hold an int64"]),
    "text": ([("x.txt", b"a\xff")], ["'txt' must hold UTF-8 text", "0xff at 2"]),
    "json": ([("x.json", b'{"a": 1, "a": 2}')], ["'json' must hold one JSON object", "the key 'a' twice"]),
    "list": ([("x.json", b"[1]")], ["one JSON object", "a list"]),
    "inner": ([("x.json", b'{"l": [{}]}')], ["'json.l' must hold", "an object in a list"]),
    "doubled": ([("x.json", b'{"a": 1}'), ("x.json.a", b"")], ["'json.a' twice"]),
    "twice": ([("x.jpg", b""), ("x.JPG", b"")], ["each member once", "'jpg' twice"]),
    "bare": ([("x", b"")], ["KEY.FEATURE", "no extension", "'x'"]),
    "dot": ([("x.", b"")], ["KEY.FEATURE", "'x.'"]),
    "key": ([("x.key", b"")], ["'key', which is the record's key"]),
    "link": ([link("x.jpg", tarfile.SYMTYPE)], ["must be a file", "a symbolic link", "'x.jpg'"]),
    "hard": ([link("x.jpg", tarfile.LNKTYPE)], ["a hard link"]),
    "device": ([link("x.jpg", tarfile.CHRTYPE)], ["a character device"]),
    "fifo": ([link("x.jpg", tarfile.FIFOTYPE)], ["a FIFO"]),
    "sparse": ([link("x.jpg", tarfile.GNUTYPE_SPARSE)], ["a sparse file"]),
    "unknown": ([link("x.jpg", b"q")], ["unknown type b'q'"]),
    "npy": ([("x.npy", npy(np.arange(3))[:-1])], ["'npy'", "bytes that its header tells"]),
    "no npy": ([("x.npy", b"abc")], ["'npy'", "must begin with"]),
    "objects": ([("x.npy", b"")], ["'npy'", "must begin with"]),
    "complex": ([("x.npy", npy(np.array([1j])))], ["complex numbers"]),
    "time": ([("x.npy", npy(np.array([0], "M8[s]")))], ["a time", "unit"]),
    "fields": ([("x.npy", npy(np.zeros(2, [("a", "i4")])))], ["a structured type"]),
    "nothing": ([("x.npy", npy(np.zeros((2, 0))))], ["shape [2, 0]"]),
    "surrogate": ([("x.t.npy", npy(np.array([[0xDC80]], "<u4").view("<U1")))], ["'t.npy'", "surrogate"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_record_is_told_by_name(tmp_path, name):
    members, said = FAULTS[name]
    path = write(tmp_path / "a.tar", [("a.x", b"1"), *members, ("z.x", b"2")])
    assert all(word in told(path) for word in [*said, f"({path}:x)"]), told(path)


def test_bad_records_go_aside_and_all_others_stay(tmp_path):
    members = []
    for i, (faulty, _) in enumerate(FAULTS.values()):
        members.append((f"a{i:02}.good", bytes([i])))
        for member in faulty:
            if isinstance(member, tarfile.TarInfo):
                members.append(link(f"b{i:02}{member.name[1:]}", member.type))
            else:
                members.append((f"b{i:02}{member[0][1:]}", member[1]))
    path = write(tmp_path / "a.tar", [*members, ("z.npy", npy(np.int16([1])))])
    count = str(len(FAULTS))
    manifest = run(
        tmp_path, "--no-shuffle", "--on-error", "quarantine", "--max-rejected", count, inputs=[path]
    )
    kept = [{"key": f"a{i:02}", "good": bytes([i])} for i in range(len(FAULTS))]
    assert records(manifest) == [*kept, {"key": "z", "npy": [1]}]
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [row["origin"] for row in rejected] == [f"{path}:b{i:02}" for i in range(len(FAULTS))]
    for row, (_, said) in zip(rejected, FAULTS.values(), strict=True):
        assert all(word.replace("'x", "") in row["reason"] for word in said), row


def test_a_name_that_is_no_utf8_goes_aside(tmp_path):
    content = pack([("a.x", b"1"), ("?.x", b"2")]).replace(b"?.x", b"\xff.x")
    at = content.find(b"\xff.x")
    header = bytearray(content[at : at + 512])
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path = tmp_path / "a.tar"
    path.write_bytes(content[:at] + header + content[at + 512 :])
    manifest = run(tmp_path, "--on-error", "quarantine", "--max-rejected", "1", inputs=[path])
    assert records(manifest) == [{"key": "a", "x": b"1"}]
    (rejected,) = map(json.loads, (tmp_path / "out" / "rejected.jsonl").read_text().splitlines())
    assert rejected["origin"] == rf"{path}:\xff" and "must be UTF-8" in rejected["reason"]


def test_a_sparse_file_of_pax_is_refused(tmp_path):
    info = tarfile.TarInfo("GNUSparseFile.0/x.bin")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "x.bin"}
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    assert "got a sparse file, 'x.bin' (" in told(tmp_path / "a.tar")


def test_a_member_too_long_is_not_read(tmp_path, monkeypatch):
    from beam_jobs.sources import tar_records

    monkeypatch.setattr(tar_records, "RECORD_MAX_BYTES", 2)
    path = write(tmp_path / "a.tar", [("a.x", b"123"), ("b.x", b"12")])
    assert f"at most 2 bytes, got 3 in 'a.x' ({path}:a)" in told(path)


@pytest.mark.parametrize("second, said", [
    (np.zeros(2, np.float32), "one dtype throughout"),
    (np.zeros(2, np.uint64), "one dtype throughout"),
    (np.zeros(2, bool), "one dtype throughout"),
    (np.array(["a", "b"]), "one dtype throughout"),
    (np.zeros((2, 2), np.int16), "lists of one depth"),
    (np.int64(3), "one dtype throughout"),
])  # fmt: skip
@pytest.mark.parametrize("split_bytes", [1, 1 << 20])
def test_arrays_of_several_dtypes_are_no_column(tmp_path, second, said, split_bytes, monkeypatch):
    monkeypatch.setattr(tar, "SPLIT_BYTES", split_bytes)
    source = opened(
        write(tmp_path / "a.tar", [("a.npy", npy(np.zeros(2, np.int16))), ("b.npy", npy(second))])
    )
    scans = [source.scan(split, Wishes()) for split in source.plan()]
    merged, _ = merge_scans(Request(), source, source.plan(), scans)
    with pytest.raises(SchemaError, match=f"{said}.*'npy'"):
        resolve_columns(source.columns, merged)


def test_inner_dimensions_that_differ_are_no_column(tmp_path, capfd):
    path = write(tmp_path / "a.tar", [("a.npy", npy(np.zeros((2, 3)))), ("b.npy", npy(np.zeros((2, 4))))])
    fails(tmp_path, capfd, path, said=["only a feature's first dimension", "'npy'"])


def test_arrays_of_text_numbers_and_single_values_keep_nulls(tmp_path):
    path = write(tmp_path / "a.tar", [
        ("a.t.npy", npy(np.array(["ü", "\0x"]))), ("b.t.npy", npy(np.array(["longer", ""]))),
        ("c.s.npy", npy(np.uint8(7))), ("d.m.npy", npy(np.array([[True], [False]]))), ("e.b.npy", npy(np.array(b"\0a"))),
    ])  # fmt: skip
    manifest = run(tmp_path, "--no-shuffle", inputs=[path])
    assert {n: (f.dtype, f.shape) for n, f in manifest.schema.features.items()} == {
        "key": ("string", ()), "t.npy": ("string", (2,)), "s.npy": ("int64", ()), "m.npy": ("bool", (2, 1)),
        "b.npy": ("bytes", ()),
    }  # fmt: skip
    assert records(manifest) == [
        {"key": "a", "t.npy": ["ü", "\0x"]}, {"key": "b", "t.npy": ["longer", ""]}, {"key": "c", "s.npy": 7},
        {"key": "d", "m.npy": [[True], [False]]}, {"key": "e", "b.npy": b"\0a"},
    ]  # fmt: skip


def test_a_declared_schema_takes_text_as_it_is_and_leaves_members_unread(tmp_path):
    path = write(
        tmp_path / "a.tar",
        [("a.id", b"007\n"), ("a.txt", b"\xff"), ("a.json", b"no"), ("a.npy", npy(np.int8([1, 2])))],
    )
    schema = {"features": {
        "id": {"dtype": "string"}, "txt": {"dtype": "bytes"}, "npy": {"dtype": "int32", "shape": [2]},
    }}  # fmt: skip
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    manifest = run(tmp_path, "--schema", str(tmp_path / "schema.json"), inputs=[path])
    assert records(manifest) == [{"id": "007\n", "txt": b"\xff", "npy": [1, 2]}]


def test_json_columns_behave_as_in_jsonl(tmp_path, capfd):
    rows = [
        {"x": True, "n": None, "d": 9007199254740993},
        {"x": 2, "d": -1},
        {"x": 0.5, "d": 18446744073709551615},
    ]
    path = write(
        tmp_path / "a.tar", [(f"{i}.meta.json", json.dumps(row).encode()) for i, row in enumerate(rows)]
    )
    manifest = run(tmp_path, "--no-shuffle", inputs=[path], output="tar")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = run(tmp_path, "--no-shuffle", inputs=[tmp_path / "a.jsonl"], output="jsonl")
    found = records(manifest)
    assert [row.pop("key") for row in found] == ["0", "1", "2"]
    assert [{n.removeprefix("meta.json."): v for n, v in row.items()} for row in found] == records(expected)
    assert {f"meta.json.{n}": f for n, f in expected.schema.features.items()} == {
        n: f for n, f in manifest.schema.features.items() if n != "key"
    }
    write(path, [("a.json", b'{"x": "a"}'), ("b.json", b'{"x": 1}')])
    fails(tmp_path, capfd, path, said=["text or numbers throughout", "'json.x'"])


def test_an_archive_without_records_is_refused(tmp_path, capfd):
    path = write(tmp_path / "a.tar", [link("d", tarfile.DIRTYPE)])
    fails(tmp_path, capfd, path, said=["at least one record", "a.tar"])
    path.write_bytes(gzip.compress(path.read_bytes()))
    fails(tmp_path, capfd, path, said=["at least one record", "a.tar"])


def test_content_tells_the_format(tmp_path):
    for name, form in (("u", tarfile.USTAR_FORMAT), ("g", tarfile.GNU_FORMAT), ("p", tarfile.PAX_FORMAT)):
        write(tmp_path / name, [("ü.x", b"1")], gzip.compress if name == "g" else bytes, form)
        assert sniff(str(tmp_path / name)) == "webdataset"
    v7 = bytearray(pack([("a.x", b"1")]))
    v7[257:265] = bytes(8)
    v7[148:156] = b" " * 8
    v7[148:156] = b"%06o\0 " % sum(v7[:512])
    (tmp_path / "a.tar").write_bytes(v7)
    assert sniff(str(tmp_path / "a.tar")) == "webdataset"
    assert read_all(tmp_path / "a.tar") == [{"key": "a", "x": b"1"}]


def test_the_same_bytes_whatever_the_batches(tmp_path, monkeypatch):
    path = write(tmp_path / "a.tar", SAMPLES)
    first = run(tmp_path, inputs=[path], output="one")
    monkeypatch.setattr(tar, "BATCH_BYTES", 500)
    second = run(tmp_path, inputs=[path], output="two")
    assert shas(first) == shas(second)
    assert first.schema == second.schema


def test_a_column_left_out_is_not_read(tmp_path):
    path = write(tmp_path / "a.tar", [("a.big", b"x" * 5000), ("a.cls", b"1")])
    source = opened(path)
    wishes = Wishes(columns={"cls": Wish(dtype="int64")}, others=Wish(used=False))
    (split,) = source.plan()
    (batch,) = source.batches(split, wishes)
    assert list(batch.columns) == ["cls"] and batch.columns["cls"].to_pylist() == [1]
