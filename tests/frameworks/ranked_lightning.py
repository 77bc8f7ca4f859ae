"""A Trainer of Lightning on several ranks, as torchrun starts them.

python ranked_lightning.py ddp|fsdp2 OUT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

from statehold.integrations.lightning import StateholdCallback

STEPS = 8


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.Linear(32, 16))
        self.register_buffer("seen", torch.zeros(()))  # equal on all ranks, and no DTensor
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.seen += 1
        loss = nn.functional.mse_loss(self.net(batch), batch)
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch), batch), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["losses"] = self.losses

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.losses = list(checkpoint["losses"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Sharded(Net):
    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def strategy(kind: str, world: int) -> Any:
    if kind == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    return ModelParallelStrategy(world, 1, process_group_backend="gloo")


def main(kind: str, out: str) -> None:
    lightning.seed_everything(0)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    data = torch.randn(48, 16, generator=torch.Generator().manual_seed(7))
    saves = ModelCheckpoint(out, every_n_train_steps=1, save_last=True)
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=world, strategy=strategy(kind, world),
        logger=False, enable_progress_bar=False, callbacks=[StateholdCallback(), saves],
    )  # fmt: skip
    model = Net() if kind == "ddp" else Sharded()
    loaders = StatefulDataLoader(data[8:], 4, shuffle=True), StatefulDataLoader(data[:8], 4)
    trainer.fit(model, *loaders, ckpt_path="last")
    if trainer.is_global_zero:
        Path(out, "losses.txt").write_text(str(model.losses))
        assert len(model.losses) == STEPS
        assert Net.load_from_checkpoint(saves.best_model_path).seen == model.seen == STEPS


if __name__ == "__main__":
    main(*sys.argv[1:])
