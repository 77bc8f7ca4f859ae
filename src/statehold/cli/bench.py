"""`statehold bench io PATH`: the factors of checkpoint I/O on the storage of PATH, and its profile.

Invariants: everything is written into a temporary directory in PATH, which is removed again, also
after an error. The profile is written last, so an interrupted study leaves none. Before anything is
measured, the study tries that the profile and the records can be written.
Not here: what is measured and chosen (cli/study).
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from statehold.cli import codes
from statehold.cli.output import ProgressBar, emit, sections, table
from statehold.cli.study import study
from statehold.cli.study.choose import StudyFigures, moving_of, rates_of, top
from statehold.cli.study.measure import Bench
from statehold.cli.study.strategies import Operation, Strategy, llama
from statehold.cli.study.sweep import JUDGED, Contrast
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
) -> study.Study:
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
    document = {**_facts(path, size), **study.document(found)}
    document["profile"] = None if file is None else str(file)
    if file is not None:
        moving, why = moving_of(found.chosen), tuple(study.reasons(found))
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
) -> study.Study:
    directory = tempfile.mkdtemp(prefix=".statehold-bench-", dir=path)
    threads = DEFAULTS.copy_threads
    progress = ProgressBar("measuring")
    try:
        made = bench(directory, size)
        return study.run(made, threads, args.seconds, args.full, progress.tell, more)
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


def _parts(found: study.Study, document: dict[str, Any], whose: str) -> Iterator[str | Table]:
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
