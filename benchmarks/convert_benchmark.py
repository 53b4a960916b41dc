"""Raw CSV to TFRecord shards: the converter against Beam as documented, on the same cores.

    TFPIPE_BENCHMARK_RECORDS=1000000 python -m pytest -o addopts="" benchmarks/convert_benchmark.py

Whole processes are timed, start-up included; the converter's time holds both passes and the
read-back of everything it wrote. The twins alternate, so that drift of the machine meets both.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.corpus import write_csv
from tfpipe.manifest import Manifest
from tfpipe.tfrecord import read_shard

NUM_RECORDS = int(os.environ.get("TFPIPE_BENCHMARK_RECORDS", "1000000"))
# Its rate hardly depends on the number; a million would only take eight minutes more.
NAIVE_RECORDS = min(NUM_RECORDS, 100_000)
ROUNDS = 3
MINIMUM_RATIO = 10.0
MAXIMUM_RSS_BYTES = 1 << 30


def run(command: list[str]) -> tuple[float, int]:
    """Runs a command; returns its wall time in seconds and the largest process's peak RSS."""
    start_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak_bytes = [0]
    watcher = threading.Thread(target=_watch_rss, args=(process.pid, peak_bytes), daemon=True)
    watcher.start()
    _, errors = process.communicate()
    elapsed_s = time.perf_counter() - start_s
    assert process.returncode == 0, errors.decode()[-3000:]
    watcher.join()
    return elapsed_s, peak_bytes[0]


def _watch_rss(pid: int, peak_bytes: list[int]) -> None:
    try:
        root = psutil.Process(pid)
        while True:
            for process in [root, *root.children(recursive=True)]:
                peak_bytes[0] = max(peak_bytes[0], process.memory_info().rss)
            time.sleep(0.05)
    except psutil.Error:
        return


@pytest.mark.benchmark(group="convert")
@pytest.mark.timeout(3600)
def test_csv_to_shards(benchmark, tmp_path):
    source, short = tmp_path / "rows.csv", tmp_path / "short.csv"
    num_bytes = write_csv(source, NUM_RECORDS)
    write_csv(short, NAIVE_RECORDS)
    tuned_s, naive_s, rss_bytes = [], [], []

    def tuned(output: Path) -> None:
        command = [sys.executable, "-m", "beam_jobs.convert", "--input", str(source), "--output", str(output)]
        elapsed_s, peak_bytes = run(command)
        tuned_s.append(elapsed_s)
        rss_bytes.append(peak_bytes)
        assert Manifest.load(output).splits["train"].num_records == NUM_RECORDS

    def naive() -> tuple[tuple[Path], dict]:
        """Before each round of the converter; hands it a fresh directory."""
        prefix = tmp_path / f"naive-{len(naive_s)}" / "train"
        prefix.parent.mkdir()
        naive_s.append(run([sys.executable, "-m", "benchmarks.convert_naive", str(short), str(prefix)])[0])
        written = sum(read_shard(path, "GZIP").num_records for path in prefix.parent.glob("*.tfrecord.gz"))
        assert written == NAIVE_RECORDS
        return (tmp_path / f"tuned-{len(naive_s)}",), {}

    benchmark.pedantic(tuned, setup=naive, rounds=ROUNDS, warmup_rounds=0)
    tuned_rate = NUM_RECORDS / statistics.median(tuned_s)
    naive_rate = NAIVE_RECORDS / statistics.median(naive_s)
    benchmark.extra_info.update(
        records=NUM_RECORDS,
        source_bytes=num_bytes,
        tuned_records_per_s=round(tuned_rate),
        naive_records=NAIVE_RECORDS,
        naive_records_per_s=round(naive_rate),
        ratio=round(tuned_rate / naive_rate, 1),
        rss_bytes=max(rss_bytes),
    )
    print(f"\nconverter {tuned_rate:,.0f} records/s, Beam as documented {naive_rate:,.0f}: "
          f"{tuned_rate / naive_rate:.1f}x; {max(rss_bytes) / 2**20:.0f} MiB a process")  # fmt: skip
    assert tuned_rate >= MINIMUM_RATIO * naive_rate
    assert max(rss_bytes) < MAXIMUM_RSS_BYTES
