"""Runs scripts in forks of one process that has imported the frameworks, which takes seconds.

python runs.py JOBS    JOBS: JSON, a list of {"script", "words", "ranks", "kill", "leave", "seed"}

With "kill": n, the first rank dies by SIGKILL inside its n-th save: all of its data is written, and
nothing is published. With "leave": n, it gets SIGTERM there instead. When one rank has ended
otherwise than with 0, the others are killed, unless they leave, too. "seed" seeds Python's
`random`. A fork without it has other numbers each time, so a run that resumes must restore them.
Prints a JSON list of the exit codes of the first ranks; what the ranks say is in OUT.rank-N.log.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import random
import runpy
import signal
import socket
import sys
import traceback
from typing import Any

import accelerate  # noqa: F401
import peft  # noqa: F401
import torch
import torch._dynamo
import torch.distributed
from transformers import LlamaForCausalLM, Trainer  # noqa: F401

from statehold.steps import store

with contextlib.suppress(ImportError):  # make integrations has it
    importlib.import_module("lightning.pytorch")

with contextlib.suppress(ImportError):
    import deepspeed

    deepspeed.ops.__compatible_ops__.clear()  # it would compile kernels of its own at a first use

DEADLINE_S, LEFT = 240, 75


def run(job: dict[str, Any]) -> int:
    ranks = job.get("ranks", 1)
    port = _free_port()
    children = {_start(job, rank, ranks, port): rank for rank in range(ranks)}
    codes = {}
    while children:
        pid, status = os.wait()
        codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
        if os.waitstatus_to_exitcode(status) not in (0, LEFT):
            for other in children:
                os.kill(other, signal.SIGKILL)
    return codes[0]


def _start(job: dict[str, Any], rank: int, ranks: int, port: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        _become(job, rank, ranks, port)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _become(job: dict[str, Any], rank: int, ranks: int, port: int) -> None:
    signal.alarm(DEADLINE_S)
    log = os.open(f"{job['words'][-1]}.rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                       "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(port)}  # fmt: skip
    if rank == 0:
        _interrupt(job.get("kill", 0), signal.SIGKILL)
        _interrupt(job.get("leave", 0), signal.SIGTERM)
    if "seed" in job:
        random.seed(job["seed"])
    torch.set_num_threads(1)
    sys.argv = [job["script"], *job["words"]]
    sys.path.insert(0, os.path.dirname(job["script"]))
    runpy.run_path(job["script"], run_name="__main__")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _interrupt(number: int, how: signal.Signals) -> None:
    publish, saves = store.publish, itertools.count(1)

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        if next(saves) == number:
            os.kill(os.getpid(), how)
        return publish(*arguments, **keywords)

    store.publish = interrupted


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    print(json.dumps([run(job) for job in json.loads(sys.argv[1])]))
