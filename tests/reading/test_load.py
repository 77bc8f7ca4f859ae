"""load() and open(): tensors of a step, copied or mapped, verified, with ties; what they refuse."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.errors import ChecksumError, StateMismatchError, StepNotFoundError, UsageError
from statehold.tensors.dtypes import NUMPY_TO_TORCH
from support.records import example
from support.steps import true_sums

PACKED = torch.float4_e2m1fn_x2
DTYPES = [
    *NUMPY_TO_TORCH.values(),
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    PACKED,
    torch.complex128,
]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def rows(dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(48, dtype=torch.uint8) % 2).view(dtype)


@pytest.fixture
def state() -> dict[str, Any]:
    torch.manual_seed(0)
    tied = torch.randn(5)
    return {
        "model": torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)),
        "kinds": {str(dtype): rows(dtype) for dtype in DTYPES},
        "odd": {
            "cut": torch.randn(6, 8).t()[1:5],
            "none": torch.empty(0, 3),
            "one": torch.ones(()),
        },
        "tied": [tied, {"again": tied}],
        7: {"key": torch.ones(2)},
        "epoch": 2,
    }


@pytest.fixture
def run(tmp_path: Path, state: dict[str, Any]) -> Path:
    with statehold.Checkpointer(tmp_path / "run", keep=3) as ckpt:
        ckpt.save(3, state).wait()
        ckpt.save(4, {"epoch": 4}).wait()
    return tmp_path / "run"


@pytest.mark.parametrize("mapped", [False, True])
def test_all_comes_back_bit_for_bit(run: Path, state: dict[str, Any], mapped: bool) -> None:
    found = statehold.load(f"{run}@3", mapped=mapped)
    live = {**state, "model": state["model"].state_dict()}
    assert found.keys() == live.keys()
    for key in ("model", "kinds", "odd", 7):
        assert found[key].keys() == live[key].keys()
        for name, tensor in live[key].items():
            got = found[key][name]
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
            assert bits(got) == bits(tensor), name
    assert found["tied"][0] is found["tied"][1]["again"]
    assert found["epoch"] == 2


def test_a_name_is_an_entry_or_all_that_begin_with_it(run: Path, state: dict[str, Any]) -> None:
    weight = state["model"][0].weight
    assert torch.equal(statehold.load(run, "model.0.weight", step=3), weight)
    assert statehold.load(run, "model.0", step=3).keys() == {"weight", "bias"}
    assert torch.equal(statehold.load(run, "tied.1.again", step=3), state["tied"][0])
    assert torch.equal(statehold.load(run, "7.key", step=3), torch.ones(2))
    assert statehold.load(run, "epoch") == 4
    directory = run / "step-000000000003"
    assert statehold.load(directory, "epoch") == 2


def test_a_mapped_tensor_is_private(run: Path) -> None:
    mapped = statehold.load(run, "model.0.weight", step=3, mapped=True)
    before = mapped.clone()
    mapped.zero_()
    assert torch.equal(statehold.load(run, "model.0.weight", step=3), before)


def flip(run: Path, name: str) -> None:
    """Change a byte of a tensor."""
    step = run / "step-000000000003"
    file = step / "rank-00000-of-00001.safetensors"
    wanted = bits(statehold.load(run, name, step=3))
    raw = bytearray(file.read_bytes())
    raw[raw.index(wanted)] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize("mapped", [False, True])
def test_damage_is_found_in_what_is_asked_for_only(run: Path, mapped: bool) -> None:
    flip(run, "model.0.weight")
    with pytest.raises(ChecksumError, match=r"model\.0\.weight"):
        statehold.load(run, "model", step=3, mapped=mapped)
    assert statehold.load(run, "model.1.weight", step=3, mapped=mapped).shape == (3, 5)
    assert statehold.load(run, "model", step=3, mapped=True, verify=False)


def test_what_is_refused(run: Path) -> None:
    with pytest.raises(StateMismatchError, match=r"near +model"):
        statehold.load(run, "modle", step=3)
    with pytest.raises(StepNotFoundError):
        statehold.load(run, step=9)
    with pytest.raises(UsageError, match="given twice"):
        statehold.load(f"{run}@3", step=3)
    with pytest.raises(UsageError, match="mapped=True"):
        statehold.load(run, verify=False)
    with pytest.raises(UsageError, match="host memory only"):
        statehold.load(run, mapped=True, device="meta")
    with pytest.raises(UsageError, match="no such run"):
        statehold.load(run / "nowhere")


def test_open_describes_steps_without_their_data(run: Path) -> None:
    found = statehold.open(run)
    assert found.steps() == [3, 4]
    assert [step.step for step in found] == [3, 4]
    step = found[3]
    os.truncate(run / "step-000000000003" / "rank-00000-of-00001.safetensors", 0)
    assert found[3] == step
    assert (step.world_size, step.values["epoch"]) == (1, 2)
    weight = step.tensors["model.0.weight"]
    assert (weight.dtype, weight.shape, weight.nbytes) == ("F32", (5, 7), 140)
    assert repr(step).startswith(
        f"<Step {run / 'step-000000000003'}: {len(step.tensors)} tensors, "
    )
    assert len(repr(step)) < len(step.path) + 40, "whatever the step holds"
    newest = found.newest()
    assert newest is not None
    assert newest.load("epoch") == 4
    with pytest.raises(StepNotFoundError):
        found[5]
    with pytest.raises(UsageError):
        statehold.open(run / "step-000000000003")


def test_a_step_of_four_ranks_comes_back_whole(tmp_path: Path) -> None:
    world = example(true_sums)
    for name, content in world.files.items():
        target = tmp_path / Path(name).relative_to("run")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    step = statehold.open(tmp_path)[7]
    assert (step.world_size, step.values) == (4, {"epoch": 3})
    for name in ("sharded", "uneven", "replicated", "free"):
        found = statehold.load(tmp_path, f"model.{name}", mapped=True)
        assert found.numpy().tobytes() == world.arrays[name].tobytes()
    for name in ("model.own", "seed"):
        with pytest.raises(StateMismatchError, match="ranks saved different"):
            statehold.load(tmp_path, name)
    whole = statehold.load(tmp_path, rank=1)
    assert whole["seed"] == 1
    assert whole["model"]["own"].numpy().tobytes() == world.own[1]["own"].tobytes()


def test_what_is_mapped_stays_while_its_step_is_retired(tmp_path: Path) -> None:
    with statehold.Checkpointer(tmp_path / "run", keep=1) as ckpt:
        ckpt.save(1, {"w": torch.full((1 << 18,), 1.0)}).wait()
        mapped = statehold.load(tmp_path / "run", "w", mapped=True, verify=False)
        for step in range(2, 6):
            ckpt.save(step, {"w": torch.full((1 << 18,), float(step))}).wait()
    assert statehold.open(tmp_path / "run").steps() == [5]
    assert bool((mapped == 1).all())


@pytest.mark.parametrize("call", [
    lambda run: statehold.load(run.encode(), "w"),
    lambda run: statehold.load(None, "w"),
    lambda run: statehold.load(3, "w"),
    lambda run: statehold.load(run, 5),
    lambda run: statehold.load(run, "w", rank="0"),
    lambda run: statehold.load(run, "w", rank=True),
    lambda run: statehold.load(run, "w", device="nonsense"),
    lambda run: statehold.load(run, "w", device="meta"),
    lambda run: statehold.load(run, "w", device=None),
    lambda run: statehold.open(None),
    lambda run: statehold.copy_step(5, f"{run}-copy"),
    lambda run: statehold.export_step(5, f"{run}-copy", "hf"),
])  # fmt: skip
def test_what_is_no_argument_is_a_usage_error(tmp_path: Path, call: Callable[[Any], Any]) -> None:
    with statehold.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"w": torch.ones(2)}).wait()
    with pytest.raises(UsageError):
        call(str(tmp_path / "run"))


@pytest.mark.parametrize("call", [
    lambda: statehold.load("run", "w"),
    lambda: statehold.open("run"),
    lambda: statehold.Checkpointer("run"),
    lambda: statehold.subscribe("run", {"w": torch.ones(2)}),
])  # fmt: skip
def test_a_deleted_working_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match="the working directory was deleted"):
        call()
