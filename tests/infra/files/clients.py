"""Two hosts with a mount each of one file system, and what they do with a run there.

    clients.py PLACE MOUNT_A MOUNT_B WANTED    WANTED: {NAME: [ARGUMENT, ...]}, in JSON

It runs the methods of Scenarios with these names, one after another, each in a run of this name. It
prints a JSON line {"scenario", ...} with what each has found, or with an "error".

Each host is a process with a host name of its own, which sees its mount at PLACE, an empty folder.
Invariant: it imports torch once, since it also runs in a virtual machine, where that takes long.
Not here: file systems and their servers.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed

import statehold
from statehold.errors import StateholdError, StorageError
from support.faults import SMALL, must, spy_on

NUMEL = 300_000
LIMIT_S = 180.0
STEPS_BESIDE = 30  # of a writer with a reader beside it
RETRY_S = 0.2
NEW_NAMESPACES = 0x00020000 | 0x04000000  # of mounts and of the host's name
PRIVATE, BIND = 0x4000 | 1 << 18, 4096

Answer = dict[str, Any]
held: list[statehold.Checkpointer] = []  # of a host


def content(step: int) -> dict[str, Any]:
    return {"weights": torch.arange(NUMEL, dtype=torch.int32) * 31 + step, "step": step}


def must_be(found: torch.Tensor, step: int) -> None:
    must(bool((found == content(step)["weights"]).all()), f"this is not step {step}")


def save(run: Path, first: int, last: int) -> None:
    with statehold.Checkpointer(run, keep=2, **SMALL) as ckpt:
        for step in range(first, last + 1):
            ckpt.save(step, content(step)).wait("committed", LIMIT_S)


def save_in_time(run: Path) -> None:
    """Save a step, once the mount has its server again."""
    for _ in range(int(LIMIT_S / RETRY_S)):
        with contextlib.suppress(StorageError):
            return save(run, 2, 2)
        signal.sigtimedwait([], RETRY_S)
    raise TimeoutError(run)


def restore(run: Path) -> int | None:
    live = content(0)
    with statehold.Checkpointer(run, keep=2, **SMALL) as ckpt:
        step = ckpt.restore(live)
    must_be(live["weights"], step or 0)
    must(live["step"] == (step or 0))
    return step


def load(run: Path) -> int:
    found = statehold.load(run)
    must_be(found["weights"], found["step"])
    return int(found["step"])


def read_until(run: Path, last: int) -> int:
    """Restore and load until the last step has come, each time a whole step, and none before."""
    newest, count = 0, 0
    while newest < last:
        for way in (restore, load):
            step = way(run) or 0
            must(step >= newest, f"step {step} came after step {newest}")
            newest, count = step, count + 1
    return count


def look(run: Path) -> list[str]:
    """What a script sees of a run, which lets the client remember what is missing."""
    return sorted(each.name for each in run.glob("*")) if run.exists() else []


def take(run: Path) -> None:
    """Save a step, and hold the run until give_back()."""
    held.append(statehold.Checkpointer(run, **SMALL))
    held[0].save(1, content(1)).wait("committed", LIMIT_S)


def give_back() -> None:
    held.pop().close()


def save_rank(run: Path, rank: int, ranks: int, port: int) -> Answer:
    """Save and restore as one rank of a job."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=ranks)
    with statehold.Checkpointer(run, peer_timeout_s=LIMIT_S, **SMALL) as ckpt:
        for step in (1, 2, 3):
            own = {**content(step), "own": rank}
            ckpt.save(step, own).wait("committed", LIMIT_S)
        live = {**content(0), "own": -1}
        restored = ckpt.restore(live)
        must_be(live["weights"], 3)
    torch.distributed.destroy_process_group()
    return {"restored": restored, "own": live["own"]}


def tell_server(command: str) -> None:
    subprocess.run(command, shell=True, check=True, stdout=sys.stderr)


def save_without_server(run: Path, stop: str, start: str, outage_s: float) -> Answer:
    """Save five steps. The server stops in the middle of the third.

    outage_s: it starts again after so long; 0: after a save has failed.
    """
    stopped = threading.Event()
    outage = threading.Thread(target=_start_later, args=(stopped, start, outage_s))
    saved, failed = [], []

    def before(operation: str, _args: tuple[Any, ...]) -> None:
        if operation == "open_write" and saved[-1:] == [2] and not stopped.is_set():
            tell_server(stop)
            stopped.set()

    with contextlib.closing(statehold.Checkpointer(run, keep=2, **SMALL)) as ckpt:
        spy_on(ckpt, before)
        if outage_s:
            outage.start()
        step = 0
        while len(saved) < 5:
            step += 1
            try:
                ckpt.save(step, content(step)).wait("committed", LIMIT_S)
                saved.append(step)
            except StorageError as error:
                failed.append(str(error))
                if len(failed) == 1:
                    tell_server(start)
                signal.sigtimedwait([], RETRY_S)
                must(len(failed) < LIMIT_S / RETRY_S, failed[-1])
        must(stopped.is_set())
    if outage_s:
        outage.join()
    return {"saved": saved, "failed": failed[:3], "newest": restore(run)}


def _start_later(stopped: threading.Event, start: str, outage_s: float) -> None:
    stopped.wait(LIMIT_S)
    signal.sigtimedwait([], outage_s)
    tell_server(start)


class Host:
    """A process that calls functions, one after another."""

    def __init__(self, name: str, mount: str, place: Path) -> None:
        self._answers, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_serve, args=(name, mount, place, theirs))
        self._process.start()
        theirs.close()

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        self._answers.send((function, args))

    def end(self) -> Any:
        must(self._answers.poll(2 * LIMIT_S), "no answer")
        result, error = self._answers.recv()
        must(not error, error)
        return result

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        self.begin(function, *args)
        return self.end()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._answers.send(None)
        self._process.join(LIMIT_S)
        self._process.kill()


def _serve(name: str, mount: str, place: Path, orders: Connection) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    must(libc.unshare(NEW_NAMESPACES) == 0, "this needs root")
    must(libc.mount(None, b"/", None, PRIVATE, None) == 0)
    must(libc.mount(os.fsencode(mount), os.fsencode(place), None, BIND, None) == 0, mount)
    socket.sethostname(name)
    torch.set_num_threads(1)
    while order := orders.recv():
        function, args = order
        try:
            orders.send((function(*args), ""))
        except BaseException:
            orders.send((None, traceback.format_exc()))


class Scenarios:
    def __init__(self, a: Host, b: Host, run: Path) -> None:
        self.a, self.b, self.run = a, b, run

    def other_host(self) -> Answer:
        """What one host has saved, the other one restores, and goes on from there."""
        self.a.call(save, self.run, 1, 3)
        restored = self.b.call(restore, self.run)
        self.b.call(save, self.run, 4, 5)
        return {"restored": [restored, self.a.call(restore, self.run)]}

    def just_begun(self) -> Answer:
        """A host has looked at a run that was not there, and another one has begun it since."""
        before = [self.b.call(look, self.run), self.b.call(restore, self.run)]
        self.a.call(save, self.run, 1, 1)
        restored = self.b.call(restore, self.run)
        self.a.call(save, self.run, 2, 2)
        return {"before": before, "restored": restored, "loaded": self.b.call(load, self.run)}

    def second_job(self) -> Answer:
        """While a host has the run, no other host can save into it."""
        self.a.call(take, self.run)
        refusal = self.b.call(refused, self.run)
        self.a.call(give_back)
        self.b.call(save, self.run, 2, 2)
        return {"refusal": refusal, "restored": self.b.call(restore, self.run)}

    def reader(self) -> Answer:
        """One host reads while another one saves and retires."""
        self.a.call(save, self.run, 1, 1)
        self.a.begin(save, self.run, 2, STEPS_BESIDE)
        count = self.b.call(read_until, self.run, STEPS_BESIDE)
        self.a.end()
        return {"reads": count}

    def ranks(self) -> Answer:
        """Two ranks of a job on two hosts."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.a.begin(save_rank, self.run, 0, 2, port)
        self.b.begin(save_rank, self.run, 1, 2, port)
        return {"ranks": [self.a.end(), self.b.end()]}

    def outage(self, stop: str, start: str, outage_s: float) -> Answer:
        """Shell commands stop the server in the middle of a save, and start it again."""
        found: Answer = self.a.call(save_without_server, self.run, stop, start, outage_s)
        return {**found, "other": self.b.call(restore, self.run)}

    failure = outage

    def closed(self, stop: str, start: str) -> Answer:
        """A job ends while the server is gone, and another host takes the run after that."""
        self.a.call(take, self.run)
        tell_server(stop)
        self.a.call(give_back)
        tell_server(start)
        self.b.call(save_in_time, self.run)
        return {"restored": self.a.call(restore, self.run)}


def refused(run: Path) -> str:
    """The name of the error of a save."""
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        try:
            ckpt.save(2, content(2)).wait("committed", LIMIT_S)
        except StateholdError as error:
            return type(error).__name__
    return "none"


@contextlib.contextmanager
def hosts(a: str, b: str, place: Path) -> Iterator[tuple[Host, Host]]:
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(contextlib.closing(Host(name, mount, place)))
            for name, mount in (("host-a", a), ("host-b", b))
        ]
        yield started[0], started[1]


def main() -> None:
    place, a, b, wanted = sys.argv[1:]
    for name, arguments in json.loads(wanted).items():
        answer: Answer = {}
        try:
            with hosts(a, b, Path(place)) as both:
                answer = getattr(Scenarios(*both, Path(place, name)), name)(*arguments)
        except BaseException:
            answer["error"] = traceback.format_exc()
        print(json.dumps({"scenario": name, **answer}), flush=True)


if __name__ == "__main__":
    main()
