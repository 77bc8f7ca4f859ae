"""Simulated nodes: each has memory (/dev/shm), a disk and a host name of its own, on one network.

node.py FOLDER FD...: torch is imported once, then a server is forked for each node, which talks
over its socket (a packet is a JSON object). A node is a mount and a UTS namespace: its memory and
its disk (mounted at FOLDER/disk) outlive the ranks that run there, and end with it.

Orders: {"job": {...}, "ranks": [...]} forks ranks; {"kill": signal} ends them; {"lose": true} ends
them and takes the memory and the disk away. Answers: what the ranks report, by rank; {"ended": wait
statuses}; {"lost": {"before": files, "after": files}}.
A rank restores, compares every element, flushes, and saves `saves` steps, one after the other:
reports {"restored"}, {"flushed"}, {"committed", "copied"}, {"done"}, or {"wrong": traceback}.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import statehold

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.faults import SMALL, must

NUMEL = 50_000
PARTS = 8  # as many as there are ranks, at most
WAIT_S = 60.0
_NEWNS, _NEWUTS = 0x00020000, 0x04000000


# -- a rank ----------------------------------------------------------------------------------------


def part(number: int, step: int) -> torch.Tensor:
    return torch.arange(NUMEL, dtype=torch.int32) * 31 + 1000 * (number + 1) + step


def content(rank: int, size: int, step: int) -> dict[str, Any]:
    """What `rank` saves: parts that it alone has; together the ranks have PARTS, however many."""
    mine = range(rank, PARTS, size)
    return {**{f"part-{number}": part(number, step) for number in mine}, "step": step}


def restored(ckpt: statehold.Checkpointer, is_first: bool) -> int | None:
    """Restore what all ranks have saved, on this one, and compare it with that."""
    names = [f"part-{number}" for number in range(PARTS)]
    state: dict[str, Any] = {name: torch.zeros(NUMEL, dtype=torch.int32) for name in names}
    state["step"] = None
    step = ckpt.restore(state)
    must((step is None) == is_first, (step, is_first))
    if step is not None:
        must(state["step"] == step)
        for number, name in enumerate(names):
            must(torch.equal(state[name], part(number, step)), name)
    return step


def take_part(job: dict[str, Any], rank: int, report: Callable[..., None]) -> None:
    disk = statehold.Directory(path=job["disk"], per_host=True, copies=1, name="disk", every=2)
    levels: list[Any] = [statehold.Memory(copies=1, agent=False), disk]
    if job["shared"]:
        levels.append(statehold.Directory(name="shared"))
    coordination = "auto" if job["kind"] == "store" else "directory"
    ckpt = statehold.Checkpointer(
        job["run"], levels=levels, coordination=coordination, peer_timeout_s=WAIT_S, **SMALL
    )
    step = restored(ckpt, job["is_first"])
    report(restored=step)
    ckpt.flush(WAIT_S)
    report(flushed=copied(ckpt))
    for number in range(1, job["saves"] + 1):
        at = (step or 0) + number
        ckpt.save(at, content(rank, job["size"], at)).wait("committed", WAIT_S)
        report(committed=at, copied=copied(ckpt))
    if job["flush"]:
        ckpt.flush(WAIT_S)
        report(committed=at, copied=copied(ckpt))
    report(done=True)
    signal.pause()


def copied(ckpt: statehold.Checkpointer) -> int:
    """The newest step that survives the loss of a node; as rank 0 knows it."""
    [level] = [each for each in ckpt.levels() if each.name == "memory.copies"]
    return level.newest or 0


def run_rank(job: dict[str, Any], rank: int, node: socket.socket) -> None:
    def report(**event: Any) -> None:
        node.send(json.dumps({"rank": rank, **event}).encode())

    try:
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job["size"])}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        if job["kind"] == "store":
            where = f"tcp://127.0.0.1:{job['port']}"
            distributed.init_process_group("gloo", where, rank=rank, world_size=job["size"])
        take_part(job, rank, report)
    except BaseException:
        report(wrong=traceback.format_exc()[-3000:])
    os._exit(1)


# -- a node ----------------------------------------------------------------------------------------


def become_node(folder: str, number: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEWNS | _NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    disk = f"{folder}/disk-{number}"
    os.mkdir(disk)
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs", "/dev/shm"],
        ["mount", "--bind", disk, f"{folder}/disk"],
    ):
        subprocess.run(command, check=True)
    socket.sethostname(f"node{number}")


def files_here(folder: str) -> int:
    return sum(
        len(names)
        for root in (f"/dev/shm/statehold-{os.getuid()}", f"{folder}/disk")
        for _, _, names in os.walk(root)
    )


def lose(folder: str) -> dict[str, int]:
    """The memory and the disk of this node are gone."""
    before = files_here(folder)
    for path in Path(folder, "disk").iterdir():
        subprocess.run(["rm", "-rf", str(path)], check=True)
    subprocess.run(["umount", "-l", "/dev/shm"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
    return {"before": before, "after": files_here(folder)}


def serve(folder: str, number: int, test: socket.socket) -> None:
    become_node(folder, number)
    pids: list[int] = []
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    test.send(json.dumps({"node": number}).encode())
    while True:
        ready, _, _ = select.select([test, ours], [], [])
        if ours in ready:
            test.send(ours.recv(1 << 16))
            continue
        order = json.loads(test.recv(1 << 16) or b'{"lose": true}')
        for rank in order.get("ranks", ()):
            pid = os.fork()
            if pid == 0:
                run_rank(order["job"], rank, theirs)
            pids.append(pid)
        if "kill" in order or "lose" in order:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            answer: dict[str, Any] = {"ended": [os.waitpid(pid, 0)[1] for pid in pids]}
            pids = []
            if "lose" in order:
                answer["lost"] = lose(folder)
            test.send(json.dumps(answer).encode())
        if "lose" in order:
            return


def main() -> None:
    folder, *fds = sys.argv[1:]
    torch.set_num_threads(1)
    for number, fd in enumerate(fds):
        if os.fork() == 0:
            serve(folder, number, socket.socket(fileno=int(fd)))
            os._exit(0)
    for _ in fds:
        os.wait()


if __name__ == "__main__":
    main()
