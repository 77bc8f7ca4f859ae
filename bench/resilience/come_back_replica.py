"""One replica of bench.resilience.come_back. It trains until it is killed.

Lines of its log, as JSON: {"ready"} when it asks to join, and {"step", "share", "at"} after the
optimizer's step, with the clock that all processes of a machine have in common.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from bench.resilience import burden
from statehold.resilience import Replicas

FOREVER = 1 << 30


def main() -> None:
    torch.set_num_threads(1)
    spec = json.loads(sys.argv[1])
    work = burden.WORK[spec["trainer"]]
    state = burden.state(spec["bytes"], is_trained=False)
    model, optimizer = state["model"], state["optimizer"]
    sample = torch.ones(1, burden.WIDTH, device="cpu")
    with (
        open(spec["log"], "w", buffering=1) as log,
        Replicas(
            model,
            optimizer,
            microbatches=spec["microbatches"],
            samples=spec["microbatches"],
            batch=1,
            seed=1,
            coordinator=spec["coordinator"],
        ) as replicas,
    ):

        def say(**line: Any) -> None:
            log.write(json.dumps(line) + "\n")

        say(ready=time.monotonic())
        for step in replicas.steps(FOREVER):
            for microbatch in step:
                work(spec["microbatch_s"])
                microbatch.backward(model(sample).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            say(step=step.number, share=step.share, at=time.monotonic())


if __name__ == "__main__":
    main()
