"""A trainer that saves steps until it is killed: `python writer.py RUN MEMORY SEED`.

With keep=1 every save overwrites the files of the step before the last one. Some steps are saved
again with another content, and now and then the run is opened anew. It says which number the
content of each committed step follows from.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch

import statehold
from support.faults import DEADLINE_S, SMALL
from support.published import content


def levels_of(run: Path, memory: Path) -> list[Any]:
    return [
        statehold.Memory(path=memory, keep=1, agent=False),
        statehold.Directory(every=3, keep=1),
    ]


def write(run: Path, memory: Path, seed: int) -> None:
    chance = random.Random(seed)
    state: dict[str, Any] = {"model": content(0), "more": torch.ones(1000)}
    while True:
        with statehold.Checkpointer(run, levels=levels_of(run, memory), **SMALL) as ckpt:
            step = ckpt.restore(state) or 0
            value = int(state["model"]["value"])
            for _ in range(chance.randrange(5, 30)):
                value += 1
                step += chance.choice([0, 1, 1, 1]) if step else 1
                for name, tensor in content(value).items():
                    state["model"][name].copy_(tensor)
                ckpt.save(step, state).wait("committed", DEADLINE_S)
                print(step, value, flush=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
