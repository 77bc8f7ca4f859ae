"""A loop of Lightning Fabric, with a step of statehold after every update.

Kill it at any moment, then run it again: it goes on bit for bit.

python examples/fabric_loop.py [RUN]
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import statehold

STEPS = 12


def main(run: str = "runs/fabric") -> None:
    torch.manual_seed(0)
    fabric = lightning.Fabric(accelerator="auto", devices=1)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    data = torch.randn(36, 16, generator=torch.Generator().manual_seed(7))
    batches = fabric.setup_dataloaders(StatefulDataLoader(data, batch_size=4, shuffle=True))
    progress: dict[str, list[float]] = {"losses": []}
    with statehold.Checkpointer(run, keep=2) as ckpt:
        state = {
            "model": model, "optimizer": optimizer, "rng": statehold.Rng(), "progress": progress,
            "data": batches._dataloader,  # its wrapper has no state
        }  # fmt: skip
        step = ckpt.restore(state) or 0
        print(f"begins after step {step}")
        while step < STEPS:
            for batch in batches:
                loss = nn.functional.mse_loss(model(batch), batch)
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()
                progress["losses"].append(loss.item())
                step += 1
                ckpt.save(step, state)
                if step == STEPS:
                    break
    Path(run, "losses.txt").write_text(str(progress["losses"]))
    print(f"trained {step} steps; the last loss is {progress['losses'][-1]}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
