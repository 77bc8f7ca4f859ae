"""A loop of Lightning Fabric on several ranks, as torchrun starts them.

python ranked_fabric.py ddp|fsdp2 OUT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lightning
import torch
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import statehold

STEPS = 9  # in epochs of 2


def started(kind: str) -> lightning.Fabric:
    world = int(os.environ["WORLD_SIZE"])
    if kind == "ddp":
        strategy = DDPStrategy(process_group_backend="gloo")
    else:

        def sharded(module: nn.Module, mesh: torch.distributed.DeviceMesh) -> nn.Module:
            fully_shard(module, mesh=mesh["data_parallel"])
            return module

        strategy = ModelParallelStrategy(sharded, world, 1, process_group_backend="gloo")
    fabric = lightning.Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    return fabric


def main(kind: str, out: str) -> None:
    torch.manual_seed(0)
    fabric = started(kind)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.Linear(64, 16))
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    data = torch.randn(16, 16, generator=torch.Generator().manual_seed(7))
    loader = StatefulDataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    batches = fabric.setup_dataloaders(loader)
    with statehold.Checkpointer(out, keep=2) as ckpt:
        state = {"model": model, "optimizer": optimizer, "data": batches._dataloader,
                 "rng": statehold.Rng(), "losses": []}  # fmt: skip
        step = ckpt.restore(state) or 0
        batches._num_iter_calls = max(step - 1, 0) // len(batches)
        while step < STEPS:
            for batch in batches:
                loss = nn.functional.mse_loss(model(batch), batch)
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()
                state["losses"].append(loss.item())
                step += 1
                ckpt.save(step, state)
                if step == STEPS:
                    break
    if fabric.is_global_zero:
        Path(out, "losses.txt").write_text(str(state["losses"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
