"""Shared objects that another run has in the same store: the store copies them to this run.

The bytes do not leave the store. The name of a shared object follows from its content, so an object
of the other run with the same name and size is the file. The copy is an object of this run alone:
either run may delete its own at any time, and the other one keeps everything that it has.

Invariants: requests go to the store of this run only, with the options of this run. The other run
is only read. An object is copied whole or not at all. What cannot be copied is left out, and no
error of the store is raised.
Not here: which run (levels/at_parent), the upload of what is left out (levels/object_place), the
references and the deletion of shared objects (object_sharing).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from statehold.checkpoint.store.object_names import SHARED
from statehold.errors import MissingFileError, StorageError
from statehold.io.objects.client import ObjectClient

logger = logging.getLogger("statehold")

AT_ONCE = 16


class Neighbour:
    """The shared objects of the run at `url`, for the run of `client`.

    If they are not in one store, nothing is asked, and nothing found.
    """

    def __init__(self, client: ObjectClient, url: str) -> None:
        self._client = client
        self._url = url
        self._both = client.around(url)
        self._failed = threading.Event()

    def bring(self, files: Mapping[str, int], before: Callable[[int], None]) -> set[str]:
        """Copy these shared objects (name -> size), and return the names of those that are copied.

        before(0) is called again and again. What it raises ends the copying, and is raised here.
        """
        found: set[str] = set()
        names = list(files) if self._both is not None else []
        with ThreadPoolExecutor(AT_ONCE, "statehold-object-copies") as threads:
            for at in range(0, len(names), AT_ONCE):
                before(0)
                some = names[at : at + AT_ONCE]
                done = threads.map(self._bring, some, [files[name] for name in some])
                found.update(name for name, is_copied in zip(some, done, strict=True) if is_copied)
        return found

    def _bring(self, name: str, size: int) -> bool:
        if self._both is None or self._failed.is_set():
            return False
        both, theirs, ours = self._both
        source, target = f"{theirs}{SHARED}/{name}", f"{ours}{SHARED}/{name}"
        try:
            if both.size(source) != size:
                return False
            both.copy(source, target)
            return self._client.size(f"{SHARED}/{name}") == size
        except MissingFileError:  # the other run has just deleted it
            return False
        except StorageError as error:
            self._give_up(error)
            return False

    def _give_up(self, error: StorageError) -> None:
        """Ask no more: each request would wait as long for its failure."""
        if not self._failed.is_set():
            self._failed.set()
            logger.info("files that the run at %s has are uploaded again: %s", self._url, error)
