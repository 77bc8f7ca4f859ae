"""What Python does not offer of the kernel: mounts, namespaces of mounts, loop devices.

Invariants: a loop device goes away by itself when nobody has it open or mounted any more, and
mounts made in a namespace of their own go away with its last process, however that dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path

MS_REC, MS_PRIVATE = 1 << 14, 1 << 18
MNT_DETACH = 2
_CLONE_NEWNS = 0x20000
_PR_SET_PDEATHSIG = 1
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_AUTOCLEAR, _DIRECT_IO = 4, 16
_LOOP_CONFIG = struct.Struct("=II QQQQQ IIII 64s 64s 32s QQ 64x")
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_TRIES = 100
_AGAIN_S = 0.05

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _checked(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def mount(source: str, target: str, kind: str, options: str = "", flags: int = 0) -> None:
    arguments = [each.encode() for each in (source, target, kind)]
    _checked(_libc.mount(*arguments, flags, options.encode()), f"mount {kind} at {target}")


def unmount(target: str, flags: int = 0) -> None:
    _checked(_libc.umount2(target.encode(), flags), f"umount {target}")


def unmount_within(seconds: float, target: str) -> None:
    """Unmount what nobody uses any more: under load the kernel may still be closing its files.

    Raises OSError, with what is open, when it is still used after so many seconds.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return unmount(target)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            if time.monotonic() > until:
                raise OSError(errno.EBUSY, f"{target} is used: {opened_below(target)}") from error
        time.sleep(_AGAIN_S)


def opened_below(folder: str) -> list[str]:
    """Files below a directory that some process has open, each with the number of the process."""
    found = []
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            path = os.readlink(fd)
            if path.startswith(f"{folder}/"):
                found.append(f"{fd.parts[2]}: {path}")
    return found


def own_mounts() -> None:
    """From here on what this process mounts is seen by itself and its children only."""
    _checked(_libc.unshare(_CLONE_NEWNS), "unshare")
    mount("none", "/", "none", flags=MS_REC | MS_PRIVATE)


def die_with_parent() -> None:
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


@contextlib.contextmanager
def loop_device(path: str, *, direct: bool, sector_bytes: int) -> Iterator[str]:
    """A block device whose content is the file `path`. It stays for as long as it is mounted.

    direct: transfers go past the page cache of the file, several at a time.
    """
    backing = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    try:
        name, device = _configured(backing, direct, sector_bytes)
    finally:
        os.close(backing)
    try:
        yield name
    finally:
        os.close(device)


def _configured(backing: int, direct: bool, sector_bytes: int) -> tuple[str, int]:
    flags = _AUTOCLEAR | (_DIRECT_IO if direct else 0)
    config = _LOOP_CONFIG.pack(
        backing, sector_bytes, 0, 0, 0, 0, 0, 0, 0, 0, flags, b"powerloss", b"", b"", 0, 0
    )
    for _ in range(_TRIES):
        name = f"/dev/loop{_free_loop()}"
        device = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(device, _LOOP_CONFIGURE, config)
        except OSError as error:
            os.close(device)
            if error.errno != errno.EBUSY:  # else somebody else was faster
                raise
        else:
            return name, device
    raise OSError(errno.EBUSY, "no free loop device")


def _free_loop() -> int:
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        return fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
    finally:
        os.close(control)


def punch(fd: int, offset: int, size: int) -> None:
    """Let a range of a file read as zeros, and take no space."""
    mode = _KEEP_SIZE | _PUNCH_HOLE
    _checked(_libc.fallocate(fd, mode, offset, size), "fallocate")


def is_loop_available() -> bool:
    return Path("/dev/loop-control").exists()
