"""Measures (and trains) on one or many workers, and says where each step's time goes.

    python -m tfpipe.trainer --data data/mnist                    one worker
    python -m tfpipe.trainer --data data/mnist --workers 2        two processes on this machine
    TF_CONFIG='{"cluster": ...}' python -m tfpipe.trainer ...     one copy a machine

Comes in: a dataset directory and options. Goes out: the verdict in the terminal, the result
as JSON and HTML. This process imports no TensorFlow: it starts the workers (worker.py),
watches them, and owns terminal and files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tfpipe import report
from tfpipe.cluster import local_clusters, parse_tf_config
from tfpipe.config import PipelineConfig, TrainerConfig
from tfpipe.errors import UsageError, check_output_file, run_command, write_output_file
from tfpipe.launcher import CPUS, run_workers, share_cpus
from tfpipe.manifest import Manifest
from tfpipe.progress import Progress
from tfpipe.sharding import plan_epoch, split_global_batch

# Between two signs of a worker's life at the start: importing TensorFlow on a busy machine.
_IMPORT_S = 120


def measure(
    data: str | os.PathLike[str],
    *,
    split: str = "train",
    pipeline: PipelineConfig | None = None,
    trainer: TrainerConfig | None = None,
    workers: int | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    on_progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> dict[str, Any]:
    """Measures where each step's time goes, and trains where `trainer.epochs` asks for it.

    Args:
        data: the dataset directory.
        split: measured and trained on.
        pipeline: how records become batches; default: 64 records a worker and step.
        trainer: what to run.
        workers: local worker processes to start. None: TF_CONFIG says who this is; without
            it one worker.
        log_dir: gets each worker's output; default: a new temporary directory.
        on_progress: called with a text, what is done and the total.

    Returns:
        The result contract's object (format "tfpipe-measurement"), the same on every worker.

    Raises:
        UsageError: a batch or a number of workers that the data can't serve, a model or map
            that can't be loaded.
        ManifestError: no usable dataset.
        ClusterError: a broken TF_CONFIG, a missing peer, a worker that died.
    """
    pipeline = pipeline or PipelineConfig(per_worker_batch_size=64)
    trainer = trainer or TrainerConfig()
    cluster = parse_tf_config(os.environ.get("TF_CONFIG"))
    if cluster and workers is not None:
        raise UsageError(
            f"--workers starts local workers and TF_CONFIG joins a cluster, got both (--workers {workers}). "
            f"Leave out one of them."
        )
    num_workers = cluster.num_workers if cluster else 1 if workers is None else workers
    clusters = [cluster] if cluster else local_clusters(num_workers)
    _check(Manifest.load(data), split, pipeline, trainer, num_workers)

    cpus = [""] if cluster else share_cpus(num_workers)
    environments: dict[int, Mapping[str, str]] = {
        member.index: {
            "TF_CONFIG": member.to_tf_config() if member.num_workers > 1 else "",
            "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1"),
            CPUS: cores,
        }
        for member, cores in zip(clusters, cpus, strict=True)
    }
    job = {
        "data": os.fspath(data),
        "split": split,
        "pipeline": pipeline.to_json(),
        "trainer": trainer.to_json(),
    }
    first = min(environments)
    results = run_workers(
        [sys.executable, "-m", "tfpipe.worker", json.dumps(job)],
        environments,
        log_dir=Path(log_dir or tempfile.mkdtemp(prefix="tfpipe-logs-")),
        start_timeout_s=trainer.start_timeout_s + _IMPORT_S,
        on_progress=lambda index, event: (
            on_progress(event["text"], event["done"], event["total"]) if index == first else None
        ),
    )
    return results[first]


def _check(
    manifest: Manifest, split: str, pipeline: PipelineConfig, trainer: TrainerConfig, num_workers: int
) -> None:
    """Refuses what can't work before any process starts."""
    plan_epoch(
        counts=[shard.num_records for shard in manifest.split(split).shards],
        num_workers=num_workers,
        per_worker_batch_size=pipeline.per_worker_batch_size,
        drop_remainder=True,  # only full batches are measured
        sharding=pipeline.sharding,
    )
    if trainer.epochs and pipeline.sharding != "per_worker":
        raise UsageError(
            f'training must use sharding="per_worker", which counts each worker\'s records, '
            f"got {pipeline.sharding!r}. Change the pipeline configuration, or leave out --train."
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        argv: without the program's name; default: sys.argv's.

    Returns:
        The exit code: 0 ok, 1 the work failed, 2 wrong usage.

    Raises:
        SystemExit: from argparse, with code 2 for a malformed command line.
    """
    args = _parser().parse_args(argv)
    return run_command(lambda: _main(args))


def _main(args: argparse.Namespace) -> None:
    cluster = parse_tf_config(os.environ.get("TF_CONFIG"))
    num_workers = args.workers or (cluster.num_workers if cluster else 1)
    trainer = TrainerConfig(
        **{field.name: getattr(args, field.name) for field in dataclasses.fields(TrainerConfig)}
    )
    if args.train != (trainer.epochs > 0):
        raise UsageError(
            f"--train needs --epochs >= 1 and --epochs needs --train, got {trainer.epochs} epochs."
        )
    outputs = {f"--{name}": path for name in ("json", "html") if (path := getattr(args, name)) is not None}
    if not (cluster and cluster.index > 0):  # worker 0 alone writes
        for option, path in outputs.items():
            check_output_file(path, option)

    log_dir = args.log_dir or Path(tempfile.mkdtemp(prefix="tfpipe-logs-"))
    console = Console(stderr=True)
    with Progress(console) as progress:
        result = measure(
            args.data,
            split=args.split,
            pipeline=_pipeline(args, num_workers),
            trainer=trainer,
            workers=args.workers,
            log_dir=log_dir,
            on_progress=progress.update,
        )
    if cluster and cluster.index > 0:
        print(f"{result['headline']}\nworker {cluster.index} is done; worker 0 writes the result")
        return
    report.render_terminal(result)
    if args.json is not None:
        write_output_file(args.json, json.dumps(result, indent=1) + "\n")
    if args.html is not None:
        report.write_html(result, args.html)
    for path in outputs.values():
        print(f"wrote {path}")
    print(f"logs in {log_dir}")


def _pipeline(args: argparse.Namespace, num_workers: int) -> PipelineConfig:
    pipeline = (
        PipelineConfig.load(args.pipeline) if args.pipeline else PipelineConfig(per_worker_batch_size=64)
    )
    size = args.per_worker_batch_size
    if args.global_batch_size is not None:
        size = split_global_batch(args.global_batch_size, num_workers)
    return pipeline if size is None else dataclasses.replace(pipeline, per_worker_batch_size=size)


def _parser() -> argparse.ArgumentParser:
    defaults = TrainerConfig()
    parser = argparse.ArgumentParser(
        prog="python -m tfpipe.trainer", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--data", required=True, metavar="DIR", help="dataset directory that the converter wrote")
    add("--split", default="train", help="default: %(default)s")
    add(
        "--workers",
        type=int,
        metavar="N",
        help="start N local worker processes; without it, TF_CONFIG says who this is; with neither, one",
    )
    add(
        "--model",
        default=defaults.model,
        metavar="MODULE:FUNCTION",
        help="returns a Keras model, a loss and an optimizer; default: %(default)s",
    )
    add(
        "--map",
        default=defaults.map,
        metavar="MODULE:FUNCTION",
        help="tf.data function applied to every parsed batch",
    )
    add("--label", default=defaults.label, help="feature that the model predicts; default: %(default)s")
    add("--pipeline", type=Path, metavar="FILE", help="a PipelineConfig as JSON")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--per-worker-batch-size", type=int, metavar="B", help="default: 64")
    batch.add_argument("--global-batch-size", type=int, metavar="B", help="of all workers together")
    add("--steps", type=int, default=defaults.steps, help="a phase and round; default: %(default)s")
    add("--rounds", type=int, default=defaults.rounds, help="default: %(default)s")
    add(
        "--warmup",
        type=int,
        default=defaults.warmup,
        help="steps before the first round; default: %(default)s",
    )
    add("--train", action="store_true", help="train for real after measuring, and evaluate")
    add("--epochs", type=int, default=defaults.epochs, metavar="E", help="to train")
    add("--json", type=Path, metavar="FILE", help="write the result")
    add("--html", type=Path, metavar="FILE", help="write the report as one self-contained page")
    add("--log-dir", type=Path, metavar="DIR", help="for the workers' output; default: a temporary one")
    for name, what in (
        ("start", "how long a worker waits for its peers at the start"),
        ("collective", "how long a step waits for its peers"),
    ):
        default = getattr(defaults, f"{name}_timeout_s")
        add(
            f"--{name}-timeout-s",
            type=int,
            default=default,
            metavar="S",
            help=f"{what}; default: %(default)s",
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
