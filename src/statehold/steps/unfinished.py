"""Unfinished copies of steps: their names, and the files of earlier copies to continue from.

    RUN/step-000000000100.5f3a09c1-7.copy-0123456789abcdef.partial/

The last part is the beginning of the sha256 of the copied manifest, which says what the files will
become. A step that was saved again has another manifest, so no file of the earlier save is taken
for it. The attempt before it is new every time, as for a save. A copy never continues in a
directory that a process of an earlier job may still know. It moves the files out, and only files
that no process has open, as the kernel says (as for spare files, store).

Invariants: the caller must verify the files that it takes over; a name proves nothing. Only copies
look at these directories; readers and saves ignore them.
Not here: the bytes (copying); when a copy is abandoned (levels/promoting).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
from typing import TYPE_CHECKING

from statehold.errors import StorageError
from statehold.steps.directories import ATTEMPT, COPY_DIGITS, delete, unless
from statehold.steps.publish import look_beside_a_writer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from statehold._core import Fs

_NAME = re.compile(
    rf"step-(?P<step>[0-9]{{12}})\.{ATTEMPT}\.copy-(?P<digest>[0-9a-f]{{{COPY_DIGITS}}})\.partial"
)


def copy_attempt(attempt: str, manifest: bytes) -> str:
    """The attempt at a copy of the step with this manifest."""
    return f"{attempt}.copy-{hashlib.sha256(manifest).hexdigest()[:COPY_DIGITS]}"


class Unfinished:
    """The copies in the making below `root`; with `only`, those of the step with this manifest."""

    def __init__(self, fs: Fs, root: str, only: bytes | None = None) -> None:
        self._fs = fs
        self._root = root
        self._only = "" if only is None else copy_attempt("", only)

    def steps(self) -> set[int]:
        """The steps with an unfinished copy."""
        return {int(match["step"]) for match in self._found()}

    def adopt(self, partial: str, name: str) -> str | None:
        """The file `name` of an earlier copy, moved into the directory `partial`.

        None if there is no such file that no other process has.
        """
        target = _NAME.fullmatch(partial.rpartition("/")[2])
        path = f"{partial}/{name}"
        for match in self._found():
            left = f"{self._root}/{match[0]}/{name}"
            if target is None or match[0] == target[0] or _copied(match) != _copied(target):
                continue
            if self._is_free(left):
                with unless(errno.ENOENT):  # another rank took it
                    self._fs.rename(left, path)
                    return path
        return None

    def clear(self, but_for: int = -1, attempt: str = "-0", *, and_own: bool = True) -> None:
        """The leading rank, which holds the lock: delete the unfinished copies of all steps
        `but_for` one.

        Newer copies of the job of `attempt` stay, and without `and_own` this one, too: other ranks
        may be ahead. By default all go, because no job has an empty token. Directories that cannot
        be deleted now are deleted by the next call.
        """
        token, number = attempt.partition(".")[0].split("-")
        for match in list(self._found()):
            is_ahead = match["token"] == token and int(match["number"]) >= int(number) + and_own
            if int(match["step"]) != but_for and not is_ahead:
                with contextlib.suppress(StorageError):  # no save fails because of leftovers
                    self._fs.sync_dir(self._root)
                    delete(self._fs, f"{self._root}/{match[0]}")

    def _is_free(self, path: str) -> bool:
        return self._fs.stat_bytes(path) is not None and self._fs.can_reuse(path)

    def _found(self) -> Iterator[re.Match[str]]:
        names = look_beside_a_writer(
            lambda: self._fs.listdir(self._root),
            lambda: self._fs.is_dir(self._root) or None,
            self._root,
        )
        for name, is_dir in names or []:
            match = _NAME.fullmatch(name) if is_dir else None
            if match and self._only in name:
                yield match


def _copied(match: re.Match[str]) -> tuple[str, str]:
    """The step and manifest that a directory is a copy of."""
    return match["step"], match["digest"]
