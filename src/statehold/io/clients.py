"""The clients of an engine: who moves bytes through it, and what each can count on.

    client          who waits for it                           buffers of its own   weight
    SAVE            the update after the next forward pass     2                    2
    RESTORE         the program                                2                    4
    PROMOTION       nobody                                     2                    1
    OFFLOAD_READ    the update under way                       2                    4
    OFFLOAD_WRITE   the update that needs its memory           2                    4
    PAGE_READ       a request that would compute otherwise     2                    4
    PAGE_WRITE      nobody                                     2                    1

Two buffers let a copy and a transfer go on at once. Weights count only where clients compete for
copy threads or the disk.

Invariants: every engine has all of these clients. Each may use all of `staging_bytes` while the
others do nothing, and none can take the last buffers of another. What is reserved for a client
costs address space until that client uses it, and no memory.
Not here: how the engine shares (native/lending.h, native/shares.h).
"""

from __future__ import annotations

import contextlib
import enum
import errno
from collections.abc import Iterator

from statehold import _core
from statehold._core import Engine, File, Fs
from statehold.errors import StorageError


class Client(enum.IntEnum):
    """A row of the engine's table."""

    SAVE = 0
    RESTORE = 1
    PROMOTION = 2
    OFFLOAD_READ = 3
    OFFLOAD_WRITE = 4
    PAGE_READ = 5
    PAGE_WRITE = 6


RESERVED_BUFFERS = 2
WEIGHTS = {
    Client.SAVE: 2,
    Client.RESTORE: 4,
    Client.PROMOTION: 1,
    Client.OFFLOAD_READ: 4,
    Client.OFFLOAD_WRITE: 4,
    Client.PAGE_READ: 4,
    Client.PAGE_WRITE: 1,
}


def open_engine(fs: Fs, staging_bytes: int, buffer_bytes: int, copy_threads: int) -> Engine:
    """An engine in which each client may use `staging_bytes`, and at least two buffers."""
    for_one = max(RESERVED_BUFFERS, -(-staging_bytes // buffer_bytes))
    for_others = RESERVED_BUFFERS * (len(Client) - 1)
    return _core.Engine(
        fs,
        (for_one + for_others) * buffer_bytes,
        buffer_bytes,
        copy_threads,
        clients=[(RESERVED_BUFFERS, WEIGHTS[client]) for client in Client],
    )


@contextlib.contextmanager
def engine_alone(staging_bytes: int, buffer_bytes: int, copy_threads: int) -> Iterator[Engine]:
    """An engine with a file system of its own, for one read."""
    with (
        contextlib.closing(_core.open_fs()) as fs,
        contextlib.closing(open_engine(fs, staging_bytes, buffer_bytes, copy_threads)) as engine,
    ):
        yield engine


def open_past_cache(fs: Fs, path: str) -> File:
    """fs.open_read, with O_DIRECT where the file system has it."""
    try:
        return fs.open_read(path, direct=True)
    except StorageError as error:
        if error.errno != errno.EINVAL:
            raise
        return fs.open_read(path)
