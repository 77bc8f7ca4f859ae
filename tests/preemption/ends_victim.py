"""Jobs that end in every way that a script can: a fork server, so that torch is imported once.

Reads one JSON request a line: {"run", "far" (the directory of a second level), "ranks", "within",
"how", "only", perhaps "stragglers_s"}. Each rank saves two steps and ends: within a with-block, or
not ("within"), by raising what `how` names, by exit(5) or by nothing; where `only` is a rank, that
one alone does, and the others save a third step, which has to fail. The second level gets the first
step and no other, unless it is flushed.

Reports on stdout, one JSON line an event: {"rank", "failed": text, "seconds"} of a third save, and
{"exits": [by rank], "seconds": since the first save}. Processes end as that of a script does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import statehold
from statehold.checkpoint import session

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.faults import SMALL

PATIENCE_S = 60.0


def report(**event: Any) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


def end(how: str) -> None:
    if how == "exit":
        sys.exit(5)
    if how:
        raise {"error": ValueError, "interrupt": KeyboardInterrupt}[how]("of the user's")


def train(ckpt: statehold.Checkpointer, order: dict[str, Any], rank: int) -> None:
    state = {"x": torch.zeros(1000)}
    newest = ckpt.restore(state) or 0
    for step in (newest + 1, newest + 2):
        ckpt.save(step, state)
    if order["only"] not in (None, rank):
        begin = time.monotonic()
        try:
            ckpt.save(newest + 3, state).wait()
        except statehold.StateholdError as error:
            report(rank=rank, failed=str(error), seconds=time.monotonic() - begin)
            raise
    end(order["how"])


kept: list[statehold.Checkpointer] = []  # as a module's variable is


def take_part(order: dict[str, Any], rank: int) -> None:
    session.STRAGGLERS_S = order.get("stragglers_s", session.STRAGGLERS_S)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(order["ranks"])}
    levels = [
        statehold.Directory(),
        statehold.Directory(path=order["far"], every=10**6, name="far"),
    ]
    alone = order["ranks"] == 1
    options: dict[str, Any] = {**SMALL, "coordination": "none" if alone else "directory"}
    ckpt = statehold.Checkpointer(order["run"], levels=levels, peer_timeout_s=PATIENCE_S, **options)
    kept.append(ckpt)
    if order["within"]:
        with ckpt:
            train(ckpt, order, rank)
    else:
        train(ckpt, order, rank)


def main() -> None:
    torch.set_num_threads(1)
    _ = statehold.Checkpointer  # imported on use, and by the forks not again
    for line in sys.stdin:
        order = json.loads(line)
        begin = time.monotonic()
        pids = []
        for rank in range(order["ranks"]):
            pid = os.fork()
            if pid == 0:
                take_part(order, rank)
                return
            pids.append(pid)
        exits = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        report(exits=exits, seconds=time.monotonic() - begin)


if __name__ == "__main__":
    main()
