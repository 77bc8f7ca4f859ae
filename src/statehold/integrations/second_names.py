"""A step that stays after its run has retired it: second names for its files in another folder.

A file with several names is never written again (docs/incremental.md), so the folder is a run of
its own with one step, and takes no space while the run has the step, too.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def step_name(step: int) -> str:
    """The name of the directory of a step in its run."""
    return f"step-{step:012d}"


def give_second_names(step: Path, folder: Path) -> None:
    """Make the directory `folder`, in which the files of the committed `step` have second names."""
    folder.mkdir()
    for path in step.iterdir():
        target = folder / path.name
        try:
            os.link(path, target)
        except OSError:  # a file system without second names
            shutil.copyfile(path, target)
