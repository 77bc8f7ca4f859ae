"""The common part of a StorageReader and a StorageWriter: directory, machine, ranks.

Invariants: a directory is absolute as soon as it is given. Without one, the error says how to give
it.
Not here: the engine (machine), reading (reader), writing (writer).
"""

from __future__ import annotations

import os

from statehold.errors import UsageError
from statehold.integrations.dcp.machine import Machine
from statehold.options import Options
from statehold.options.paths import absolute


class StepEndpoint:
    """A directory that torch may replace, and the machine that moves bytes from or to it."""

    _call: str  # a call of torch that may give it

    def __init__(self, path: str | os.PathLike[str] | None, options: Options) -> None:
        super().__init__()
        self._path = None if path is None else absolute(path, "the checkpoint")
        self._machine = Machine(options)

    @property
    def checkpoint_id(self) -> str | None:
        """The directory of the next call."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._path = absolute(checkpoint_id, "the checkpoint")

    def _directory(self) -> str:
        path = self.checkpoint_id
        if path is None:
            raise UsageError(
                f"a {self._call} needs a directory",
                hint=f"give {self._call}() a checkpoint_id, or the {type(self).__name__} a path",
            )
        return path
