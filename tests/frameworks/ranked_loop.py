"""A loop of Accelerate over FSDP2 on several ranks, as torchrun starts them."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import statehold
from statehold.integrations.accelerate import accelerator_state

STEPS = 6


def main(out: str) -> None:
    set_seed(0)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP"),
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(36, 16, generator=torch.Generator().manual_seed(7))
    loader = StatefulDataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with statehold.Checkpointer(Path(out), keep=2) as ckpt:
        state = {**accelerator_state(accelerator), "progress": {"losses": []}}
        step = ckpt.restore(state) or 0
        while step < STEPS:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(batch), batch)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    state["progress"]["losses"].append(loss.item())
                    step += 1
                    ckpt.save(step, state)
                if step == STEPS:
                    break
    if accelerator.is_main_process:
        Path(out, "losses.txt").write_text(str(state["progress"]["losses"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
