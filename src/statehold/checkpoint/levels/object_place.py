"""A level in an object store: steps become objects.

Owns: the names of attempts, which follow from the copied manifest.
Not here: objects, their commit, and how they are read (steps/objects), which step (promoting), the
bytes (steps/copying).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import astuple

from statehold.checkpoint.levels.remembered import recall
from statehold.errors import CorruptionError, StateholdError
from statehold.format.entries import sha256
from statehold.format.manifest import Commit, Manifest
from statehold.options.keep import Keep
from statehold.ranks.peers import Peers
from statehold.steps.copying import Copy, DataFile, blocks, content_of, is_shared
from statehold.steps.directories import each_of
from statehold.steps.objects import ObjectSteps, shared_name
from statehold.steps.owners import OwnedSteps
from statehold.steps.store import Retention
from statehold.steps.target import Target


def urls_at_parent(manifest: bytes, where: str) -> list[str]:
    """The object stores of the run that a step's run began from. where: the step, for messages.

    The parent has noted them itself. The note is read in the run directory that the manifest names,
    and only there: a parent that has moved, or whose note cannot be read, has no URLs. A URL is no
    permission to ask anybody: the caller asks its own store only.
    """
    with contextlib.suppress(StateholdError, OSError, ValueError):
        parent = Manifest.said(manifest, where).parent
        if parent is not None:
            return [each.where for each in recall(parent.run) if each.kind == "objects"]
    return []


class ObjectPlace(Target):
    """The steps of a run in an object store.

    objects: of the store. keep: which committed steps stay (options/keep).
    owned: whose steps these are.
    """

    def __init__(
        self,
        name: str,
        objects: ObjectSteps,
        *,
        keep: int | Keep | None,
        owned: OwnedSteps,
    ) -> None:
        super().__init__(name, objects, owned)
        self.objects = objects
        self._owner = owned
        self._retention = Retention(keep, objects.manifest)
        self._is_alone = True
        self._taken: tuple[int, str] | None = None  # the step and attempt that is being copied

    @property
    def leads(self) -> bool:
        return self._owner.leads

    def prepare(self, peers: Peers | None) -> None:
        self.objects.ask_again()  # leftovers are deleted when another step comes
        self._is_alone = peers is None

    def take(self, copy: Copy) -> None:
        step, attempt = copy.step, attempt_at(copy.part.manifest)
        self._owner.claim()
        if self.leads:
            # Other ranks may already be copying a later save of this step.
            self.objects.clear(but_for=step, and_newer=self._is_alone)
        self._taken = step, attempt
        shared = {file.name: _object_of(file) for file in copy.part.files if is_shared(file.name)}
        self.objects.refer(step, attempt, shared)
        there = self._shared_there(copy, shared)
        for file in copy.part.files:
            if file.name in shared:
                self._take_shared(copy, file, shared[file.name], there)
            elif not self._is_there(copy, file, attempt):
                with copy.blocks(file) as verified:
                    self.objects.upload(step, attempt, file.name, file.bytes, verified, copy.before)
        for name, raw in copy.part.records:
            self.objects.upload(step, attempt, name, len(raw), [memoryview(raw)])

    def _shared_there(self, copy: Copy, shared: Mapping[str, str]) -> set[str]:
        """The shared objects that need no upload: they are there, or the store has copied them from
        the parent of the run."""
        sizes = {shared[file.name]: file.bytes for file in copy.part.files if file.name in shared}
        there = {name for name, size in sizes.items() if self.objects.shared.has(name, size)}
        if len(there) < len(sizes):
            for url in urls_at_parent(copy.part.manifest, self.objects.path(copy.step)):
                left = {name: size for name, size in sizes.items() if name not in there}
                there |= self.objects.neighbour(url).bring(left, copy.before)
        return there

    def _take_shared(self, copy: Copy, file: DataFile, name: str, there: set[str]) -> None:
        if name in there:
            copy.watch.linked(file.bytes)
            return
        with copy.blocks(file) as verified:
            self.objects.shared.upload(name, file.bytes, verified, copy.before)
        there.add(name)

    def _is_there(self, copy: Copy, file: DataFile, attempt: str) -> bool:
        """Whether an earlier copy of this manifest has left the file whole. It is read to check."""
        if not self.objects.has(copy.step, attempt, file.name, file.bytes):
            return False
        uploaded = self.objects.uploaded(copy.step, attempt, file.name)
        try:
            for block in blocks(file, uploaded):
                copy.before(len(block))
        except CorruptionError:
            return False  # it is replaced
        return True

    def commit(self, step: int, attempt: str | None, manifest: bytes) -> None:
        listed = Manifest.listed(manifest, self.path(step), step)
        records = [each.name for each in listed.records] if isinstance(listed, Commit) else []
        self.objects.publish(step, attempt_at(manifest), manifest, records)
        self._retention.forget(step)
        self._taken = None

    def retain(self) -> str:
        going = self._retention.going(self.steps)
        each_of((n for n in going if not self.objects.has_readers(n)), self.objects.retire)
        return ""

    def drop(self, attempt: str | None) -> None:
        if self._taken is not None:
            self.objects.abandon(*self._taken)
            self._taken = None

    def rewind(self, step: int) -> list[int]:
        given_up = [newer for newer in self.steps() if newer > step]
        each_of(given_up, self.objects.retire)
        return given_up

    def quarantine(self, step: int) -> str:
        self._owner.claim()
        self._retention.forget(step)
        return self.objects.quarantine(step)

    def stop(self) -> None:
        self.objects.stop()

    def close(self) -> None:
        self.objects.close()


def _object_of(file: DataFile) -> str:
    """The shared object for a file: the same for all files with its content."""
    nbytes, block_bytes, spans = content_of(file)
    content = [nbytes, block_bytes, [astuple(span) for span in spans]]
    return shared_name(sha256(json.dumps(content).encode()))


def attempt_at(manifest: bytes) -> str:
    """The attempt at the step with this manifest: the same for every copier, at any time.

    So the next copy finds the uploads of an earlier one, but not those of another save of the step.
    """
    digest = sha256(manifest)
    return f"{digest[:8]}-{int(digest[8:20], 16) % 10**12}"
