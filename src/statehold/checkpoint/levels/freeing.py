"""The memory levels of a run on this host, and giving their memory back.

Invariants: only directories of this user on a memory file system are memory levels, whatever a note
in the run says. Only what a store has made there is deleted: steps in the order of
R1 to R3, then leftovers, and the directory if nothing else is in it.
Not here: whether the steps are anywhere else (cli/free).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from statehold._core import Fs
from statehold.checkpoint.levels.memory import COPIES_SUFFIX, memory_path
from statehold.checkpoint.levels.remembered import recall
from statehold.errors import StorageError
from statehold.io.memory_room import is_memory
from statehold.process.host_memory import SHARED_MEMORY
from statehold.steps.directories import delete
from statehold.steps.owners import FILE_NAME, Identity, owner_at
from statehold.steps.store import Store


def memory_of(run: str, base: str = SHARED_MEMORY) -> list[str]:
    """The directories of this host's memory that belong to a run, which may be gone itself.

    run: its directory, or one of the directories of memory. Raises CorruptionError for a note that
        cannot be read.
    """
    path = os.path.realpath(run)
    if os.path.dirname(path) == os.path.dirname(memory_path(path, base)):
        named = [path]
    else:
        here = ("", socket.gethostname())
        noted = recall(path) if os.path.isdir(path) else ()
        identity = Identity(path, draws=False)
        named = [
            each.where
            for each in noted
            if each.kind == "memory"
            and each.host in here
            # A run that somebody hands over could name the memory of another one.
            and (owner := owner_at(each.where)) is not None
            and identity.owns(owner)
        ]
        named.append(memory_path(path, base))
    found = [each for where in named for each in (where, where + COPIES_SUFFIX)]
    return [each for each in dict.fromkeys(found) if _is_own_memory(each)]


def free(fs: Fs, directory: str) -> None:
    """Delete the steps in a directory of memory, and the directory. The caller has its lock.

    Raises StorageError.
    """
    store = Store(fs, os.path.realpath(directory), reuse=False)
    store.recover()
    store.give_up(store.steps())
    for name in _set_aside(fs, store.root):
        delete(fs, f"{store.root}/{name}")
    with contextlib.suppress(StorageError):  # what is not a step may stay
        for name in (".lock", FILE_NAME):
            if fs.stat_bytes(f"{store.root}/{name}") is not None:
                fs.unlink(f"{store.root}/{name}")
        fs.rmdir(store.root)


def _set_aside(fs: Fs, root: str) -> Iterator[str]:
    for name, is_dir in fs.listdir(root):
        if is_dir and name.startswith("step-") and name.endswith((".corrupt", ".partial")):
            yield name


def _is_own_memory(directory: str) -> bool:
    try:
        found = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and is_memory(directory)
