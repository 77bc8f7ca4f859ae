"""A loop of Accelerate, with gradient accumulation and a step of statehold after every update.

Kill it at any moment, then run it again: it goes on bit for bit.
python examples/accelerated.py [RUN]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import statehold
from statehold.integrations.accelerate import accelerator_state

STEPS, ACCUMULATE = 12, 2


def main(run: str = "runs/accelerated") -> None:
    set_seed(0)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=ACCUMULATE,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    data = torch.randn(36, 16, generator=torch.Generator().manual_seed(7))
    loader = StatefulDataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    with statehold.Checkpointer(run, keep=2) as ckpt:
        state = {**accelerator_state(accelerator), "progress": {"losses": []}}
        step = ckpt.restore(state) or 0
        losses = state["progress"]["losses"]
        while step < STEPS:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(batch), batch)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    losses.append(loss.item())
                    step += 1
                    ckpt.save(step, state)
                if step == STEPS:
                    break
    Path(run, "losses.txt").write_text(str(losses))
    print(f"trained {step} steps; the last loss is {losses[-1]}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
