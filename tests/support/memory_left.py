"""The memory that runs of tests have left on this host.

Not here: memory at a path that a test has chosen (the fixture `memory`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from statehold.checkpoint.levels.memory import COPIES_SUFFIX
from statehold.process.host_memory import home_path
from statehold.steps.owners import owner_at


def free_below(folder: Path) -> None:
    """Remove the steps in memory of all runs below a folder, also of runs that are gone."""
    for root in Path(home_path()).glob("*"):
        owner = owner_at(str(root))
        if owner is not None and Path(owner.run).is_relative_to(folder.resolve()):
            shutil.rmtree(root, ignore_errors=True)
            shutil.rmtree(f"{root}{COPIES_SUFFIX}", ignore_errors=True)
