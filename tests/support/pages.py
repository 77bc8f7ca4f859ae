"""Pages of a KV cache that follow from a number, and a small store of them."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from statehold.kv import PageStore, PageVerdict, opened
from statehold.kv.page import HEADER_BYTES
from statehold.kv.tiers import FileTier, Geometry
from statehold.units import MiB

PAGE = 20_000  # not a multiple of a block
SLOT = HEADER_BYTES + 20_480
OLD, NEW = b"o" * 16, b"n" * 16
FsT = TypeVar("FsT")


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def page(number: int, nbytes: int = PAGE) -> bytes:
    return random.Random(number).randbytes(nbytes)


def made(path: Path, **options: object) -> PageStore:
    options = {"page_bytes": PAGE, "capacity": 2 * MiB, "memory": 16 * SLOT, **options}
    return PageStore(path, deadline_s=60.0, **options)  # type: ignore[arg-type]


def put(store: PageStore, *numbers: int) -> list[PageVerdict]:
    found = store.put([key(n) for n in numbers], [page(n) for n in numbers]).wait()
    store.flush()
    return found


def get(store: PageStore, *numbers: int) -> list[PageVerdict]:
    """The verdicts; a HIT has the right bytes."""
    into = [bytearray(PAGE) for _ in numbers]
    verdicts = store.get([key(n) for n in numbers], into).wait()
    for number, verdict, found in zip(numbers, verdicts, into, strict=True):
        assert verdict is not PageVerdict.HIT or found == page(number)
    return verdicts


def file_systems(monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Any], FsT]) -> list[FsT]:
    """The file systems of stores that are opened from now on: the native one, wrapped."""
    found = list[FsT]()

    class Tier(FileTier):
        def __init__(self, fs: Any, root: str, geometry: Geometry) -> None:
            found.append(wrap(fs))
            super().__init__(found[-1], root, geometry)  # type: ignore[arg-type]

    monkeypatch.setattr(opened, "FileTier", Tier)
    return found


class Held:
    """A job that ends once `may_end` is set."""

    def __init__(self, job: Any) -> None:
        self.begun, self.may_end, self._job = threading.Event(), threading.Event(), job

    def wait(self, timeout: float | None) -> bool:
        self.begun.set()
        return self.may_end.wait(timeout) and bool(self._job.wait(None))

    def is_moved(self) -> bool:
        """Wait until its bytes are moved; it has not ended yet."""
        return bool(self._job.wait(None))

    def checksums(self) -> bytes:
        return bytes(self._job.checksums())

    def cancel(self) -> None:
        self._job.cancel()
