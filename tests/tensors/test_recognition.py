"""What capture recognises from the capture before is what it would find without it.

STATEHOLD_RECOGNITION: how many random states; each changes several times.
"""

from __future__ import annotations

import gc
import inspect
import os
import textwrap
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import statehold
from statehold.errors import StateholdError
from statehold.tensors import captured as captured_module
from statehold.tensors import found as found_module
from statehold.tensors.capture import capture
from statehold.tensors.found import Found
from statehold.tensors.recognition import Seen
from support.changing import Changing
from support.quantized import Made

STATES = int(os.environ.get("STATEHOLD_RECOGNITION", "40"))
CHANGES = 8
CONDITIONS = [
    "and name not in taken",
    "address != 0  # that of a meta tensor",
    "and address not in held",
    "and value.shape == sight.shape",
    "and value.stride() == sight.stride",
    "and value.dtype is sight.dtype",
    "and eager is sight.eager",
    "and (place is sight.place or place == sight.place)",
    "and sight.is_usual",
    "and not value.is_neg()",
    "and not value.is_inference()",
]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    statehold.allow_tensor_class(Made)
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


def seen_of(state: Any, rank: int | None, seen: Seen | None) -> Any:
    """All there is to know of a capture; what clones hold instead of where they lie."""
    try:
        found = capture(state, rank, seen=seen)
    except StateholdError as error:
        return str(error)
    tensors = [
        (
            each.spec,
            each.tensor.tolist() if each.owned and not each.tensor.is_meta else each.address,
            each.version,
            (each.tensor.dtype, each.tensor.shape, each.tensor.stride()),
            each.strided,
            (each.external, each.owned, each.is_gated, each.eager),
            id(each.wrapper),
        )
        for each in found.tensors
    ]
    return tensors, found.tree, found.note, found.doubts


def first_difference(states: range, mesh: DeviceMesh) -> str | None:
    """Of captures with memory from those without; None where all are equal."""
    for seed in states:
        changing = Changing(seed, mesh if seed % 2 else None)
        rank = 0 if seed % 2 else None
        seen = Seen()
        for number in range(CHANGES):
            with torch.inference_mode() if (seed + number) % 7 == 0 else nullcontext():
                state = changing.state()
                expected, found = seen_of(state, rank, None), seen_of(state, rank, seen)
            if found != expected:
                return f"seed {seed}, capture {number}:\n{found}\n{expected}"
            for _ in range(changing.random.randrange(3)):
                changing.change()
    return None


@pytest.mark.parametrize("are_on_device", [False, True])
def test_a_capture_with_memory_is_the_same(
    are_on_device: bool, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    if are_on_device:
        for module in (captured_module, found_module):
            monkeypatch.setattr(module, "is_external", lambda tensor: tensor.dim() > 0)
    assert first_difference(range(STATES), mesh) is None


@pytest.mark.parametrize("condition", CONDITIONS)
def test_each_condition_of_recognition_is_needed(
    condition: str, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = textwrap.dedent(inspect.getsource(Found.nodes))
    assert source.count(condition) == 1
    wrong = source.replace(condition, "True" if condition.startswith("address") else "")
    names = dict(vars(found_module))
    exec(compile("from __future__ import annotations\n" + wrong, "<wrong>", "exec"), names)
    monkeypatch.setattr(Found, "nodes", names["nodes"])
    assert first_difference(range(1000), mesh) is not None


def test_most_tensors_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(5)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state, seen = {"model": model, "optimizer": optimizer}, Seen()
    assert len(capture(state, seen=seen).tensors) == 40

    def add(*_: Any, **__: Any) -> str:
        raise AssertionError("a tensor was captured in full")

    monkeypatch.setattr(Found, "add", add)
    for _ in range(2):
        optimizer.step()
        assert len(capture(state, seen=seen).tensors) == 40


def test_no_tensor_is_kept_for_the_next_capture() -> None:
    seen = Seen()
    for _ in range(2):
        capture({"model": torch.nn.Linear(3, 3)}, seen=seen)
    left: list[Any] = [seen]
    reached: dict[int, Any] = {}
    while left:
        each = left.pop()
        if id(each) not in reached and not isinstance(each, type):
            reached[id(each)] = each
            left += gc.get_referents(each)
    assert any(isinstance(each, torch.Size) for each in reached.values())
    assert not any(isinstance(each, torch.Tensor) for each in reached.values())
