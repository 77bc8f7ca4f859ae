"""Processes of a store that are killed, that offer too much, and a load that hangs.

    PYTHONPATH=tests python -m kv.kills [--kills N] [--dir DIR]      the figures of all three

kills    a process puts pages and is killed by SIGKILL; the next one finds them, in every second
         round without the memory that the host had. Older: stored for OLDER_S before the kill.
budget   three processes offer OFFERED times what the files may take; the space that these take is
         looked at all the time
hang     one load takes HANG_S, and others go on

Not here: damage (faults), kills in a change of the tables that others see (test_kills).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from statehold.kv import PageStore, PageVerdict
from statehold.kv.opened import OpenStore
from statehold.kv.page import slot_bytes
from statehold.kv.tiers import memory_path
from statehold.units import MiB
from support.faults import must
from support.pages import key, page

NBYTES = 8000
OLDER_S = 1.0
OFFERED = 20
HANG_S = 5.0
_GOOD = (PageVerdict.STORED, PageVerdict.THERE)


def opened(path: Path, capacity: int, memory: int = 1 * MiB) -> PageStore:
    return PageStore(path, page_bytes=NBYTES, capacity=capacity, memory=memory, deadline_s=60.0)


def forked(action: Callable[[int], None]) -> tuple[int, int]:
    """A process that calls this with the end of a pipe to write to; its pid, and the other end."""
    source, to = os.pipe()
    pid = os.fork()
    if pid:
        os.close(to)
        return pid, source
    try:
        os.close(source)
        action(to)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


# -- kills -----------------------------------------------------------------------------------------


def _puts(path: Path, first: int, capacity: int, to: int) -> None:
    with opened(path, capacity) as store:
        os.write(to, b"begins\n")
        for number in range(first, first + 10_000):
            found = store.put([key(number)], [page(number, NBYTES)]).wait()
            if found[0] in _GOOD:
                os.write(to, b"%d %.6f\n" % (number, time.monotonic()))


def _gets(path: Path, numbers: list[int], capacity: int, to: int) -> None:
    """What came back of each, as a letter: H, M, B, L, or W for wrong bytes."""
    with opened(path, capacity) as store:
        into = [bytearray(NBYTES) for _ in numbers]
        found = store.get([key(n) for n in numbers], into).wait()
        for number, verdict, got in zip(numbers, found, into, strict=True):
            is_wrong = verdict is PageVerdict.HIT and got != page(number, NBYTES)
            os.write(to, b"W" if is_wrong else verdict.name[:1].encode())


def kills(folder: Path, count: int) -> Counter[str]:
    """What became of the pages of processes that were killed. A few kills may take less than
    OLDER_S, so they go on until there are older pages."""
    dice, path = random.Random(count), folder / "killed"
    capacity = max(256, 2 * count) * MiB  # no page has to go
    stored, counts, first = dict[int, float](), Counter[str](), 0
    for kill in range(max(count, 1000)):
        if kill >= count and any(name.startswith("older") for name in counts):
            break
        pid, source = forked(partial(_puts, path, first, capacity))
        with open(source) as said:
            assert said.readline() == "begins\n"
            time.sleep(dice.random() * 0.05)  # the moment of the kill, and nothing waits for it
            os.kill(pid, signal.SIGKILL)
            killed_s = time.monotonic()
            new = [
                line.split() for line in said.read().splitlines(keepends=True) if line[-1] == "\n"
            ]
        os.waitpid(pid, 0)
        stored.update((int(number), float(at)) for number, at in new)
        first += 10_000
        counts["kills"] += 1
        counts["stored"] += len(new)
        if kill % 2:
            os.unlink(memory_path(os.fspath(path), slot_bytes(NBYTES)))
        old = [n for n, at in stored.items() if killed_s - at > OLDER_S]
        asked = [*dice.sample(old, min(len(old), 60)), *(int(number) for number, _ in new)]
        pid, source = forked(partial(_gets, path, asked, capacity))
        with open(source) as said:
            found = said.read()
        assert os.waitpid(pid, 0)[1] == 0
        older, newer = found[: len(asked) - len(new)], found[len(asked) - len(new) :]
        for name, letters in (("older", older), ("newer", newer)):
            counts.update(f"{name} {letter}" for letter in letters)
        # Without the memory, a page of the last moments may be gone. What is back once, stays.
        for (number, _), letter in zip(new, newer, strict=True):
            if letter == "M" and kill % 2:
                del stored[int(number)]
    return counts


# -- the budget ------------------------------------------------------------------------------------


def _offers(path: Path, first: int, count: int, capacity: int, to: int) -> None:
    total = Counter[str]()
    with opened(path, capacity) as store:
        for begin in range(first, first + count, 16):
            numbers = range(begin, min(begin + 16, first + count))
            pages = [page(n, NBYTES) for n in numbers]
            total.update(v.value for v in store.put(list(map(key, numbers)), pages).wait())
        store.flush()
        said = store.stats()
    own = all(said[name] == total[name] for name in ("stored", "dropped", "late", "there"))
    names = ("stored", "dropped", "late", "unwritten")
    os.write(to, " ".join(map(str, [total.total(), *(said[n] for n in names), own])).encode())


def budget(folder: Path, capacity: int = 16 * MiB) -> dict[str, Any]:
    """The most that the files took, and what the processes have counted."""
    path, processes = folder / "budget", 3
    count = OFFERED * capacity // NBYTES // processes
    opened(path, capacity).close()
    ends = [forked(partial(_offers, path, n * count, count, capacity)) for n in range(processes)]
    most, left = 0, {pid for pid, _ in ends}
    while left:
        most = max(most, sum(each.stat().st_blocks * 512 for each in path.iterdir()))
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
    said = [os.read(source, 1000).decode().split() for _, source in ends]
    with opened(path, capacity) as store:
        evicted, pages = store.stats()["evicted"], store.stats()["pages"]
    offered, *verdicts, unwritten = (sum(int(each[n]) for each in said) for n in range(5))
    return {
        "offered": offered,
        "stored + dropped + late": " + ".join(map(str, verdicts)),
        "capacity": capacity,
        "most": most,
        "evicted + in files + unwritten": f"{evicted} + {pages} + {unwritten}",
        "uncounted": offered - sum(verdicts) + verdicts[0] - evicted - pages - unwritten,
        "counts agree": all(each[5] == "True" for each in said),
    }


# -- a load that hangs -----------------------------------------------------------------------------


class _Hangs:
    def __init__(self, job: Any) -> None:
        self._job, self._until = job, time.monotonic() + HANG_S

    def wait(self, timeout: float | None) -> bool:
        left = max(0.0, self._until - time.monotonic())
        if timeout is not None and timeout < left:
            time.sleep(timeout)  # the storage that hangs
            return False
        time.sleep(left)
        return bool(self._job.wait(timeout))

    def checksums(self) -> bytes:
        return bytes(self._job.checksums())

    def cancel(self) -> None:
        self._job.cancel()


def hang(folder: Path, deadline_s: float = 0.2) -> dict[str, float]:
    """Times, in ms: a load that hangs; look-ups and loads from memory without it, and beside it."""
    path, capacity = folder / "hang", 16 * MiB
    with opened(path, capacity) as store:
        store.put([key(n) for n in range(64)], [page(n, NBYTES) for n in range(64)]).wait()
    begin, keys = OpenStore.job, [key(n) for n in range(64)]
    with opened(path, capacity) as store:
        store.get(keys[:8], [bytearray(NBYTES) for _ in range(8)]).wait()

        def times(action: Callable[[], object], count: int) -> list[float]:
            taken = []
            for _ in range(count):
                before = time.perf_counter()
                action()
                taken.append(1000 * (time.perf_counter() - before))
            return sorted(taken)

        def load() -> None:
            found = store.get(keys[:8], [bytearray(NBYTES) for _ in range(8)]).wait()
            assert set(found) == {PageVerdict.HIT}

        plain, loads = times(lambda: store.contains(keys), 500), times(load, 200)
        hanging = lambda self, *a, **k: _Hangs(begin(self, *a, **k))  # noqa: E731
        with mock.patch.object(OpenStore, "job", hanging):
            into = [bytearray(NBYTES) for _ in range(8)]
            before = time.perf_counter()
            late = store.get(keys[20:28], into, deadline_s=deadline_s)
            beside = times(lambda: store.contains(keys), 500)
            must(set(late.wait()) == {PageVerdict.LATE})
            late_ms = 1000 * (time.perf_counter() - before)
        after = times(load, 200)
    at = lambda found: found[int(len(found) * 0.99)]  # noqa: E731
    return {
        "late after": late_ms,
        "look-up p99": at(plain),
        "look-up p99 beside": at(beside),
        "load p99": at(loads),
        "load p99 after": at(after),
        "look-up median beside": statistics.median(beside),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kv.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--dir", default=".")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.dir))
    try:
        counts = kills(folder, args.kills)
        print("kills: " + ", ".join(f"{name} {n}" for name, n in sorted(counts.items())))
        older = {name: n for name, n in counts.items() if name.startswith("older")}
        share = older.get("older H", 0) / max(1, sum(older.values()))
        print(f"pages older than {OLDER_S:g} s that are back: {share:.2%}", flush=True)
        for name, found in (("budget", budget(folder)), ("hang, ms", hang(folder))):
            print(f"{name}: " + ", ".join(f"{n} {v}" for n, v in found.items()), flush=True)
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
