"""Many sessions on several processors, and what all of them found.

Each worker is a process with mounts of its own and a tmpfs of its own: whatever ends it, even a
SIGKILL, ends what it has mounted and started.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerloss import plans
from powerloss.linux import MNT_DETACH, die_with_parent, mount, own_mounts, unmount
from powerloss.session import Lab, Report, Session
from sim.campaign import quiet

_TMPFS = "size=4g,mode=700"


@dataclass(frozen=True, slots=True)
class Orders:
    """states: about how many in all; per_session: of each workload. before: called where a workload
    begins."""

    states: int
    seed: int
    file_systems: tuple[str, ...]
    kinds: tuple[str, ...]
    processes: int
    per_session: int = 40
    before: Callable[[], object] = int  # nothing

    @property
    def sessions(self) -> range:
        """Their seeds."""
        return range(self.seed, self.seed + -(-self.states // self.per_session))

    @property
    def drawn(self) -> int:
        """How many states are drawn from the first log of a session; second losses are added."""
        return -(-self.per_session * 3 // 4)


def run(orders: Orders) -> Iterator[dict[str, Any]]:
    """The reports of all sessions, as they come; see session.Report."""
    with tempfile.TemporaryDirectory(prefix="powerloss-") as folder:
        workers = [_Worker(orders, index, Path(folder)) for index in range(orders.processes)]
        try:
            yield from _told(workers)
        finally:
            for worker in workers:
                worker.end()


class _Worker:
    def __init__(self, orders: Orders, index: int, folder: Path) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read)
            _work(orders, index, folder, write)
        os.close(write)
        self.lines = os.fdopen(read)

    def end(self) -> None:
        self.lines.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _told(workers: list[_Worker]) -> Iterator[dict[str, Any]]:
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.lines, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                line = key.fileobj.readline()  # type: ignore[union-attr]
                if line:
                    yield json.loads(line)
                else:
                    selector.unregister(key.fileobj)


def _work(orders: Orders, index: int, folder: Path, out: int) -> None:
    """A worker: every `processes`-th session; ends the process."""
    code = 1
    try:
        die_with_parent()
        quiet()
        own_mounts()
        mount("powerloss", str(folder), "tmpfs", _TMPFS)
        lab = Lab(folder)
        for seed in orders.sessions[index :: orders.processes]:
            report = _session(orders, lab, seed)
            os.write(out, json.dumps(report.document()).encode() + b"\n")
        unmount(str(folder), MNT_DETACH)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _session(orders: Orders, lab: Lab, seed: int) -> Report:
    plan = plans.draw(seed, orders.file_systems, orders.kinds)
    session = Session(lab, plan, orders.before)
    try:
        return session.run(orders.drawn)
    except Exception:
        session.report.failed = f"{plan}\n{traceback.format_exc()}"
        return session.report


def total(reports: list[dict[str, Any]]) -> Counter[tuple[str, str, str, str]]:
    """How many states of each kind were checked."""
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for report in reports:
        for *key, count in report["states"]:
            counts[tuple(key)] += count
    return counts
