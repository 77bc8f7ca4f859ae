"""A Llama of low-rank pairs, split along the bottleneck over the ranks of a job.

Kill it at any moment, then run it again. On as many ranks it goes on bit for bit, and on another
number of them from the same state.

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

STEPS = 16


class Sequences:
    """Each token is the one before it and a constant of its sequence. All ranks draw alike."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __next__(self) -> torch.Tensor:
        first, more = torch.randint(64, (2, 8, 1), generator=self.generator)
        return (first + more * torch.arange(32)) % 64

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["generator"])


def main(run: str = "runs/lowrank") -> None:
    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=64, use_cache=False,
        )
    )  # fmt: skip
    replaced = lowrank.convert(model, rank=16)
    lowrank.keep_bottlenecks(model)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tp",))
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = Sequences(seed=1)
    state = {"model": model, "optimizer": optimizer, "data": data, "losses": []}
    with statehold.Checkpointer(run, keep=2) as ckpt:
        start = ckpt.restore(state) or 0
        if distributed.get_rank() == 0:
            print(f"{len(replaced)} pairs on {mesh.size()} ranks, from step {start} of {STEPS}")
        for step in range(start, STEPS):
            tokens = next(data)
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
