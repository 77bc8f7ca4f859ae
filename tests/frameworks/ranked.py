"""A Trainer on several ranks, as torchrun starts them: python ranked.py ddp|fsdp2 OUT."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from statehold.integrations.transformers import StateholdTrainer

FSDP2 = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    },
}


STEPS = 6


def main(kind: str, out: str) -> None:
    set_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, attention_dropout=0.1)  # fmt: skip
    tokens = torch.randint(64, (28, 16), generator=torch.Generator().manual_seed(7))
    options: dict[str, Any] = FSDP2 if kind == "fsdp2" else {}
    if "WORLD_SIZE" in os.environ:
        options = {**options, "ddp_backend": "gloo"}
    arguments = TrainingArguments(
        out, max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=1, save_steps=1, save_total_limit=2, report_to=[], disable_tqdm=True,
        use_cpu=True, **options,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = StateholdTrainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=True)
    if trainer.args.process_index == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        Path(out, "losses.txt").write_text(str(losses))
        assert len(losses) == STEPS
        assert LlamaForCausalLM.from_pretrained(Path(out, f"checkpoint-{STEPS}"))


if __name__ == "__main__":
    main(*sys.argv[1:])
