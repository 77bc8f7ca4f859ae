"""`statehold verify RUN[@STEP] [--levels]`: read and check every byte of a step, or of its copies.

Invariants: for every bad piece it shows the file, bytes, tensor and rank. A damaged file that
several steps hold is named once, with all of them. Files that no document names are listed. They
are not damage, because a restore does not look at them.
Not here: what counts as damage (checking).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from statehold._core import Fs
from statehold.cli import codes, levels
from statehold.cli.checking import CheckReport, SpanReader, check_step
from statehold.cli.output import (
    ProgressBar,
    bad,
    counted,
    emit,
    good,
    note,
    plain,
    say,
    table,
    weak,
)
from statehold.cli.places import tree_bytes
from statehold.errors import StateholdError, StepNotFoundError
from statehold.reading.places import StepPlace, asked_of, file_system, find, run_at
from statehold.reading.sizes import files_below
from statehold.steps.directories import REPLACED, step_of
from statehold.steps.pool import POOL_NAME
from statehold.steps.publish import directory_id, look_beside_a_writer, where
from statehold.steps.shelf import DirectoryShelf
from statehold.units import format_bytes, format_seconds

_SHOWN = 20  # findings of a step


def run(args: argparse.Namespace) -> int:
    fs = file_system()
    documents, shared, looked = [], SharedDamage(), list[levels.FoundLevel]()
    for document, report, seconds in _checked(fs, args, looked):
        documents.append(document)
        known = shared.add(report)
        if not args.json:
            _show(report, seconds, document.get("level"), known)
    for level in looked:
        if level.state == "unreadable":
            note(f"level {level.entry.name} was not read: ", level.error)
    if not documents:
        raise StepNotFoundError("the step was retired while it was read")
    intact = all(document["intact"] for document in documents)
    if args.json:
        files = [each.document() for each in shared.files.values()]
        emit({"intact": intact, "steps": documents, "shared_damage": files})
    else:
        for each in shared.files.values():
            say(_shown(each))
        if args.all:
            say(_summary(documents))
    return codes.code_at_levels([level.state for level in looked], is_damaged=not intact)


def _checked(
    fs: Fs, args: argparse.Namespace, looked: list[levels.FoundLevel]
) -> Iterator[tuple[dict[str, Any], CheckReport, float]]:
    """(output for --json, findings, seconds) of each step, or copy. looked: gets the levels."""
    if not args.levels:
        places = _all(fs, args.step) if args.all else [find(fs, args.step, damaged=True)]
        for report, seconds in verified(fs, places):
            yield document_of(report, seconds), report, seconds
        return
    run, wanted = asked_of(args.step)
    looked += levels.levels_of(fs, run, far=True, options=levels.far_options(args.option))
    steps = levels.steps_of(looked)
    if not steps or (wanted is not None and wanted not in steps):
        facts = {"run": run_at(run), "levels": ", ".join(level.entry.name for level in looked)}
        raise StepNotFoundError("no such step at any level of this run", facts=facts)
    for step in steps if args.all else [steps[-1] if wanted is None else wanted]:
        for level, _ in levels.copies_of(looked, step):
            for report, seconds in verified_copy(fs, level, step):
                document = {"level": level.entry.name, **document_of(report, seconds)}
                document["path"] = level.held[step]["path"]
                yield document, report, seconds


def verified_copy(
    fs: Fs, level: levels.FoundLevel, step: int
) -> Iterator[tuple[CheckReport, float]]:
    """The findings in a copy of a step at a level; nothing if it was retired meanwhile."""
    if level.place is not None:
        with level.place.near(step) as directory:
            yield from verified(
                fs, [StepPlace(directory, step, level.entry.name, level.entry.per_host)]
            )


def verified(fs: Fs, places: Iterable[StepPlace]) -> Iterator[tuple[CheckReport, float]]:
    """Read and check steps; the findings in each, and the seconds.

    A step that its job retires meanwhile is left out.
    """
    with SpanReader() as reader:
        for place in places:
            begin_s = time.perf_counter()
            report = _verify(fs, place, reader)
            if report is not None:
                yield report, time.perf_counter() - begin_s


def _all(fs: Fs, text: str) -> list[StepPlace]:
    store = DirectoryShelf(fs, run_at(text))
    steps = store.steps()
    if not steps:
        raise StepNotFoundError("no step is committed in this run", facts={"run": text})
    return [StepPlace(store.where(step), step, text) for step in steps]


class _Damage(StateholdError):
    """A look at a step has found damage; it counts if the step is still the same save."""

    def __init__(self, report: CheckReport) -> None:
        super().__init__("a step is damaged")
        self.report = report


def _verify(fs: Fs, place: StepPlace, reader: SpanReader) -> CheckReport | None:
    """The findings in one save of a step; None if it was retired meanwhile."""
    named, final = place.directory, place.directory.removesuffix(REPLACED)

    def now() -> str:  # a writer may be giving it its other name
        return named if fs.is_dir(named) else where(fs, final)

    def look() -> CheckReport:
        report = _read_all(fs, replace(place, directory=now()), reader)
        if not report.is_intact:
            raise _Damage(report)
        return report

    try:
        return look_beside_a_writer(look, lambda: directory_id(now()), final)
    except _Damage as found:
        return found.report


def _read_all(fs: Fs, place: StepPlace, reader: SpanReader) -> CheckReport:
    nbytes = tree_bytes(place.directory)[0]
    with contextlib.closing(ProgressBar(f"step {place.step}", nbytes)) as progress:
        return check_step(fs, place, reader, progress.advance)


def document_of(report: CheckReport, seconds: float) -> dict[str, Any]:
    """The output of a step with --json."""
    return {
        "step": report.place.step,
        "path": report.place.directory,
        "intact": report.is_intact,
        "world_size": report.world_size,
        "ranks_here": report.world_size - len(report.elsewhere),
        "files": report.files,
        "tensors": len(report.names),
        "pieces": report.pieces,
        "bytes": report.bytes,
        "seconds": round(seconds, 6),
        "damage": [finding.document() for finding in report.findings],
        "foreign": report.foreign,
    }


def _show(report: CheckReport, seconds: float, level: str | None, known: Collection[str]) -> None:
    """known: files whose damage was shown in another step."""
    where = f" at level {level}" if level else ""
    speed = format_bytes(int(report.bytes / max(seconds, 1e-9)))
    state = good("intact") if report.is_intact else bad("DAMAGED")
    part = ""
    if report.elsewhere:
        here = report.world_size - len(report.elsewhere)
        part = weak(f", part ({here} of {report.world_size} ranks here)")
    counts = ((report.files, "file"), (len(report.names), "tensor"), (report.pieces, "piece"))
    held = ", ".join(counted(*each) for each in counts)
    say(f"step {report.place.step}{where}: ", state, part, f"; {held}, "
        f"{format_bytes(report.bytes)} in {format_seconds(seconds)} ({speed}/s)")  # fmt: skip
    findings = [each for each in report.findings if each.file not in known]
    if findings:
        header = ("DAMAGE", "TENSOR", "RANK", "FILE", "BYTES", "PIECES", "DETAIL")
        shown = findings[:_SHOWN]
        rows = (cells_of(each.document()) for each in shown)
        say(table(header, rows, right="RANK BYTES PIECES", prose="DETAIL"))
        if len(findings) > len(shown):
            say(f"and {len(findings) - len(shown)} more; --json lists all of them")
    for name in sorted(known):
        say(f"the same damaged file as in a step above: {plain(name)}")
    for name in report.foreign:
        say(f"not part of the step: {plain(name)}")


def _summary(documents: Sequence[dict[str, Any]]) -> str:
    """What was checked, in one line."""
    wrong = [document for document in documents if not document["intact"]]
    steps = ", ".join(dict.fromkeys(str(document["step"]) for document in wrong))
    damaged = f", {len(wrong)} damaged (step {steps})" if wrong else ""
    size = format_bytes(sum(document["bytes"] for document in documents))
    return f"in all: {len(documents) - len(wrong)} intact{damaged}; {size}"


def _shown(file: DamagedFile) -> str:
    steps = f"step{'s' * (len(file.steps) > 1)} {', '.join(map(str, file.steps))}"
    others = f", and {counted(file.elsewhere, 'name')} outside of the run" if file.elsewhere else ""
    return f"one damaged file that steps share: {plain(file.file)}, in {steps}{others}"


def cells_of(finding: Mapping[str, Any]) -> tuple[Any, ...]:
    """The cells of a finding, as --json has it, in the order of the table."""
    detail, expected, rank = finding["detail"], finding["expected"], finding["rank"]
    if expected is not None:
        compared = f"expected {expected}, got {finding['got'] or 'nothing'}"
        detail = f"{detail}: {compared}" if detail else compared
    where = "-" if finding["begin"] is None else f"[{finding['begin']}, {finding['end']})"
    tensor, file = finding["tensor"] or "-", finding["file"] or "-"
    rank, pieces = "-" if rank is None else rank, finding["pieces"] or "-"
    return finding["what"], tensor, rank, file, where, pieces, detail


# -- shared damage ---------------------------------------------------------------------------------
# Only names and inodes are looked at. Steps are those of the run that has the file; other runs,
# forked from it, may hold it, too, and are only counted.


Inode = tuple[int, int]


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """file: its name in the first of the steps of `run`. elsewhere: how many names it has outside
    of the run."""

    run: str
    file: str
    steps: tuple[int, ...]
    elsewhere: int

    def document(self) -> dict[str, Any]:
        return asdict(self)


class SharedDamage:
    """The damaged files with several names that were found in steps."""

    def __init__(self) -> None:
        self.files: dict[Inode, DamagedFile] = {}

    def add(self, report: CheckReport) -> set[str]:
        """Take the files of another step. Returns the names of those that were there already."""
        known = set()
        for name in {each.file for each in report.findings if each.file is not None}:
            path = f"{report.place.directory}/{name}"
            with contextlib.suppress(OSError):  # it is missing
                found = os.lstat(path)
                key = found.st_dev, found.st_ino
                if key in self.files:
                    known.add(name)
                elif found.st_nlink > 1:
                    self.files[key] = _held(os.path.dirname(report.place.directory), name, found)
        return known


def _held(run: str, name: str, found: os.stat_result) -> DamagedFile:
    steps, names = [], 0
    for folder in os.listdir(run):
        if folder == POOL_NAME or folder.startswith("step-"):
            files = files_below([os.path.join(run, folder)])
            count = sum(os.path.samestat(each, found) for each in files)
            step = step_of(folder)
            if count and step is not None:
                steps.append(step)
            names += count
    return DamagedFile(run, name, tuple(sorted(steps)), max(0, found.st_nlink - names))
