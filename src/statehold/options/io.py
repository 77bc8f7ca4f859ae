"""Io: how bytes move between memory and storage. Settings for experts, in one value.

Four fields say how bytes move (`Moving`). If such a field is None, its value comes from the profile
that `statehold bench io` measured on the storage, if there is one, and otherwise from `DEFAULTS`.
Invariants: an Io is valid as soon as it is made. A profile never overrides a field that the user
gave.
Not here: where a profile lies and when statehold uses it (io/profile).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Literal

from statehold.errors import refused, shown
from statehold.options.keywords import answering, check_choice, check_count, check_flag
from statehold.options.paths import PATH
from statehold.units import MiB, TiB, format_bytes, parse_bytes

Backend = Literal["auto", "io_uring", "threads"]
BACKENDS = ("auto", "io_uring", "threads")

# A buffer is one write: below 1 MiB the device is not kept busy, and a checksum block (1 MiB)
# must never straddle two buffers.
BUFFER_BYTES_MIN = MiB
MEMORY_BYTES_MAX = 64 * TiB  # what the engine takes
_MOST = 4096  # transfers, threads


@dataclass(frozen=True, kw_only=True, slots=True)
class Moving:
    """How bytes move: the values of the fields of Io that a profile can give, too."""

    buffer_bytes: int
    queue_depth: int
    backend: str
    copy_threads: int


_PROCESSORS = os.cpu_count() or 1
DEFAULTS = Moving(
    buffer_bytes=16 * MiB,
    queue_depth=32,
    backend="auto",
    # Four read and check 19 GB/s of what the page cache has, and a device takes 55.
    copy_threads=max(min(4, _PROCESSORS), min(8, _PROCESSORS // 2)),
)


@answering()
@dataclass(frozen=True, kw_only=True, slots=True)
class Io:
    """How bytes move between memory and storage: `Checkpointer(..., io=Io(queue_depth=64))`.

    Leave this to `statehold bench io`, unless you have measured something better.

    Args:
        buffer_bytes: size of one staging buffer and of one write. None: from the profile, or
            16 MiB.
        queue_depth: transfers in flight at once. None: from the profile, or 32.
        copy_threads: threads that copy and checksum. None: from the profile, or half the number of
            processors, at least 4 and at most 8, but not more than there are.
        backend: "io_uring", "threads" (pread/pwrite), or "auto", which takes io_uring if the kernel
            allows it. None: from the profile, or "auto".
        profile: the profile of the storage that `statehold bench io` measured. "auto" takes the
            file in ~/.config/statehold/io, if there is one. A path takes this file. None takes no
            profile.
        reuse_files: overwrite the files of retired steps instead of allocating new ones.
        share_files: give a data file that has not changed another name in the new step, instead of
            writing it again.
        address: the address of this host on the network over which hosts read each other's files,
            if each host has its own level; a name or a number, without a port. None: the address
            from which this host reaches MASTER_ADDR, or the address of its own name.

    Raises:
        UsageError: a value is not valid; the error names it.
    """

    buffer_bytes: int | str | None = None
    queue_depth: int | None = None
    copy_threads: int | None = None
    backend: Backend | None = None
    profile: str | os.PathLike[str] | None = "auto"
    reuse_files: bool = True
    share_files: bool = True
    address: str | None = None

    def __post_init__(self) -> None:
        if self.backend is not None:
            check_choice("backend", self.backend, BACKENDS)
        if self.profile is not None and not isinstance(self.profile, PATH):
            raise refused("not a profile", '"auto", a path, or None', self.profile)
        check_count("queue_depth", self.queue_depth, _MOST)
        check_count("copy_threads", self.copy_threads, _MOST)
        check_flag("reuse_files", self.reuse_files)
        check_flag("share_files", self.share_files)
        if self.address is not None and not (isinstance(self.address, str) and self.address):
            raise refused("not an address", "a name or a number", shown(self.address))
        buffer = settled(self).buffer_bytes
        if not BUFFER_BYTES_MIN <= buffer <= MEMORY_BYTES_MAX or buffer % BUFFER_BYTES_MIN:
            text = "buffer_bytes must be a multiple of 1 MiB"
            raise refused(text, "at most 64 TiB", format_bytes(buffer))


def settled(io: Io) -> Moving:
    """The values of `io`, with the defaults instead of None."""
    buffer = DEFAULTS.buffer_bytes if io.buffer_bytes is None else parse_bytes(io.buffer_bytes)
    return Moving(
        buffer_bytes=buffer,
        queue_depth=io.queue_depth or DEFAULTS.queue_depth,
        backend=io.backend or DEFAULTS.backend,
        copy_threads=io.copy_threads or DEFAULTS.copy_threads,
    )


def filled(io: Io, moving: Moving, staging_bytes: int | None) -> Io:
    """These settings, with the values of `moving` instead of None.

    staging_bytes: if it does not hold two buffers of `moving`, these are left out. So a run that
        opens without a profile also opens with one.
    """
    found = {
        field.name: getattr(moving, field.name)
        for field in fields(Moving)
        if getattr(io, field.name) is None
    }
    if staging_bytes is not None and staging_bytes < 2 * moving.buffer_bytes:
        found.pop("buffer_bytes", None)
    return replace(io, **found)
