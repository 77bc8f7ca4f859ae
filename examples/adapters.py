"""LoRA with peft and the Trainer of transformers: a step holds the adapters, and not the base.

Kill it at any moment, then run it again: it goes on bit for bit.

python examples/adapters.py [OUTPUT_DIR]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

import statehold
from statehold.integrations.transformers import StateholdTrainer

STEPS = 12


def adapted_model() -> torch.nn.Module:
    """A base that the script makes again in the same way, as from_pretrained would."""
    set_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4)  # fmt: skip
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1, target_modules=["q_proj"])
    return get_peft_model(LlamaForCausalLM(config), lora)


def main(out: str = "runs/adapters") -> None:
    tokens = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(7))
    arguments = TrainingArguments(
        out, max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, save_steps=1,
        save_total_limit=2, report_to=[], disable_tqdm=True, use_cpu=True, learning_rate=1e-2,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = StateholdTrainer(model=adapted_model(), args=arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=True)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    Path(out, "losses.txt").write_text(str(losses))

    adapters = statehold.load(out, "model")  # alone, without the trainer and the optimizer
    assert not adapted_model().load_state_dict(adapters, strict=False).unexpected_keys
    print(f"trained {trainer.state.global_step} steps; the last loss is {losses[-1]}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
