"""The soak for seconds: it runs, and notices what grows. `make soak MINUTES=n` is the long one."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from soak import usage
from soak.loop import Soak
from support.faults import DEADLINE_S

WARM_ROUNDS = 4
GAUGES = ["descriptors", "threads", "heap_bytes", "objects", "rss_bytes", "shared"]


@pytest.mark.thorough
def test_nothing_grows(tmp_path: Path) -> None:
    told = Soak(tmp_path, WARM_ROUNDS).run(0)
    assert "rounds" in told


class Leaks:
    """Ways to leave something behind, and what makes up for each of them."""

    def __init__(self, undo: ExitStack) -> None:
        self.undo = undo
        self.kept: list[object] = []

    def descriptor(self) -> None:
        self.undo.callback(os.close, os.dup(0))

    def thread(self) -> None:
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait, args=(DEADLINE_S,))
        thread.start()
        self.undo.callback(thread.join)
        self.undo.callback(stop.set)

    def heap_bytes(self) -> None:
        self.kept += [bytearray(1024) for _ in range(256)]

    def objects(self) -> None:
        self.kept += [object() for _ in range(2000)]

    def rss_bytes(self) -> None:
        pages = mmap.mmap(-1, 32 << 20)
        pages.write(bytes(len(pages)))
        self.undo.callback(pages.close)

    def shared(self) -> None:
        name = Path(f"/dev/shm/statehold-{os.getpid()}-{len(self.kept)}")
        name.touch()
        self.kept.append(name)
        self.undo.callback(name.unlink)


@pytest.fixture
def leaks() -> Iterator[Leaks]:
    with ExitStack() as undo:
        yield Leaks(undo)


@pytest.mark.parametrize("gauge", GAUGES)
def test_a_leak_is_noticed(tmp_path: Path, monkeypatch, leaks: Leaks, gauge: str) -> None:
    monkeypatch.setattr(usage, "SETTLE_S", 0.0)  # nothing of this goes away by itself
    leak = getattr(leaks, gauge.removesuffix("s") if gauge in {"descriptors", "threads"} else gauge)

    class Leaking(Soak):
        def round(self) -> None:
            leak()

    with pytest.raises(AssertionError, match=gauge):
        Leaking(tmp_path, WARM_ROUNDS).run(0)


def test_a_file_left_behind_is_noticed(tmp_path: Path) -> None:
    soak = Soak(tmp_path)
    soak.alone(tmp_path / "run")
    (tmp_path / "run" / "step-000000000099.partial").mkdir()
    with pytest.raises(AssertionError, match="files in"):
        soak.holds(tmp_path / "run", [soak.step - 1])
