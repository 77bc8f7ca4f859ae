"""Which run owns the steps: a run has an identity, and each of its levels names the run that saves.

    RUN/run.json      the id of the run, drawn when it first saves to more than its directory, or
                      when it gets its first step from elsewhere
    LEVEL/run.json    the run that saves at a level, and where its directory was then. LEVEL is a
                      directory, memory, or the URL of an object store

Owns: the decision of a run about the steps of a level; notes, which are small files in a run
directory that are no step.
Invariants: a run with an id does not see the steps of another one, and does not save to its level.
Steps and levels from before there were ids have no owner. Only the leading rank writes, when it
saves. A path in a note is looked at, and never created.

Not here: when this is called (target, checkpoint/levels), requests (objects), the note of the
levels (checkpoint/levels/remembered).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

from statehold.encoding.strictjson import Checker
from statehold.errors import CorruptionError, RunBusyError, storing
from statehold.process.warn import logger
from statehold.process.whole_files import open_regular

if TYPE_CHECKING:
    from statehold.steps.store import Store

# -- who owns the steps ----------------------------------------------------------------------------


FILE_NAME = "run.json"
FORMAT = "statehold-run"
VERSION = 1
_ID = re.compile(r"[0-9a-f]{16}")
_TEXT = re.compile(r"[^\x00-\x1f\x7f]{0,4096}")
_SUMMARY = "the note of the run that owns these steps is not valid"
_HINT = (
    "no step is lost. Give the level a place of its own. If no other run saves there, delete this "
    "note: the next save writes a new one"
)

_HINT_ANOTHER = (
    "give this level a place of its own. If that run is gone for good and this run should replace "
    f"it, delete {FILE_NAME} there. Its steps then belong to this run, and keep= of this run "
    "deletes them"
)
_REMOVED = "somebody has removed the directory of that run, and not its steps at this level. "
_REMOVE = "remove these steps first: statehold free RUN --yes --force removes those in memory"
_HINT_REMOVED = (
    f"{_REMOVED}Call restore(state) before the first save to continue that run. To train from the "
    f"start again, {_REMOVE}"
)
_HINT_REPLACED = f"{_REMOVED}To save steps of this run here, {_REMOVE}"


@dataclass(frozen=True, slots=True)
class Owner:
    """A run: its id, and the place of its directory when it wrote the note."""

    id: str
    run: str
    host: str

    def __str__(self) -> str:
        return f"{self.run} on {self.host} (id {self.id})"

    def encode(self) -> bytes:
        about = {"id": self.id, "run": self.run, "host": self.host}
        document = {"format": FORMAT, "version": VERSION, **about}
        return json.dumps(document, indent=1).encode() + b"\n"

    @classmethod
    def decode(cls, raw: bytes, path: str) -> Owner:
        """Raises CorruptionError."""
        check = Checker(CorruptionError, _SUMMARY, path, _HINT)
        names = ("format", "version", "id", "run", "host")
        found = check.members(check.headed(raw, 2, FORMAT, (VERSION,)), "the file", names)
        return cls(
            check.text(found["id"], "id", _ID, "16 hexadecimal digits"),
            check.text(found["run"], "run", _TEXT, "a path"),
            check.text(found["host"], "host", _TEXT, "the name of a host"),
        )


class Identity:
    """The identity of the run in the directory `run`. Thread-safe.

    draws: this process may give the run an id. Others wait until it has one.
    """

    def __init__(self, run: str, *, draws: bool = True) -> None:
        self.run = os.path.realpath(run)
        self._host = socket.gethostname()
        self._guard = threading.Lock()
        self._draws = draws
        self._id = _id_at(self.run)

    @property
    def own(self) -> Owner | None:
        """This run; None as long as it has no id."""
        with self._guard:
            return None if self._id is None else self._as(self._id)

    @property
    def is_noted(self) -> bool:
        """Whether the run directory has a note, if the run has an id."""
        return self._id is None or os.path.lexists(os.path.join(self.run, FILE_NAME))

    def adopt(self, owner: Owner) -> None:
        """Continue as this run."""
        with self._guard:
            self._id = owner.id

    def establish(self) -> None:
        """Draw an id, unless there is one, and note it in the run directory. Raises OSError.

        A run that cannot note its id has none: the next job would be another run.
        """
        with self._guard:
            noted = _id_at(self.run)
            known = self._id or noted
            if self._draws:
                known = known or secrets.token_hex(8)
                if known != noted:
                    write_note(self.run, FILE_NAME, self._as(known).encode())
            self._id = known

    def _as(self, run_id: str) -> Owner:
        return Owner(run_id, self.run.encode("utf-8", "replace").decode(), self._host)

    def owns(self, owner: Owner) -> bool:
        """Whether a note names this run, and not a run that it is a copy of, or that is its
        copy."""
        own = self.own
        return own is not None and own.id == owner.id and not self.lives_elsewhere(owner)

    def lives_elsewhere(self, owner: Owner) -> bool:
        """Whether the directory of that run exists, and is not this one."""
        if owner.run == self.run or _id_at(owner.run) != owner.id:
            return False
        try:
            return not os.path.samefile(owner.run, self.run)
        except OSError:  # this one does not exist yet
            return True


class Notes(Protocol):
    """The small files beside the steps of a level."""

    @property
    def where(self) -> str:
        """The level, for people: a path or a URL."""

    def note(self, name: str) -> bytes | None:
        """What a note says; None if there is none."""

    def put_note(self, name: str, content: bytes) -> None:
        """Make or replace a note."""


@dataclass(frozen=True, slots=True)
class DirectoryNotes:
    """The notes in a directory."""

    where: str

    def note(self, name: str) -> bytes | None:
        return read_note(os.path.join(self.where, name), _SUMMARY, _HINT)

    def put_note(self, name: str, content: bytes) -> None:
        with storing("write", os.path.join(self.where, name)):
            write_note(self.where, name, content)


class OwnedSteps:
    """The owner of the steps at a level, as the run `identity` sees it.

        restore   a run that has no id yet (its directory is new, or old) may take steps of the
                  level, with a warning that names both runs. It continues as the run it found,
                  unless it has steps of its own, or the directory of that run still exists: then
                  it is another run
        save      a save to a level of another run is refused. It is also refused after a copy of
                  this directory, or a restart elsewhere, has taken the level over
        look      subscriptions and commands pass over a level of another run

    leads: this rank asks, and writes, for all. yields: an agent asks; it takes nothing from a newer
        trainer.
    """

    def __init__(
        self, level: str, notes: Notes, identity: Identity, *, leads: bool, yields: bool
    ) -> None:
        self._level = level
        self._notes = notes
        self._identity = identity
        self.leads = leads
        self._yields = yields
        self._owner: Owner | None = None
        self._is_claimed = self._was_logged = False
        self.is_refused = False

    @property
    def is_anothers(self) -> bool:
        """Whether the steps belong to another run; logged once."""
        if self._is_claimed or self._identity.own is None:
            return False
        if self._owner is None:
            with contextlib.suppress(CorruptionError):  # the next copy raises it
                self._owner = self.owner()
        if self._owner is None or self._identity.owns(self._owner):
            return False
        if self.leads and not self._was_logged:
            self._was_logged = True
            logger.warning(
                "continuing without level %s\n%s", self._level, self._refusal(self._owner)
            )
        return True

    def claim(self, *, is_empty: bool = False) -> None:
        """Before the first copy, and before each one to an object store: take the level for this
        run. Raises RunBusyError if another run owns it.

        is_empty: there are no steps; then it is taken from whatever run it was. A note that a rule
            of the store has deleted is written again: another run would have left its own.
        """
        own = self._own()
        if not self.leads or own is None:
            return
        owner = self.owner()
        if self._yields and owner is not None and owner.id == own.id:
            return
        if owner is None or (not self._is_claimed and (is_empty or self._identity.owns(owner))):
            if owner != own:
                self._notes.put_note(FILE_NAME, own.encode())
                owner = self.owner()
            self._is_claimed = owner == own
        if owner != own:
            self._refuse(owner)

    def was_removed(self) -> None:
        """Nothing is left of the level: the next claim() takes it as a new one."""
        self._owner, self._is_claimed = None, False

    def check(self, *, is_empty: bool) -> None:
        """Raise RunBusyError as claim() would. Changes nothing."""
        owner = self.owner()
        if owner is not None and not is_empty and not self._identity.owns(owner):
            self._refuse(owner)

    def restored(self, step: int, *, has_steps: bool) -> None:
        """`step` was restored from here. has_steps: the run has steps of its own."""
        owner = self.owner() if self._identity.own is None else None
        if owner is None:
            return
        is_same = owner.run == self._identity.run
        if not is_same and (has_steps or self._identity.lives_elsewhere(owner)):
            logger.warning("step %d was restored from another run\n%s", step, self._refusal(owner))
            return
        self._identity.adopt(owner)
        if not has_steps:
            logger.warning(
                "step %d belongs to the run %s; it came from level %s: %s. The run directory %s "
                "has no steps, so it continues that run. The other job must not save meanwhile. "
                "To start a run of its own, give the level another place, or %s",
                step, owner, self._level, self._notes.where, self._identity.run, _REMOVE,
            )  # fmt: skip

    def owner(self) -> Owner | None:
        """The run that the level names. Raises StorageError and CorruptionError."""
        raw = self._notes.note(FILE_NAME)
        return None if raw is None else Owner.decode(raw, f"{self._notes.where}/{FILE_NAME}")

    def _own(self) -> Owner | None:
        """This run. It gets its id now, if it has none and its directory can be written."""
        if self._identity.own is None:
            with contextlib.suppress(OSError):
                self._identity.establish()
        return self._identity.own

    def _refuse(self, owner: Owner | None) -> NoReturn:
        self.is_refused = True
        raise self._refusal(owner)

    def _refusal(self, owner: Owner | None) -> RunBusyError:
        own, hint = self._identity.own, _HINT_ANOTHER
        if owner is not None and owner.run == self._identity.run:
            hint = _HINT_REMOVED if own is None else _HINT_REPLACED
        return RunBusyError(
            "the steps at this level belong to another run",
            facts={"level": self._level, "place": self._notes.where,
                   "saved there by": owner or "no run any more",
                   "this run": own or self._identity.run},
            hint=hint,
        )  # fmt: skip


def begin_run(first: Store, run: str) -> None:
    """Give a run an id before its first level gets its first step from elsewhere. Another run may
    have been removed at its path, and its steps at other levels are not those of this run."""
    if first.fs.backend != "sim" and not first.steps():  # of a simulated disk there are no notes
        with contextlib.suppress(OSError):  # the run goes on without an id
            Identity(run).establish()


def owner_at(directory: str) -> Owner | None:
    """The run that a directory names; None if it names none that can be read."""
    path = os.path.join(directory, FILE_NAME)
    with contextlib.suppress(CorruptionError, OSError, ValueError):
        raw = read_note(path, _SUMMARY, _HINT)
        return None if raw is None else Owner.decode(raw, path)
    return None


def other_owner(directory: str, run: str) -> Owner | None:
    """The run that owns the steps in a directory, if it is not the one in the directory `run`."""
    if os.path.realpath(directory) == os.path.realpath(run):
        return None
    owner = owner_at(directory)
    return None if owner is None or Identity(run, draws=False).owns(owner) else owner


def _id_at(run: str) -> str | None:
    owner = owner_at(run)
    return None if owner is None else owner.id


# -- notes -----------------------------------------------------------------------------------------
# A note is written whole or not at all. What is read is a regular file and bounded; no link is
# followed. One job saves into a run, so nobody else writes.

NOTE_BYTES_MAX = 64 * 1024


def write_note(run: str, name: str, content: bytes) -> None:
    """Make or replace the note `name` in the run directory, which is made. Raises OSError."""
    os.makedirs(run, exist_ok=True)
    temporary = os.path.join(run, f".{name}.partial")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)
    os.replace(temporary, os.path.join(run, name))


def read_note(path: str, summary: str, hint: str) -> bytes | None:
    """What a note says; None if there is none. Raises CorruptionError with this summary."""
    try:
        fd = open_regular(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        facts = {"file": path, "why": error.strerror}
        raise CorruptionError(summary, facts=facts, hint=hint) from error
    with open(fd, "rb") as file:
        return file.read(NOTE_BYTES_MAX)
