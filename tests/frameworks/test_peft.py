"""Adapters: a step holds what is trained, and peft opens the checkpoint."""

from __future__ import annotations

from functools import partial
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


def train(
    model: Any, out: Path, kind: Any = StateholdTrainer, save_steps: int = 1, **more: Any
) -> Any:
    rows = torch.randint(64, (16, 8), generator=torch.Generator().manual_seed(7))
    arguments = transformers.TrainingArguments(
        str(out), max_steps=3, save_steps=save_steps, per_device_train_batch_size=2,
        report_to=[], disable_tqdm=True, use_cpu=True, learning_rate=1e-2,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = kind(model=model, args=arguments, train_dataset=data, **more)
    trainer.train(resume_from_checkpoint=True)
    return trainer


@pytest.mark.thorough
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


# -- adapters that are frozen now and exist nowhere else -------------------------------------------

KINDS = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False),
    "biases": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], bias="all"),
    "modules": lambda: peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    ),
    "dora": lambda: peft.LoraConfig(
        r=2, target_modules=["q_proj"], use_dora=True, init_lora_weights=False
    ),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=["q_proj"], init_weights=False),
    "vectors": lambda: peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def two_adapters(kind: str, seed: int) -> Any:
    """Over the same base each time. "first" is frozen, with values of this process alone."""
    made = base()
    for layer in made.model.layers:
        layer.self_attn.q_proj.bias = torch.nn.Parameter(torch.zeros(32))
    transformers.set_seed(seed)
    model = peft.get_peft_model(made, KINDS[kind](), adapter_name="first")
    trained_before = [each for each in model.parameters() if each.requires_grad]
    with torch.no_grad():
        for each in trained_before:
            each.normal_()
    model.add_adapter("second", KINDS[kind]() if kind != "biases" else KINDS["lora"]())
    model.set_adapter("second")
    for each in trained_before:
        each.requires_grad_(False)
    return model, trained_before


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_adapter_comes_back(tmp_path: Path, kind: str) -> None:
    model, frozen = two_adapters(kind, 1)
    train(model, tmp_path)
    again, came_back = two_adapters(kind, 2)
    assert not all(map(torch.equal, came_back, frozen))
    train(again, tmp_path)
    assert all(map(torch.equal, came_back, frozen))
    whole = {name for name, _ in model.named_parameters()}
    assert len(statehold.load(tmp_path, "model")) < len(whole)  # the base is in no step


def test_each_adapter_has_its_own_weights_in_a_checkpoint(tmp_path: Path) -> None:
    model, _ = two_adapters("lora", 1)
    train(model, tmp_path)
    for name in ("first", "second"):
        opened = peft.PeftModel.from_pretrained(
            two_adapters("lora", 3)[0].unload(), tmp_path / "checkpoint-3" / name
        )
        expected = peft.get_peft_model_state_dict(model, adapter_name=name)
        found = peft.get_peft_model_state_dict(opened)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)


def test_so_it_does_with_an_accelerator(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from statehold.integrations.accelerate import accelerator_state

    model, frozen = two_adapters("lora", 1)
    again, came_back = two_adapters("lora", 2)
    with statehold.Checkpointer(tmp_path, staging_bytes="64MiB") as ckpt:
        for each, act in ((model, partial(ckpt.save, 1)), (again, ckpt.restore)):
            accelerator = accelerate.Accelerator(cpu=True)
            accelerator.prepare(each)
            act(accelerator_state(accelerator))
            if each is model:
                ckpt.flush()
    assert all(map(torch.equal, came_back, frozen))


# -- parameters of the base that begin to train later ----------------------------------------------


def late(model: Any) -> Any:
    [head] = [each for name, each in model.named_parameters() if name.endswith("lm_head.weight")]
    return head


class Unfreezes(transformers.TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == 2:
            late(others["model"]).requires_grad_(True)


def with_a_late_head(out: Path, kind: Any = StateholdTrainer) -> Any:
    model = adapted()
    held = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW([*held, late(model)], lr=1e-2)
    train(model, out, kind, callbacks=[Unfreezes()], optimizers=(optimizer, None))
    return late(model)


def test_what_begins_to_train_later_is_in_each_later_step_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun = late(adapted())
    trained = with_a_late_head(tmp_path)
    assert not torch.equal(trained, begun)
    names = [
        [name for name in statehold.load(tmp_path, "model", step=step) if "lm_head" in name]
        for step in (1, 2, 3)
    ]
    assert (len(names[0]), len(names[2])) == (0, 1)
    assert caplog.text.count("began to train") == 1
    assert torch.equal(with_a_late_head(tmp_path), trained)


def test_the_best_step_may_be_from_before_a_parameter_began_to_train(tmp_path: Path) -> None:
    class Back(StateholdTrainer):
        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
            result = super()._inner_training_loop(*args, **kwargs)
            self.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
            self._load_best_model()
            return result

    with_a_late_head(tmp_path, Back)


# Which layers have a norm that trains at a step.
def at_begin_and_later(step: int) -> list[int]:
    return [0, 1] if step > 1 else [0]


def in_turns(step: int) -> list[int]:
    return [step - 1] if step < 3 else []


@pytest.mark.parametrize("plan", [at_begin_and_later, in_turns])
def test_what_trained_before_the_first_save_comes_back(tmp_path: Path, plan: Any) -> None:
    class Plans(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            for number, norm in enumerate(norms(others["model"])):
                norm.requires_grad_(number in plan(state.global_step + 1))

    def norms(model: Any) -> list[Any]:
        return [each for name, each in model.named_parameters() if "input_layernorm" in name]

    def trained() -> list[Any]:
        model = adapted()
        held = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW([*held, *norms(model)], lr=1e-2)
        train(model, tmp_path, save_steps=3, callbacks=[Plans()], optimizers=(optimizer, None))
        return norms(model)

    first = trained()
    assert not any(map(torch.equal, first, norms(adapted())))
    assert sum("layernorm" in name for name in statehold.load(tmp_path, "model")) == 2
    assert all(map(torch.equal, trained(), first))
