"""The place of the steps of a memory level: a directory of this user and this run below /dev/shm.

Invariants: the directory belongs to this user, and no other user may look into it. Anything else
with that name is refused, and neither followed nor changed. A process that opens the same run on
the same host finds the directory again, until the host restarts.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat

from statehold.errors import StorageError, storage_error

SHARED_MEMORY = "/dev/shm"


def memory_root(run: str, base: str = SHARED_MEMORY) -> str:
    """The directory for the run directory `run`; its parent exists on return."""
    path = memory_path(run, base)
    home = os.path.dirname(path)
    try:
        os.mkdir(home, 0o700)
    except FileExistsError:
        _check_ours(home)
    except OSError as error:
        raise storage_error("create a memory level", error.errno or 0, home) from error
    return path


def memory_path(run: str, base: str = SHARED_MEMORY) -> str:
    """The directory for the run directory `run`. Nothing is made."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(run))).hexdigest()[:16]
    return os.path.join(base, f"statehold-{os.getuid()}", name)


def _check_ours(home: str) -> None:
    found = os.lstat(home)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return
    raise StorageError(
        "the directory for memory levels does not belong to this user alone",
        errno=errno.EPERM,
        path=home,
        facts={"expected": f"a directory of user {os.getuid()}, mode 0700",
               "got": f"owner {found.st_uid}, mode {stat.filemode(found.st_mode)}"},
        hint="pass Memory(path=...) on a tmpfs; the existing directory may hold another user's "
        "steps",
    )  # fmt: skip
