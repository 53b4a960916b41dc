"""Both passes as one Beam pipeline on the local runner, pinned.

    Create(InputSplit) --ScanSplit--> all scans --MakePlan--> Plan
                       --EncodeSplit(Plan)--> (shard, Piece) --GroupByKey--> WriteShard --> results

One pipeline, so that the worker processes start once: the plan reaches pass 2 as a side input,
which no split of pass 2 can start without. Failures are elements (`outcome.py`); only a fault
of the runner itself, such as a killed worker, is an exception here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

import apache_beam as beam
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from beam_jobs.keys import CountKeys, FinishPlan
from beam_jobs.outcome import PLAN_FAILURE, RESULTS, Failure, load, save
from beam_jobs.plan import Plan, PlanSummary, Request
from beam_jobs.scan import MakePlan, ScanSplit, read_plan
from beam_jobs.sources import InputSplit, Source, Wishes
from beam_jobs.write import EncodeSplit, WriteShard, merge_statistics
from tfpipe.errors import TfpipeError
from tfpipe.manifest import Shard

# Input below this is converted in this process: starting workers takes longer than the work.
IN_MEMORY_BYTES = 24 << 20
# How long the runner may take to notice that a worker process died. It does so where it talks to that
# worker; where it only waits for it, it waits forever (Beam 2.77: the future of the instruction is not ended).
DEAD_WORKER_S = 5.0


class SaveResults(beam.DoFn):
    """Leaves all results in staging for the driver."""

    def __init__(self, staging: str) -> None:
        self.staging = staging

    def process(self, results: tuple[int, Iterable[tuple[int, Shard | Failure]]]) -> Iterator[None]:
        """(ALL, all (shard's index, Shard | Failure)) -> nothing."""
        yield from ()  # Beam takes nothing but an iterable for what a DoFn gives
        ordered = sorted(results[1], key=lambda item: item[0])
        failures = [result for _, result in ordered if isinstance(result, Failure)]
        shards = [dataclasses.asdict(result) for _, result in ordered if isinstance(result, Shard)]
        save(self.staging, RESULTS, {"failures": list(map(dataclasses.asdict, failures)), "shards": shards})


class SavePlanFailure(beam.DoFn):
    """Leaves the failure of pass 1, if there was one, in staging for the driver."""

    def __init__(self, staging: str) -> None:
        self.staging = staging

    def process(self, plan: Plan | Failure) -> Iterator[None]:
        """Plan | Failure -> nothing."""
        yield from ()
        if isinstance(plan, Failure):
            save(self.staging, PLAN_FAILURE, dataclasses.asdict(plan))


def build(
    pipeline: beam.Pipeline,
    *,
    source: Source,
    splits: Sequence[InputSplit],
    wishes: Wishes,
    request: Request,
    staging: str,
) -> None:
    """Builds the pipeline.

    Args:
        pipeline: to add to.
        source: to read.
        splits: of the source, in order.
        wishes: what the scan checks.
        request: what the user asked for.
        staging: the run's own directory.
    """
    inputs = pipeline | "CreateSplits" >> beam.Create(splits) | "SpreadSplits" >> beam.Reshuffle()
    plan = (
        inputs
        | "ScanSplit"
        >> beam.ParDo(
            ScanSplit(source, wishes, request.scan_limit, staging)
        )  # (ALL, (index, SplitScan | Failure))
        | "CollectScans" >> beam.GroupByKey()  # of one key: a third of the transforms that ToList has
        | "MakePlan" >> beam.ParDo(MakePlan(request, source, splits, staging))  # Plan | Failure
    )
    if request.split_by:
        plan = (
            inputs
            | "CountKeys" >> beam.ParDo(CountKeys(request, source, staging), beam.pvalue.AsSingleton(plan))
            | "CollectKeys" >> beam.GroupByKey()
            | "FinishPlan" >> beam.ParDo(FinishPlan(request, staging), beam.pvalue.AsSingleton(plan))
        )
    plan | "SavePlanFailure" >> beam.ParDo(SavePlanFailure(staging))
    (
        inputs
        | "EncodeSplit" >> beam.ParDo(EncodeSplit(request, source, staging), beam.pvalue.AsSingleton(plan))
        | "GroupByShard" >> beam.GroupByKey()  # (shard, [Piece | Failure])
        | "WriteShard" >> beam.ParDo(WriteShard(staging), beam.pvalue.AsSingleton(plan))
        | "CollectShards" >> beam.GroupByKey()  # (ALL, [(shard, Shard | Failure)])
        | "SaveResults" >> beam.ParDo(SaveResults(staging))
    )


def run(
    *,
    source: Source,
    splits: Sequence[InputSplit],
    wishes: Wishes,
    request: Request,
    staging: str,
    beam_args: Sequence[str],
    watch: Callable[[], None],
) -> tuple[PlanSummary, list[Shard]]:
    """Runs both passes.

    Args:
        source: to read.
        splits: of the source, in order.
        wishes: what the scan checks.
        request: what the user asked for.
        staging: the run's own directory.
        beam_args: the user's options for Beam.
        watch: called a few times a second while the pipeline runs.

    Returns:
        The plan that was carried out, and the shards in its order, verified.

    Raises:
        TfpipeError: whatever went wrong, the first problem of the input before all others.
    """
    options = pipeline_options(beam_args, source.work_bytes)
    with _quiet_log() as log:
        outcome: list[BaseException] = []

        def body() -> None:
            try:
                pipeline = beam.Pipeline(runner=FnApiRunner(), options=options)
                build(pipeline, source=source, splits=splits, wishes=wishes, request=request, staging=staging)
                pipeline.run().wait_until_finish()
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=body, name="pipeline", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            watch()
            if log.dead_worker is not None:
                thread.join(DEAD_WORKER_S)
                if thread.is_alive():
                    outcome.append(log.dead_worker)
                    break
        shards, failures = _results(staging)
        if failures or outcome or not shards:
            trace = failures[0].trace if failures else repr(outcome)
            log.keep(trace)
        if failures and failures[0].kind:
            raise failures[0].to_error()
        if failures:
            raise TfpipeError(f"{failures[0].message}. Nothing was published. Details: {log.path}")
        if outcome or not shards:
            what = _last_line(outcome[0]) if outcome else "no results"
            raise TfpipeError(
                f"the pipeline must end with every shard written, got {what}. Details: {log.path}"
            )
        plan = read_plan(staging)
        if plan is None or len(plan.shard_splits) != len(shards):
            raise TfpipeError(f"every planned shard must be written, got {len(shards)}. Details: {log.path}")
    statistics = merge_statistics(staging, plan.schema, splits)
    for name, known in plan.statistics.items():
        statistics[name] |= {key: known[key] for key in ("unit", "narrowed") if key in known}
    return dataclasses.replace(plan, statistics=statistics), shards


def pipeline_options(beam_args: Sequence[str], work_bytes: int) -> PipelineOptions:
    """The user's options, with defaults for what they don't say.

    Args:
        beam_args: for Beam.
        work_bytes: see `FileSource`.

    Returns:
        Options of the local runner: worker processes over all cores, or none for a small input.
    """
    options = PipelineOptions(list(beam_args))
    given = {arg.split("=")[0] for arg in beam_args}
    direct = options.view_as(DirectOptions)
    if "--direct_running_mode" not in given:
        small = work_bytes < IN_MEMORY_BYTES and "--direct_num_workers" not in given
        direct.direct_running_mode = "in_memory" if small else "multi_processing"
    if direct.direct_running_mode == "in_memory":
        direct.direct_num_workers = 1
    elif not direct.direct_num_workers or "--direct_num_workers" not in given:
        direct.direct_num_workers = len(os.sched_getaffinity(0))
    return options


def _results(staging: str) -> tuple[list[Shard], list[Failure]]:
    if (failure := load(staging, PLAN_FAILURE)) is not None:
        return [], [Failure(**failure)]
    results = load(staging, RESULTS) or {"failures": [], "shards": []}
    return [Shard(**shard) for shard in results["shards"]], [Failure(**f) for f in results["failures"]]


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}".rstrip(". ")


class _Log:
    """A file that takes what Beam and its workers say."""

    def __init__(self, path: str) -> None:
        self.path, self.kept = path, False
        self.dead_worker: BaseException | None = None

    def keep(self, trace: str) -> None:
        """Keeps the file, with a traceback at its end."""
        self.kept = True
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"\n{trace}\n")


@contextlib.contextmanager
def _quiet_log() -> Iterator[_Log]:
    """Sends the log and the workers' stderr to a file, which is kept only if something goes wrong.

    The workers inherit this process's stderr as a file descriptor, so that one is redirected;
    Python's own `sys.stderr` keeps pointing to the terminal.
    """
    handle, path = tempfile.mkstemp(prefix="tfpipe-convert-", suffix=".log")
    log = _Log(path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = open(handle, "a", encoding="utf-8")  # noqa: SIM115
    root.handlers[:] = [logging.StreamHandler(stream)]
    root.setLevel(logging.WARNING)
    sys.stderr.flush()
    terminal = os.dup(2)
    python_stderr = sys.stderr
    redirect = python_stderr is sys.__stderr__

    def note(args: threading.ExceptHookArgs) -> None:
        traceback.print_exception(args.exc_value, file=stream)
        if args.thread is not None and args.thread.name == "run_worker":  # waits for one process
            log.dead_worker = args.exc_value

    # What ends in a thread of the runner's, such as the stream to a worker that was killed.
    excepthook, threading.excepthook = threading.excepthook, note
    os.dup2(stream.fileno(), 2)
    if redirect:
        sys.stderr = open(os.dup(terminal), "w", buffering=1, encoding="utf-8")  # noqa: SIM115
    try:
        yield log
    except BaseException:
        log.kept = True
        raise
    finally:
        if redirect:
            sys.stderr.close()
            sys.stderr = python_stderr
        os.dup2(terminal, 2)
        os.close(terminal)
        root.handlers[:] = handlers
        root.setLevel(level)
        threading.excepthook = excepthook
        stream.close()
        if not log.kept:
            os.unlink(path)
