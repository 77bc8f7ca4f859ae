"""A training loop that is asked to leave: a fork server, so that torch is imported once.

Reads one JSON request a line: {"run", "memory" (a folder, or null), "within_s", "body"} and forks a
child that restores, checks what it restored, and runs the body:

    train   saves at each step, for ever
    rare    saves only when it is asked to leave
    deaf    computes without ever saving again, in one native call after the other
    stuck   saves into a file system that never answers

Children report on stdout, one JSON line an event: {"restored": step, "steps"}, {"ready"}, {"saved":
step} after save() has returned, {"committed": step}. The server reports {"child": pid}, and ends
every request with {"exit": exit code, "at": when, on the monotonic clock}.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import statehold

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.faults import SMALL, spy_on

NUMEL = 700_000


def report(**event: Any) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


def content(step: int) -> torch.Tensor:
    """What a step must hold: different in every element from step to step."""
    return torch.arange(NUMEL, dtype=torch.int32) * 31 + step


def check(ckpt: statehold.Checkpointer, state: dict[str, Any]) -> int:
    steps = ckpt.steps()
    newest = ckpt.restore(state)
    for step in steps:
        ckpt.restore(state, step)
        if state["step"] != step or not torch.equal(state["w"], content(step)):
            report(wrong=step)
    report(restored=newest or 0, steps=steps)
    return newest or 0


def train(ckpt: statehold.Checkpointer, state: dict[str, Any], step: int, body: str) -> None:
    while True:
        step += 1
        ckpt.gate()
        state["w"].copy_(content(step))
        state["step"] = step
        if body == "deaf":
            torch.randn(700, 700) @ torch.randn(700, 700)
        elif body != "rare" or ckpt.is_leaving:
            save = ckpt.save(step, state)
            report(saved=step)
            if body == "rare":
                save.wait()
        if body == "train" and step % 3 == 0:
            report(committed=save.wait().step)


def hold_up(_operation: str, _args: tuple[Any, ...]) -> None:
    threading.Event().wait()


def child(request: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    levels = [statehold.Directory(keep=2)]
    if request["memory"]:
        memory = statehold.Memory(path=request["memory"])
        levels = [memory, statehold.Directory(keep=2, every=5)]  # type: ignore[list-item]
    state: dict[str, Any] = {"w": torch.zeros(NUMEL, dtype=torch.int32), "step": 0}
    with statehold.Checkpointer(request["run"], levels=levels, **SMALL) as ckpt:
        step = check(ckpt, state)
        ckpt.leave_on(within_s=request["within_s"])
        if request["body"] == "stuck":
            spy_on(ckpt, hold_up)
        report(ready=True)
        train(ckpt, state, step, request["body"])


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child(json.loads(line))
            except SystemExit as left:
                code = int(str(left.code))
            except BaseException as error:
                report(error=repr(error))
            os._exit(code)
        report(child=pid)
        _, status = os.waitpid(pid, 0)
        report(exit=os.waitstatus_to_exitcode(status), at=time.monotonic())


if __name__ == "__main__":
    main()
