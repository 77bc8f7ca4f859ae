"""Data files that several steps in an object store have: one object, and references to it.

    1. A rank puts the reference object of its files into the directory of the attempt.
    2. It uploads those of the shared objects that are not there. Their names follow from their
       content, and an object is whole or missing.
    3. The rank that commits checks that all objects that the attempt refers to are there (`check`).
    4. The commit object makes the step (store/objects).
    5. If steps were deleted since the last commit, it deletes the objects to which no directory
       refers (`sweep`).

Invariants: an object goes only after the reference objects of all steps that had it, so a
committed step never refers to an object that is being deleted. One thread does 3 and 5, one after
the other: an object that another rank found in 2, and that a sweep deleted since, is missing in 3.
Then the copy fails, and the next one uploads it. If a reference object cannot be read, nothing is
deleted.
Not here: names (object_names), which files are shared (checkpoint/save/sharing).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from statehold.checkpoint.store.object_names import (
    SHARED,
    decode_references,
    encode_references,
    is_reference_name,
    reference_name,
)
from statehold.errors import MissingFileError
from statehold.io.objects.client import ObjectClient
from statehold.io.objects.parallel import side_by_side
from statehold.layout.plan import file_of

_REFERENCES_BYTES_MAX = 1 << 20
_READS_AT_ONCE = 16


class SharedObjects:
    """The shared objects below the URL of a run. Thread-safe."""

    def __init__(self, client: ObjectClient) -> None:
        self._client = client
        self._guard = threading.Lock()
        self._known: dict[str, Mapping[str, str]] = {}  # by the path of the reference object

    # -- by every rank ---------------------------------------------------------------------

    def refer(self, directory: str, files: Mapping[str, str]) -> None:
        """Step 1, for files of any ranks: data file -> shared object."""
        by_rank: dict[str, dict[str, str]] = {}
        for file, name in files.items():
            by_rank.setdefault(_references_of(file), {})[file] = name
        for reference, its in by_rank.items():
            self._client.put(f"{directory}/{reference}", encode_references(its))

    def has(self, name: str, size: int) -> bool:
        """Whether a shared object is there."""
        return self._client.size(f"{SHARED}/{name}") == size

    def upload(
        self, name: str, size: int, blocks: Iterable[memoryview], before: Callable[[int], None]
    ) -> None:
        """Step 2. As ObjectSteps.upload()."""
        self._client.upload(f"{SHARED}/{name}", size, blocks, before)

    # -- by readers ------------------------------------------------------------------------

    def path_of(self, directory: str, file: str) -> str:
        """The object with the bytes of a file of a step."""
        found = file_of(file)
        if found is None or not found[2]:
            return f"{directory}/{file}"  # the first file of a rank is of one step only
        name = self._references(f"{directory}/{_references_of(file)}").get(file)
        return f"{directory}/{file}" if name is None else f"{SHARED}/{name}"

    def forget(self, directory: str) -> None:
        """The directory is being deleted, or may be another one now."""
        with self._guard:
            self._known = {
                path: files
                for path, files in self._known.items()
                if not path.startswith(f"{directory}/")
            }

    def _references(self, path: str) -> Mapping[str, str]:
        with self._guard:
            known = self._known.get(path)
        if known is None:
            try:
                raw = self._client.get(path, _REFERENCES_BYTES_MAX)
            except MissingFileError:
                return {}  # the next attempt may put it there
            known = decode_references(raw, self._client.path(path))
            with self._guard:
                self._known[path] = known
        return known

    # -- by the rank that commits ------------------------------------------------------------

    def check(self, directory: str) -> None:
        """Step 3. Raises MissingFileError."""
        wanted = self._wanted_by([directory])
        missing = wanted.difference(self._there()) if wanted else wanted
        if missing:
            self.forget(directory)
            facts = {"file": self._client.path(min(missing)), "missing": len(missing)}
            raise MissingFileError("an object that the step shares is gone", facts=facts)

    def sweep(self, directories: Iterable[str]) -> None:
        """Step 5. directories: all that are there, of steps and of attempts."""
        if there := self._there():
            wanted = self._wanted_by(directories)
            for path in there - wanted:
                self._client.delete(path)

    def _there(self) -> set[str]:
        return set(self._client.list(SHARED)[0])

    def _wanted_by(self, directories: Iterable[str]) -> set[str]:
        """The paths of the objects to which directories refer."""
        lists = [partial(self._client.list, each) for each in directories]
        listed = side_by_side(lists, _READS_AT_ONCE)
        found = [path for names, _ in listed for path in names if is_reference_name(path)]
        files = side_by_side([partial(self._references, each) for each in found], _READS_AT_ONCE)
        return {f"{SHARED}/{name}" for each in files for name in each.values()}


def _references_of(file: str) -> str:
    """The reference object for a data file."""
    found = file_of(file)
    assert found is not None
    return reference_name(found[0], found[1])
