"""The files that a host serves to others: those of committed steps, below given roots.

    /PLACE/step-000000000100/NAME

Owns: the meaning of a path, and how it is opened.
Invariants: a path is matched as it came, without decoding, and must match these patterns. Each part
is opened below the one before it, and no link is followed. A save does not overwrite a file that is
open here (Store). A file that was retired before has no name here.
Not here: who may ask, and how files are sent (serving).
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from statehold.checkpoint.store.directory_names import step_of
from statehold.checkpoint.store.object_names import is_file_name
from statehold.checkpoint.store.replacing import REPLACED
from statehold.errors import UsageError, shown

_PLACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # the latter two: a link
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO has no reader to wait


class UnreadableError(Exception):
    """It exists, as far as one can tell, but the storage refuses it now."""


class Served:
    """The committed steps of the directories `roots`, by the names of their places."""

    def __init__(self, roots: Mapping[str, str]) -> None:
        for place in roots:
            if _PLACE.fullmatch(place) is None:
                raise UsageError("not a valid name of a place", facts={"got": shown(place)})
        self._roots = {place: os.path.realpath(root) for place, root in roots.items()}

    @contextmanager
    def open(self, path: str) -> Iterator[tuple[int, int]]:
        """(descriptor, bytes) of a file. Raises FileNotFoundError for other paths, and
        UnreadableError."""
        match path.split("/"):
            case ["", place, step, name] if (
                place in self._roots and step_of(step) is not None and is_file_name(name)
            ):
                with self._opened(place, step) as folder, _open(name, _FILE, folder) as descriptor:
                    found = os.fstat(descriptor)
                    if not stat.S_ISREG(found.st_mode):
                        raise FileNotFoundError
                    yield descriptor, found.st_size
            case _:
                raise FileNotFoundError

    @contextmanager
    def _opened(self, place: str, step: str) -> Iterator[int]:
        with _open(self._roots[place], _FOLDER) as root, ExitStack() as opened:
            yield _standing(step, root, opened)


def _standing(step: str, root: int, opened: ExitStack) -> int:
    """The directory of a step, which has another name for a moment while it is being replaced."""
    for name in (step, step + REPLACED):
        with suppress(FileNotFoundError):
            return opened.enter_context(_open(name, _FOLDER, root))
    return opened.enter_context(_open(step, _FOLDER, root))


@contextmanager
def _open(path: str, flags: int, folder: int | None = None) -> Iterator[int]:
    try:
        descriptor = os.open(path, flags, dir_fd=folder)
    except OSError as error:
        if error.errno in _ABSENT:
            raise FileNotFoundError from None
        raise UnreadableError(os.strerror(error.errno or 0)) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)
