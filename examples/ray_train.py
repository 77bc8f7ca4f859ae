"""Ray Train: if a worker is killed, Ray starts all of them again, and they go on bit for bit.

Kill all of it at any moment, then run it again: that goes on bit for bit, too.

python examples/ray_train.py [RUN]
"""

from __future__ import annotations

import sys
from pathlib import Path

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import statehold

STEPS, WORKERS = 24, 2


def train(config: dict[str, str]) -> None:
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.Linear(64, 16))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)  # each worker draws batches of its own
    state = {"model": model, "optimizer": optimizer, "rng": statehold.Rng()}
    state["losses"] = losses = []
    with statehold.Checkpointer(config["run"], keep=2, peer_timeout_s=60) as ckpt:
        step = ckpt.restore(state) or 0
        while step < STEPS:
            batch = torch.randn(8, 16)
            loss = nn.functional.mse_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            ckpt.save(step := step + 1, state)
    ray.train.report({"step": step, "loss": losses[-1]})  # without a checkpoint of Ray's
    Path(config["run"], f"losses-{rank}.txt").write_text(str(losses))


def main(run: str = "runs/ray") -> None:
    TorchTrainer(
        train,
        train_loop_config={"run": str(Path(run).resolve())},  # on a disk that all workers have
        torch_config=TorchConfig("gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=WORKERS),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:2])
