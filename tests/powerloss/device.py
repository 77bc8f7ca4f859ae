"""A block device that logs what becomes of it: fuse below a loop device.

    with RecordingDevice(folder, image, position, seed) as device:
        mount(device.name, ...)          # and unmount it before the end
        ...
    journal = device.journal()

The file `image` is changed. Everything that this starts has ended when the block is left, whatever
ended it; who serves the disk dies with the process that began it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import traceback
from pathlib import Path

from powerloss import fuse
from powerloss.journal import Journal, Position, Recorder, parse
from powerloss.linux import MNT_DETACH, die_with_parent, loop_device, mount, unmount

SECTOR_BYTES = 4096
_END_S = 20.0
_CONNECTIONS = Path("/sys/fs/fuse/connections")


class RecordingDevice:
    """position: where the log says how far it is. seed: of which answers come late."""

    def __init__(
        self,
        folder: Path,
        image: Path,
        position: Position,
        seed: int,
    ) -> None:
        self._image, self._seed = image, seed
        self._log, self._file = folder / "log", folder / "disk"
        self._connection: Path | None = None
        self._stack = contextlib.ExitStack()
        self._server = -1
        self._position = position
        self.name = ""

    def __enter__(self) -> RecordingDevice:
        self._file.touch()
        self._position.set(0)
        try:
            self._mount()
            loop = loop_device(str(self._file), direct=True, sector_bytes=SECTOR_BYTES)
            self.name = self._stack.enter_context(loop)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def journal(self) -> Journal:
        """What was logged. Once the device is closed."""
        return parse(self._log.read_bytes())

    def close(self) -> None:
        """Detach and unmount the disk, and end who serves it. Safe to call twice."""
        self._stack.close()
        if self._server < 0:
            return
        try:
            unmount(str(self._file), MNT_DETACH)
        except OSError:  # it was not mounted
            os.kill(self._server, signal.SIGKILL)
        if not self._has_ended():
            self._abort()
        os.waitpid(self._server, 0)
        self._server = -1

    def _mount(self) -> None:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        try:
            options = f"fd={fd},rootmode=100600,user_id=0,group_id=0"
            mount("powerloss", str(self._file), "fuse", options)
            self._server = os.fork()
            if self._server == 0:
                self._serve(fd)
        finally:
            os.close(fd)
        number = os.minor(os.stat(self._file).st_dev)
        self._connection = _CONNECTIONS / str(number) / "abort"

    def _serve(self, fd: int) -> None:
        """In a process of its own."""
        code = 1
        try:
            die_with_parent()
            image = os.open(self._image, os.O_RDWR | os.O_CLOEXEC)
            recorder = Recorder(str(self._log), self._position)
            fuse.Disk(fd, image, recorder, self._seed).serve()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _has_ended(self) -> bool:
        pidfd = os.pidfd_open(self._server)
        try:
            return bool(select.select([pidfd], [], [], _END_S)[0])
        finally:
            os.close(pidfd)

    def _abort(self) -> None:
        """Somebody still has the disk: let all who wait for it fail."""
        with contextlib.suppress(OSError):
            if self._connection is not None:
                self._connection.write_text("1")
        os.kill(self._server, signal.SIGKILL)
