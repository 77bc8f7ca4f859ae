"""The directory of this user in the memory of the host: `/dev/shm/statehold-UID`.

Invariants: it belongs to this user, and no other user may look into it. Anything else with that
name is refused, and neither followed nor changed.
"""

from __future__ import annotations

import errno
import os
import stat

from statehold.errors import StorageError, storage_error

SHARED_MEMORY = "/dev/shm"


def home_path(base: str = SHARED_MEMORY) -> str:
    """Where the directory is. Nothing is made."""
    return os.path.join(base, f"statehold-{os.getuid()}")


def home(base: str = SHARED_MEMORY) -> str:
    """The directory, which exists on return. Raises StorageError."""
    path = home_path(base)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        check_home(base)
    except OSError as error:
        raise storage_error("create a memory level", error.errno or 0, path) from error
    return path


def check_home(base: str = SHARED_MEMORY) -> None:
    """Raise StorageError if something else is where the directory belongs."""
    path = home_path(base)
    if not os.path.lexists(path):
        return
    found = os.lstat(path)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return
    raise StorageError(
        "the directory for memory levels does not belong to this user alone",
        errno=errno.EPERM,
        path=path,
        facts={"expected": f"a directory of user {os.getuid()}, mode 0700",
               "got": f"owner {found.st_uid}, mode {stat.filemode(found.st_mode)}"},
        hint="pass Memory(path=...) on a tmpfs; the existing directory may hold another user's "
        "steps",
    )  # fmt: skip
