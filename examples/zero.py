"""DeepSpeed with ZeRO, and a step of statehold after every update.

Kill it at any moment, then run it again: on as many ranks it goes on bit for bit.

torchrun --nproc-per-node=2 examples/zero.py [STAGE] [RUN]
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import torch
from torch import nn

import statehold
from statehold.integrations.deepspeed import engine_state

STEPS = 8


def start(stage: int) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 61), nn.Dropout(0.2), nn.Linear(61, 5), nn.Linear(5, 17))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": STEPS}},
        "bf16": {"enabled": True},
    }
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    return deepspeed.initialize(model=model, config=config)[0]


def main(stage: str = "3", run: str = "runs/zero") -> None:
    engine = start(int(stage))
    data = torch.randn(96, 17, generator=torch.Generator().manual_seed(7)).bfloat16()
    losses: list[float] = []
    with statehold.Checkpointer(run, keep=2) as ckpt:
        state = {**engine_state(engine), "progress": {"losses": losses}}
        step = ckpt.restore(state) or 0
        while step < STEPS:
            begin = (step * engine.world_size + engine.global_rank) * 4 % 96
            batch = data[begin : begin + 4].to(engine.device)
            loss = (engine(batch) - batch).float().pow(2).mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            step += 1
            ckpt.save(step, state)
    if engine.global_rank == 0:
        Path(run, "losses.txt").write_text(str(losses))
        print(f"trained {step} steps; the last loss is {losses[-1]}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
