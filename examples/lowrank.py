"""A Llama of low-rank pairs, split along the bottleneck over the ranks of a job.

Kill it at any moment, then run it again: on as many ranks it goes on bit for bit.

torchrun --nproc-per-node=2 examples/lowrank.py [RUN]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import statehold
from statehold import lowrank
from statehold.lowrank.parallel import parallelize


def tokens_of(step: int) -> torch.Tensor:
    """Each token is the one before it and a constant of its sequence. All ranks draw alike."""
    first, more = torch.randint(64, (2, 8, 1), generator=torch.Generator().manual_seed(step))
    return (first + more * torch.arange(32)) % 64


def main(run: str = "runs/lowrank", steps: int = 16) -> None:
    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    config = LlamaConfig(hidden_size=64, intermediate_size=160, num_hidden_layers=2,
                         num_attention_heads=4, vocab_size=64, use_cache=False)  # fmt: skip
    model = LlamaForCausalLM(config)
    replaced = lowrank.convert(model, rank=16)
    lowrank.keep_bottlenecks(model)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tp",))
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = {"model": model, "optimizer": optimizer, "losses": []}
    with statehold.Checkpointer(run, keep=2) as ckpt:
        start = ckpt.restore(state) or 0
        if distributed.get_rank() == 0:
            print(f"{len(replaced)} pairs on {mesh.size()} ranks, from step {start} of {steps}")
        for step in range(start, steps):
            tokens = tokens_of(step)
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state["losses"].append(loss.item())
            ckpt.save(step + 1, state)
    if distributed.get_rank() == 0:
        Path(run, "losses.txt").write_text(str(state["losses"]))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:2])
