"""`python -m bench.integrations.lightning_trainer`: Lightning's Trainer with a save at every step.

Owns: the time of a step, from the beginning of one to that of the next, and the wall time of fit()
for each step. At the end of fit() our saves are committed, and the last weights are written.
Invariants: the Trainer without saves, with its own checkpoints and with ours take turns in one
process, with the same seed, data and model. The first steps of a training do not count. Both keep
one checkpoint. Ours are durable when they are committed; Lightning calls no fsync.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from bench.harness import ROOT, median
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


class Clock(Callback):
    def __init__(self) -> None:
        self.begun: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun.append(time.perf_counter())

    def steps(self) -> list[float]:
        pairs = zip(self.begun, self.begun[1:], strict=False)
        return [later - earlier for earlier, later in pairs][WARM:]


def train(size: str, case: str, steps: int, folder: Path) -> tuple[list[float], float]:
    """The times of the steps, and the wall time of a step."""
    width, count = SIZES[size]
    lightning.seed_everything(0, verbose=False)
    clock = Clock()
    callbacks: list[Any] = [clock]
    if case != "no saves":
        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=1))
    if case == "statehold":
        callbacks.append(StateholdCallback())
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", callbacks=callbacks, logger=False,
        enable_checkpointing=case != "no saves", enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    data = StatefulDataLoader(torch.randn(steps * 32, width), batch_size=32)
    model = Net(width, count)
    begin = time.perf_counter()
    trainer.fit(model, data)
    return clock.steps(), (time.perf_counter() - begin) / steps


def measure(size: str, steps: int, rounds: int, base: Path) -> dict[str, Any]:
    taken: dict[str, list[float]] = {case: [] for case in CASES}
    walls: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(rounds):
        for case in CASES:
            folder = Path(tempfile.mkdtemp(prefix="lightning-", dir=base))
            try:
                found, wall = train(size, case, steps, folder)
            finally:
                shutil.rmtree(folder)
            taken[case] += found
            walls[case].append(wall)
    return {
        "size": size, "steps": steps, "rounds": rounds,
        "step_s": {case: median(each) for case, each in taken.items()},
        "wall_s": {case: median(each) for case, each in walls.items()},
    }  # fmt: skip


def shown(found: dict[str, Any]) -> str:
    free = found["step_s"]["no saves"]
    parameters = sum(each.numel() for each in Net(*SIZES[found["size"]]).parameters())
    lines = [f"{found['size']}: {parameters / 1e6:.2f} million parameters, {found['steps']} steps, "
             f"{found['rounds']} rounds", f"{'':12}{'step':>12}{'over no saves':>16}"
             f"{'a save adds':>14}{'fit() a step':>15}"]  # fmt: skip
    for case in CASES:
        step, wall = found["step_s"][case], found["wall_s"][case]
        lines.append(
            f"{case:12}{step * 1e3:9.1f} ms{step / free:14.2f} x"
            f"{(step - free) * 1e3:11.1f} ms{wall * 1e3:12.1f} ms"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.integrations.lightning_trainer")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--steps", type=int, help="of a training; by default 60 and 12")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=ROOT / "bench/out")
    arguments = parser.parse_args()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    record: list[dict[str, Any]] = []
    for size in arguments.sizes:
        steps = arguments.steps or STEPS[size]
        record.append(measure(size, steps, arguments.rounds, arguments.dir))
        print(shown(record[-1]), flush=True)
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"load {load}; torch {torch.__version__}, {torch.get_num_threads()} threads")
    (arguments.dir / "lightning.json").write_text(json.dumps({"load": load, "cases": record}))


if __name__ == "__main__":
    main()
