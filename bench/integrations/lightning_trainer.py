"""`python -m bench.integrations.lightning_trainer`: Lightning's Trainer with a save at every step.

Owns: the Trainer without saves, with its own checkpoints and with ours. At the end of fit() our
saves are committed, and the last weights are written.
Invariants: all have the same seed, data and model, and keep one checkpoint. Ours are durable when
they are committed. Lightning calls no fsync.
Not here: the rounds, the times and the table (comparison.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from bench.integrations.comparison import Clock, Comparison, step_wall
from statehold.integrations.lightning import StateholdCallback

# width and count of square layers
SIZES = {"tiny": (64, 4), "50m": (2048, 12)}
STEPS = {"tiny": 60, "50m": 12}
WARM = 4
CASES = ("no saves", "Lightning", "statehold")


class Net(lightning.LightningModule):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        layers = ([nn.Linear(width, width), nn.ReLU()] for _ in range(count))
        self.net = nn.Sequential(*(each for pair in layers for each in pair))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Times(Clock, Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        self.begin()


def parameters(size: str) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in Net(*SIZES[size]).parameters())


def train(size: str, case: str, steps: int, folder: Path) -> tuple[list[float], float]:
    width, count = SIZES[size]
    lightning.seed_everything(0, verbose=False)
    times = Times()
    callbacks: list[Any] = [times]
    if case != "no saves":
        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=1))
    if case == "statehold":
        callbacks.append(StateholdCallback())
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", callbacks=callbacks, logger=False,
        enable_checkpointing=case != "no saves", enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    data = StatefulDataLoader(torch.randn(steps * 32, width, device="cpu"), batch_size=32)
    model = Net(width, count)
    wall = step_wall(lambda: trainer.fit(model, data), steps)
    return times.steps(WARM), wall


if __name__ == "__main__":
    Comparison(
        "bench.integrations.lightning_trainer", "lightning.json", CASES, STEPS, parameters, train
    ).main()
