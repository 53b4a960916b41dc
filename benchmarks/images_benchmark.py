"""Folders of JPEGs to shards: against the decoder alone, and against copying, on the same cores.

    python -m pytest -o addopts="" benchmarks/images_benchmark.py

The decoder alone: Pillow decodes every file as far as the check does, in as many processes as there are cores,
whose start is not counted; the converter's time is its whole process's less an import's.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path

import pytest

from benchmarks.convert_benchmark import run
from benchmarks.corpus import write_jpegs
from tfpipe.manifest import Manifest

NUM_IMAGES = int(os.environ.get("TFPIPE_BENCHMARK_IMAGES", "3000"))
ROUNDS = 3
# The check reads every byte that the full decoder reads; within 10 % of the decoder alone.
MINIMUM_RATIO = 0.9


def decode(path: str) -> int:
    from PIL import Image

    image = Image.open(io.BytesIO(Path(path).read_bytes()))
    image.load()
    return image.width


@pytest.mark.benchmark(group="images")
@pytest.mark.timeout(1800)
def test_jpegs_in_folders(benchmark, tmp_path):
    source = tmp_path / "photos"
    num_bytes = write_jpegs(source, NUM_IMAGES)
    paths = [str(path) for path in sorted(source.rglob("*.jpg"))]
    checked_s, unchecked_s, decoder_s = [], [], []
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        pool.map(decode, paths[:64])

        def convert(output: Path, *options: str) -> float:
            command = [
                sys.executable,
                "-m",
                "beam_jobs.convert",
                "--input",
                str(source),
                "--output",
                str(output),
            ]
            elapsed_s, _ = run([*command, *options])
            assert Manifest.load(output).splits["train"].num_records == NUM_IMAGES
            return elapsed_s

        def tuned(output: Path) -> None:
            checked_s.append(convert(output))

        def others() -> tuple[tuple[Path], dict]:
            start_s = time.perf_counter()
            assert sum(pool.imap_unordered(decode, paths, chunksize=64)) == 256 * NUM_IMAGES
            decoder_s.append(time.perf_counter() - start_s)
            unchecked_s.append(convert(tmp_path / f"unchecked-{len(decoder_s)}", "--no-decode-check"))
            return (tmp_path / f"checked-{len(decoder_s)}",), {}

        benchmark.pedantic(tuned, setup=others, rounds=ROUNDS, warmup_rounds=0)
    import_s = statistics.median(
        run([sys.executable, "-c", "import apache_beam, pyarrow"])[0] for _ in range(3)
    )
    rates = {
        "checked": NUM_IMAGES / (statistics.median(checked_s) - import_s),
        "unchecked": NUM_IMAGES / (statistics.median(unchecked_s) - import_s),
        "decoder": NUM_IMAGES / statistics.median(decoder_s),
    }
    benchmark.extra_info.update(
        images=NUM_IMAGES, source_bytes=num_bytes, import_s=round(import_s, 2), minimum_ratio=MINIMUM_RATIO,
        **{f"{name}_images_per_s": round(rate) for name, rate in rates.items()},
    )  # fmt: skip
    print(f"\nimages/s: decoded and converted {rates['checked']:,.0f}, copied {rates['unchecked']:,.0f}, "
          f"decoder alone {rates['decoder']:,.0f}")  # fmt: skip
    assert rates["checked"] >= MINIMUM_RATIO * rates["decoder"]
