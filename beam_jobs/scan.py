"""Pass 1: every input split is read and counted; then the plan is made.

    InputSplit --ScanSplit--> (index, SplitScan | Failure) --all of them--> Plan | Failure

Nothing is written before the plan is known, except the run's own progress marks.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import apache_beam as beam

from beam_jobs.outcome import ALL, Failure, guarded, has_failed, load, save, unfinished
from beam_jobs.plan import Plan, PlanSummary, Reject, Request, make_plan
from beam_jobs.sources import InputSplit, Source, Wishes, printable
from beam_jobs.sources.summary import SplitScan

PLAN = "plan.json"
REJECTED = "rejected.jsonl"
# A sample that compresses to more than this part of its size is not worth it.
COMPRESSION_PAYS = 0.9
_SAMPLE_ROWS = 1000


class ScanSplit(beam.DoFn):
    """Counts the records of an input split.

    Args:
        source: to read.
        wishes: what to check.
        max_rejected: rows of a split that can't be taken before the rest need not be looked at.
        staging: the run's own directory.
    """

    def __init__(self, source: Source, wishes: Wishes, max_rejected: int, staging: str) -> None:
        self.source, self.wishes, self.max_rejected, self.staging = source, wishes, max_rejected, staging

    @guarded(lambda split, failure: (ALL, (split.index, failure)))
    def process(self, split: InputSplit) -> Iterator[tuple[int, tuple[int, SplitScan | Failure]]]:
        """InputSplit -> (ALL, (its index, what was found))."""
        name = f"scan-{split.index}.json"  # there if a run that is resumed got so far
        if (found := load(self.staging, name)) is None:
            scan = self.source.scan(split, self.wishes, self.max_rejected)
            save(self.staging, name, scan.to_json())
        else:
            scan = SplitScan.from_json(found)
        mark(self.staging, "scan", split.index, scan.rows)
        yield ALL, (split.index, scan)


class MakePlan(beam.DoFn):
    """Makes the plan from all scans.

    Args:
        request: what the user asked for.
        source: that was scanned.
        splits: all of them, in order.
        staging: the run's own directory; the plan is left there for the driver.
    """

    def __init__(self, request: Request, source: Source, splits: Sequence[InputSplit], staging: str) -> None:
        self.request, self.source, self.splits, self.staging = request, source, splits, staging

    @guarded(lambda _, failure: failure)
    def process(
        self, scans: tuple[int, Iterable[tuple[int, SplitScan | Failure]]]
    ) -> Iterator[Plan | Failure]:
        """(ALL, all scans, in any order) -> Plan | Failure."""
        plan = self._plan([scan for _, scan in sorted(scans[1], key=lambda item: item[0])])
        if isinstance(plan, Plan) and not self.request.split_by:  # else `keys.FinishPlan` does
            save(self.staging, PLAN, plan.summary().to_json())
        yield plan

    def _plan(self, scans: list[SplitScan | Failure]) -> Plan | Failure:
        # The first problem of the input counts, whichever worker met one first.
        before: list[SplitScan] = []
        for scan in scans:
            if isinstance(scan, Failure):
                return scan
            before.append(scan)
            if scan.bad and (scan.bad[-1].fatal or len(scan.bad) > self.request.scan_limit):
                break
        plan, rejects = make_plan(self.request, self.source, self.splits[: len(before)], before)
        save_rejects(self.staging, rejects)
        if plan.compression == "auto":
            plan = dataclasses.replace(plan, compression=choose_compression(plan, self.source, self.splits))
        return plan


def choose_compression(plan: Plan, source: Source, splits: Sequence[InputSplit]) -> str:
    """Compresses a sample of encoded records to see whether it pays.

    Args:
        plan: with schema and layout.
        source: to sample.
        splits: of the source; the first and the middle one are looked at.

    Returns:
        "GZIP", or "" where the sample hardly shrinks or need not be tried.
    """
    if source.is_compressed:
        return ""
    from isal import isal_zlib

    from beam_jobs.encode import RecordTooLong, encode_batch

    before = after = 0
    for split in {0: splits[0], len(splits) // 2: splits[len(splits) // 2]}.values():
        for batch in source.read(split, plan.wishes, plan.rejected.get(split.index, ())):
            sample = plan.layout.assemble(batch.slice(0, _SAMPLE_ROWS))
            try:
                data = encode_batch(sample, plan.schema).data
            except RecordTooLong:  # told with its place where it is written
                break
            before += len(data)
            after += len(isal_zlib.compress(data, 1))
            break
    return "" if before and after > COMPRESSION_PAYS * before else "GZIP"


def save_rejects(staging: str, rejects: Sequence[Reject]) -> None:
    """Leaves the rows that are left out in staging, one JSON object a line."""
    temporary = Path(staging) / f"{REJECTED}{unfinished()}"
    with open(temporary, "w", encoding="utf-8") as file:
        for reject in rejects:
            line = {"origin": printable(reject.origin), "reason": reject.reason, "raw": reject.raw}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    os.replace(temporary, Path(staging) / REJECTED)


def mark(staging: str, stage: str, index: int, rows: int) -> None:
    """Leaves a mark that a piece of work is done; the driver's progress bar counts them."""
    if not has_failed(staging):
        (Path(staging) / f"done-{stage}-{index}-{rows}").touch()


def read_marks(staging: str) -> dict[str, tuple[int, int]]:
    """Counts the marks.

    Returns:
        Per stage: pieces of work done, and their records.
    """
    totals: dict[str, tuple[int, int]] = {}
    for path in Path(staging).glob("done-*"):
        _, stage, _, rows = path.name.split("-")
        count, total = totals.get(stage, (0, 0))
        totals[stage] = count + 1, total + int(rows)
    return totals


def read_plan(staging: str) -> PlanSummary | None:
    """Loads the plan that `MakePlan` left, or None if there is none (yet)."""
    content = load(staging, PLAN)
    return None if content is None else PlanSummary.from_json(content)
