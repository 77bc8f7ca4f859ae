"""A file system in user space that is one file: the disk under a loop device, which is watched.

Speaks the protocol of /dev/fuse itself (linux/fuse.h). The root of the mount is the file. Every
write, discard and flush goes into the log (journal), and some answers come late, so that several
writes are under way when a flush is asked for, and answers come in another order than questions.

Runs in a process of its own: whoever waits for this disk in the kernel must not be who serves it.
Ends when the file system is unmounted. Its death ends every wait for it with an error.
"""

from __future__ import annotations

import errno
import heapq
import os
import random
import stat
import struct
import threading
import time
from collections.abc import Callable

from powerloss.journal import FLUSH, WRITE, ZERO, Recorder
from powerloss.linux import punch

_MOST = 256 << 10  # bytes of one write
_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_INIT = struct.Struct("<IIII")
_INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
_ATTR = struct.Struct("<QII QQQQQQ IIIIIIIIII")
_OPEN_OUT = struct.Struct("<QII")
_RW = struct.Struct("<QQIIQII")
_WRITE_OUT = struct.Struct("<II")
_FALLOCATE = struct.Struct("<QQQII")
_STATFS_OUT = struct.Struct("<QQQQQIIII24x")

_GETATTR, _SETATTR, _OPEN, _READ, _WRITE, _STATFS, _RELEASE = 3, 4, 14, 15, 16, 17, 18
_FSYNC, _FLUSH, _INIT_CALL, _INTERRUPT, _DESTROY, _FALLOCATE_CALL = 20, 25, 26, 36, 38, 43
_FORGET, _BATCH_FORGET = 2, 42
_ASYNC_READ, _BIG_WRITES, _ASYNC_DIO, _MAX_PAGES = 1, 1 << 5, 1 << 15, 1 << 22
_PARALLEL_DIRECT_WRITES = 1 << 6
_PUNCH_HOLE, _ZERO_RANGE = 2, 16
_FOREVER_S = 1 << 20
_LATE = ((0.2, 0.002), (0.5, 0.005), (0.8, 0.015))  # which part of the answers, by up to (seconds)

Answer = Callable[[], None]


class Late:
    """Gives answers when their time has come."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Answer]] = []
        self._count = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def after(self, seconds: float, answer: Answer) -> None:
        with self._changed:
            self._count += 1
            heapq.heappush(self._due, (time.monotonic() + seconds, self._count, answer))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            self._next()()

    def _next(self) -> Answer:
        with self._changed:
            while not self._due or self._due[0][0] > time.monotonic():
                left = self._due[0][0] - time.monotonic() if self._due else None
                self._changed.wait(left)
            return heapq.heappop(self._due)[2]


class Disk:
    """Serves the file `image` to the kernel on `fuse`, an open /dev/fuse.

    seed: of which requests are answered late, and how late.
    """

    def __init__(self, fuse: int, image: int, recorder: Recorder, seed: int) -> None:
        self._fuse = fuse
        self._image = image
        self._size = os.fstat(image).st_size
        self._recorder = recorder
        self._chance = random.Random(seed)
        self._late, self._late_s = self._chance.choice(_LATE)
        self._later = Late()
        self._calls = {
            _INIT_CALL: self._init,
            _GETATTR: self._getattr,
            _SETATTR: self._getattr,
            _OPEN: self._open,
            _READ: self._read,
            _WRITE: self._write,
            _STATFS: self._statfs,
            _FSYNC: self._fsync,
            _FALLOCATE_CALL: self._fallocate,
            _RELEASE: self._nothing,
            _FLUSH: self._nothing,
            _DESTROY: self._nothing,
        }

    def serve(self) -> None:
        """Until the file system is unmounted."""
        buffer = bytearray(_MOST + (64 << 10))
        view = memoryview(buffer)
        while True:
            try:
                got = os.readv(self._fuse, [buffer])
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue  # the request was interrupted
                if error.errno == errno.ENODEV:
                    return
                raise
            _, opcode, unique, *_ = _IN.unpack_from(buffer)
            if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                continue
            call = self._calls.get(opcode)
            if call is None:
                self._answer(unique, error=errno.ENOSYS)
            else:
                call(unique, view[_IN.size : got])

    def _answer(self, unique: int, *parts: bytes, error: int = 0) -> None:
        size = _OUT.size + sum(len(part) for part in parts)
        try:
            os.writev(self._fuse, [_OUT.pack(size, -error, unique), *parts])
        except OSError as failed:
            if failed.errno not in (errno.ENOENT, errno.ENODEV):  # nobody waits for it any more
                raise

    def _nothing(self, unique: int, _told: memoryview) -> None:
        self._answer(unique)

    def _init(self, unique: int, told: memoryview) -> None:
        major, minor, ahead, _ = _INIT.unpack_from(told)
        flags = _ASYNC_READ | _BIG_WRITES | _ASYNC_DIO | _MAX_PAGES
        pages = _MOST // 4096
        self._answer(
            unique, _INIT_OUT.pack(7, min(minor, 31), ahead, flags, 64, 48, _MOST, 1, pages, 0, 0)
        )
        if major != 7:
            raise OSError(errno.EPROTO, f"the kernel speaks FUSE {major}.{minor}")

    def _attributes(self) -> bytes:
        mode = stat.S_IFREG | 0o600
        return _ATTR.pack(
            _FOREVER_S, 0, 0, 1, self._size, self._size // 512, *[0] * 6, mode, 1, *[0] * 3, 4096, 0
        )

    def _getattr(self, unique: int, _told: memoryview) -> None:
        self._answer(unique, self._attributes())

    def _open(self, unique: int, _told: memoryview) -> None:
        self._answer(unique, _OPEN_OUT.pack(0, _PARALLEL_DIRECT_WRITES, 0))

    def _statfs(self, unique: int, _told: memoryview) -> None:
        self._answer(unique, _STATFS_OUT.pack(0, 0, 0, 1, 0, 4096, 255, 4096, 0))

    def _read(self, unique: int, told: memoryview) -> None:
        _, offset, size, *_ = _RW.unpack_from(told)
        self._answer(unique, os.pread(self._image, size, offset))

    def _write(self, unique: int, told: memoryview) -> None:
        _, offset, size, *_ = _RW.unpack_from(told)
        data = told[_RW.size : _RW.size + size]
        number = self._recorder.asked(WRITE, offset, size, data)
        os.pwrite(self._image, data, offset)
        self._soon(unique, number, _WRITE_OUT.pack(size, 0))

    def _fallocate(self, unique: int, told: memoryview) -> None:
        _, offset, size, mode, _ = _FALLOCATE.unpack_from(told)
        if not mode & (_PUNCH_HOLE | _ZERO_RANGE):
            self._answer(unique, error=errno.EOPNOTSUPP)
            return
        number = self._recorder.asked(ZERO, offset, size)
        punch(self._image, offset, size)
        self._soon(unique, number)

    def _fsync(self, unique: int, _told: memoryview) -> None:
        self._soon(unique, self._recorder.asked(FLUSH))

    def _soon(self, unique: int, number: int, *parts: bytes) -> None:
        """Answer now or later."""

        def answer() -> None:
            self._recorder.answered(number)
            self._answer(unique, *parts)

        if self._chance.random() < self._late:
            self._later.after(self._late_s * self._chance.random(), answer)
        else:
            answer()
