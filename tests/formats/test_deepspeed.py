"""ZeRO comes in from any number of ranks, with moments; universal checkpoints go both ways."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.errors import CorruptionError, MissingFileError, UnsupportedValueError
from support import zero_files
from support.transfers import check_equal, saved
from support.zero_files import KEYS, SHAPES, classes, reference

__all__ = ["classes"]


def check(state: dict[str, Any]) -> None:
    """All that is in `reference()`."""
    for name, fields in reference().items():
        check_equal(state["fp32"][name], fields["fp32"])
        check_equal(state["model"][name], fields["fp32"].bfloat16())
        moments = state["optimizer"]["state"][f"model.{name}"]
        for key in KEYS[1:]:
            check_equal(moments[key], fields[key])
        assert moments["step"] == 3
    [group] = state["optimizer"]["param_groups"]
    assert group["params"] == [f"model.{name}" for name in SHAPES]
    assert group["betas"] == (0.9, 0.95)
    assert (state["deepspeed"]["global_steps"], state["deepspeed"]["mine"]) == (3, {"epoch": 2})


@pytest.mark.thorough
@pytest.mark.usefixtures("classes")
@pytest.mark.parametrize("latest", [True, False])
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_comes_in_whole(tmp_path: Path, stage: int, ranks: int, latest: bool) -> None:
    source = zero_files.write(tmp_path / "zero", stage, ranks, latest=latest)
    statehold.import_step(source, f"{tmp_path / 'run'}@3")
    check(statehold.load(tmp_path / "run"))


def changed(source: Path, files: str, change: Callable[[int, dict[str, Any]], object]) -> Path:
    """The checkpoint, with a change in each file, by its number."""
    for number, path in enumerate(sorted((source / "global_step3").glob(files))):
        content = torch.load(path, weights_only=False)
        change(number, content)
        torch.save(content, path)
    return source


MODELS, OPTIMIZERS = "*_model_states.pt", "*_optim_states.pt"
LACKING, TIED = torch.empty(0, dtype=torch.bfloat16), "head.weight"


def tie(_: int, content: dict[str, Any]) -> None:
    content["module"][TIED] = LACKING
    content["shared_params"] = {TIED: "0.weight"}


def freeze(rank: int, content: dict[str, Any]) -> None:
    """Two ranks of a weight that no optimizer has."""
    content["module"]["frozen"] = LACKING
    content["frozen_param_shapes"] = {"frozen": torch.Size((3, 1))}
    content["frozen_param_fragments"] = {
        "frozen": torch.tensor([[1.0, 2.0], [3.0, 0.0]][rank]).bfloat16()
    }


def universal(source: Path, folder: Path) -> Path:
    """As DeepSpeed's ds_to_universal: the model states as they were, beside the parameters."""
    statehold.import_step(source, f"{folder / 'run'}@3")
    statehold.export_step(f"{folder / 'run'}@3", folder / "universal", "deepspeed-universal")
    inner = folder / "universal" / "global_step3"
    (inner / "mp_rank_00_model_states.pt").unlink()
    for path in (source / "global_step3").glob(MODELS):
        shutil.copy(path, inner)
    for left in [*(inner / "zero").glob(TIED), *(inner / "zero").glob("frozen")]:
        shutil.rmtree(left)
    return folder / "universal"


@pytest.mark.usefixtures("classes")
@pytest.mark.parametrize("is_universal", [False, True])
def test_a_weight_that_is_tied_or_frozen_comes_in_from_stage_3(
    tmp_path: Path, is_universal: bool
) -> None:
    source = zero_files.write(tmp_path / "zero", 3, 2)
    changed(changed(source, MODELS, tie), MODELS, freeze)
    found = universal(source, tmp_path) if is_universal else source
    statehold.import_step(found, f"{tmp_path / 'in'}@3")
    state = statehold.load(tmp_path / "in")
    check(state)
    assert torch.equal(state["model"][TIED], state["model"]["0.weight"])
    assert torch.equal(state["model"]["frozen"], torch.tensor([[1.0], [2.0], [3.0]]).bfloat16())
    assert "frozen_param_fragments" not in state["deepspeed"]


@pytest.mark.usefixtures("classes")
def test_a_weight_that_no_file_has_is_named(tmp_path: Path) -> None:
    def lose(_: int, content: dict[str, Any]) -> None:
        content["module"] |= {TIED: LACKING, "buffer": torch.empty(0)}
        content["buffer_names"] = ["buffer"]

    source = changed(zero_files.write(tmp_path / "zero", 3, 1), MODELS, lose)
    with pytest.raises(CorruptionError, match=TIED):
        statehold.import_step(source, f"{tmp_path / 'run'}@3")
    changed(source, MODELS, lambda _, content: content["module"].pop(TIED))
    statehold.import_step(source, f"{tmp_path / 'run'}@3")
    assert statehold.load(tmp_path / "run", "model.buffer").shape == (0,)


@pytest.mark.usefixtures("classes")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_weight_without_elements_is_one(tmp_path: Path, stage: int) -> None:
    def add(_: int, content: dict[str, Any]) -> None:
        content["module"]["gate"] = torch.empty(0, 4, dtype=torch.bfloat16)

    source = changed(zero_files.write(tmp_path / "zero", stage, 1), MODELS, add)
    statehold.import_step(source, f"{tmp_path / 'run'}@3")
    assert statehold.load(tmp_path / "run", "model.gate").shape == (0, 4)


@pytest.mark.usefixtures("classes")
@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_without_moments_comes_in(tmp_path: Path, stage: int) -> None:
    """Before the first update, or of plain SGD, an optimizer has none."""

    def clear(_: int, content: dict[str, Any]) -> None:
        inner = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
        content["optimizer_state_dict"][inner]["state"] = {}

    source = changed(zero_files.write(tmp_path / "zero", stage, 2), OPTIMIZERS, clear)
    statehold.import_step(source, f"{tmp_path / 'run'}@3")
    state = statehold.load(tmp_path / "run")
    for name, fields in reference().items():
        check_equal(state["fp32"][name], fields["fp32"])
    assert state["optimizer"]["state"] == {}
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    with statehold.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.restore({"model": model, "optimizer": optimizer}, strict=False)
    assert not optimizer.state


@pytest.mark.usefixtures("classes")
def test_the_directory_may_be_the_run(tmp_path: Path) -> None:
    """save_into_steps() makes it one."""
    source = zero_files.write(tmp_path / "zero", 3, 2)
    statehold.import_step(source, f"{source}@3")
    check(statehold.load(source))


@pytest.mark.usefixtures("classes")
def test_it_restores_into_a_model_and_an_optimizer_of_torch(tmp_path: Path) -> None:
    source = zero_files.write(tmp_path / "zero", 2, 3)
    statehold.import_step(source, f"{tmp_path / 'run'}@3")
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    with statehold.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.restore({"model": model, "optimizer": optimizer}, strict=False)
    weight = model[0].weight
    assert torch.equal(weight, reference()["0.weight"]["fp32"].bfloat16())
    assert torch.equal(optimizer.state[weight]["exp_avg"], reference()["0.weight"]["exp_avg"])
    counts = {id(fields["step"]) for fields in optimizer.state.values()}
    assert len(counts) == len(SHAPES)


@pytest.mark.usefixtures("classes")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_universal_checkpoint_goes_out_and_comes_in(tmp_path: Path, stage: int) -> None:
    step = f"{tmp_path / 'run'}@3"
    statehold.import_step(zero_files.write(tmp_path / "zero", stage, 2), step)
    assert statehold.export_step(step, tmp_path / "out", "deepspeed-universal") == ()
    assert (tmp_path / "out" / "latest_universal").read_text() == "global_step3"
    folder = tmp_path / "out" / "global_step3" / "zero" / "0.weight"
    for key in KEYS:
        found = torch.load(folder / f"{key}.pt", weights_only=True)
        check_equal(found, {"param": reference()["0.weight"][key], "cat_dim": 0})
    for number, source in enumerate((tmp_path / "out", tmp_path / "out" / "global_step3")):
        statehold.import_step(source, f"{tmp_path / 'back'}@{number}")
        check(statehold.load(tmp_path / "back", step=number))


def test_a_state_of_torch_goes_out(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "epoch": 2}
    step = saved(tmp_path / "run", 1, state)
    with pytest.warns(RuntimeWarning, match="epoch"):
        left_out = statehold.export_step(step, tmp_path / "out", "deepspeed-universal")
    assert left_out == ("epoch",)
    statehold.import_step(tmp_path / "out", f"{tmp_path / 'back'}@1")
    found = statehold.load(tmp_path / "back")
    check_equal(found["model"]["weight"], model.weight.detach())
    check_equal(found["fp32"]["weight"], model.weight.detach().float())
    moment = optimizer.state[model.weight]["exp_avg"]
    check_equal(found["optimizer"]["state"]["model.weight"]["exp_avg"], moment.float())


def test_what_has_no_model_and_optimizer_is_refused(tmp_path: Path) -> None:
    step = saved(tmp_path / "run", 1, {"w": torch.ones(2)})
    with pytest.raises(UnsupportedValueError, match="needs a model and its optimizer"):
        statehold.export_step(step, tmp_path / "out", "deepspeed-universal")
    by_number = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []}
    step = saved(tmp_path / "run", 2, {"model": {"w": torch.ones(2)}, "optimizer": by_number})
    with pytest.raises(UnsupportedValueError, match=r"state_dict\(\)"):
        statehold.export_step(step, tmp_path / "other", "deepspeed-universal")


@pytest.mark.usefixtures("classes")
def test_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    source = zero_files.write(tmp_path / "zero", 2, 3) / "global_step3"
    (source / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(MissingFileError, match=r"ranks without one +1"):
        statehold.import_step(source, f"{tmp_path / 'run'}@3")
    (source / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CorruptionError, match="do not have all of a parameter"):
        statehold.import_step(source, f"{tmp_path / 'run'}@3")


@pytest.mark.usefixtures("classes")
def test_tensor_parallel_files_are_refused(tmp_path: Path) -> None:
    source = zero_files.write(tmp_path / "zero", 2, 1) / "global_step3"
    torch.save({}, source / "mp_rank_01_model_states.pt")
    with pytest.raises(UnsupportedValueError, match="tensor-parallel"):
        statehold.import_step(source, f"{tmp_path / 'run'}@3")
