"""Jobs of four processes, one of them killed: a fork server, so that torch is imported once.

victim.py FD...: one lane for each socket (a packet is a JSON object), each runs one job at a time.
A request is {"run", "kind": "store" or "directory", "timeout_s", "saves", "kill": null or
{"rank", "at", "after"}}. Every rank restores, checks each visible step element by element, and
saves `saves` more; with `kill` that rank sends itself SIGKILL in the last save but one, before or
after the step of the protocol that is called `at` (see `POINTS`).

Reports: {"pids"}, then by rank {"restored", "steps"}, {"requested"}, {"committed"},
{"killed": at, "after"} before dying, {"failed": what, "error", "ranks", "seconds"}, {"wrong"},
{"done": [what was passed, in order]}. Ranks that are done stay until a packet comes: rank 0
serves the store, or would still tell the others. Last comes {"exits": wait status of each}.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import statehold
from statehold.checkpoint.save import call

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.faults import SMALL
from support.inside import inside

SIZE = 4
NUMEL = 100_000
COMMIT_S = 60.0

# What happens to the files of a save, by the numbers of the commit protocol.
POINTS = {
    "D1 directory": lambda op, args: op == "mkdir" and ".partial" in args[0],
    "D1 file": lambda op, args: op == "open_write",
    "D2": lambda op, args: op == "finish",
    "D3 record": lambda op, args: op == "write_file" and "/rank-" in args[0],
    "D3 sync": lambda op, args: op == "sync_dir" and ".partial" in args[0],
    "D4 arrive": lambda op, args: op == "arrive",
    "D4 gather": lambda op, args: op == "gather",
    "D5": lambda op, args: op == "write_file" and "manifest.json" in args[0],
    "D6": lambda op, args: op == "rename" and args[0].endswith(".partial"),
    "D7": lambda op, args: op == "sync_dir" and ".partial" not in args[0],
    "R1": lambda op, args: op == "rename" and args[1].endswith(".retired"),
    "R3": lambda op, args: op == "rename" and args[1].endswith(".spare"),
    "told": lambda op, args: op == "conclude",
    "outcome": lambda op, args: op == "outcome",
}


class Hook:
    """Stands around the calls of some object."""

    def __init__(self, target: Any, around: Callable[[str, tuple[Any, ...], Any], Any]) -> None:
        self._target = target
        self._around = around

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value
        return lambda *args, **kwargs: self._around(name, args, lambda: value(*args, **kwargs))


class Executioner:
    """Kills this process before or after one point, once armed."""

    def __init__(self, kill: dict[str, Any] | None, report: Callable[..., None]) -> None:
        self._kill = kill
        self._report = report
        self.armed = False
        self.passed: list[str] = []

    def stand_around(self, ckpt: statehold.Checkpointer) -> None:
        opened: Any = inside(ckpt)
        start = call.start_write
        call.start_write = lambda *args: Hook(start(*args), self.around)
        opened.levels.store.fs = Hook(opened.levels.store.fs, self.around)
        publisher = opened.pipeline.publisher
        publisher.peers = Hook(publisher.peers, self.around)

    def around(self, operation: str, args: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        found = [point for point, is_it in POINTS.items() if is_it(operation, args)]
        if not (self.armed and found):
            return act()
        self._maybe(found[0], after=False)
        try:
            return act()
        finally:  # also where another rank has made the directory before
            self._maybe(found[0], after=True)
            self.passed.append(found[0])

    def _maybe(self, point: str, after: bool) -> None:
        if self._kill and (self._kill["at"], self._kill["after"]) == (point, after):
            self._report(killed=point, after=after)
            os.kill(os.getpid(), signal.SIGKILL)


def content(rank: int, step: int) -> dict[str, Any]:
    """What `rank` holds of a step: every element differs from rank to rank, or on none."""
    same = torch.arange(NUMEL, dtype=torch.int32) * 31 + step
    return {"same": same, "own": same + 1000 * (rank + 1), "rank": rank, "step": step}


def blank() -> dict[str, Any]:
    zeros = torch.zeros(NUMEL, dtype=torch.int32)
    return {"same": zeros, "own": zeros.clone(), "rank": None, "step": None}


def check(ckpt: statehold.Checkpointer, rank: int, report: Callable[..., None]) -> int:
    """Restore every visible step and compare it whole; the newest, 0 without one."""
    state = blank()
    steps = ckpt.steps()
    newest = ckpt.restore(state)
    report(restored=newest, steps=steps)
    for step in steps:
        ckpt.restore(state, step)
        expected = content(rank, step)
        same = all(torch.equal(state[name], expected[name]) for name in ("same", "own"))
        if not same or (state["rank"], state["step"]) != (rank, step):
            report(wrong=step)
    return newest or 0


def take_part(order: dict[str, Any], rank: int, report: Callable[..., None]) -> None:
    kill = order["kill"] if order["kill"] and order["kill"]["rank"] == rank else None
    executioner = Executioner(kill, report)
    options = {**SMALL, "keep": 2, "peer_timeout_s": COMMIT_S}
    coordination = "auto" if order["kind"] == "store" else "directory"
    ckpt = statehold.Checkpointer(order["run"], coordination=coordination, **options)
    begin, doing = time.monotonic(), "restore"
    try:
        first = check(ckpt, rank, report) + 1
        peers: Any = inside(ckpt).peers
        peers.timeout_s = order["timeout_s"]  # not before: a busy machine forks slowly
        executioner.stand_around(ckpt)
        last = first + order["saves"] - 1
        for step in range(first, last + 1):
            if step == last - 1:
                inside(ckpt).pipeline.drain()  # nothing of an earlier save is taken for this one
                executioner.armed = True
            begin, doing = time.monotonic(), f"save {step}"
            report(requested=step)
            ckpt.save(step, content(rank, step)).wait("committed", COMMIT_S)
            report(committed=step)
    except statehold.StateholdError as error:
        report(
            failed=doing,
            error=type(error).__name__,
            text=str(error),
            ranks=getattr(error, "ranks", ()),
            seconds=time.monotonic() - begin,
        )
    report(done=executioner.passed)


def rank_of_job(order: dict[str, Any], rank: int, port: int, lane: socket.socket) -> None:
    def report(**event: Any) -> None:
        lane.send(json.dumps({"rank": rank, **event}).encode())

    try:
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(SIZE)}
        if order["kind"] == "store":
            where = f"tcp://127.0.0.1:{port}"
            distributed.init_process_group("gloo", where, rank=rank, world_size=SIZE)
        take_part(order, rank, report)
    except BaseException:
        report(wrong=traceback.format_exc()[-3000:], done=[])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def run_job(order: dict[str, Any], lane: socket.socket) -> None:
    port, (end, keep) = free_port(), os.pipe()
    pids = []
    for rank in range(SIZE):
        pid = os.fork()
        if pid == 0:
            os.close(keep)
            rank_of_job(order, rank, port, lane)
            os.read(end, 1)  # until the lane closes its end
            os._exit(0)
        pids.append(pid)
    os.close(end)
    lane.send(json.dumps({"pids": pids}).encode())
    lane.recv(1 << 16)
    os.close(keep)
    exits = [os.waitpid(pid, 0)[1] for pid in pids]
    lane.send(json.dumps({"exits": exits}).encode())


def serve(lane: socket.socket) -> None:
    while order := lane.recv(1 << 16):
        run_job(json.loads(order), lane)


def main() -> None:
    for fd in sys.argv[1:]:
        if os.fork() == 0:
            serve(socket.socket(fileno=int(fd)))
            os._exit(0)
    for _ in sys.argv[1:]:
        os.wait()


if __name__ == "__main__":
    main()
