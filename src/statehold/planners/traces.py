"""Failures over time: drawn from a distribution, or given.

A trace is iterated again and again, and gives the same failures each time, in the order of time. So
all policies of a comparison meet the same failures, however long each of them takes.

    CSV    a header `time_s,replica,repair_s`, then a line for each failure
    JSON   a list of objects with these keys, or {"failures": [...], "duration_s": ...}

`replica` is a number from 0 on, and counts modulo the replicas of the job. If it is empty or null,
the whole job fails. `repair_s` is the time until the machines of the replica may be used again.
Without it they come back with the next restart of the job. A trace that is shorter than a run is
repeated, shifted by `duration_s`, which is the time of the last failure if it is not given.

Invariants: times are in seconds since the start of the job. The same seed draws the same failures.
Pure: it parses text, and reads no file.
"""

from __future__ import annotations

import csv
import heapq
import io
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statehold.encoding import strictjson
from statehold.errors import UsageError, refused, shown

COLUMNS = ("time_s", "replica", "repair_s")
EXPONENTIAL = 1.0


@dataclass(frozen=True, slots=True)
class Failure:
    """replica: None if the whole job fails. repair_s: infinite until the next restart."""

    at_s: float
    replica: int | None
    repair_s: float = math.inf


@dataclass(frozen=True, slots=True)
class DrawnTrace:
    """Failures of nodes, each with a Weibull clock that begins at 0 and again after each repair.

    mtbf_s: of the whole job, by the mean of the clocks. With a shape below 1 a young job fails more
        often than that. nodes: of a replica. repair_s: the mean of exponential repairs.
    job_mtbf_s: of losses of the whole job, which come at a constant rate.
    """

    replicas: int
    mtbf_s: float
    seed: int = 0
    shape: float = EXPONENTIAL
    nodes: int = 1
    repair_s: float = math.inf
    job_mtbf_s: float = math.inf

    def __iter__(self) -> Iterator[Failure]:
        of_nodes = self._superposed() if self.shape == EXPONENTIAL else self._renewed()
        return heapq.merge(of_nodes, self._of_job(), key=lambda failure: failure.at_s)

    def _superposed(self) -> Iterator[Failure]:
        """Constant rates: the sum of the clocks is one clock. A failure of a replica that is down
        is drawn, and has no effect."""
        random_ = random.Random(f"nodes {self.seed}")
        at_s = 0.0
        while True:
            at_s += random_.expovariate(1 / self.mtbf_s)
            yield Failure(at_s, random_.randrange(self.replicas), self._repair(random_))

    def _renewed(self) -> Iterator[Failure]:
        random_ = random.Random(f"nodes {self.seed}")
        count = self.replicas * self.nodes
        scale_s = self.mtbf_s * count / math.gamma(1 + 1 / self.shape)
        clocks = [(random_.weibullvariate(scale_s, self.shape), node) for node in range(count)]
        heapq.heapify(clocks)
        while True:
            at_s, node = clocks[0]
            repair_s = self._repair(random_)
            again_s = at_s + (repair_s if math.isfinite(repair_s) else 0.0)
            next_s = again_s + random_.weibullvariate(scale_s, self.shape)
            heapq.heapreplace(clocks, (next_s, node))
            yield Failure(at_s, node // self.nodes, repair_s)

    def _of_job(self) -> Iterator[Failure]:
        random_ = random.Random(f"job {self.seed}")
        at_s = 0.0
        while math.isfinite(self.job_mtbf_s):
            at_s += random_.expovariate(1 / self.job_mtbf_s)
            yield Failure(at_s, None)

    def _repair(self, random_: random.Random) -> float:
        is_drawn = 0 < self.repair_s < math.inf
        return random_.expovariate(1 / self.repair_s) if is_drawn else self.repair_s


@dataclass(frozen=True, slots=True)
class Given:
    """Failures from a file, in the order of time, repeated after duration_s."""

    failures: Sequence[Failure]
    duration_s: float

    def __iter__(self) -> Iterator[Failure]:
        for turn in itertools.count():
            for each in self.failures:
                at_s = each.at_s + turn * self.duration_s
                yield Failure(at_s, each.replica, each.repair_s)

    def mtbf_s(self) -> float:
        """The mean time between two failures."""
        return self.duration_s / len(self.failures)


Trace = DrawnTrace | Given


def parse(text: str) -> Given:
    """A trace from the text of a file. Raises UsageError for anything else."""
    is_json = text.lstrip().startswith(("[", "{"))
    rows, duration = _json_rows(text) if is_json else (csv_rows(text, COLUMNS, COLUMNS[:2]), None)
    found = sorted((_failure(row, n) for n, row in enumerate(rows, 1)), key=lambda each: each.at_s)
    if not found:
        raise UsageError("a trace has no failures", hint="give at least one, or no trace")
    last_s = found[-1].at_s
    duration_s = _number(duration, "duration_s", "the trace") if duration is not None else last_s
    if duration_s < last_s or duration_s <= 0:
        facts = {"expected": f"above 0, and at least {last_s:g} s", "got": f"{duration_s:g} s"}
        raise UsageError("a trace is shorter than its failures", facts=facts)
    return Given(tuple(found), duration_s)


def csv_rows(text: str, columns: Sequence[str], needed: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a trace with these columns. Raises UsageError without those that it needs."""
    reader = csv.DictReader(io.StringIO(text.removeprefix("\ufeff")))  # as spreadsheets save it
    try:
        if missing := sorted(set(needed) - set(reader.fieldnames or ())):
            got = f"missing {','.join(missing)}"
            raise refused("a trace has no header with its columns", ",".join(columns), got)
        return [*reader]
    except csv.Error as error:
        raise refused("a trace is no CSV", ",".join(columns), str(error)) from error


def _json_rows(text: str) -> tuple[list[Mapping[str, Any]], Any]:
    try:
        document = strictjson.message(text.encode("utf-8", "replace"))
    except ValueError as error:
        raise UsageError("a trace is not JSON", facts={"error": str(error)}) from error
    rows = document.get("failures") if isinstance(document, dict) else document
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        expected = 'a list of objects, or {"failures": [...]}'
        raise UsageError("a trace is not a list of failures", facts={"expected": expected})
    return rows, document.get("duration_s") if isinstance(document, dict) else None


def _failure(row: Mapping[str, Any], number: int) -> Failure:
    where = f"failure {number}"
    at_s = _number(row.get("time_s"), "time_s", where)
    replica, repair = row.get("replica"), row.get("repair_s")
    return Failure(
        at_s,
        None if replica in (None, "") else int(_number(replica, "replica", where)),
        math.inf if repair in (None, "") else _number(repair, "repair_s", where),
    )


def _number(value: Any, name: str, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        facts = {"where": where, "expected": f"{name}: a number from 0 on", "got": shown(value)}
        raise UsageError("a trace has a value that is not a number", facts=facts)
    return number
