"""What several tests need: small datasets with a manifest, and groups of real worker processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfpipe.manifest import Manifest, Shard, Split, shard_name
from tfpipe.schema import TEXT_DTYPES, Feature, Schema
from tfpipe.tfrecord import WINDOW_BITS, frame, read_shard

REPOSITORY = Path(__file__).resolve().parent.parent


def serialize(schema: Schema, record: Mapping[str, Any]) -> bytes:
    """One record as a serialized tf.train.Example; a missing or None value is an absent feature."""
    import tensorflow as tf

    features = {}
    for name, feature in schema.features.items():
        value = record.get(name)
        if value is None:
            continue
        features[name] = _feature(tf, feature, value)
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def _feature(tf: Any, feature: Feature, value: Any) -> Any:
    if feature.dtype in TEXT_DTYPES:
        values = [value] if isinstance(value, (str, bytes)) else np.asarray(value, dtype=object).ravel()
        values = [v.encode() if isinstance(v, str) else v for v in values]
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    array = np.asarray(value, dtype=np.dtype(feature.dtype).newbyteorder("<"))
    if feature.encoding == "raw":
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[array.tobytes()]))
    if feature.encoding == "int64_list":
        return tf.train.Feature(int64_list=tf.train.Int64List(value=array.ravel()))
    return tf.train.Feature(float_list=tf.train.FloatList(value=array.ravel()))


def write_shard(path: Path, payloads: Sequence[bytes], compression: str = "GZIP") -> Shard:
    """Writes serialized examples as one shard and returns its manifest entry."""
    data = b"".join(map(frame, payloads))
    if compression:
        deflater = zlib.compressobj(1, zlib.DEFLATED, WINDOW_BITS[compression])
        data = deflater.compress(data) + deflater.flush()
    path.write_bytes(data)
    content = read_shard(path, compression)
    return Shard(
        name=path.name,
        num_records=content.num_records,
        num_bytes=content.num_bytes,
        uncompressed_bytes=content.uncompressed_bytes,
        sha256=content.sha256,
    )


def write_dataset(
    directory: Path | str,
    schema: Schema,
    records: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Mapping[str, Any]]],
    num_shards: int = 4,
    compression: str = "GZIP",
    *,
    counts: Sequence[int] | None = None,
) -> Manifest:
    """Writes a small dataset directory as the converter would.

    Args:
        directory: made if it does not exist.
        schema: of every record.
        records: dicts by feature name, in order; or such lists by split (default: one split, "train").
        num_shards: of each split; shard sizes differ by at most one.
        compression: "GZIP", "ZLIB" or "".
        counts: records in each shard instead of equal sizes.

    Returns:
        The manifest, loaded back from the directory.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    by_split = records if isinstance(records, Mapping) else {"train": records}
    splits = {}
    for split, rows in by_split.items():
        sizes = counts or [
            len(rows) * (i + 1) // num_shards - len(rows) * i // num_shards for i in range(num_shards)
        ]
        assert sum(sizes) == len(rows), "counts must add up to the records"
        shards, start = [], 0
        for index, size in enumerate(sizes):
            payloads = [serialize(schema, row) for row in rows[start : start + size]]
            name = shard_name(split, index, len(sizes), compression)
            shards.append(write_shard(directory / name, payloads, compression))
            start += size
        splits[split] = Split(shards=tuple(shards))
    manifest = Manifest(schema=schema, splits=splits, compression=compression)
    manifest.save(directory)
    return Manifest.load(directory)


def free_ports(number: int) -> list[int]:
    """Ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def run_workers(
    script: str,
    num_workers: int,
    timeout_s: float = 120,
    *,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Runs the same Python source as real worker processes of one cluster, each with its TF_CONFIG.

    Args:
        script: Python source.
        num_workers: processes; worker 0 is the chief.
        timeout_s: deadline for all of them together.
        arguments: `sys.argv[1:]` of each.
        environment: added to each process's environment.

    Returns:
        Each worker's standard output.

    Raises:
        AssertionError: a worker failed or the deadline passed; shows every worker's output.
    """
    peers = [f"127.0.0.1:{port}" for port in free_ports(num_workers)]
    processes = []
    for index in range(num_workers):
        config = {"cluster": {"worker": peers}, "task": {"type": "worker", "index": index}}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", script, *arguments],
                env={
                    **os.environ,
                    "CUDA_VISIBLE_DEVICES": "",
                    "TF_CPP_MIN_LOG_LEVEL": "2",
                    **(environment or {}),
                    "TF_CONFIG": json.dumps(config),
                },
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    return _collect(processes, timeout_s)


def _collect(processes: list[subprocess.Popen[str]], timeout_s: float) -> list[str]:
    deadline, outputs, reason = time.monotonic() + timeout_s, [], ""
    try:
        # One after the other: pipes are small, so a worker's output must stay below 64 KiB
        # until its turn comes.
        for index, process in enumerate(processes):
            try:
                out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                reason = reason or f"worker {index} was not done after {timeout_s} s"
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
            if process.returncode and not reason:
                # The others wait for it in a collective: no need to wait for them as well.
                reason = f"worker {index} ended with {process.returncode}"
                deadline = min(deadline, time.monotonic() + 5)
            outputs.append((out, err))
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if reason:
        logs = "\n".join(f"--- worker {i}\n{out}\n{err[-6000:]}" for i, (out, err) in enumerate(outputs))
        raise AssertionError(f"{reason}\n{logs}")
    return [out for out, _ in outputs]
