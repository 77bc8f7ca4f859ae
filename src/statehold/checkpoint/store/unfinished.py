"""Copies of steps in the making: what they are called, and what earlier ones have left to go on.

    RUN/step-000000000100.5f3a09c1-7.copy-0123456789abcdef.partial/

The last part is the beginning of the sha256 of the manifest that is copied: it tells what the files
are to become. A step that was saved again has another manifest, so nothing of the one before is
taken for it. The attempt before it is new every time, as that of a save: a copy never goes on in a
directory that a process of an earlier job may still know, but moves the files out of it, and only
those that the kernel says nobody has open (as with spare files, checkpoint/store/store).

Invariants: what is taken over is to be verified by whoever takes it; a name proves nothing. Nobody
but a copy looks at these directories: readers and saves pass over them.
Not here: the bytes (levels/copying); when a copy is given up (levels/promoting).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
from typing import TYPE_CHECKING

from statehold.checkpoint.store.beside import look_beside_a_writer
from statehold.checkpoint.store.directories import delete, unless
from statehold.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from statehold._core import Fs

__all__ = ["COPY", "Unfinished", "copy_attempt"]

_DIGITS = 16
COPY = rf"\.copy-[0-9a-f]{{{_DIGITS}}}"
_NAME = re.compile(
    r"step-(?P<step>\d{12})\.(?P<token>[0-9a-f]{8})-(?P<number>\d{1,12})"
    rf"\.copy-(?P<digest>[0-9a-f]{{{_DIGITS}}})\.partial"
)


def copy_attempt(attempt: str, manifest: bytes) -> str:
    """The attempt at a copy of the step with this manifest."""
    return f"{attempt}.copy-{hashlib.sha256(manifest).hexdigest()[:_DIGITS]}"


class Unfinished:
    """The copies in the making below `root`."""

    def __init__(self, fs: Fs, root: str) -> None:
        self._fs = fs
        self._root = root

    def steps(self) -> set[int]:
        """The steps of which a copy was begun and not finished."""
        return {int(match["step"]) for match in self._found()}

    def adopt(self, partial: str, name: str) -> str | None:
        """The file `name` of an earlier copy of what is to be the directory `partial`, moved there;
        None if there is none that nobody else has."""
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

    def clear_all(self) -> None:
        """Delete all of them, where nothing is copied to: whoever holds the lock may."""
        for match in list(self._found()):
            with contextlib.suppress(StorageError):  # no save fails for what is left behind
                self._fs.sync_dir(self._root)
                delete(self._fs, f"{self._root}/{match[0]}")

    def clear(self, but_for: int | None, attempt: str, *, and_own: bool = True) -> None:
        """Who leads: delete the unfinished copies of all steps `but_for` one. Newer ones of the job
        of `attempt` stay, and without `and_own` this one: other ranks may be ahead.

        What cannot be deleted now is deleted when this is called again.
        """
        token, number = attempt.partition(".")[0].split("-")
        for match in list(self._found()):
            first = int(number) + and_own
            is_ahead = match["token"] == token and int(match["number"]) >= first
            if int(match["step"]) != but_for and not is_ahead:
                with contextlib.suppress(StorageError):
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
            if match:
                yield match


def _copied(match: re.Match[str]) -> tuple[str, str]:
    """What a directory is a copy of."""
    return match["step"], match["digest"]
