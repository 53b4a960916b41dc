"""Reads TFRecord files from end to end, several at a time: for `tfpipe.index`.

A file is read by one process, and what was found comes in the files' order, so the result is the
same for any number of processes.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

from tfpipe.errors import ShardError
from tfpipe.example_summary import ExampleSummary
from tfpipe.examples import Place
from tfpipe.manifest import Shard
from tfpipe.tfrecord import ShardReader

_PROGRESS_RECORDS = 10_000
# A process takes half a second to start: less is read sooner by one.
_BYTES_OF_A_PROCESS = 8 << 20


def read_files(
    paths: Sequence[Path],
    compression: str,
    only: Collection[str] | None,
    num_processes: int = 1,
    on_progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> Iterator[tuple[Shard, ExampleSummary]]:
    """Reads files of tf.train.Examples.

    Args:
        paths: the files.
        compression: of all of them.
        only: the features to look at; None for all.
        num_processes: at most; fewer for few or small files. With more than one, the main module of the
            program must be importable (`if __name__ == "__main__"`).
        on_progress: called with a text, the files done and all files.

    Yields:
        What each file holds, in order.

    Raises:
        ShardError: a file is damaged or can't be read; or a process was killed.
        RecordError: a record is no tf.train.Example.
        SchemaError: records of a file disagree with each other.
    """
    num_bytes = sum(path.stat().st_size for path in paths if path.exists())
    num_processes = min(num_processes, len(paths), num_bytes // _BYTES_OF_A_PROCESS)
    if num_processes < 2:
        for done, path in enumerate(paths):
            yield _read(path, compression, only, partial(_tell, on_progress, done, len(paths)))
        return
    # Spawned, since a fork of a process with threads (TensorFlow's, say) can hang.
    pool = ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        found = [pool.submit(_read, path, compression, only) for path in paths]
        for done, (path, future) in enumerate(zip(paths, found, strict=True)):
            on_progress(path.name, done, len(paths))
            yield future.result()
    except BrokenProcessPool:
        raise ShardError(
            f"a process that reads files must live until it is done, got one that was killed, for want of "
            f"memory perhaps ({paths[0].parent}). Use fewer: --processes 1"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _tell(on_progress: Callable[[str, int, int], None], done: int, total: int, text: str) -> None:
    on_progress(text, done, total)


def _read(
    path: Path,
    compression: str,
    only: Collection[str] | None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> tuple[Shard, ExampleSummary]:
    summary = ExampleSummary(only)
    reader = ShardReader(path, compression)
    file = str(path)
    try:
        for number, payload in enumerate(reader):
            if number % _PROGRESS_RECORDS == 0:
                on_progress(f"{path.name}: {number:,} records" if number else path.name)
            summary.add(payload, Place(file, number))
    except OSError as error:
        raise ShardError(f"a file must be readable, got {error.strerror} ({path}).") from None
    assert reader.content is not None
    return Shard(name=path.name, **dataclasses.asdict(reader.content)), summary
