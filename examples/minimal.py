"""A loop that runs as it is: train a little, save at every step, go on when run again.

The batches are the loop's own, so it needs nothing but torch. With a data loader: see the README.

python examples/minimal.py              # kill it at any moment, then run it again
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import statehold

STEPS = 60


class Batches:
    """Random batches from a generator of its own; statehold saves whatever has a state_dict."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(64, 256, generator=self.generator)
        return x, x.roll(1, dims=1).tanh()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["generator"])


def main(run: str = "runs/minimal", pause_s: float = 0.05) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Batches(seed=1)

    with statehold.Checkpointer(run, keep=3, staging_bytes="64MiB") as ckpt:
        state = {"model": model, "optimizer": optimizer, "data": data, "rng": statehold.Rng()}
        start = ckpt.restore(state) or 0  # the newest intact step, or None when there is none
        print(f"starting at step {start} of {STEPS}")
        for step in range(start, STEPS):
            x, y = next(data)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # waits only for what is not yet copied
            save = ckpt.save(step + 1, state)  # returns in milliseconds
            print(f"step {step + 1:3d}  loss {loss.item():.6f}")
            time.sleep(pause_s)  # leaves you the time to interrupt it
        if start < STEPS:
            print(save.wait("committed", timeout=60).stats)


if __name__ == "__main__":
    main(*sys.argv[1:2])  # where the run lives
