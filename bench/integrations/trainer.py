"""`python -m bench.integrations.trainer`: the Trainer of transformers with a save at every step.

Owns: the time of a step, from the beginning of one to that of the next; and the wall time of
train() for each step. At the end of train() our saves are committed at every level, and the last
weights for from_pretrained are written.
Invariants: the Trainer without saves, with its own checkpoints, and ours without and with a level
in memory take turns in one process, with the same seed, data and model. The first five steps of a
training do not count. All keep two checkpoints. Ours are durable when they are committed. The
Trainer calls no fsync: its checkpoints survive the death of the process, like those in memory.
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

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import statehold
from bench.harness import ROOT, median
from statehold.checkpoint.levels.memory import memory_root
from statehold.integrations.transformers import StateholdTrainer

# hidden, intermediate, layers, heads, vocabulary, tokens of a step
SIZES = {"tiny": (64, 128, 2, 4, 256, 32), "130m": (768, 2048, 12, 12, 32000, 64)}
STEPS = {"tiny": 100, "130m": 14}
WARM = 5


class InMemory(StateholdTrainer):
    """Saves into memory that outlives the process, and every half hour to the disk."""

    def checkpointer(self, run: str, keep: int | None) -> Any:
        levels = [statehold.Memory(), statehold.Directory(every="30min", keep=keep)]
        return statehold.Checkpointer(run, levels=levels)


CASES = {
    "no saves": Trainer, "Trainer": Trainer, "statehold": StateholdTrainer, "in memory": InMemory,
}  # fmt: skip


class Clock(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.begun: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun.append(time.perf_counter())

    def steps(self) -> list[float]:
        pairs = zip(self.begun, self.begun[1:], strict=False)
        return [later - earlier for earlier, later in pairs][WARM:]


def model_of(size: str) -> Any:
    hidden, inner, layers, heads, words, _ = SIZES[size]
    set_seed(0)
    config = LlamaConfig(
        vocab_size=words, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(size: str, case: str, steps: int, folder: Path) -> tuple[list[float], float, int]:
    """The times of the steps, the wall time of a step, and the parameters of the model."""
    model, clock = model_of(size), Clock()
    tokens = torch.randint(SIZES[size][4], (steps, SIZES[size][5]))
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=1, save_steps=1,
        save_strategy="no" if case == "no saves" else "steps", save_total_limit=2,
        logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = CASES[case](
        model=model, args=arguments, callbacks=[clock],
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    )  # fmt: skip
    begin = time.perf_counter()
    trainer.train()
    wall = (time.perf_counter() - begin) / steps
    return clock.steps(), wall, sum(each.numel() for each in model.parameters())


def measure(size: str, steps: int, rounds: int, base: Path) -> dict[str, Any]:
    taken: dict[str, list[float]] = {case: [] for case in CASES}
    walls: dict[str, list[float]] = {case: [] for case in CASES}
    parameters = 0
    for _ in range(rounds):
        for case in CASES:
            folder = Path(tempfile.mkdtemp(prefix="trainer-", dir=base))
            try:
                found, wall, parameters = train(size, case, steps, folder)
            finally:
                shutil.rmtree(folder)
                shutil.rmtree(memory_root(str(folder)), ignore_errors=True)
            taken[case] += found
            walls[case].append(wall)
    return {
        "size": size, "parameters": parameters, "steps": steps, "rounds": rounds,
        "step_s": {case: median(each) for case, each in taken.items()},
        "wall_s": {case: median(each) for case, each in walls.items()},
    }  # fmt: skip


def shown(found: dict[str, Any]) -> str:
    free, free_wall = found["step_s"]["no saves"], found["wall_s"]["no saves"]
    title = f"{found['size']}: {found['parameters'] / 1e6:.1f} million parameters, "
    lines = [f"{title}{found['steps']} steps, {found['rounds']} rounds"]
    lines.append(f"{'':12}{'step':>12}{'over no saves':>16}{'train() a step':>18}{'':>8}")
    for case in CASES:
        step, wall = found["step_s"][case], found["wall_s"][case]
        lines.append(
            f"{case:12}{step * 1e3:9.1f} ms{step / free:14.2f} x"
            f"{wall * 1e3:15.1f} ms{wall / free_wall:6.2f} x"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.integrations.trainer")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--steps", type=int, help="of a training; by default 100 and 14")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=ROOT / "bench/out")
    arguments = parser.parse_args()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    record: list[dict[str, Any]] = []
    for size in arguments.sizes:
        record.append(
            measure(size, arguments.steps or STEPS[size], arguments.rounds, arguments.dir)
        )
        print(shown(record[-1]), flush=True)
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"load {load}; torch {torch.__version__}, {torch.get_num_threads()} threads")
    (arguments.dir / "trainer.json").write_text(json.dumps({"load": load, "cases": record}))


if __name__ == "__main__":
    main()
