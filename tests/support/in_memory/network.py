"""Hosts in one process: ranks that are threads read each other's simulated disks.

Each rank takes an exchange() of one MemoryNetwork; what it serves is read on its own file system,
with the faults of that. A host that is `cut` off answers nobody any more.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from statehold.errors import UnavailableError
from statehold.steps.near_files import NearFiles

if TYPE_CHECKING:
    from statehold._core import Fs
    from statehold.checkpoint.levels.hosts.place import HostPlace
    from statehold.steps.shelf import ShelfFile
    from statehold.steps.store import Store


class MemoryNetwork:
    """What is served, by address. `cut`: addresses of hosts that do not answer."""

    def __init__(self) -> None:
        self.served: dict[str, dict[str, Store]] = {}
        self.cut: set[str] = set()
        self.reads = 0

    def exchange(self) -> MemoryExchange:
        return MemoryExchange(self)

    def find(self, address: str, place: str) -> Store:
        self.reads += 1
        if address in self.cut or address not in self.served:
            raise UnavailableError("cannot reach", errno=errno.ECONNREFUSED, path=address)
        return self.served[address][place]


class MemoryExchange:
    """One rank's end of it."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._address = ""

    def serve(self, places: Sequence[HostPlace]) -> str:
        if not self._address:
            self._address = f"{len(self._network.served)}"
            self._network.served[self._address] = {
                place.name: place.store for level in places for place in (level, level.copies)
            }
        return self._address

    def let_in(self, secret: str) -> None: ...

    def reach(self, address: str, secret: str, place: str) -> MemoryFiles:
        return MemoryFiles(self._network, address, place)

    def near(self, place: HostPlace) -> MemoryNear:
        return MemoryNear(place.store.fs)

    def stop(self) -> None:
        self._network.served.pop(self._address, None)

    def close(self) -> None:
        self.stop()


class MemoryFiles:
    """The files of one level on one host."""

    def __init__(self, network: MemoryNetwork, address: str, place: str) -> None:
        self._network = network
        self._where = address, place

    def read_file(self, path: str, max_bytes: int) -> bytes:
        step, name = _split(path)
        return self._network.find(*self._where).read(step, name, max_bytes)

    def open_read(self, path: str) -> ShelfFile:
        return self._network.find(*self._where).open_file(*_split(path))

    def fetch(self, path: str, targets: Sequence[tuple[int, memoryview]]) -> None:
        with contextlib.closing(self.open_read(path)) as file:
            for begin, memory in targets:
                file.read_into(memory, begin)


def _split(path: str) -> tuple[int, str]:
    """The step and the file that a path means."""
    directory, _, name = path.partition("/")
    return int(directory.removeprefix("step-")), name


class MemoryNear(NearFiles):
    """Files of other hosts, on the simulated disk of this one."""

    def __init__(self, fs: Fs) -> None:
        super().__init__(())
        self._fs = fs

    def bring(
        self,
        step: int,
        name: str,
        nbytes: int,
        needed: Sequence[tuple[int, int]] | None,
        fetch: Callable[[Sequence[tuple[int, memoryview]]], None],
    ) -> str:
        memory = bytearray(nbytes)
        view = memoryview(memory)
        fetch([(begin, view[begin:end]) for begin, end in needed or [(0, nbytes)]])
        folder = f"/fetched-{secrets.token_hex(8)}"
        self._fs.mkdir(folder)
        self._fs.write_file(f"{folder}/{name}", bytes(memory))
        return f"{folder}/{name}"
