"""The Trainer of Lightning with a step of statehold at every step, and validation in between.

Kill it at any moment, then run it again: it goes on bit for bit.
python examples/lightning_trainer.py [OUTPUT_DIR]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from statehold.integrations.lightning import StateholdCallback

STEPS = 16


class Net(lightning.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(16, width), nn.Dropout(0.2), nn.Linear(width, 16))
        self.register_buffer("losses", torch.zeros(STEPS))  # a part of the state, too

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch), batch)
        self.losses[self.global_step] = loss.detach()
        return loss

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch), batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(out: str = "runs/lightning") -> None:
    lightning.seed_everything(0)
    data = torch.randn(40, 16, generator=torch.Generator().manual_seed(7))
    saves = ModelCheckpoint(out, every_n_train_steps=1, save_last=True)
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, enable_progress_bar=False,
        callbacks=[StateholdCallback(), saves],
    )  # fmt: skip
    loaders = StatefulDataLoader(data[8:], 4, shuffle=True), StatefulDataLoader(data[:8], 4)
    model = Net()
    trainer.fit(model, *loaders, ckpt_path="last")
    Path(out, "losses.txt").write_text(str(model.losses.tolist()))
    print(f"trained {trainer.global_step} steps; the last loss is {model.losses[-1]}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
