"""A level in an object store: steps go there as objects, and come near again before they are read.

Owns: the names of attempts, which follow from what is copied; the files that a restore has brought
near, and where they lie until it is closed.
Not here: objects and their commit (storage/objects), which step (promoting), the bytes (copying).
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from statehold.errors import CorruptionError, MissingFileError, NoSpaceError, storage_error
from statehold.levels.copying import Copy, DataFile, blocks

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
        self._taken: tuple[int, str] | None = None  # what is being copied: step and attempt
        self._fetched: list[str] = []

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
        pass  # what earlier jobs have left goes when another step comes

    def take(self, copy: Copy) -> None:
        step, attempt = copy.step, attempt_at(copy.part.manifest)
        if self._leads:
            # Of this step other ranks may be copying a later save already.
            self._objects.clear(but_for=step)
        self._taken = step, attempt
        for file in copy.part.files:
            if self._is_there(copy, file, attempt):
                continue
            with copy.opened(file) as source:
                verified = blocks(file, source)
                self._objects.upload(step, attempt, file.name, file.bytes, verified, copy.before)
        for name, raw in copy.part.records:
            self._objects.upload(step, attempt, name, len(raw), [memoryview(raw)])

    def _is_there(self, copy: Copy, file: DataFile, attempt: str) -> bool:
        """Whether an earlier copy of this manifest has left the file whole. It is read to know."""
        if not self._objects.has(copy.step, attempt, file.name, file.bytes):
            return False
        uploaded = self._objects.uploaded(copy.step, attempt, file.name)
        try:
            for block in blocks(file, uploaded):
                copy.before(len(block))
        except CorruptionError:
            return False  # it is replaced
        return True

    def commit(self, step: int, attempt: str | None, manifest: bytes) -> None:
        self._objects.publish(step, attempt_at(manifest), manifest)
        self._taken = None

    def retain(self) -> None:
        for step in self.steps()[: -self._keep] if self._keep else ():
            self._objects.retire(step)

    def drop(self, attempt: str | None) -> None:
        if self._taken is not None:
            self._objects.abandon(*self._taken)
            self._taken = None

    def rewind(self, step: int) -> list[int]:
        given_up = [newer for newer in self.steps() if newer > step]
        for newer in given_up:
            self._objects.retire(newer)
        return given_up

    def close(self) -> None:
        for folder in self._fetched:
            shutil.rmtree(folder, ignore_errors=True)
        self._objects.close()

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


def attempt_at(manifest: bytes) -> str:
    """The attempt at the step with this manifest: the same whoever copies it, and when. So what one
    copy has uploaded is found by the next; of a step that is saved again, nothing is."""
    digest = hashlib.sha256(manifest).hexdigest()
    return f"{digest[:8]}-{int(digest[8:20], 16) % 10**12}"


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
