"""StateholdTrainer decides as Trainer does, and resumes with the same bits.

Where the Trainer has its own behaviour, the test runs both with the same seeds and compares.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import statehold  # noqa: E402
from statehold.checkpoint.session import Session  # noqa: E402
from statehold.errors import (  # noqa: E402
    ChecksumError,
    StateMismatchError,
    StepNotFoundError,
    UsageError,
)
from statehold.integrations.transformers import StateholdTrainer, logged_at  # noqa: E402
from statehold.integrations.transformers.folders import Folders  # noqa: E402

STEPS = 6
STEP_2 = "step-000000000002"
TOKENS = torch.randint(64, (28, 8), generator=torch.Generator().manual_seed(7))
DATA = [{"input_ids": row, "labels": row} for row in TOKENS]


def model() -> Any:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, attention_dropout=0.1, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def arguments(out: Path, **changes: Any) -> Any:
    base = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "logging_steps": 1, "save_steps": 1, "report_to": [], "disable_tqdm": True,
        "use_cpu": True, "learning_rate": 1e-2,
    }  # fmt: skip
    return TrainingArguments(str(out), **{**base, **changes})


def trainer(out: Path, kind: Any = StateholdTrainer, more: Any = (), **changes: Any) -> Any:
    return kind(
        model=model(), args=arguments(out, **changes), train_dataset=DATA, eval_dataset=DATA[:4],
        callbacks=list(more),
    )  # fmt: skip


def both(folder: Path, our: Any = StateholdTrainer, **changes: Any) -> list[Any]:
    """The Trainer and ours, each trained from the same seed."""
    found = []
    for name, kind in (("stock", Trainer), ("ours", our)):
        found.append(trainer(folder / name, kind, **changes))
        found[-1].train()
    return found


def folders(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("checkpoint-*"))


def logged(found: Any) -> list[dict[str, Any]]:
    """What was logged, without times."""
    times = ("runtime", "per_second")
    return [
        {key: value for key, value in entry.items() if not any(each in key for each in times)}
        for entry in found.state.log_history
    ]


def same_weights(one: Any, other: Any) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)


class Stop(Exception):
    pass


class StopAfter(TrainerCallback):  # type: ignore[misc]
    """Ends the process's part of the training with an error, at the save of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            raise Stop


def stopped(out: Path, step: int, **changes: Any) -> None:
    with pytest.raises(Stop):
        trainer(out, more=[StopAfter(step)], **changes).train()


# -- resuming --------------------------------------------------------------------------------------


def test_a_rank_begins_that_looks_before_rank_0_has_made_the_directory(tmp_path: Path) -> None:
    class Early(StateholdTrainer):
        def checkpointer(self, run: str, keep: int | None) -> statehold.Checkpointer:
            opened = super().checkpointer(run, keep)
            shutil.rmtree(run)  # the next save makes it again
            return opened

    trainer(tmp_path / "out", Early, max_steps=1).train(resume_from_checkpoint=True)
    assert (tmp_path / "out/step-000000000001").is_dir()


@pytest.mark.thorough
@pytest.mark.parametrize("step", [2, 4])
def test_a_resumed_training_is_that_of_the_trainer(tmp_path: Path, step: int) -> None:
    stock = trainer(tmp_path / "stock", Trainer, logging_steps=3)
    stock.train()
    stopped(tmp_path / "ours", step, logging_steps=3)
    again = trainer(tmp_path / "ours", logging_steps=3)
    again.train(resume_from_checkpoint=True)
    assert same_weights(again.model, stock.model)
    assert logged(again)[:-1] == logged(stock)[:-1]


def test_a_finished_training_takes_no_further_step(tmp_path: Path) -> None:
    """A warned job may leave with its last step, and is then started again."""
    once, again = (
        trainer(tmp_path / "out", max_steps=2, lr_scheduler_type="constant") for _ in range(2)
    )
    once.train()
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2
    assert same_weights(again.model, once.model)
    assert folders(tmp_path / "out") == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.thorough
def test_callbacks_and_schedulers_that_look_at_metrics_go_on(tmp_path: Path) -> None:
    changes = {
        "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss",
        "load_best_model_at_end": True, "lr_scheduler_type": "reduce_lr_on_plateau",
        "restore_callback_states_from_checkpoint": True,
    }  # fmt: skip
    patience = EarlyStoppingCallback(early_stopping_patience=50)
    whole = trainer(tmp_path / "whole", more=[patience], **changes)
    whole.train()
    stopped(tmp_path / "cut", 3, **changes)
    again = trainer(tmp_path / "cut", more=[EarlyStoppingCallback(50)], **changes)
    again.train(resume_from_checkpoint=True)
    assert same_weights(again.model, whole.model)
    assert logged(again)[:-1] == logged(whole)[:-1]


def told(caplog: pytest.LogCaptureFixture) -> str:
    texts = "\n".join(each.getMessage() for each in caplog.records if each.name == "statehold")
    caplog.clear()
    return texts


def test_a_folder_that_was_copied_without_its_step_is_not_begun_over(tmp_path: Path) -> None:
    trainer(tmp_path / "run", max_steps=2).train()
    shutil.copytree(tmp_path / "run/checkpoint-2", tmp_path / "copy/checkpoint-2")
    with pytest.raises(StepNotFoundError, match="no committed step"):
        trainer(tmp_path / "copy").train(resume_from_checkpoint=True)
    assert [each.name for each in (tmp_path / "copy").glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_a_sampler_whose_order_is_lost_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, strategy: str
) -> None:
    trainer(tmp_path, train_sampling_strategy=strategy, max_steps=1).train()
    is_named = "LengthGroupedSampler draws the order of an epoch" in told(caplog)
    assert is_named == (strategy == "group_by_length")


@pytest.mark.thorough
def test_what_differs_after_a_resume_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workers = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "max_steps": 1}
    trainer(tmp_path / "workers", **workers).train()
    assert "dataloader_persistent_workers=True" in told(caplog)
    for changes, text in (
        ({}, "the step has the state of EarlyStoppingCallback, and it is not restored"),
        ({"restore_callback_states_from_checkpoint": True}, None),
        ({"save_only_model": True}, "no optimizer and no scheduler"),
    ):
        out = tmp_path / f"out-{len(changes)}-{text is None}"
        evaluated = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss",
                     **changes}  # fmt: skip
        for steps in (1, 2):
            patience = EarlyStoppingCallback(50)
            trainer(out, more=[patience], max_steps=steps, **evaluated).train(
                resume_from_checkpoint=steps > 1
            )
            said = told(caplog)
            assert (text in said) if steps > 1 and text else "the step" not in said, said


def test_another_kind_of_optimizer_is_one_difference_of_a_group(tmp_path: Path) -> None:
    trainer(tmp_path / "out", max_steps=1).train()
    with pytest.raises(StateMismatchError, match="those of another kind of optimizer") as caught:
        trainer(tmp_path / "out", optim="sgd").train(resume_from_checkpoint=True)
    assert "differ in 2 places" in str(caught.value)


@pytest.mark.thorough
@pytest.mark.parametrize("damaged", ["*.safetensors", "manifest.json"])
def test_a_damaged_step_is_set_aside(tmp_path: Path, damaged: str) -> None:
    out = tmp_path / "out"
    whole = trainer(out)
    whole.train()
    (file,) = (out / f"step-{STEPS:012d}").glob(damaged)
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    again = trainer(out)
    again.train(resume_from_checkpoint=True)
    assert same_weights(again.model, whole.model)
    assert (out / f"step-{STEPS:012d}.corrupt").is_dir()
    assert logged(again)[:-1] == logged(whole)[:-1]


def test_a_damaged_step_that_cannot_be_set_aside_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path, max_steps=2).train()
    (file,) = (tmp_path / "step-000000000002").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100] + bytes(100))
    monkeypatch.setattr(Session, "claim", lambda *_: False)  # another job may have the lock
    with pytest.raises(ChecksumError):
        trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=True)


@pytest.mark.thorough
def test_a_folder_names_the_step_to_go_back_to(tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole = trainer(out)
    whole.train()
    back = trainer(out)
    back.train(resume_from_checkpoint=str(out / "checkpoint-3"))
    assert same_weights(back.model, whole.model)
    with pytest.raises(StepNotFoundError, match="no committed step"):
        trainer(out).train(resume_from_checkpoint=str(out / "checkpoint-77"))


def test_an_older_step_discards_nothing_until_the_first_save(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def back(**changes: Any) -> None:
        trainer(out, **changes).train(resume_from_checkpoint=str(out / "checkpoint-1"))

    def steps() -> list[int]:
        with statehold.Checkpointer(out) as ckpt:
            return ckpt.steps()

    trainer(out, max_steps=3).train()
    with pytest.raises(StateMismatchError):
        back(optim="sgd")
    back(save_strategy="no", max_steps=2)
    assert (steps(), len(folders(out))) == ([1, 2, 3], 3)
    (data,) = (out / "step-000000000001").glob("*.safetensors")
    content = data.read_bytes()
    data.write_bytes(content[:-100] + bytes(100))
    with pytest.raises(ChecksumError):
        back()
    assert (steps(), len(folders(out))) == ([1, 2, 3], 3)
    data.write_bytes(content)
    back(max_steps=2)
    assert (steps(), folders(out)) == ([1, 2], ["checkpoint-1", "checkpoint-2"])


def test_a_step_whose_folder_was_deleted_goes_at_the_first_save(tmp_path: Path) -> None:
    """The step before it may not fit."""
    out, whole = tmp_path / "out", trainer(tmp_path / "whole")
    whole.train()
    with pytest.raises(Stop):
        trainer(out, more=[StopAfter(3)]).train()
    shutil.rmtree(out / "checkpoint-3")
    with pytest.raises(StateMismatchError):
        trainer(out, optim="sgd").train(resume_from_checkpoint=True)
    with statehold.Checkpointer(out) as ckpt:
        assert ckpt.steps() == [1, 2, 3]
    again = trainer(out)
    again.train(resume_from_checkpoint=True)
    assert same_weights(again.model, whole.model)
    assert folders(out) == folders(tmp_path / "whole")


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    """Such as one of DeepSpeed, which has its weights in a format of its own."""
    out = tmp_path / "out"
    for step in (8, 9):
        (out / f"checkpoint-{step}").mkdir(parents=True)
        (out / f"checkpoint-{step}/trainer_state.json").write_text("{}")
    (out / "checkpoint-9/global_step9").mkdir()
    with pytest.raises(StepNotFoundError):
        trainer(out).train(resume_from_checkpoint=str(out / "checkpoint-9"))
    trainer(out, max_steps=1).train()
    assert folders(out) == ["checkpoint-1", "checkpoint-9"]


@pytest.mark.thorough
def test_a_folder_that_a_person_has_deleted_does_not_count(tmp_path: Path) -> None:
    out = tmp_path / "out"
    trainer(out).train()
    for step in (5, 6):
        for path in sorted((out / f"checkpoint-{step}").rglob("*"), reverse=True):
            path.unlink()
        (out / f"checkpoint-{step}").rmdir()
    begun: list[int] = []

    class Begin(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            begun.append(state.global_step)

    trainer(out, more=[Begin()]).train(resume_from_checkpoint=True)
    assert begun == [4]


@pytest.mark.thorough
def test_a_checkpoint_of_the_trainer_itself_resumes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole = trainer(tmp_path / "whole", Trainer)
    whole.train()
    with pytest.raises(Stop):
        trainer(out, Trainer, more=[StopAfter(3)]).train()
    again = trainer(out)
    again.train(resume_from_checkpoint=True)
    assert same_weights(again.model, whole.model)


def test_used_directories_are_not_overwritten(tmp_path: Path) -> None:
    trainer(tmp_path / "out", max_steps=1).train()
    with pytest.raises(UsageError, match="has steps already"):
        trainer(tmp_path / "out").train()


# -- which checkpoints stay ------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_limits_and_the_best_model_mean_the_same(tmp_path: Path, limit: int) -> None:
    changes = {
        "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss",
        "load_best_model_at_end": True, "save_total_limit": limit, "learning_rate": 0.1,
    }  # fmt: skip
    stock, ours = both(tmp_path, **changes)
    assert ours.state.best_metric == stock.state.best_metric
    assert 1 < ours.state.best_global_step < STEPS  # otherwise this would show little
    assert Path(ours.state.best_model_checkpoint).name == Path(
        stock.state.best_model_checkpoint
    ).name  # fmt: skip
    assert folders(tmp_path / "ours") == folders(tmp_path / "stock")
    assert same_weights(ours.model, stock.model)
    reloaded = LlamaForCausalLM.from_pretrained(ours.state.best_model_checkpoint)
    assert same_weights(reloaded, ours.model)


@pytest.mark.thorough
def test_every_checkpoint_opens_with_from_pretrained(tmp_path: Path) -> None:
    both(tmp_path)
    for step in range(1, STEPS + 1):
        one, other = (
            LlamaForCausalLM.from_pretrained(tmp_path / name / f"checkpoint-{step}")
            for name in ("stock", "ours")
        )
        assert same_weights(one, other)
    state = json.loads((tmp_path / "ours/checkpoint-4/trainer_state.json").read_text())
    assert state["global_step"] == 4


@pytest.mark.thorough
def test_a_step_says_what_was_logged_at_it(tmp_path: Path) -> None:
    ours = trainer(tmp_path / "ours", eval_strategy="steps", eval_steps=2, learning_rate=0.1)
    ours.train()
    run = statehold.open(tmp_path / "ours")
    losses = {
        each["step"]: each["eval_loss"] for each in ours.state.log_history if "eval_loss" in each
    }
    assert {step: run[step].metrics.get("eval_loss") for step in (2, 4, 6)} == losses
    assert "eval_loss" not in run[3].metrics
    assert run[3].metrics["learning_rate"] > 0
    best = min(losses, key=lambda step: losses[step])
    loaded = statehold.load(f"{tmp_path}/ours@best:eval_loss", "model")
    folder = tmp_path / "ours" / f"checkpoint-{best}"
    weights = LlamaForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], weights[name]) for name in loaded)


def test_what_cannot_be_a_metric_fails_no_save() -> None:
    odd = {"a": 1, "b": "text", "c" * 300: 2.0, "d\n": 3.0, "e": True, "f": [1.0], "g": 1 << 2000,
           "step": 4}  # fmt: skip
    assert logged_at(4, [{"old": 1.0, "step": 3}, odd]) == {"a": 1.0}
    many = {f"m{i}": float(i) for i in range(3000)}
    assert len(logged_at(1, [{**many, "step": 1}])) == 1000


# -- other trainers --------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_trainer_that_overrides_saving_is_reached(tmp_path: Path) -> None:
    """TRL's trainers write a card and then call the Trainer."""
    carded: list[int] = []

    class Carding(Trainer):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            carded.append(self.state.global_step)
            super()._save_checkpoint(model, trial)

    class Both(Carding, StateholdTrainer):
        pass

    trainer(tmp_path / "out", Both, max_steps=2).train()
    assert carded == [1, 2]
    assert (tmp_path / "out/step-000000000002").is_dir()


@pytest.mark.thorough
def test_levels_are_a_method(tmp_path: Path, memory: Callable[..., Any]) -> None:
    import statehold

    class Levels(StateholdTrainer):
        def checkpointer(self, run: str, keep: int | None) -> Any:
            levels = [statehold.Memory(path=memory), statehold.Directory(keep=keep)]
            return statehold.Checkpointer(run, levels=levels)

    trainer(tmp_path / "out", Levels, max_steps=2).train()
    assert LlamaForCausalLM.from_pretrained(tmp_path / "out/checkpoint-2")


BEST_IS_2 = {
    "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss",
    "load_best_model_at_end": True, "learning_rate": 0.1, "lr_scheduler_type": "constant",
}  # fmt: skip


def test_the_best_step_stays_where_it_can_be_loaded_although_only_memory_had_it(
    tmp_path: Path, memory: Callable[..., Any]
) -> None:
    class Levels(StateholdTrainer):
        def checkpointer(self, run: str, keep: int | None) -> Any:
            levels = [statehold.Memory(path=memory), statehold.Directory(every=100, keep=keep)]
            return statehold.Checkpointer(run, levels=levels)

    stock, ours = both(tmp_path, Levels, **BEST_IS_2)
    assert ours.state.best_global_step == 2
    assert not [level for level in (memory, tmp_path / "ours") if (level / STEP_2).exists()]
    assert same_weights(ours.model, stock.model)
    assert LlamaForCausalLM.from_pretrained(ours.state.best_model_checkpoint)


def test_a_best_step_that_no_level_has_is_no_error_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Folders, "hold", lambda *_: None)  # as if each host had a level of its own
    trainer(tmp_path / "out", save_total_limit=1, **BEST_IS_2).train()
    assert "step 2 is the best one, and no level has it any more" in told(caplog)


def test_the_best_saved_step_stays_although_an_unsaved_one_is_better(tmp_path: Path) -> None:
    losses = {1: 5.0, 2: 1.0, 3: 0.5}

    def evaluated(kind: Any) -> Any:
        class Evaluated(kind):  # type: ignore[misc]
            def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
                return {"eval_loss": losses.get(self.state.global_step, 9.0)}

            def _export(self, folder: Any) -> None:
                if not self.is_in_train:  # as if the disk had no time for weights until then
                    super()._export(folder)

        changes = {**BEST_IS_2, "save_steps": 2, "save_total_limit": 2, "max_steps": 10}
        found = trainer(tmp_path / kind.__name__, Evaluated, **changes)
        found.train()
        assert found.state.best_global_step == 3
        assert Path(found.state.best_model_checkpoint).name == "checkpoint-2"
        return found

    stock, ours = evaluated(Trainer), evaluated(StateholdTrainer)
    assert same_weights(ours.model, stock.model)
    assert LlamaForCausalLM.from_pretrained(ours.state.best_model_checkpoint)
