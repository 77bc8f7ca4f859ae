"""`python -m bench.integrations.trainer`: the Trainer of transformers with a save at every step.

Owns: the Trainer without saves, with its own checkpoints, and ours without and with a level in
memory. At the end of train() our saves are committed at every level, and the last weights for
from_pretrained are written.
Invariants: all have the same seed, data and model, and keep two checkpoints. Ours are durable when
they are committed. The Trainer calls no fsync: its checkpoints survive the death of the process,
like those in memory.
Not here: the rounds, the times and the table (comparison.py).
"""

from __future__ import annotations

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
from bench.integrations.comparison import Clock, Comparison, step_wall
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


class Times(Clock, TrainerCallback):  # type: ignore[misc]
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begin()


def model_of(size: str) -> Any:
    hidden, inner, layers, heads, words, _ = SIZES[size]
    set_seed(0)
    config = LlamaConfig(
        vocab_size=words, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def parameters(size: str) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in model_of(size).parameters())


def train(size: str, case: str, steps: int, folder: Path) -> tuple[list[float], float]:
    model, times = model_of(size), Times()
    tokens = torch.randint(SIZES[size][4], (steps, SIZES[size][5]), device="cpu")
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=1, save_steps=1,
        save_strategy="no" if case == "no saves" else "steps", save_total_limit=2,
        logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = CASES[case](
        model=model, args=arguments, callbacks=[times],
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    )  # fmt: skip
    wall = step_wall(trainer.train, steps)
    return times.steps(WARM), wall


if __name__ == "__main__":
    Comparison(
        "bench.integrations.trainer", "trainer.json", [*CASES], STEPS, parameters, train
    ).main()
