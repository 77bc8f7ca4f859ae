"""Two loss curves on the same text: full rank, and pairs of a quarter of the width.

`python -m bench.lowrank losses --out FILE.json --plot FILE.svg`. The text is the source of Python's
standard library, as bytes; the last twentieth is held out. Both models see the same windows in the
same order, with the same learning rate, warm-up and cosine.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.lowrank.model import Llama, Size, made

SIZE = Size(width=96, ff=256, layers=3, heads=4, batch=8, length=64)
HELD_OUT, WARM_UP, CLIP, DECAY = 0.05, 100, 0.5, 0.01
VALIDATION_BATCHES, SMOOTHED = 16, 50


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lowrank losses")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1, help="of each model (1)")
    parser.add_argument("--out", type=Path, help="write the curves as JSON")
    parser.add_argument("--plot", type=Path, help="draw them (matplotlib)")
    given = parser.parse_args(arguments)
    ways = ("full", "bottleneck")
    with multiprocessing.get_context("spawn").Pool(len(ways)) as pool:
        trained = pool.starmap(_trained, [(way, given) for way in ways], chunksize=1)
    found = {"command": " ".join(["python -m bench.lowrank", *sys.argv[1:]])}
    found |= dict(zip(ways, trained, strict=True))
    if given.out:
        given.out.write_text(json.dumps(found) + "\n")
    if given.plot:
        draw(found, given.plot)
    return 0


def _texts() -> tuple[Tensor, Tensor]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\0".join(each.read_bytes() for each in files)
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = int(len(values) * (1 - HELD_OUT))
    return values[:cut], values[cut:]


def _batch(text: Tensor, generator: torch.Generator) -> Tensor:
    begins = torch.randint(
        len(text) - SIZE.length - 1, (SIZE.batch, 1), generator=generator, device="cpu"
    )
    return text[begins + torch.arange(SIZE.length + 1, device="cpu")].long()


def _trained(way: str, given: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(given.threads)
    training, held_out = _texts()
    steps, peak = given.steps, given.lr
    model = made(SIZE, way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        ),
    )
    generator = torch.Generator().manual_seed(1)
    losses, validation, begin = [], [], time.perf_counter()
    for step in range(1, steps + 1):
        loss = model.loss(_batch(training, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        losses.append(round(loss.item(), 4))
        if step % max(1, steps // 10) == 0:
            validation.append((step, _validated(model, held_out)))
            print(f"{way}: step {step}, held out {validation[-1][1]:.4f} nats a byte", flush=True)
    parameters = sum(each.numel() for each in model.parameters())
    seconds = time.perf_counter() - begin
    return {"parameters": parameters, "seconds": seconds, "losses": losses,
            "validation": validation}  # fmt: skip


@torch.no_grad()
def _validated(model: Llama, held_out: Tensor) -> float:
    generator = torch.Generator().manual_seed(2)
    losses = [model.loss(_batch(held_out, generator)).item() for _ in range(VALIDATION_BATCHES)]
    return sum(losses) / len(losses)


def draw(found: dict[str, Any], path: Path) -> None:
    """Each point is the mean of SMOOTHED steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.fonttype"], mpl.rcParams["svg.hashsalt"] = "none", "lowrank"
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    for way, label in (("full", "full rank"), ("bottleneck", "pairs, a quarter of the width")):
        each = found[way]
        losses = torch.tensor(each["losses"], device="cpu")
        means = losses[: len(losses) // SMOOTHED * SMOOTHED].view(-1, SMOOTHED).mean(1).tolist()
        steps = [SMOOTHED * (at + 1) for at in range(len(means))]
        name = f"{label}: {each['parameters'] / 1e6:.2f} million parameters"
        (line,) = axis.plot(steps, means, label=name, linewidth=1.2)
        axis.plot(*zip(*each["validation"], strict=True), "o", color=line.get_color(), markersize=4)
    axis.set_xlabel("step")
    axis.set_ylabel("nats a byte (points: held out)")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
