"""Rows that can't be taken: what is kept of them, and how the good ones beside them are.

    with BadRows(scan, max_rejected) as bad:
        accept(batch, take, lambda part, misfit: bad.add(...))

The block ends early, without an error, at the first bad row more than allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

# Characters of a rejected row that are kept.
RAW_CHARACTERS = 1000


class Fault(Exception):
    """Why a record can't be taken.

    Attributes:
        problem: what must hold and what was found.
        remedy: what to do.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem, self.remedy = problem, remedy


class Misfit(Exception):
    """A value that does not fit what its column must hold.

    Attributes:
        number: its row within the batch.
        column: its column's name.
        expected: what must hold.
        found: the value, shortened.
        remedy: what to do.
    """

    def __init__(self, number: int, column: str, expected: str, found: str, remedy: str) -> None:
        super().__init__(number, column, expected, found, remedy)
        self.number, self.column, self.expected = number, column, expected
        self.found, self.remedy = found, remedy


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that can't be taken.

    Attributes:
        row: its number within the split, the first is 1.
        problem: what must hold and what was found.
        remedy: what to do.
        raw: the row's text or values, shortened.
        origin: where it is, if a row number of the split's file does not tell.
        fatal: whether nothing behind it can be read, so that leaving it out is no way on.
    """

    row: int
    problem: str
    remedy: str
    raw: str = ""
    origin: str = ""
    fatal: bool = False


class _Enough(Exception):
    """More bad rows than allowed: the rest need not be looked at."""


class BadRows:
    """Collects the bad rows of a split's scan, up to one more than allowed.

    Args:
        scan: whose `bad` they go to.
        allowed: how many.
    """

    def __init__(self, scan: Any, allowed: int) -> None:
        self.scan, self.allowed = scan, allowed

    def __enter__(self) -> BadRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.scan.bad.sort(key=lambda bad: bad.row)
        return kind is _Enough

    def add(self, bad: BadRow) -> None:
        """Adds one."""
        self.scan.bad.append(bad)
        if bad.fatal or len(self.scan.bad) > self.allowed:
            raise _Enough


def accept(batch: Any, take: Callable[[Any], None], reject: Callable[[Any, Misfit], None]) -> None:
    """Takes all rows of a batch but those that don't fit, the first of them first.

    A batch with a misfit is halved until the misfit stands alone, so that a few bad rows cost a
    few looks at their neighbours, not one look at all of them each.

    Args:
        batch: with `rows` and `halves()`.
        take: takes a batch whole, or raises `Misfit` and leaves all as it was.
        reject: gets a batch of one row, and why it does not fit.
    """
    try:
        take(batch)
    except Misfit as misfit:
        if batch.rows == 1:
            reject(batch, misfit)
            return
        for half in batch.halves():
            accept(half, take, reject)
