"""Which step on disk a name means.

Owns: what makes a directory a run: a step, a leftover, or another file of statehold. An empty
directory is a run without steps.
Invariants: reading takes no lock. Nothing here imports torch, because the commands use it, too.
Not here: how a name is written (options/paths), the contents of a step (saved), levels other than
the run directory (checkpoint/levels).
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from statehold import _core
from statehold._core import Fs
from statehold.checkpoint.agent.looking import LOG_NAME
from statehold.checkpoint.levels import remembered
from statehold.checkpoint.restore.choice import Choice, chosen
from statehold.errors import MissingFileError, StepNotFoundError, StorageError, UsageError, shown
from statehold.format.entries import DOCUMENT_BYTES_MAX
from statehold.format.manifest import Commit, Manifest
from statehold.format.saved import MANIFEST_NAME, SavedStep, open_step
from statehold.observe.background_log import log_once
from statehold.options.paths import STEP_NAME, NamedStep, absolute, check_run, named_step
from statehold.steps import owners
from statehold.steps.directories import misnamed
from statehold.steps.lock import LOCK_NAME
from statehold.steps.pool import POOL_NAME
from statehold.steps.publish import ask_server, directory_id, is_directory, look_beside_a_writer
from statehold.steps.shelf import DirectoryShelf
from statehold.steps.whole import newest_whole

T = TypeVar("T")

_OF_A_STEP = r"step-[0-9]{12}(?:\..*)?\.(partial|retired|replaced|corrupt)"
LEFTOVER = re.compile(rf"{_OF_A_STEP}|\.spare|\.ready|{re.escape(POOL_NAME)}")
_FILES = {LOCK_NAME, LOG_NAME, remembered.FILE_NAME, owners.FILE_NAME}


class NotFoundError(UsageError):
    """What a name means does not exist."""


def file_system() -> Fs:
    """For documents and names; data is read by an engine of its own."""
    return _core.open_fs("threads", 1, 1)


@dataclass(frozen=True, slots=True)
class StepPlace:
    """A step on disk. label: the argument that named it. is_part: other hosts have the files of the
    ranks that have none here."""

    directory: str
    step: int
    label: str
    is_part: bool = False

    def open(self, fs: Fs, rank: int | None = None) -> SavedStep:
        """The step as `rank` of its ranks sees it, or as somebody else does (None)."""
        if rank is None:
            return open_step(fs.read_file, self.directory, self.step, 0, 0)
        world_size = load_manifest(fs, self.directory).world_size
        is_number = isinstance(rank, int) and not isinstance(rank, bool)
        if not is_number or not 0 <= rank < world_size:
            expected = "0" if world_size == 1 else f"0 to {world_size - 1}"
            facts = {"expected": expected, "got": shown(rank)}
            raise UsageError("this rank did not save the step", facts=facts)
        return open_step(fs.read_file, self.directory, self.step, rank, world_size)


def asked_of(asked: str | NamedStep) -> tuple[str, int | None]:
    """The run and the step that an argument means; None: the newest."""
    named = named_step(asked) if isinstance(asked, str) else asked
    run = run_of(named.run)
    if named.is_newest or named.step is not None:
        return run, named.step
    with contextlib.closing(file_system()) as fs:
        return run, chosen(DirectoryShelf(fs, run), Choice.of(named))


def step_in(text: str) -> tuple[str, int]:
    """The run and the number in RUN@STEP, neither of which has to exist. Raises UsageError."""
    named = named_step(text)
    if named.step is None:
        facts = {"expected": "RUN@STEP, with a number", "got": text}
        raise UsageError("a new step needs a run and a number", facts=facts)
    return check_run(named.run), named.step


def check_source(path: str) -> None:
    """Raises NotFoundError if there is no file or directory that can be imported."""
    if not os.path.lexists(path):
        raise NotFoundError("no such checkpoint", facts={"path": path})


def find(fs: Fs, asked: str | NamedStep, *, damaged: bool = False) -> StepPlace:
    """The step that an argument means. A caller that knows the run and the step hands over both: as
    one text, they could be the path of another run. damaged: the newest step may have lost files.
    Raises StepNotFoundError."""
    text = str(asked)
    ask_server(asked if isinstance(asked, str) else asked.run)
    if isinstance(asked, str) and os.path.exists(f"{text}/{MANIFEST_NAME}"):
        return StepPlace(directory_of(text), _number_of(fs, text), text)
    run, wanted = asked_of(asked)
    store = DirectoryShelf(fs, run)
    if wanted is None:
        wanted = max(store.steps(), default=None) if damaged else newest_whole(store)
    if wanted is None:
        hint = misnamed(fs, run_at(run)) or None
        raise StepNotFoundError("no step is committed in this run", facts={"run": run}, hint=hint)
    if wanted not in store.steps():
        store.open(wanted)  # raises, and lists the existing steps
    return StepPlace(store.where(wanted), wanted, text)


def tell_misnamed(run: str) -> None:
    """Log what a run without steps holds under other names: it is not passed over in silence."""
    with contextlib.suppress(StorageError), contextlib.closing(file_system()) as fs:
        if os.path.isdir(run) and not DirectoryShelf(fs, run).steps():
            log_once(misnamed(fs, run))


def directory_of(text: str) -> str:
    """The absolute path of a directory; the directory itself, if the path is a link to it: no link
    is followed where names are listed. Raises UsageError for what only a shell or a store knows."""
    path = absolute(text, "the run")
    return os.path.realpath(path) if os.path.islink(path) else path


def run_of(text: str) -> str:
    """A run directory. Raises NotFoundError if there is none."""
    path = directory_of(text) if text else text  # of @STEP, nothing is left
    if not is_directory(path):
        run = text.rpartition("@")[0]
        if os.path.isdir(run):
            facts = {"expected": run, "got": text}
            raise UsageError("this takes a run, not a step of it", facts=facts)
        raise NotFoundError(
            "no such run directory", facts={"run": text or "nothing"}, hint=_hint(text)
        )
    # otherwise it would seem to have no steps
    if named := STEP_NAME.fullmatch(os.path.basename(path)):
        above = os.path.dirname(path)
        facts = {"expected": above, "got": path}
        hint = f"show, verify and diff take a step: {above}@{int(named[1])}"
        raise NotFoundError("this is the directory of a step, not of a run", facts=facts, hint=hint)
    return path


def run_at(text: str) -> str:
    """As run_of(). Raises StepNotFoundError if the directory holds only what no run has."""
    path = run_of(text)
    names = os.listdir(path)
    if names and not any(map(_is_of_a_run, names)):
        raise StepNotFoundError(
            "this directory is not a run",
            facts={"directory": path, "expected": "steps (step-...) or other files of statehold",
                   "got": f"{len(names)} other name{'s' if len(names) > 1 else ''}"},
            hint=misnamed(file_system(), path)
            or f"the first save makes it a run; to find the runs below it: statehold tree {path}",
        )  # fmt: skip
    return path


def _is_of_a_run(name: str) -> bool:
    return name in _FILES or bool(STEP_NAME.fullmatch(name) or LEFTOVER.fullmatch(name))


def _hint(text: str) -> str:
    """What the name of a directory that is not there may mean."""
    above, name = os.path.split(text)
    with contextlib.suppress(OSError):
        beside = [
            each.name for each in os.scandir(above or ".") if each.is_dir() and each.name != name
        ]
        if near := difflib.get_close_matches(name, beside, 1):
            return f"did you mean {os.path.join(above, near[0])}?"
    return "RUN is the directory given to Checkpointer; name a step of it as RUN@STEP"


def load_manifest(fs: Fs, directory: str) -> Manifest | Commit:
    """The manifest of a step directory. Raises ManifestError, MissingFileError."""
    path = f"{directory}/{MANIFEST_NAME}"
    if fs.stat_bytes(path) is None:
        raise MissingFileError("a step has no manifest", facts={"file": path})
    return Manifest.decode(fs.read_file(path, DOCUMENT_BYTES_MAX), path)


def at_rest(fs: Fs, asked: str | NamedStep, look: Callable[[StepPlace], T]) -> T:
    """The result of `look` at the step that an argument means, read from one save of it.

    Raises StepNotFoundError, also if the step was retired meanwhile.
    """
    while True:
        place = find(fs, asked)
        directory = place.directory
        seen = look_beside_a_writer(
            partial(look, place), partial(directory_id, directory), directory
        )
        if seen is not None:
            return seen


def _number_of(fs: Fs, directory: str) -> int:
    """By its name, or, if somebody has renamed it, by its manifest."""
    named = STEP_NAME.fullmatch(os.path.basename(os.path.abspath(directory)))
    return int(named[1]) if named else load_manifest(fs, directory).step
