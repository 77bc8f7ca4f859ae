"""Ranks of DeepSpeed, as torchrun starts them: python zero_ranks.py save|load STAGE DIRECTORY TOLD.

`save` trains three steps and writes a checkpoint of ZeRO, and its weights and moments to the file
TOLD. `load` loads a universal checkpoint, and writes the same.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

deepspeed.ops.__compatible_ops__.clear()  # it would compile kernels, and wait for a killed compiler

KEYS = ("exp_avg", "exp_avg_sq")


def engine_of(stage: int, *, universal: bool) -> Any:
    torch.manual_seed(5 if universal else 0)
    model = torch.nn.Sequential(torch.nn.Linear(17, 13), torch.nn.Linear(13, 5))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "checkpoint": {"load_universal": universal},
    }
    found = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return found[0]


def tell(engine: Any, path: str) -> None:
    told = {}
    for name, parameter in engine.module.named_parameters():
        fields = {"fp32": safe_get_full_fp32_param(parameter).clone()}
        fields |= {key: safe_get_full_optimizer_state(parameter, key).clone() for key in KEYS}
        told[name] = fields
    if torch.distributed.get_rank() == 0:
        torch.save(told, path)
    torch.distributed.barrier()


def main() -> None:
    what, stage, directory, path = sys.argv[1:]
    deepspeed.init_distributed("gloo")
    engine = engine_of(int(stage), universal=what == "load")
    if what == "load":
        engine.load_checkpoint(directory)
    else:
        for _ in range(3):
            loss = engine(torch.randn(2, 17, dtype=torch.bfloat16)).float().pow(2).sum()
            engine.backward(loss)
            engine.step()
        engine.save_checkpoint(directory, tag="global_step3", client_state={"mine": 7})
    tell(engine, path)
    os._exit(0)  # DeepSpeed on gloo may abort at its end


main()
