"""Four ranks that train in lockstep and are asked to leave: a fork server, to import torch once.

Reads one JSON request a line: {"run", "memory" (a folder, or null), "coordination", "within_s",
"body", "slow": [ranks that take longer over a step], "steps", "delay_s" (of the last save's
storage)}. Every rank restores, checks what it restored element by element, and trains: an
all-reduce of all ranks at each step, and then

    every   a save at each step
    rare    a save when it is the last step
    ends    nothing more after "steps" steps: the run ends by itself
    fails   rank 1 raises after "steps" steps; no collectives

Reports on stdout, one JSON line an event: {"pids"}, then by rank {"restored"}, {"ready"}, {"step"},
{"last": step} where the process is to end with it, {"exit": code, "at": when, on the monotonic
clock}; {"over"} when all ranks have ended.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import statehold

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.faults import SMALL, spy_on

SIZE = 4
NUMEL = 100_000
PEER_S = 30.0


def report(**event: Any) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


def content(rank: int, step: int) -> torch.Tensor:
    """What `rank` holds of a step: every element differs from step to step and rank to rank."""
    return torch.arange(NUMEL, dtype=torch.int32) * 31 + step + 1000 * (rank + 1)


def check(ckpt: statehold.Checkpointer, rank: int, state: dict[str, Any]) -> int:
    newest = ckpt.restore(state) or 0
    if newest and (state["step"] != newest or not torch.equal(state["own"], content(rank, newest))):
        report(rank=rank, wrong=newest)
    report(rank=rank, restored=newest)
    return newest


def slow_down(ckpt: statehold.Checkpointer, delay_s: float) -> None:
    """Every call of the file system takes up to so long."""
    chance = random.Random(delay_s)
    spy_on(ckpt, lambda _operation, _args: time.sleep(delay_s * chance.random()))  # the storage's


def train(
    ckpt: statehold.Checkpointer, order: dict[str, Any], rank: int, state: dict[str, Any], step: int
) -> None:
    chance = random.Random(rank)
    together = torch.zeros(8)
    for number in range(1, order["steps"] + 1):
        step += 1
        if rank in order["slow"]:
            time.sleep(chance.random() * 0.03)  # the work of a step
        if order["body"] != "fails":
            distributed.all_reduce(together)
        elif rank == 1 and number == order["steps"]:
            raise ValueError("something of the user's")
        ckpt.gate()
        state["own"].copy_(content(rank, step))
        state["step"] = step
        if ckpt.is_last(step):
            report(rank=rank, last=step)
            slow_down(ckpt, order["delay_s"])
        if order["body"] in ("every", "fails") or ckpt.is_last(step):
            ckpt.save(step, state)
        report(rank=rank, step=step)


def take_part(order: dict[str, Any], rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(SIZE)}
    where = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", where, rank=rank, world_size=SIZE)
    levels: list[Any] = [statehold.Directory(keep=2)]
    if order["memory"]:
        memory = statehold.Memory(path=order["memory"])
        levels = [memory, statehold.Directory(keep=2, every=1000)]
    options = {**SMALL, "coordination": order["coordination"], "peer_timeout_s": PEER_S}
    state = {"own": torch.zeros(NUMEL, dtype=torch.int32), "step": 0}
    with statehold.Checkpointer(order["run"], levels=levels, **options) as ckpt:
        step = check(ckpt, rank, state)
        ckpt.leave_on(within_s=order["within_s"])
        report(rank=rank, ready=True)
        train(ckpt, order, rank, state, step)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def rank_of_job(order: dict[str, Any], rank: int, port: int) -> None:
    code = 1
    try:
        take_part(order, rank, port)
        code = 0
    except SystemExit as left:
        code = int(str(left.code))
    except ValueError:
        code = 3
    except BaseException:
        report(rank=rank, failed=traceback.format_exc()[-2000:])
    # As a script ends: its threads are waited for.
    threads = [thread.name for thread in threading.enumerate()]
    if "statehold-hear" in threads:
        report(rank=rank, wrong=f"threads left: {threads}")
    os._exit(code)


def run_job(order: dict[str, Any]) -> None:
    port = free_port()
    pids = []
    for rank in range(SIZE):
        pid = os.fork()
        if pid == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            rank_of_job(order, rank, port)
        pids.append(pid)
    report(pids=pids)
    for _ in range(SIZE):
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        report(rank=pids.index(pid), exit=code, at=time.monotonic())
    report(over=True)


def main() -> None:
    _ = statehold.Checkpointer  # imported on use, and by the forks not again
    for line in sys.stdin:
        run_job(json.loads(line))


if __name__ == "__main__":
    main()
