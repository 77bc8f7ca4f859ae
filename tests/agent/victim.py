"""A trainer with a level in memory, to be killed: a fork server, so that torch is imported once.

Reads one JSON request a line and forks a child for it, in a session of its own:

    run, memory   directories; "far": options of the levels behind it, each a Directory; "objects":
                  of an ObjectStore behind these, or null
    saves         so many steps; then close(), or, with "then": "stay", wait to be killed
    worker        fork a process first that stays when the trainer is gone, as workers may
    patience      [retry_s, give_up_s] for the agent, or null
    ranks         how many trainers, which find each other through the run directory

It restores and checks what it restored, then saves. Children report on stdout, one JSON line an
event: {"worker": pid}, {"restored": step, "steps"}, {"committed": step}, {"staying"}. The server
reports {"children": pids}, and ends every request with {"exits": exit codes}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

import statehold
from statehold.checkpoint.agent import starting

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.agents import NUMEL, content
from support.faults import DEADLINE_S, SMALL


def report(**event: Any) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


def check(ckpt: statehold.Checkpointer, state: dict[str, Any]) -> int:
    """Restore every visible step and compare it whole; returns the newest, 0 without one."""
    steps = ckpt.steps()
    newest = ckpt.restore(state)
    for step in steps:
        ckpt.restore(state, step)
        if state["step"] != step or not torch.equal(state["w"], content(step)):
            report(wrong=step)
    report(restored=newest or 0, steps=steps)
    return newest or 0


def fork_worker() -> None:
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()  # whoever ends the trainer's group does not end it
        signal.alarm(int(DEADLINE_S))  # the trainer may die before it says so
        os.write(done, b"!")
        signal.pause()
    os.read(ready, 1)
    report(worker=pid)


def train(ckpt: statehold.Checkpointer, request: dict[str, Any]) -> None:
    state: dict[str, Any] = {"w": torch.zeros(NUMEL, dtype=torch.int32), "step": 0}
    start = check(ckpt, state)
    for step in range(start + 1, start + 1 + request["saves"]):
        if step == start + 2 and request["worker"]:
            fork_worker()
        ckpt.gate()
        state["w"].copy_(content(step))
        state["step"] = step
        report(committed=ckpt.save(step, state).wait("committed", DEADLINE_S).step)


def child(request: dict[str, Any], rank: int) -> None:
    torch.set_num_threads(1)
    os.setsid()
    ranks = request["ranks"]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    if request["patience"]:
        retry_s, give_up_s = request["patience"]
        starting.Orders = partial(  # type: ignore[misc, assignment]
            starting.Orders, retry_s=retry_s, give_up_s=give_up_s
        )
    levels: list[Any] = [
        statehold.Memory(path=request["memory"]),
        *(statehold.Directory(**options) for options in request["far"]),
    ]
    if request["objects"]:
        levels.append(statehold.ObjectStore(**request["objects"]))
    together = {"coordination": "directory", "peer_timeout_s": DEADLINE_S} if ranks > 1 else {}
    with statehold.Checkpointer(request["run"], levels=levels, **SMALL, **together) as ckpt:
        train(ckpt, request)
        if request["then"] == "stay":
            report(staying=True)
            signal.pause()


def forked(request: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            child(request, rank)
        except BaseException as error:
            report(error=repr(error))
        os._exit(0)
    return pid


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        pids = [forked(request, rank) for rank in range(request["ranks"])]
        report(children=pids)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        report(exits=[os.waitstatus_to_exitcode(status) for status in statuses])


if __name__ == "__main__":
    main()
