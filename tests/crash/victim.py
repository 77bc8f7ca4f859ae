"""The process that crash tests kill: a fork server, so that torch is imported once.

Reads one JSON request a line: {"run", "kill_at" ([operation, n], or null), "saves", "again",
"shares", "waits"}. Forks a child that restores, checks what it restored, and saves on; with
`kill_at` the child sends itself SIGKILL before its n-th storage operation of that name, counted
from 1. Children report on stdout, one JSON line an event: {"restored": step or null, "steps":
[...]}, {"requested": step}, {"committed": step, "linked": bytes}, {"operation": name, "number": n}
before dying, {"operations": {name: count}} at a normal end. The server ends every request with
{"exit": wait status}.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import statehold

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.faults import SMALL, spy_on
from support.seccomp import RENAMEAT2, forbid
from support.sharing import small_files

NUMEL = 700_000  # 2.7 MiB: more than the staging memory, and a tail that is not aligned


def report(**event: Any) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


def content(step: int) -> torch.Tensor:
    """What a step must hold: different in every element from step to step."""
    return torch.arange(NUMEL, dtype=torch.int32) * 31 + step


def rarely(step: int) -> dict[str, Any]:
    """What changes with every third step, so steps share files; and with every sixth, copied before
    save() returns."""
    begin = step // 3 * 7.0
    frozen = [torch.nn.Parameter(torch.arange(9000.0) + begin + i, False) for i in range(4)]
    loose = [torch.arange(9000.0) - step // 6 - i for i in range(4)]
    return {"frozen": torch.nn.ParameterList(frozen), "loose": loose}


def is_rarely(step: int, state: dict[str, Any]) -> bool:
    expected = rarely(step)
    return all(
        torch.equal(one, other)
        for name, each in expected.items()
        for one, other in zip(state[name], each, strict=True)
    )


def check(ckpt: statehold.Checkpointer, state: dict[str, Any], shares: bool) -> int:
    """Restore every visible step and compare it whole; returns the newest, 0 without one."""
    steps = ckpt.steps()
    newest = ckpt.restore(state)
    report(restored=newest, steps=steps)
    for step in steps:
        ckpt.restore(state, step)
        is_right = state["step"] == step and torch.equal(state["w"], content(step))
        if not is_right or (shares and not is_rarely(step, state)):
            report(wrong=step)
            os._exit(3)
    return newest or 0


def child(
    run: str, kill_at: list[Any] | None, saves: int, again: bool, shares: bool, waits: bool
) -> None:
    """again: save each step twice, where the kernel does not exchange two names. shares: steps
    share files. waits: each save begins when the one before is committed, and has learned what
    stays the same, which comes after the commit."""
    torch.set_num_threads(1)
    if again:
        forbid(RENAMEAT2[platform.machine()], errno.EINVAL)
    count: Counter[str] = Counter()

    def before(operation: str, _args: tuple[Any, ...]) -> None:
        count[operation] += 1
        if [operation, count[operation]] == kill_at:
            report(operation=operation, number=count[operation])
            os.kill(os.getpid(), signal.SIGKILL)

    state: dict[str, Any] = {"w": torch.zeros(NUMEL, dtype=torch.int32), "step": 0}
    state |= rarely(-1000) if shares else {}
    with small_files(), statehold.Checkpointer(run, keep=1, **SMALL) as ckpt:
        start = check(ckpt, state, shares)
        spy_on(ckpt, before)
        previous = None
        for step in range(start + 1, start + 1 + saves):
            state["w"].copy_(content(step))
            state["step"] = step
            state |= rarely(step) if shares else {}
            report(requested=step)
            for _ in range(1 + again):
                if waits:
                    ckpt.flush(60)
                save = ckpt.save(step, state)
                if previous is not None:
                    done = previous.wait("committed", 60)
                    report(committed=done.step, linked=done.stats.linked_bytes)
                previous = save
    report(operations=count)


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                child(**request)
            except BaseException as error:
                report(error=repr(error))
                os._exit(4)
            os._exit(0)
        report(child=pid)
        _, status = os.waitpid(pid, 0)
        report(exit=status)


if __name__ == "__main__":
    main()
