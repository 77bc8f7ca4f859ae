"""copy_step(): a step in another directory.

Not here: which step a name means (places), how it is copied (checkpoint/levels/step_copies).
"""

from __future__ import annotations

import contextlib
import os

from statehold import _core
from statehold.checkpoint.levels.step_copies import CopiedStep, Report, copy_into
from statehold.errors import UsageError
from statehold.options.paths import check_run
from statehold.reading.places import StepPlace, at_rest

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
        if place.is_part:
            raise UsageError(
                "other hosts have files of this step, so it cannot be copied from here",
                facts={"step": place.directory},
                hint="copy a step from a level that all hosts see",
            )
        return copy_into(fs, place.directory, target, link=link, report=report)

    with contextlib.closing(_core.open_fs("auto", TRANSFERS)) as fs:
        return at_rest(fs, os.fspath(step), copy)
