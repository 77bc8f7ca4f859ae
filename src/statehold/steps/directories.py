"""The directories in a run directory: their names, their attempts, their making and their end.

    step-000000000100                             a committed step
    step-000000000100.replaced                    counts as that step while it is missing
    step-000000000110.partial                     being written, by one rank
    step-000000000110.5f3a09c1-7.partial          by several: the attempt, as TOKEN-NUMBER
    step-000000000090.retired                     no longer kept
    step-...5f3a09c1-7.copy-0123456789abcdef.partial    a copy in the making (target)

Invariants: a directory is made with a durable name, and deleted with its contents.

Not here: their purpose (store, integrations/dcp/writer).
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from statehold._core import Fs
from statehold.errors import (
    CorruptionError,
    FormatVersionError,
    InvariantError,
    StorageError,
    storage_error,
)
from statehold.format.entries import DOCUMENT_BYTES_MAX
from statehold.format.manifest import Manifest
from statehold.format.saved import MANIFEST_NAME
from statehold.options.paths import STEP_NAME, step_name

# -- names -----------------------------------------------------------------------------------------


COPY_DIGITS = 16
ATTEMPT = r"(?P<token>[0-9a-f]{8})-(?P<number>[0-9]{1,12})"
_COPY = rf"\.copy-[0-9a-f]{{{COPY_DIGITS}}}"
_NAMED = re.compile(rf"{ATTEMPT}(?:{_COPY})?")
REPLACED = ".replaced"
_STANDING = re.compile(rf"{STEP_NAME.pattern}(?:{re.escape(REPLACED)})?")
_ATTEMPTED = re.compile(rf"{STEP_NAME.pattern}\.{ATTEMPT}\.partial")
_ENDED = re.compile(rf"{STEP_NAME.pattern}\.(?:partial|retired)")


T = TypeVar("T")


class Attempt(NamedTuple):
    """One try of a job of several ranks to save a step."""

    token: str
    number: int


def step_of(name: str) -> int | None:
    """The step whose directory has this name once it is committed; None for any other name."""
    match = STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def standing_step_of(name: str) -> int | None:
    """The same, where the step may also have been hidden to be replaced."""
    match = _STANDING.fullmatch(name)
    return int(match[1]) if match else None


def is_leftover(name: str) -> bool:
    """Whether a directory of this name is of no use once its job has ended."""
    return _ENDED.fullmatch(name) is not None or attempt_of(name) is not None


def attempt_of(name: str) -> Attempt | None:
    """The attempt that writes this directory; None if no attempt is in its name."""
    match = _ATTEMPTED.fullmatch(name)
    return Attempt(match["token"], int(match["number"])) if match else None


def check_attempt(attempt: str) -> None:
    """Raise InvariantError unless it names an attempt at a save, or at a copy."""
    if _NAMED.fullmatch(attempt) is None:
        raise InvariantError("not a valid name of an attempt to save", facts={"got": repr(attempt)})


# -- making and deleting them ----------------------------------------------------------------------


def make_directories(fs: Fs, path: str) -> None:
    """Make a directory, its parents included, and make their names durable.

    Existing ones are synced, too: the process that made them may have died before it could sync
    them.
    """
    missing = []
    while path and not fs.is_dir(path):
        # Another rank may make it between the two calls.
        if fs.stat_bytes(path) is not None and not fs.is_dir(path):
            raise storage_error("create the directory: a file is in its place", errno.ENOTDIR, path)
        missing.append(path)
        path = path.rpartition("/")[0]
    # Everything above it was synced before it was made, and its contents, too.
    if path:
        # We did not make a parent that we may not read, or that of an automounter.
        with unless(errno.EACCES, errno.EINVAL):
            fs.sync_dir(parent_of(path))
    for path in reversed(missing):
        with unless(errno.EEXIST):  # another rank made it
            fs.mkdir(path)
        fs.sync_dir(parent_of(path))


def delete(fs: Fs, directory: str, only: Callable[[str], bool] | None = None) -> None:
    """Delete a directory that no name of a step leads to, with its contents.

    only: whether something of that name goes. Then the directory stays, with the rest, and others
    may be about to make files there.
    """

    def remove(entry: tuple[str, bool]) -> None:
        name, is_dir = entry
        if is_dir:
            delete(fs, f"{directory}/{name}")
        else:
            with unless(errno.ENOENT):  # another rank took it meanwhile
                fs.unlink(f"{directory}/{name}")

    each_of((entry for entry in fs.listdir(directory) if only is None or only(entry[0])), remove)
    if only is None:
        fs.rmdir(directory)


def each_of(found: Iterable[T], remove: Callable[[T], object]) -> None:
    """Remove each of what was found. If some of it stays, raise its first error after the rest."""
    failed: StorageError | None = None
    for each in found:
        try:
            remove(each)
        except StorageError as error:
            failed = failed or error
    if failed is not None:
        raise failed


@contextlib.contextmanager
def unless(*expected: int) -> Iterator[None]:
    """Ignore a storage error with one of these errno."""
    try:
        yield
    except StorageError as error:
        if error.errno not in expected:
            raise


def parent_of(path: str) -> str:
    return path.rpartition("/")[0] or ("/" if path[:1] == "/" else ".")


# -- directories that do not count -----------------------------------------------------------------
# A directory that holds a step does not count if it is not named like one. `dcp.save(...,
# checkpoint_id="RUN/step-100")` makes such a directory, and so does a person who renames a step.


_SHOWN = 8
_OURS = (".partial", ".corrupt")  # also of a killed dcp.save(), and what restore() set aside


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
        f"restore step {found[newest]}, rename {newest} to {step_name(found[newest])}"
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
