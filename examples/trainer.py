"""The Trainer of transformers with a step of statehold at every step.

Kill it at any moment, then run it again: it goes on bit for bit.

python examples/trainer.py [OUTPUT_DIR]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from statehold.integrations.transformers import StateholdTrainer

STEPS = 12


def tiny_model() -> LlamaForCausalLM:
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, attention_dropout=0.1)  # fmt: skip
    return LlamaForCausalLM(config)


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(64, (count, 16), generator=torch.Generator().manual_seed(7))
    return [{"input_ids": row, "labels": row} for row in tokens]


def main(out: str = "runs/trainer") -> None:
    set_seed(0)
    arguments = TrainingArguments(
        out, max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, save_steps=1,
        save_total_limit=2, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = StateholdTrainer(model=tiny_model(), args=arguments, train_dataset=samples(32))
    trainer.train(resume_from_checkpoint=True)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    Path(out, "losses.txt").write_text(str(losses))
    print(f"trained {trainer.state.global_step} steps; the last loss is {losses[-1]}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
