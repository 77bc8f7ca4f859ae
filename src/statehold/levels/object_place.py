"""A level in an object store: steps go there as objects, and come near again before they are read.

Owns: the attempts of a process that is alone, which has no names for them; the files that a restore
has brought near, and where they lie until it is closed.
Not here: objects and their commit (storage/objects), which step (promoting), the bytes (copying).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from statehold.errors import MissingFileError, NoSpaceError, storage_error
from statehold.levels.copying import Copy, blocks

if TYPE_CHECKING:
    from statehold.storage.objects import ObjectSteps

__all__ = ["ObjectPlace"]


class ObjectPlace:
    """The steps of a run in an object store.

    keep: committed steps to keep; None keeps all. leads: this rank clears and retires. near:
    directories in which files that are read may lie for a while; the first with room is taken.
    """

    def __init__(
        self,
        name: str,
        objects: ObjectSteps,
        *,
        keep: int | None,
        leads: bool,
        near: Sequence[str],
    ) -> None:
        self.name = name
        self._objects = objects
        self._keep = keep
        self._leads = leads
        self._near = near
        self._own = secrets.token_hex(4)
        self._attempts = 0
        self._fetched: list[str] = []
        self._is_prepared = False

    def steps(self) -> list[int]:
        return self._objects.steps()

    def read(self, step: int, name: str, max_bytes: int) -> bytes:
        return self._objects.read(step, name, max_bytes)

    def find(self, step: int, name: str, nbytes: int) -> str:
        size = self._objects.size(step, name)
        if size != nbytes:
            raise MissingFileError(
                "a file of a step is not in the object store as it was committed",
                facts={"file": f"{self._objects.path(step)}/{name}",
                       "expected": f"{nbytes} bytes", "got": size},
            )  # fmt: skip
        path = f"{self._room_for(nbytes)}/{name}"
        with _mapped(path, nbytes) as memory:
            self._objects.fetch(step, name, 0, memory)
        return path

    def protect(self, step: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # who reads a step that is replaced is told, and asks again

    def prepare(self, token: str | None) -> None:
        if self._leads and not self._is_prepared:
            self._objects.clear(_OfJob(token or self._own))
        self._is_prepared = True

    def take(self, copy: Copy) -> None:
        self._attempts += 1
        step, attempt = copy.step, self._named(copy.attempt)
        for file in copy.part.files:
            with copy.opened(file) as source:
                verified = blocks(file, source)
                self._objects.upload(step, attempt, file.name, file.bytes, verified, copy.before)
        for name, raw in copy.part.records:
            self._objects.upload(step, attempt, name, len(raw), [memoryview(raw)])

    def commit(self, step: int, attempt: str | None, manifest: bytes) -> None:
        self._objects.publish(step, self._named(attempt), manifest)

    def retain(self) -> None:
        for step in self.steps()[: -self._keep] if self._keep else ():
            self._objects.retire(step)

    def abandon(self, step: int, attempt: str | None) -> None:
        self._objects.abandon(step, self._named(attempt))

    def rewind(self, step: int) -> list[int]:
        given_up = [newer for newer in self.steps() if newer > step]
        for newer in given_up:
            self._objects.retire(newer)
        return given_up

    def close(self) -> None:
        for folder in self._fetched:
            shutil.rmtree(folder, ignore_errors=True)
        self._objects.close()

    def _named(self, attempt: str | None) -> str:
        """The attempt that is under way: one at a time, for a process that is alone."""
        return attempt or f"{self._own}-{self._attempts}"

    def _room_for(self, nbytes: int) -> str:
        """A new directory with room for a file."""
        for directory in self._near:
            with contextlib.suppress(OSError):
                free = os.statvfs(directory)
                if free.f_bavail * free.f_frsize > nbytes:
                    folder = tempfile.mkdtemp(prefix=".statehold-fetched-", dir=directory)
                    self._fetched.append(folder)
                    return folder
        raise NoSpaceError(
            "no room to bring a file of a step near",
            facts={"needed": f"{nbytes} bytes", "looked at": ", ".join(self._near)},
        )


class _OfJob:
    """All attempts of one job: other ranks may be ahead with some of them."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __contains__(self, attempt: object) -> bool:
        return isinstance(attempt, str) and attempt.partition("-")[0] == self._token


@contextlib.contextmanager
def _mapped(path: str, nbytes: int) -> Iterator[memoryview]:
    """A new file, as memory to be filled."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if nbytes:
                os.posix_fallocate(fd, 0, nbytes)
            mapping = mmap.mmap(fd, nbytes) if nbytes else None
        finally:
            os.close(fd)
    except OSError as error:
        raise storage_error("bring a file near", error.errno or 0, path) from error
    if mapping is None:
        yield memoryview(b"")
        return
    with mapping, memoryview(mapping) as memory:
        yield memory
