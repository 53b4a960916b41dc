"""Framing against TensorFlow, damage located, big records in linear time."""

import gzip
import hashlib
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import write_shard
from tfpipe.errors import ShardError
from tfpipe.tfrecord import CHUNK_BYTES, ShardReader, frame, read_shard, sniff_compression

COMPRESSIONS = ["GZIP", "ZLIB", ""]


@given(st.lists(st.binary(max_size=200), max_size=20), st.sampled_from(COMPRESSIONS))
def test_what_is_framed_is_read_back(tmp_path_factory, payloads, compression):
    path = tmp_path_factory.mktemp("frames") / "x.tfrecord"
    shard = write_shard(path, payloads, compression)
    assert list(ShardReader(path, compression)) == payloads
    assert shard.num_records == len(payloads)
    assert shard.num_bytes == path.stat().st_size
    assert shard.uncompressed_bytes == sum(16 + len(payload) for payload in payloads)
    assert shard.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_tensorflow_reads_what_we_frame_and_we_read_what_it_writes(tmp_path, compression):
    import tensorflow as tf

    payloads = [b"", b"a" * 100_000, b"b"]
    write_shard(tmp_path / "ours", payloads, compression)
    ours = tf.data.TFRecordDataset(str(tmp_path / "ours"), compression_type=compression)
    assert list(ours.as_numpy_iterator()) == payloads
    with tf.io.TFRecordWriter(str(tmp_path / "theirs"), options=compression) as writer:
        for payload in payloads:
            writer.write(payload)
    assert list(ShardReader(tmp_path / "theirs", compression)) == payloads
    assert sniff_compression(tmp_path / "theirs") == sniff_compression(tmp_path / "ours") == compression


def test_several_gzip_members_are_one_stream(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(frame(b"a") + frame(b"b")[:5]) + gzip.compress(frame(b"b")[5:]))
    assert list(ShardReader(path, "GZIP")) == [b"a", b"b"]


def test_big_records_take_linear_time(tmp_path):
    payload = bytes(CHUNK_BYTES * 48)
    path = tmp_path / "big"
    path.write_bytes(frame(payload) + frame(b"x"))
    start = time.perf_counter()
    assert [len(p) for p in ShardReader(path, "")] == [len(payload), 1]
    assert time.perf_counter() - start < 2  # joining at each chunk would copy 1.2 GB


def test_a_well_compressed_file_comes_in_bounded_pieces(tmp_path):
    from tfpipe import tfrecord

    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(frame(bytes(CHUNK_BYTES * 9))))
    with open(path, "rb") as file:
        pieces = list(tfrecord._inflate(file, "GZIP"))
    assert max(len(data) for _, data in pieces) <= CHUNK_BYTES
    assert b"".join(raw for raw, _ in pieces) == path.read_bytes()


PAYLOADS = [bytes([65 + i]) * 30 for i in range(10)]
FRAMED = 30 + 16


@pytest.mark.parametrize(
    ("position", "what"), [(3 * FRAMED, "length's checksum"), (3 * FRAMED + 20, "payload's checksum")]
)
def test_a_flipped_byte_is_located(tmp_path, position, what):
    path = tmp_path / "x.tfrecord"
    write_shard(path, PAYLOADS, "")
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    offset = rf"record 3 \(uncompressed offset {3 * FRAMED}\)"
    with pytest.raises(ShardError, match=rf"{offset}: the {what} is wrong .*x\.tfrecord\).*Convert"):
        read_shard(path, "")


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_damage_inside_a_compressed_stream_is_located(tmp_path, compression):
    path = tmp_path / "x"
    payloads = [hashlib.sha256(bytes([i])).digest() * 8 for i in range(200)]
    write_shard(path, payloads, compression)
    data = bytearray(path.read_bytes())
    for i in range(len(data) // 2, len(data) // 2 + 40):
        data[i] ^= 0xFF
    path.write_bytes(data)
    good = []
    with pytest.raises(ShardError, match=r"damage at record (\d+)") as caught:
        for payload in ShardReader(path, compression):
            good.append(payload)
    assert 40 < len(good) < 160 and good == payloads[: len(good)]
    assert f"record {len(good)} (uncompressed offset {len(good) * (256 + 16)})" in str(caught.value)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_truncated_file(tmp_path, compression):
    path = tmp_path / "x"
    write_shard(path, PAYLOADS, compression)
    path.write_bytes(path.read_bytes()[:-5])
    message = "the compressed stream ends early" if compression else "41 bytes at the end are no record"
    with pytest.raises(ShardError, match=message):
        read_shard(path, compression)


@pytest.mark.parametrize("actual", COMPRESSIONS)
@pytest.mark.parametrize("expected", COMPRESSIONS)
def test_another_compression_than_expected_is_named(tmp_path, actual, expected):
    if actual == expected:
        return
    path = tmp_path / "x"
    write_shard(path, PAYLOADS, actual)
    found = f"got {actual or 'no'} compression where {expected or 'none'} was expected"
    with pytest.raises(ShardError, match=found):
        read_shard(path, expected)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(ShardError, match=r"readable, got No such file.*nope"):
        read_shard(tmp_path / "nope", "")
    (tmp_path / "empty").write_bytes(b"")
    assert read_shard(tmp_path / "empty", "").num_records == 0
    (tmp_path / "none.gz").write_bytes(zlib.compress(b"", 1))
    assert read_shard(tmp_path / "none.gz", "ZLIB").num_records == 0
