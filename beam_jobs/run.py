"""Both passes as Beam pipelines: one on the local runner, pinned; one a pass on an engine of several machines.

    Create(InputSplit) --ScanSplit--> all scans --MakePlan--> Plan
                       --EncodeSplit(Plan)--> (shard, Piece) --GroupByKey--> WriteShard --> results

On the local runner it is one pipeline, so that the worker processes start once: the plan reaches
pass 2 as a side input, which no split of pass 2 can start without. Engines differ in how they take
side inputs (Dask computes them again for every bundle), so there the driver makes the plan between
two pipelines; what they leave in staging, which all of them see, joins the two. Failures are elements
(`outcome.py`); only a fault of the runner itself, such as a killed worker, is an exception here.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from beam_jobs.engines import engine_of, engine_options, local_options
from beam_jobs.keys import CountKeys, FinishPlan
from beam_jobs.log import quiet_log
from beam_jobs.outcome import ALL, PLAN_FAILURE, RESULTS, Failure, load, save
from beam_jobs.plan import Plan, PlanSummary, Request
from beam_jobs.scan import MakePlan, ScanSplit, read_plan
from beam_jobs.sources import InputSplit, Source, Wishes
from beam_jobs.sources.summary import SplitScan
from beam_jobs.write import EncodeSplit, WriteShard, merge_statistics
from tfpipe.errors import OutputError, TfpipeError
from tfpipe.manifest import Shard

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


class SaveFailures(beam.DoFn):
    """Leaves the failures of a pass over all input splits in staging for the driver.

    Args:
        staging: the run's own directory.
        name: of the file.
    """

    def __init__(self, staging: str, name: str) -> None:
        self.staging, self.name = staging, name

    def process(self, results: tuple[int, Iterable[tuple[int, object]]]) -> Iterator[None]:
        """(ALL, all (split's index, anything | Failure)) -> nothing."""
        yield from ()
        if not os.path.isdir(self.staging):  # or the engine would tell of some file
            raise OutputError(
                f"the output must be a directory that every worker sees by the same path, got none on "
                f"{platform.node()} ({os.path.dirname(self.staging)}). Choose an --output on a shared file system."
            )
        failures = {i: dataclasses.asdict(found) for i, found in results[1] if isinstance(found, Failure)}
        save(self.staging, self.name, failures)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be done.

    Attributes:
        source: to read.
        splits: of the source, in order.
        wishes: what the scan checks.
        request: what the user asked for.
        staging: the run's own directory.
        inline: whether pieces travel through the runner; see `pieces.py`.
    """

    source: Source
    splits: Sequence[InputSplit]
    wishes: Wishes
    request: Request
    staging: str
    inline: bool

    def inputs(self, pipeline: beam.Pipeline) -> beam.PCollection[InputSplit]:
        """The input splits, spread over the workers."""
        return pipeline | "CreateSplits" >> beam.Create(self.splits) | "SpreadSplits" >> beam.Reshuffle()

    def scan(self, inputs: beam.PCollection[InputSplit]) -> beam.PCollection:
        """Pass 1: (ALL, all (index, SplitScan | Failure))."""
        scan = ScanSplit(self.source, self.wishes, self.request.scan_limit, self.staging)
        # Grouped by one key: a third of the transforms that ToList has.
        return inputs | "ScanSplit" >> beam.ParDo(scan) | "CollectScans" >> beam.GroupByKey()

    def count_keys(self, inputs: beam.PCollection[InputSplit], plan: Any) -> beam.PCollection:
        """The pass in between, of `--split-by`: (ALL, all (index, counts | Failure))."""
        count = CountKeys(self.request, self.source, self.staging)
        return inputs | "CountKeys" >> beam.ParDo(count, plan) | "CollectKeys" >> beam.GroupByKey()

    def write(self, inputs: beam.PCollection[InputSplit], plan: Any) -> None:
        """Pass 2: leaves its results in staging."""
        encode = EncodeSplit(self.request, self.source, self.staging, self.inline)
        (
            inputs
            | "EncodeSplit" >> beam.ParDo(encode, plan)
            | "GroupByShard" >> beam.GroupByKey()  # (shard, [Piece | Failure])
            | "WriteShard" >> beam.ParDo(WriteShard(self.staging), plan)
            | "CollectShards" >> beam.GroupByKey()  # (ALL, [(shard, Shard | Failure)])
            | "SaveResults" >> beam.ParDo(SaveResults(self.staging))
        )

    def make_plan(self) -> MakePlan:
        """What makes the plan from all scans."""
        return MakePlan(self.request, self.source, self.splits, self.staging)


def run_in_one(job: Job, options: PipelineOptions) -> None:
    """Runs both passes as one pipeline on the local runner."""
    pipeline = beam.Pipeline(runner=FnApiRunner(), options=options)
    inputs = job.inputs(pipeline)
    plan = job.scan(inputs) | "MakePlan" >> beam.ParDo(job.make_plan())  # Plan | Failure
    if job.request.split_by:
        counts = job.count_keys(inputs, beam.pvalue.AsSingleton(plan))
        finish = FinishPlan(job.request, job.staging)
        plan = counts | "FinishPlan" >> beam.ParDo(finish, beam.pvalue.AsSingleton(plan))
    plan | "SavePlanFailure" >> beam.ParDo(SavePlanFailure(job.staging))
    job.write(inputs, beam.pvalue.AsSingleton(plan))
    pipeline.run().wait_until_finish()


def run_apart(job: Job, options: PipelineOptions) -> None:
    """Runs each pass as a pipeline of its own on an engine; the driver makes the plan in between."""

    def collect(name: str, build: Callable[[beam.PCollection[InputSplit]], beam.PCollection]) -> list[Any]:
        pipeline = beam.Pipeline(options=options)
        saved = f"{name}-failures.json"
        build(job.inputs(pipeline)) | "SaveFailures" >> beam.ParDo(SaveFailures(job.staging, saved))
        _finish(pipeline)
        failures = {int(i): Failure(**found) for i, found in (load(job.staging, saved) or {}).items()}
        found = ((split.index, load(job.staging, f"{name}-{split.index}.json")) for split in job.splits)
        results = [
            (i, failures.get(i, content)) for i, content in found if i in failures or content is not None
        ]
        if len(results) != len(job.splits) and not failures:
            raise TfpipeError(
                f"every input split must be read, got {len(results)} of {len(job.splits)}. Convert again."
            )
        return results

    scans = [
        (i, found if isinstance(found, Failure) else SplitScan.from_json(found))
        for i, found in collect("scan", job.scan)
    ]
    (plan,) = job.make_plan().process((ALL, scans))
    if job.request.split_by and not isinstance(plan, Failure):
        counts = collect("keys", lambda inputs: job.count_keys(inputs, plan))
        (plan,) = FinishPlan(job.request, job.staging).process((ALL, counts), plan)
    if isinstance(plan, Failure):
        save(job.staging, PLAN_FAILURE, dataclasses.asdict(plan))
        return
    pipeline = beam.Pipeline(options=options)
    job.write(job.inputs(pipeline), plan)
    _finish(pipeline)


def _finish(pipeline: beam.Pipeline) -> None:
    result = pipeline.run()
    try:
        result.wait_until_finish()
    finally:
        if (client := getattr(result, "client", None)) is not None:  # Dask's, which its runner leaves open
            client.close()


def run(
    *,
    source: Source,
    splits: Sequence[InputSplit],
    wishes: Wishes,
    request: Request,
    staging: str,
    beam_args: Sequence[str],
    watch: Callable[[], None],
    pieces: str = "auto",
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
        pieces: "inline", "files", or "auto" for what suits the runner.

    Returns:
        The plan that was carried out, and the shards in its order, verified.

    Raises:
        TfpipeError: whatever went wrong, the first problem of the input before all others.
    """
    engine = engine_of(beam_args)
    if engine:
        options = engine_options(beam_args, engine, len(splits))
    else:
        options = local_options(beam_args, source.work_bytes)
    job = Job(
        source=source, splits=splits, wishes=wishes, request=request, staging=staging,
        inline=bool(engine) if pieces == "auto" else pieces == "inline",
    )  # fmt: skip
    with quiet_log() as log:
        outcome: list[BaseException] = []

        def body() -> None:
            try:
                (run_apart if engine else run_in_one)(job, options)
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
        if outcome and isinstance(outcome[0], TfpipeError):
            raise outcome[0]
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


def _results(staging: str) -> tuple[list[Shard], list[Failure]]:
    if (failure := load(staging, PLAN_FAILURE)) is not None:
        return [], [Failure(**failure)]
    results = load(staging, RESULTS) or {"failures": [], "shards": []}
    return [Shard(**shard) for shard in results["shards"]], [Failure(**f) for f in results["failures"]]


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}".rstrip(". ")
