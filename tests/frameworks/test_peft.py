"""Adapters: a step holds what is trained, and peft opens the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import statehold

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from statehold.integrations.transformers import StateholdTrainer  # noqa: E402


def base() -> Any:
    transformers.set_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4,
        )
    )  # fmt: skip


def adapted(**more: Any) -> Any:
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], **more)
    return peft.get_peft_model(base(), lora)


def train(model: Any, out: Path) -> Any:
    rows = torch.randint(64, (16, 8), generator=torch.Generator().manual_seed(7))
    arguments = transformers.TrainingArguments(
        str(out), max_steps=3, save_steps=1, per_device_train_batch_size=2, report_to=[],
        disable_tqdm=True, use_cpu=True, learning_rate=1e-2,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = StateholdTrainer(model=model, args=arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=True)
    return trainer


@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["lm_head"]}])
def test_a_step_holds_the_trained_part_only(tmp_path: Path, more: dict[str, Any]) -> None:
    model = adapted(**more)
    train(model, tmp_path)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    saved = statehold.load(tmp_path, "model")
    assert saved.keys() == trained.keys()
    assert all(torch.equal(saved[name], each) for name, each in trained.items())

    again = adapted(**more)
    assert not again.load_state_dict(saved, strict=False).unexpected_keys
    opened = peft.PeftModel.from_pretrained(base(), tmp_path / "checkpoint-3")
    inputs = torch.arange(8)[None]
    with torch.no_grad():
        expected = model.eval()(inputs).logits
        assert torch.equal(again.eval()(inputs).logits, expected)
        assert torch.equal(opened.eval()(inputs).logits, expected)


def test_another_model_with_frozen_parameters_is_saved_as_a_whole(tmp_path: Path) -> None:
    model = base()
    model.lm_head.weight.requires_grad_(False)
    train(model, tmp_path)
    assert "lm_head.weight" in statehold.load(tmp_path, "model")
