"""Directories of a run that hold a step and do not count, because they are not named like one.

`dcp.save(..., checkpoint_id="RUN/step-100")` makes such a directory, and so does a person who
renames a step.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from statehold.checkpoint.store.directory_names import is_leftover, standing_step_of
from statehold.errors import CorruptionError, FormatVersionError, StorageError
from statehold.format.entries import DOCUMENT_BYTES_MAX
from statehold.format.manifest import Manifest
from statehold.format.saved import MANIFEST_NAME

if TYPE_CHECKING:
    from statehold._core import Fs

_SHOWN = 8
_OURS = (
    ".partial",
    ".corrupt",
)  # also of a dcp.save() that was killed, and what restore() set aside


def misnamed(fs: Fs, run: str) -> str:
    """What to tell a person about such directories; "" if there are none."""
    found = {}
    with contextlib.suppress(StorageError):  # a reader of the run raises it
        for name in sorted(name for name, is_dir in fs.listdir(run) if is_dir):
            step = None if _is_known(name) else _step_in(fs, f"{run}/{name}")
            if step is not None:
                found[name] = step
    if not found:
        return ""
    names = list(found)
    shown = ", ".join(names[-_SHOWN:]) + (", ..." if len(names) > _SHOWN else "")
    newest = max(names, key=lambda name: found[name])
    return (
        f"directories of {run} hold steps and do not count, because of their names: {shown}. To "
        f"restore step {found[newest]}, rename {newest} to step-{found[newest]:012d}"
    )


def _is_known(name: str) -> bool:
    is_ours = name.startswith(".") or name.endswith(_OURS) or is_leftover(name)
    return is_ours or standing_step_of(name) is not None


def _step_in(fs: Fs, directory: str) -> int | None:
    """The step whose manifest is in a directory, if there is one."""
    path = f"{directory}/{MANIFEST_NAME}"
    with contextlib.suppress(StorageError, CorruptionError, FormatVersionError):
        if fs.stat_bytes(path) is not None:
            return Manifest.decode(fs.read_file(path, DOCUMENT_BYTES_MAX), path).step
    return None
