"""Workers of an elastic torchrun: a worker or a node may be lost, and a node may join.

torchrun then starts all workers again. They go on with the newest step, bit for bit: sums of whole
numbers have the same bits in every order, so no bit depends on how many workers there are.

torchrun --nnodes=1:2 ... examples/elastic.py [RUN], as in docs/cluster.md
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed, nn

import statehold

STEPS, PARTS, UNITS = 24, 8, 2.0**40  # PARTS of each batch, in turn for each rank; UNITS in a 1.0


def part_of(step: int, part: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(PARTS * step + part))


def main(run: str = "runs/elastic") -> None:
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parameters = list(model.parameters())
    sizes = [1, *(each.numel() for each in parameters)]
    state = {"model": model, "optimizer": optimizer, "losses": (losses := list[float]())}
    # The rest of a job that has lost a node leaves this block after peer_timeout_s.
    with statehold.Checkpointer(run, keep=2, peer_timeout_s=60) as ckpt:
        step = ckpt.restore(state) or 0
        while step < STEPS:
            step += 1
            total = torch.zeros(sum(sizes), dtype=torch.int64)
            for part in range(rank, PARTS, ranks):
                batch = part_of(step, part)
                loss = nn.functional.mse_loss(model(batch), batch)
                found = [loss, *torch.autograd.grad(loss, parameters)]
                total += (torch.cat([each.flatten() for each in found]) * UNITS).round().long()
            distributed.all_reduce(total)
            mean, *grads = (total.double() / UNITS / PARTS).float().split(sizes)
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad.view_as(parameter)
            optimizer.step()
            losses.append(mean.item())
            ckpt.save(step, state)
    if rank == 0:
        Path(run, "losses.txt").write_text(str(losses))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:2])
