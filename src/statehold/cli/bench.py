"""`statehold bench io PATH`: the factors of checkpoint I/O on the storage of PATH, and its profile.

Owns: a study: rounds of cases until the time is over, a choice, its proof, the reasons, and the
documents of all that.
Invariants: everything is written into a temporary directory in PATH, which is removed again, also
after an error. The profile is written last, so an interrupted study leaves none. Before anything is
measured, the study tries that the profile and the records can be written. The candidates of the
choice are measured first, so a study that runs out of time has them. Figures of one case lie
minutes apart, so a median has seen the storage at several times. At the end the choice and the best
are measured again in turns, and that ratio is reported.
Not here: the cases, and the choice from their figures (cli/study).
"""

from __future__ import annotations

import argparse
import datetime
import errno
import json
import math
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from statehold.cli import codes
from statehold.cli.output import ProgressBar, emit, sections, table
from statehold.cli.study.measure import Bench
from statehold.cli.study.strategies import (
    JUDGED,
    Case,
    Contrast,
    Figure,
    Operation,
    Strategy,
    StudyFigures,
    best_of,
    bytes_of,
    cases_of,
    centre,
    choose,
    comparisons,
    finding,
    likely,
    llama,
    margin,
    moving_of,
    ordered,
    rates_of,
    score,
    strategies,
    top,
)
from statehold.cli.tables import Table
from statehold.errors import NoSpaceError, refused, storing
from statehold.io import profile
from statehold.io.mounts import mount_of
from statehold.options.io import DEFAULTS
from statehold.options.paths import absolute, check_path
from statehold.process.whole_files import try_folder
from statehold.reading.places import NotFoundError
from statehold.units import MiB, format_bytes, format_seconds, parse_bytes

_SIZE_MIN = 1 * MiB
_ROOM = 2.5  # of the size: writes that warm an engine up, the measured writes, and slack


def run(args: argparse.Namespace) -> int:
    study_at(args, lambda directory, size: Bench(directory, llama(size)))
    return codes.YES


def study_at(
    args: argparse.Namespace, bench: Callable[[str, int], Bench], more: Sequence[Contrast] = ()
) -> Study:
    """Measure, choose, write the profile and the records, and print.

    bench: makes one of a directory and the size of the state. more: comparisons with strategies
        that statehold does not have.
    """
    path = absolute(args.path, "the path")
    for each in filter(None, (args.profile, args.out)):
        check_path(each, "the output")
    size = _checked(path, args)
    file = None if args.no_profile else Path(args.profile or profile.path_for(path))
    _check_outputs(file, args.out)
    found = _measured(path, size, args, bench, more)
    document = {**_facts(path, size), **document_of(found)}
    document["profile"] = None if file is None else str(file)
    if file is not None:
        moving, why = moving_of(found.chosen), tuple(reasons(found))
        rates = rates_of(found.figures)
        profile.save(
            profile.Profile(mount_of(path), moving, document["measured"], why, rates), file
        )
    parts = [part for part in _parts(found, document, _whose(file, path)) if part]
    if args.out:
        _write_records(Path(args.out), document, "\n\n".join(map(str, parts)))
    emit(document) if args.json else sections(*parts)
    return found


def _checked(path: str, args: argparse.Namespace) -> int:
    """The size of the state, if there is space for the study."""
    if not os.path.isdir(path):
        raise NotFoundError("no such directory", facts={"path": path})
    size = parse_bytes(args.size)
    if size < _SIZE_MIN or not (0 < args.seconds < math.inf):
        expected = f"at least {format_bytes(_SIZE_MIN)}, more than 0 s"
        raise refused("too little to measure", expected, f"{args.size}, {args.seconds} s")
    info = os.statvfs(path)
    free = info.f_bavail * info.f_frsize
    if free < _ROOM * size:
        facts = {"path": path, "expected": format_bytes(int(_ROOM * size)),
                 "got": format_bytes(free)}  # fmt: skip
        raise NoSpaceError("too little free space to measure", facts=facts, hint="--size")
    return size


def _check_outputs(file: Path | None, out: str | None) -> None:
    """Raises StorageError if the profile or the records cannot be written."""
    with storing("write the results of the study"):
        if out is not None:
            try_folder(out)
        if file is not None:
            try_folder(file.parent)
            if file.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))


def _whose(file: Path | None, path: str) -> str:
    """Who takes the profile that was written."""
    if file is None:
        return ""
    if os.path.realpath(file) == os.path.realpath(profile.path_for(path)):
        return "A Checkpointer takes these settings for runs on this storage."
    use = f'Checkpointer(..., io=Io(profile="{file}"))'
    return f"No run takes this profile by itself. To use it: {use}"


def _measured(
    path: str,
    size: int,
    args: argparse.Namespace,
    bench: Callable[[str, int], Bench],
    more: Sequence[Contrast],
) -> Study:
    directory = tempfile.mkdtemp(prefix=".statehold-bench-", dir=path)
    threads = DEFAULTS.copy_threads
    progress = ProgressBar("measuring")
    try:
        made = bench(directory, size)
        return study_of(made, threads, args.seconds, args.full, progress.tell, more)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        progress.close()


def _facts(path: str, size: int) -> dict[str, Any]:
    mount = mount_of(path)
    return {
        "path": path,
        "storage": {"device": mount.device, "point": mount.point, "kind": mount.kind},
        "state_bytes": size,
        "tensors": len(llama(size).sizes),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "measured": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _write_records(directory: Path, document: Any, text: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    public = {key: value for key, value in document.items() if key not in ("path", "profile")}
    (directory / "io-results.json").write_text(json.dumps(public, indent=1) + "\n")
    (directory / "io-table.txt").write_text(text + "\n")


# -- text ------------------------------------------------------------------------------------------


def _parts(found: Study, document: dict[str, Any], whose: str) -> Iterator[str | Table]:
    storage = document["storage"]
    head = (
        f"{format_bytes(document['state_bytes'])} in {document['tensors']} tensors on "
        f"{storage['device']} ({storage['kind']}), {document['cores']} cores, load "
        f"{document['load'][0]}; {found.rounds} rounds, {format_seconds(found.took_s)}\n"
        "GB/s, medians, and the share of the best; ~ moved by more than a quarter between rounds"
    )
    yield head
    yield _judged_table(found.figures)
    yield _other_table(found.figures)
    yield _limits(document["rates"]) if document["rates"] else ""
    yield "What was found (~ moved):"
    yield _listed(document["findings"])
    yield "What to use:"
    yield _listed(document["why"])
    yield _listed([f"not possible here: {each['name']}: {each['why']}"
                   for each in document["refused"]])  # fmt: skip
    if document["unmeasured"]:
        yield f"no time for {len(document['unmeasured'])} strategies; raise --seconds"
    yield whose


def _limits(rates: dict[str, int]) -> str:
    write, read = (rates[f"{name}_bytes_per_s"] / 1e9 for name in ("write", "read"))
    return (
        f"The limit of this storage, which is the best of all strategies: {write:.2f} GB/s "
        f"writing, {read:.2f} GB/s reading cold"
    )


def _listed(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _judged_table(figures: StudyFigures) -> Table:
    tops = {operation: top(figures, operation) for operation in JUDGED}
    header, rows = ["STRATEGY"], []
    for operation in JUDGED:
        header += [operation.value.upper(), "OF-BEST"]
    for strategy in figures.strategies():
        row: list[str] = [strategy.name]
        for operation in JUDGED:
            row += _cells(figures, strategy, operation, tops[operation])
        rows.append(row)
    return table(header, rows, right=" ".join(["OF-BEST", *header[1:]]))


def _cells(
    figures: StudyFigures, strategy: Strategy, operation: Operation, top: float
) -> list[str]:
    rate = figures.of(strategy, operation)
    if rate is None:
        return ["-", "-"]
    mark = "~" if figures.moved(strategy, operation) else " "
    return [f"{rate:.2f}{mark}", f"{rate / top:.2f}"]


def _other_table(figures: StudyFigures) -> Table | str:
    """Factors by which only some strategies are measured."""
    rows = []
    for strategy, operation in figures.rates:
        if operation not in JUDGED:
            rate, _ = _cells(figures, strategy, operation, 1.0)
            rows.append((strategy.name, operation.value, rate))
    return table(("STRATEGY", "RESTORE", "GB/S"), rows, right="GB/S") if rows else ""


# -- a study ---------------------------------------------------------------------------------------


# Shares of the time: rounds of everything, rounds of the likely ones, the proof.
FIRST, SECOND = 0.5, 0.65
ROUNDS_MAX = 9
TURNS_MIN, TURNS_MAX = 3, 15
CHALLENGES_MAX = 3
DUELS = 4  # that share what is left of the time
SLACK = 0.05
PROVED = (Operation.OVERWRITE, Operation.COLD)

Show = Callable[[str, float], None]  # what runs now, and the share of the time that is over


@dataclass(frozen=True, slots=True)
class Remeasured:
    """The chosen settings against the best other ones of a kind, measured again in turns.

    ratio: the median of the ratios of the turns; `low` and `high` are their ends.
    """

    kind: str  # "statehold": of all settings; "bytes": of all strategies, without copy and checksum
    operation: Operation
    chosen: Strategy
    best: Strategy
    ratio: float
    low: float
    high: float
    turns: int


@dataclass
class Study:
    """The result: `refused` are the strategies that cannot run here, and the reasons.

    score, score_before: of the choice and of the middle, from the rounds. Scores that differ by
        less than `margin` are equal.
    """

    middle: Strategy
    full: bool
    compared: list[Contrast]
    figures: StudyFigures = field(default_factory=StudyFigures)
    refused: dict[Strategy, str] = field(default_factory=dict)
    unmeasured: list[Strategy] = field(default_factory=list)
    rounds: int = 0
    chosen: Strategy = field(default_factory=Strategy)
    score: float = 0.0
    score_before: float = 0.0
    margin: float = 0.0
    proofs: list[Remeasured] = field(default_factory=list)
    took_s: float = 0.0


def study_of(
    bench: Bench,
    copy_threads: int,
    seconds: float,
    full: bool,
    show: Show,
    more: Sequence[Contrast] = (),
) -> Study:
    """Measure, choose, prove. more: comparisons with strategies that statehold does not have."""
    middle = centre(copy_threads)
    study = Study(middle, full, [*more, *comparisons(middle)])
    clock = _Clock(bench, study, seconds, show)
    cases = cases_of(strategies(middle, full, study.compared))
    clock.rounds(cases, FIRST, ROUNDS_MAX)
    study.unmeasured = [
        case.strategy
        for case in cases
        if case.strategy not in study.refused and study.figures.of(case.strategy, JUDGED[0]) is None
    ]
    candidates = likely(study.figures, study.middle, full)
    clock.rounds(cases_of(_judged(candidates)), SECOND, ROUNDS_MAX)
    study.chosen = choose(study.figures, candidates, study.middle)
    _prove(study, clock)
    _judge(study)
    study.took_s = clock.elapsed_s
    return study


def _judge(study: Study) -> None:
    figures, pool = study.figures, study.figures.engines()
    study.score = score(figures, study.chosen, pool)
    study.score_before = score(figures, study.middle, pool)
    study.margin = margin(figures)


class _Clock:
    """Runs cases while there is time."""

    def __init__(self, bench: Bench, study: Study, seconds: float, show: Show) -> None:
        self._bench, self._study, self._seconds = bench, study, seconds
        self._show = show
        self._begin_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin_s

    @property
    def share(self) -> float:
        """The share of the time that is over."""
        return min(1.0, self.elapsed_s / self._seconds)

    def is_over(self, share: float) -> bool:
        return self.elapsed_s >= share * self._seconds

    def rounds(self, cases: Sequence[Case], share: float, most: int) -> None:
        """Whole rounds until that share of the time is over.

        The first round may take all the time except that of the proof. Cases without time are not
        measured.
        """
        for index in range(most):
            for case in ordered(cases, index):
                if self.is_over(SECOND if index == 0 else share):
                    return
                self._study.figures.add(case.strategy, self.time(case))
            self._study.rounds = max(self._study.rounds, index + 1)

    def time(self, case: Case) -> dict[Operation, float]:
        study = self._study
        if case.strategy in study.refused:
            return {}
        self._show(case.strategy.name, self.share)
        timing = self._bench.time(case)
        if timing.refused:
            study.refused[case.strategy] = timing.refused
        return timing.rates


def _judged(found: Sequence[Strategy]) -> list[Figure]:
    return [(strategy, operation) for strategy in found for operation in JUDGED]


# -- the proof -------------------------------------------------------------------------------------


def _prove(study: Study, clock: _Clock) -> None:
    """Let the best others challenge the choice; the one that is better side by side replaces it.

    Rounds compare figures that lie minutes apart. Turns compare figures that lie seconds apart.
    """
    beaten: set[Strategy] = set()
    for _ in range(CHALLENGES_MAX):
        pool = [each for each in study.figures.engines() if each not in beaten]
        duels = [
            _duel(clock, "statehold", study.chosen, rival)
            for rival in _rivals(study.figures, pool, study.chosen)
        ]
        study.proofs = [proof for duel in duels for proof in duel]
        lost = next((duel for duel in duels if is_lost(duel)), None)
        if lost is None:
            break
        beaten.add(study.chosen)
        study.chosen, study.proofs = lost[0].best, [_turned(proof) for proof in lost]
        if clock.is_over(1.0):
            break
    plain = bytes_of(study.chosen)
    others = [each for each in study.figures.strategies() if not each.is_engine]
    for rival in _rivals(study.figures, others, plain):
        study.proofs += _duel(clock, "bytes", plain, rival)


def _rivals(figures: StudyFigures, pool: Sequence[Strategy], chosen: Strategy) -> list[Strategy]:
    """The best others in the operations that are proved."""
    others = [each for each in pool if each != chosen]
    found = [best_of(figures, others, operation) for operation in PROVED]
    return list(dict.fromkeys(each for each in found if each is not None))


def is_lost(duel: Sequence[Remeasured]) -> bool:
    """Whether the other is better in its worst operation, by more than chance."""
    own = min((proof.ratio for proof in duel), default=1.0)
    others = min((1 / proof.ratio for proof in duel), default=1.0)
    return own < 1 - SLACK and others > own


def _turned(proof: Remeasured) -> Remeasured:
    """The same from the other side."""
    return replace(
        proof,
        chosen=proof.best,
        best=proof.chosen,
        ratio=1 / proof.ratio,
        low=1 / proof.high,
        high=1 / proof.low,
    )


def _duel(clock: _Clock, kind: str, chosen: Strategy, rival: Strategy) -> list[Remeasured]:
    """Both in turns, until a part of the remaining time is over; the first of each turn changes."""
    cases = cases_of([(each, operation) for each in (chosen, rival) for operation in PROVED])
    ratios: dict[Operation, list[float]] = {operation: [] for operation in PROVED}
    until = clock.share + (1 - clock.share) / DUELS
    for index in range(TURNS_MAX):
        if index >= TURNS_MIN and clock.is_over(until):
            break
        rates = {case.strategy: clock.time(case) for case in ordered(cases, index)}
        if not all(rates.values()):
            return []
        for operation, found in ratios.items():
            found.append(rates[chosen][operation] / rates[rival][operation])
    return [
        Remeasured(
            kind, operation, chosen, rival, median(found), min(found), max(found), len(found)
        )
        for operation, found in ratios.items()
    ]


# -- the results -----------------------------------------------------------------------------------
# Pure. Every figure comes with the number of its measurements and its range.


_SETTINGS = {
    "mover": "{}",
    "block_bytes": "buffers of {}",
    "depth": "{} transfers in flight",
    "copy_threads": "{} copying",
}


def findings(study: Study) -> list[str]:
    """The findings from the comparisons, as far as they were measured."""
    made = groupby(study.compared, key=lambda each: (each.what, each.than))
    sentences = [finding(study.figures, same) for _, same in made]
    return [text for text in sentences if text is not None]


def reasons(study: Study) -> list[str]:
    """The settings to use, and the reasons."""
    chosen = study.chosen
    lines = [f"use {profile.described(moving_of(chosen))}"]
    changed = [name for name in _SETTINGS if getattr(chosen, name) != getattr(study.middle, name)]
    for name in changed:
        now, before = (_SETTINGS[name].format(_value(s, name)) for s in (chosen, study.middle))
        lines.append(f"{now} instead of {before}")
    if not changed:
        lines.append("that is what statehold does without a profile")
    lines.append(
        f"in what it does worst it reaches {study.score:.2f} of the best of the sweep, and "
        f"{study.score_before:.2f} without a profile; less than {study.margin:.2f} between two "
        "settings is by chance"
    )
    lines += [proved(proof) for proof in study.proofs]
    if study.proofs:
        worst = min(proof.ratio for proof in study.proofs)
        lines.append(f"so the chosen settings reach {worst:.3f} of the best others, or more")
    return lines


def _value(strategy: Strategy, name: str) -> object:
    value = getattr(strategy, name)
    if name == "block_bytes":
        return format_bytes(value)
    return value.value if name == "mover" else value


def proved(proof: Remeasured) -> str:
    """One proof as a sentence."""
    against = {
        "statehold": "a rival setting",
        "bytes": "a rival of all strategies, bytes only",
    }[proof.kind]
    return (
        f"{proof.operation.value}: measured again in {proof.turns} turns, the settings reach "
        f"{proof.ratio:.3f} ({proof.low:.2f} to {proof.high:.2f}) of {against}: {proof.best.name}"
    )


def document_of(study: Study) -> dict[str, Any]:
    """All of it for programs."""
    return {
        "rounds": study.rounds,
        "seconds": round(study.took_s, 1),
        "chosen": asdict(moving_of(study.chosen)),
        "rates": _rates(study.figures),
        "score": study.score,
        "score_before": study.score_before,
        "margin": study.margin,
        "why": reasons(study),
        "findings": findings(study),
        "strategies": [_strategy(study.figures, each) for each in study.figures.strategies()],
        "refused": [{"name": s.name, "why": why} for s, why in study.refused.items()],
        "unmeasured": [each.name for each in study.unmeasured],
        "proofs": [
            {**asdict(p), "chosen": p.chosen.name, "best": p.best.name} for p in study.proofs
        ],
    }


def _rates(figures: StudyFigures) -> dict[str, int] | None:
    rates = rates_of(figures)
    return asdict(rates) if rates else None


def _strategy(figures: StudyFigures, strategy: Strategy) -> dict[str, Any]:
    measured = {
        operation.value: {
            "gb_per_s": figures.of(each, operation),
            "all": [round(rate, 4) for rate in rates],
            "moved": figures.moved(each, operation),
        }
        for (each, operation), rates in figures.rates.items()
        if each == strategy
    }
    return {"name": strategy.name, **asdict(strategy), "measured": measured}
