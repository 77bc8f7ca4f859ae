"""What people do with a Trainer of transformers, and with the folders that it leaves, beside the
plain way: StateholdTrainer does the same, or says in one sentence why not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import TrainerCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

import statehold  # noqa: E402
from frameworks.test_transformers import (  # noqa: E402
    STEPS,
    Stop,
    StopAfter,
    folders,
    same_weights,
    stopped,
    told,
    trainer,
)
from statehold.errors import StepNotFoundError  # noqa: E402
from statehold.integrations.transformers import StateholdTrainer  # noqa: E402
from support.faults import SMALL  # noqa: E402


def committed(out: Path) -> list[int]:
    return statehold.open(out).steps()


def optimizer_steps(found: Any) -> float:
    return float(found.optimizer.state_dict()["state"][0]["step"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A training that was left alone."""
    found = trainer(tmp_path_factory.mktemp("whole"))
    found.train()
    return found


# -- checkpoints of other runs ---------------------------------------------------------------------


def of_another_run(d: Path) -> str:
    return str(d / "first/checkpoint-3")


def with_a_slash(d: Path) -> str:
    return f"{d}/first/checkpoint-3/"


def relative(d: Path) -> str:
    return "first/../first/checkpoint-3"


def moved(d: Path) -> str:
    os.rename(d / "first", d / "moved")
    return str(d / "moved/checkpoint-3")


def linked(d: Path) -> str:
    (d / "latest").symlink_to(d / "first/checkpoint-3")
    return str(d / "latest")


def by_its_directory(d: Path) -> str:
    return str(d / "first/step-000000000003")


def by_its_name(d: Path) -> str:
    return f"{d}/first@3"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "way", [of_another_run, with_a_slash, relative, moved, linked, by_its_directory, by_its_name]
)
def test_a_checkpoint_of_another_run_resumes_whole(
    tmp_path: Path, way: Any, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stopped(tmp_path / "first", 3)
    before = sorted(os.listdir(tmp_path / "first"))
    path = way(tmp_path)
    again = trainer(tmp_path / "second")
    again.train(resume_from_checkpoint=path)
    assert same_weights(again.model, whole.model)
    assert optimizer_steps(again) == STEPS
    assert committed(tmp_path / "second") == [4, 5, 6]
    assert folders(tmp_path / "second") == ["checkpoint-4", "checkpoint-5", "checkpoint-6"]
    if way is not moved:
        assert sorted(os.listdir(tmp_path / "first")) == before  # it was only read


@pytest.mark.thorough
def test_the_same_path_in_the_own_run(tmp_path: Path, whole: Any) -> None:
    stopped(tmp_path / "out", 5)
    again = trainer(tmp_path / "out")
    again.train(resume_from_checkpoint=f"{tmp_path}/out/checkpoint-3/")
    assert same_weights(again.model, whole.model)
    assert committed(tmp_path / "out") == [1, 2, 3, 4, 5, 6]


@pytest.mark.thorough
def test_a_job_that_always_names_the_other_run_can_be_started_again(
    tmp_path: Path, whole: Any
) -> None:
    stopped(tmp_path / "first", 3)
    path = str(tmp_path / "first/checkpoint-3")
    with pytest.raises(Stop):
        trainer(tmp_path / "out", more=[StopAfter(5)]).train(resume_from_checkpoint=path)
    again = trainer(tmp_path / "out")
    again.train(resume_from_checkpoint=path)
    assert same_weights(again.model, whole.model)
    assert committed(tmp_path / "out") == [3, 4, 5, 6]


@pytest.mark.thorough
def test_so_can_one_that_goes_back_to_the_best_step(tmp_path: Path, whole: Any) -> None:
    """Of which only the folder has the files by now."""
    out = tmp_path / "out"
    trainer(out).train()
    shutil.move(out / "step-000000000003", out / "checkpoint-3")
    for step in (1, 2, 4):
        shutil.rmtree(out / f"step-{step:012d}")
    again = trainer(out)
    again.train(resume_from_checkpoint=str(out / "checkpoint-3"))
    assert same_weights(again.model, whole.model)
    assert committed(out) == [3, 4, 5, 6]


def test_a_folder_that_was_copied_without_its_step_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path / "first", max_steps=2).train()
    shutil.copytree(tmp_path / "first/checkpoint-2", tmp_path / "copied/checkpoint-2")
    for path in ("copied/checkpoint-2", "copied", "nowhere/checkpoint-2", "nowhere"):
        with pytest.raises(StepNotFoundError, match="copy the whole run"):
            trainer(tmp_path / "second").train(resume_from_checkpoint=str(tmp_path / path))


# -- auto_find_batch_size --------------------------------------------------------------------------


class NoMemory(TrainerCallback):  # type: ignore[misc]
    """The device has no memory, once, when a step begins."""

    def __init__(self, step: int) -> None:
        self._step: int | None = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            self._step = None
            raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.thorough
@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize("resume", [None, True, "checkpoint-2"])
@pytest.mark.parametrize("fails_at", [2, 4])
def test_a_smaller_batch_trains_on(
    tmp_path: Path, limit: int | None, resume: Any, fails_at: int
) -> None:
    out, changes = tmp_path / "out", {"auto_find_batch_size": True, "save_total_limit": limit}
    if resume is not None:
        trainer(out, max_steps=2, **changes).train()
    again = trainer(out, more=[NoMemory(fails_at)], **changes)
    again.train(resume_from_checkpoint=str(out / resume) if isinstance(resume, str) else resume)
    assert again.state.global_step == STEPS
    assert again._train_batch_size < again.args.train_batch_size
    assert committed(out)[-1] == STEPS
    assert len(committed(out)) <= (limit or STEPS)
    assert folders(out) == [f"checkpoint-{step}" for step in committed(out)]
    reloaded = transformers.LlamaForCausalLM.from_pretrained(out / f"checkpoint-{STEPS}")
    assert same_weights(reloaded, again.model)


def test_a_smaller_batch_loses_no_step(tmp_path: Path) -> None:
    begun: list[int] = []

    class Begins(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            begun.append(state.global_step)

    out = tmp_path / "out"
    found = trainer(out, more=[NoMemory(0), NoMemory(3), Begins()], auto_find_batch_size=True,
                    per_device_train_batch_size=8)  # fmt: skip
    found.train()
    assert begun == [0, 0, 3]
    assert committed(out) == [1, 2, 3, 4, 5, 6]
    assert optimizer_steps(found) == STEPS


# -- models beside the one that trains -------------------------------------------------------------


class Averages(StateholdTrainer):
    """With an average of the weights, a teacher that stays, and a table of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.average = torch.nn.Linear(2, 2, bias=False)
        self.teachers = [torch.nn.Linear(2, 2)]
        torch.nn.init.zeros_(self.average.weight)
        self.table = {"seen": 0}

    def extra_state(self) -> dict[str, Any]:
        return {"table": self.table}

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.table["seen"] += 1
        self.average.weight.data.mul_(0.5).add_(self.state.global_step + 1)
        return super().training_step(*args, **kwargs)


class Shadow(TrainerCallback):  # type: ignore[misc]
    """A model of a callback, made when the training begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.shadow = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(self.shadow.weight)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        with torch.no_grad():
            self.shadow.weight.add_(state.global_step)


@pytest.mark.thorough
def test_models_that_change_beside_it_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left, cut = Shadow(), Shadow()
    whole = trainer(tmp_path / "whole", Averages, more=[left])
    whole.train()
    with pytest.raises(Stop):
        trainer(tmp_path / "cut", Averages, more=[Shadow(), StopAfter(3)]).train()
    saved = statehold.load(tmp_path / "cut", "extra")
    assert sorted(saved) == ["Shadow-shadow", "average", "table"]  # no teacher
    again = trainer(tmp_path / "cut", Averages, more=[cut])
    again.train(resume_from_checkpoint=True)
    assert torch.equal(again.average.weight, whole.average.weight)
    assert torch.equal(cut.shadow.weight, left.shadow.weight)
    assert again.table == whole.table
    assert "nothing here takes it" not in told(caplog)

    trainer(tmp_path / "cut").train(resume_from_checkpoint=str(tmp_path / "cut/checkpoint-4"))
    assert "the step has Shadow-shadow, average, table" in told(caplog)


class Averager:
    """As libraries of averages have it: an object that is no module."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.shadow = [torch.zeros(2), torch.zeros(3)]
        torch.nn.init.zeros_(self.model.weight)


class Holds(TrainerCallback):  # type: ignore[misc]
    """What moves is in an object, in a list, or is another tensor after each step."""

    def __init__(self) -> None:
        self.averager = Averager()
        self.centers = {"first": torch.zeros(2), "stays": torch.zeros(2)}
        self.center = torch.zeros(())
        self.results = torch.zeros(0)
        self._last = torch.zeros(2)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = state.global_step
        self.averager.model.weight.data.mul_(0.5).add_(now)
        for each in (*self.averager.shadow, self.centers["first"], self._last):
            each.mul_(0.5).add_(now)
        self.center = 0.5 * self.center + now
        self.results = torch.full((now,), 1.0)

    def moving(self) -> list[torch.Tensor]:
        inside = [self.averager.model.weight, *self.averager.shadow]
        return [*inside, *self.centers.values(), self.center]


@pytest.mark.thorough
def test_so_do_tensors_and_models_in_objects(tmp_path: Path) -> None:
    left, again = Holds(), Holds()
    trainer(tmp_path / "whole", more=[left]).train()
    with pytest.raises(Stop):
        trainer(tmp_path / "cut", more=[Holds(), StopAfter(3)]).train()
    saved = statehold.load(tmp_path / "cut", "extra")
    inside = ["averager-model", "averager-shadow-0", "averager-shadow-1", "center", "centers-first"]
    assert sorted(saved) == [f"Holds-{name}" for name in inside]
    trainer(tmp_path / "cut", more=[again]).train(resume_from_checkpoint=True)
    assert all(map(torch.equal, again.moving(), left.moving()))


@pytest.mark.thorough
def test_a_step_has_a_model_beside_as_it_was_in_the_save(tmp_path: Path) -> None:
    """Whenever it changes next, and though its version counter misses that."""

    class Small(StateholdTrainer):
        def checkpointer(self, run: str, keep: int | None) -> statehold.Checkpointer:
            return statehold.Checkpointer(run, keep=keep, **SMALL)

    class Large(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.model = torch.nn.Linear(1 << 12, 1 << 12, bias=False)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.model.weight.data.fill_(state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.model.weight.data.fill_(100)

    trainer(tmp_path, Small, more=[Large()], max_steps=3).train()
    for step in committed(tmp_path):
        saved = statehold.load(tmp_path, "extra", step=step)["Large-model"]["weight"]
        assert saved.unique().tolist() == [step]


def test_a_model_that_is_made_after_the_beginning_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Late(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.teacher = torch.nn.Linear(1, 1)
            self.logits = torch.ones(state.global_step)

    trainer(tmp_path, more=[Late()], max_steps=2).train()
    assert told(caplog).count("so no step holds it: Late-teacher.") == 1
    assert "extra" not in statehold.load(tmp_path)


# -- the folders -----------------------------------------------------------------------------------


class Reads(TrainerCallback):  # type: ignore[misc]
    """Uploads the folder, as reporters do."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        assert json.loads((folder / "trainer_state.json").read_text())
        if (folder / "model.safetensors").exists():
            self.found.append(state.global_step)


def test_a_callback_that_reads_the_folder_is_named_or_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path / "fast", more=[Reads()], max_steps=1).train()
    assert "Reads: on_save() is called before checkpoint-N has its weights" in told(caplog)

    class Waits(StateholdTrainer):
        weights_before_on_save = True

    reads = Reads()
    trainer(tmp_path / "slow", Waits, more=[reads], save_total_limit=2).train()
    assert reads.found == list(range(1, STEPS + 1))
    assert "on_save" not in told(caplog)
    assert folders(tmp_path / "slow") == ["checkpoint-5", "checkpoint-6"]


@pytest.mark.parametrize("way", ["own function", "added later", "saves by itself"])
def test_so_is_one_however_it_comes_to_read(
    tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Adds(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                found.add_callback(Reads())

    class Saves(Reads):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = True

    read = TrainerCallback()
    read.on_save = Reads().on_save
    ways = {"own function": read, "added later": Adds(), "saves by itself": Saves()}
    name = {"own function": "TrainerCallback", "added later": "Reads", "saves by itself": "Saves"}
    strategy = {"save_strategy": "no"} if way == "saves by itself" else {}
    found = trainer(tmp_path, more=[ways[way]], max_steps=3, **strategy)
    found.train()
    assert told(caplog).count(f"{name[way]}: on_save() is called before") == 1


def killed_in_a_save(out: Path, step: int) -> None:
    """As if the job had died before the commit: the folder is there, and its step is not."""
    stopped(out, step)
    shutil.rmtree(out / f"step-{step:012d}")
    for path in (out / f"checkpoint-{step}").iterdir():
        if path.name != "trainer_state.json":
            path.unlink()


@pytest.mark.thorough
@pytest.mark.parametrize("step", [1, 4])
def test_the_newest_folder_of_a_killed_job_resumes_the_newest_step(
    tmp_path: Path, step: int, whole: Any, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    killed_in_a_save(out, step)
    last = get_last_checkpoint(str(out))
    assert Path(last).name == f"checkpoint-{step}"
    again = trainer(out)
    again.train(resume_from_checkpoint=last)
    assert f"checkpoint-{step} is of a save that was never committed" in told(caplog)
    assert same_weights(again.model, whole.model)
    assert committed(out) == list(range(1, STEPS + 1))


def test_folders_of_killed_saves_are_no_checkpoints_of_a_new_training(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "checkpoint-70").mkdir(parents=True)
    (out / "checkpoint-70/trainer_state.json").write_text("{}")
    (out / "checkpoint-80").mkdir()
    (out / "checkpoint-80/model.safetensors").write_text("of somebody else")
    trainer(out, max_steps=2).train()
    assert folders(out) == ["checkpoint-1", "checkpoint-2", "checkpoint-80"]
