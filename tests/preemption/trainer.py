"""A rank under torchrun: trains until it is asked to leave. Usage: trainer.py RUN.

Reports on stdout, one JSON line an event: {"rank", "step"}, {"rank", "left": exit code, "last"}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import distributed

import statehold

WITHIN_S = 20.0


def report(**event: Any) -> None:
    os.write(1, json.dumps({"rank": distributed.get_rank(), **event}).encode() + b"\n")


def main() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    weights = torch.zeros(100_000)
    state = {"weights": weights}
    step = 0
    try:
        with statehold.Checkpointer(sys.argv[1], staging_bytes="64MiB") as ckpt:
            ckpt.restore(state)
            ckpt.leave_on(within_s=WITHIN_S)
            while True:
                step += 1
                distributed.all_reduce(torch.ones(1))
                ckpt.gate()
                weights += 1
                if ckpt.is_last(step):
                    ckpt.save(step, state)
                report(step=step)
    except SystemExit as left:
        report(left=left.code, last=step)
        raise


if __name__ == "__main__":
    main()
