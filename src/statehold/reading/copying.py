"""copy_step(): a step in another directory, with the same bytes and documents, so the same step.

    1. Each data file gets a second name in the destination, where the file system gives one, and is
       read and verified. Elsewhere it is copied, and verified on the way.
    2. The records follow, and then the manifest, byte for byte, by the commit of the destination
       (D3 to D7).

Invariants: the source is only read. A copy that was interrupted is continued by the next one, which
verifies what is there. The destination may be a run, and is locked meanwhile. Its steps stay, and
so does what other saves and copies have left there. A step of the same number and another content
is refused. The source was still at its place when all files were there.

Not here: which step a name means (places), the bytes (steps/copying).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from statehold import _core
from statehold._core import Fs
from statehold.checkpoint.levels.forking import check_standing
from statehold.checkpoint.telemetry.watch import CopyWatch, LevelWatch
from statehold.errors import CorruptionError, StorageError, UsageError
from statehold.format.entries import sha256
from statehold.observe.background_log import BackgroundLog, counted
from statehold.observe.counters import Figures
from statehold.options.paths import check_path, check_run
from statehold.reading.places import StepPlace, at_rest, load_manifest
from statehold.steps.copying import Copy, CopyPart, part_of
from statehold.steps.owners import begin_run
from statehold.steps.shelf import DirectoryShelf, StepShelf
from statehold.steps.store import Store
from statehold.steps.target import opened
from statehold.steps.whole import whole_steps
from statehold.units import MiB

_BUFFER_BYTES = 16 * MiB

# (bytes done, bytes in all) -> nothing.
Report = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class CopiedStep:
    """A step that was copied.

    Attributes:
        path: its directory in the destination.
        linked_bytes: the bytes of data files that have got a second name.
        copied_bytes: the bytes of the other data files.
        was_there: whether the destination had the step already; then nothing was done.
    """

    path: str
    linked_bytes: int = 0
    copied_bytes: int = 0
    was_there: bool = False


def copy_into(
    fs: Fs, directory: str, destination: str, *, link: bool = True, report: Report | None = None
) -> CopiedStep:
    """Copy the step in `directory` into the directory `destination`.

    link: give files a second name instead of copying them, where that is possible.
    Raises UsageError if the destination has another save of the step, RunBusyError if a job uses
    it, StepNotFoundError if the step is retired meanwhile, and what reading and writing raise.
    """
    where = directory.rstrip("/")
    source = StepShelf(fs, where)
    step = source.step
    part = part_of(source, step, lambda saved, _: range(saved))
    if (there := _there(fs, destination, step, part)) is not None:
        return there
    store = Store(fs, os.path.realpath(destination), reuse=False)
    with opened(store, destination, "destination", _BUFFER_BYTES, part.manifest) as target:
        if (there := _there(fs, destination, step, part)) is not None:  # another copy was faster
            return there
        begin_run(store, destination)
        watch = CopyWatch(LevelWatch("copy", 0, None, Figures({}), BackgroundLog()), "write")
        near = where if link else None
        with counted(f"copying step {step}", part.nbytes, report) as before:
            target.take(Copy(step, None, part, source, before, watch, near))
        check_standing(fs, where, part.manifest)
        target.commit(step, None, part.manifest)
        copied = part.nbytes - watch.linked_bytes
        return CopiedStep(target.path(step), watch.linked_bytes, copied)


def _there(fs: Fs, destination: str, step: int, part: CopyPart) -> CopiedStep | None:
    """The step, if the destination has it. Raises UsageError if it is another save of it."""
    store = DirectoryShelf(fs, os.path.realpath(destination))
    if step not in whole_steps(store):
        _check_not_renamed(store, step)
        return None
    if sha256(store.manifest(step)) != sha256(part.manifest):
        raise UsageError(
            "the destination has another save of this step",
            facts={"step": step, "destination": destination},
            hint="copy it into another directory",
        )
    return CopiedStep(store.where(step), was_there=True)


def _check_not_renamed(store: DirectoryShelf, step: int) -> None:
    """A damaged copy of the step may be replaced, another step under its name may not."""
    with contextlib.suppress(CorruptionError, StorageError):  # damaged, or not there
        number = load_manifest(store.fs, store.path(step)).step
        if number != step:
            raise UsageError(
                "the destination has another step under the name of this one",
                facts={"directory": store.path(step), "expected": f"step {step}", "got": number},
                hint="give the directory its own name back, or copy into another directory",
            )


TRANSFERS = 16


def copy_step(
    step: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    link: bool = True,
    report: Report | None = None,
) -> CopiedStep:
    """Copy a step into another directory, verified; returns its `path` there, and what it took.

    The copy has the same number, bytes and manifest. A copy that was interrupted is continued by
    the next call. If the destination has the step already, nothing happens.

    Args:
        step: "RUN@STEP", the run directory (its newest step), or the directory of a step.
        destination: a run directory, or a directory that is to be one.
        link: give files a second name instead of copying them, where the file system does that.
            Such files take no space, and are shared: damage of one is damage of both.
        report: called with the bytes done and in all, from time to time.

    Raises:
        StepNotFoundError: there is no such step.
        UsageError: the destination has another save of the step.
        RunBusyError: a job saves into the destination.
        CorruptionError: bytes of the step are damaged.
    """
    target = check_run(destination)

    def copy(place: StepPlace) -> CopiedStep:
        return copy_into(fs, place.directory, target, link=link, report=report)

    with contextlib.closing(_core.open_fs("auto", TRANSFERS)) as fs:
        return at_rest(fs, check_path(step, "the step"), copy)
