"""What capture recognises from the capture before is what it would find without it.

STATEHOLD_RECOGNITION: how many random states; each changes several times. With it the defects that
take minutes to be found are looked for, too.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import statehold
from statehold.errors import StateholdError
from statehold.tensors import captured as captured_module
from statehold.tensors import columns
from statehold.tensors import found as found_module
from statehold.tensors.captured import Capturing
from statehold.tensors.columns import Tensors
from statehold.tensors.found import Found, Seen
from statehold.tensors.kinds import capture, modules, optimizers
from statehold.tensors.kinds.optimizers import _States
from statehold.tensors.storable import impl_of
from support.changing import Changing
from support.quantized import Made

STATES = int(os.environ.get("STATEHOLD_RECOGNITION", "24"))
CHANGES = 8
# (where it is, a condition of recognition, what it becomes: nothing is found out by it any more,
# a seed of states that show it: the first to be tried).
Defect = tuple[Any, str, str, str, int]
ONE_BY_ONE: list[Defect] = [
    (Found, "nodes", "and not self._is_any_taken((name,))", "", 46),
    (Found, "nodes", "address != 0  # that of a meta tensor", "True", 9),
    (Found, "nodes", "and address not in held", "", 14),
    (Found, "nodes", "and value.shape == sight.shape", "", 1),
    (Found, "nodes", "and value.dtype is sight.dtype", "", 0),
    (Found, "nodes", "and eager is sight.eager", "", 4),
    (Found, "nodes", "and (place is sight.place or place == sight.place)", "", 3),
    (Found, "nodes", "and sight.is_usual", "", 20),
    (Found, "nodes", "and not value.is_neg()", "", 1),
    (Found, "nodes", "and not value.is_inference()", "", 385),
]
TOGETHER: list[Defect] = [
    (Found, "nodes", "and address not in self._places", "", 47),
    (Found, "_recognised", "batch.observed == observed", "True", 0),
    (Found, "_recognised", "or reading.facts != batch.facts", "", 0),
    (Found, "_recognised", "not self._taken.isdisjoint(batch.names)", "False", 46),
    (Found, "_are_apart", "len(alone) == len(places)", "True", 180),
    (Found, "_are_apart", "and self._places.keys().isdisjoint(alone)", "", 47),
    (Found, "_add_places", "not self._held or self._held.keys().isdisjoint(places)", "True", 47),
    (
        Found,
        "_remember",
        "and form.dtype is sight.dtype  # else a view of another dtype is stored",
        "",
        0,
    ),
    (columns, "read", "(shapes, strides", "(None, strides", 8),
    (columns, "read", "strides, dtypes, d", "None, dtypes, d", 33),
    (columns, "read", "dtypes, devices", "None, devices", 0),
    (columns, "read", "devices_of(tensors), layouts", "[-1] * len(tensors), layouts", 0),
    (columns, "read", "any(are_neg)", "False", 1),
    (columns, "read", "), layouts)", "), [])", 9),
    (Found, "_learned", " or reading.facts.layouts", "", 1),
    (Found, "_recognised", " or not self._add_places(reading.places)", "", 0),
    (found_module, "_stored", " and not dtype.is_complex", "", 20),
    (modules, "_new", "eager is Eager.ALL or not each", "not each", 4),
    (modules, "capture", "if place_of is None else None\n", "\n", 3),
    (captured_module, "_new", "owners.state or repeat(False)", "repeat(False)", 0),
    (captured_module, "_new", "list(map(not_, owners.gated))", "[True] * len(names)", 0),
    (Capturing, "_plain_batch", " and owners is not MARKED", "", 0),
    (_States, "_batch", "marked is Eager.ALL)", "False)", 15),
    (_States, "_batch", "places is None and not", "not", 3),
    (modules, "capture", "to.rank, names, ", "to.rank, ", 117),
    (modules, "capture", "are_parameters, to", "to", 90),
    (modules, "capture", "to.layouts_of(held)", "None", 81),
    (Capturing, "_owners_of", "self._gated_ids.issuperset(map(id, tensors))", "True", 2),
    (Seen, "mapping", " or list(map(id, known.parts)) != list(map(id, parts))", "", 0),
    (Tensors, "_is_of", " and self._parts == known.parts", "", 0),
    (Tensors, "_is_of", "self._work_out() != known.columns", "False", 0),
]
RARE: list[Defect] = [
    (Found, "_are_apart", "and 0 not in alone", "", 0),
]
if "STATEHOLD_RECOGNITION" in os.environ:
    TOGETHER += RARE


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    statehold.allow_tensor_class(Made)
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


def seen_of(of: Changing, rank: int | None, seen: Seen | None) -> Any:
    """All there is to know of a capture; what clones hold instead of where they lie. Without memory
    each tensor is captured alone."""
    alone = mock.patch.object(Found, "_learned", return_value=None)
    try:
        with alone if seen is None else nullcontext():
            found = capture(of.state(), rank, of.stepping, seen)
    except StateholdError as error:
        return str(error)
    tensors = [
        (
            each.spec,
            each.alias.tolist() if each.owned and not each.tensor.is_meta else each.address,
            each.version,
            (each.tensor.dtype, each.tensor.shape, each.tensor.stride()) if not each.owned else 0,
            each.form,
            impl_of(each.storage) if not each.owned else 0,
            each.strided,
            (each.external, each.owned, each.is_gated, each.eager),
            id(each.wrapper),
        )
        for each in found.tensors
    ]
    return tensors, found.tree, found.note, found.doubts


def first_difference(states: Iterable[int], mesh: DeviceMesh) -> str | None:
    """Of captures with memory, also with an empty one, from those without; None where all are
    equal."""
    for seed in states:
        changing = Changing(seed, mesh if seed % 2 else None)
        rank = 0 if seed % 2 else None
        seen = Seen()
        for number in range(CHANGES):
            with torch.inference_mode() if (seed + number) % 7 == 0 else nullcontext():
                expected = seen_of(changing, rank, None)
                for memory in (seen, Seen()):
                    found = seen_of(changing, rank, memory)
                    if found != expected:
                        return f"seed {seed}, capture {number}:\n{found}\n{expected}"
            for _ in range(changing.random.randrange(3)):
                changing.change()
    return None


def on_device(patch: pytest.MonkeyPatch, are_there: Callable[[torch.Tensor], bool]) -> None:
    """Take these tensors for those of a device."""
    patch.setattr(found_module, "is_external", are_there)
    patch.setattr(columns, "devices_of", lambda given: [are_there(each) - 1 for each in given])


def make_small(patch: pytest.MonkeyPatch, batch: int) -> None:
    """Batches of so many tensors, and of one parameter's state."""
    for owner in (captured_module, modules):
        patch.setattr(owner, "BATCH", batch)
    for owner in (captured_module, optimizers):
        patch.setattr(owner, "STATES", 1)


@pytest.fixture(params=["small", "large"])
def batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches are seldom out of the ordinary; large ones hold a whole state."""
    if request.param == "small":
        make_small(monkeypatch, 2)
    # Every parameter of another optimizer is worth a note.
    monkeypatch.setattr(captured_module, "TOLD_BYTES_MIN", 1)


@pytest.mark.thorough
@pytest.mark.usefixtures("batches")
@pytest.mark.parametrize("are_on_device", [False, True])
def test_a_capture_with_memory_is_the_same(
    are_on_device: bool, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    if are_on_device:
        on_device(monkeypatch, lambda tensor: tensor.dim() > 0)
    assert first_difference(range(STATES), mesh) is None


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("defect", "batch"),
    [(each, 0) for each in ONE_BY_ONE]
    + [(each, 4 if each[1] in ("_add_places", "_are_apart") else 2) for each in TOGETHER],
    ids=lambda each: f"{each[1]}: {each[2]}" if isinstance(each, tuple) else "",
)
def test_each_condition_of_recognition_is_needed(
    defect: Defect, batch: int, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, function, condition, instead, seed = defect
    source = textwrap.dedent(inspect.getsource(getattr(owner, function)))
    assert source.count(condition) == 1
    wrong = source.replace(condition, instead)
    module = sys.modules[getattr(owner, "__module__", owner.__name__)]
    names: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + wrong, "<wrong>", "exec")
    exec(code, vars(module), names)
    monkeypatch.setattr(owner, function, names[function])
    if owner is columns and function == "read":
        monkeypatch.setattr(found_module, "read", names[function])
    if batch:
        make_small(monkeypatch, batch)
    else:
        monkeypatch.setattr(Found, "_recognised", lambda *_: None)
    if "devices_of" in condition:
        on_device(monkeypatch, lambda tensor: tensor.untyped_storage().nbytes() > 24)
    monkeypatch.setattr(captured_module, "TOLD_BYTES_MIN", 1)
    # Capture without memory raises no such error.
    with suppress(TypeError, ValueError, LookupError, RuntimeError):
        assert first_difference(chain([seed], range(1000)), mesh) is not None


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


def test_a_name_that_two_batches_of_new_tensors_make_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_small(monkeypatch, 2)
    one, other = torch.nn.Linear(2, 2), torch.nn.ModuleDict({"b": torch.nn.Linear(2, 2)})
    with pytest.raises(StateholdError, match="the same name"):
        capture({"a.b": one, "a": other}, 0)


@pytest.mark.parametrize(("moved", "to"), [(0, 3), (3, 0), (1, 2)])
def test_a_tie_with_a_tensor_that_lies_where_it_lay_is_found(
    moved: int, to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch, 1)
    live = torch.nn.ParameterList([torch.full((2,), float(each)) for each in range(4)])
    seen = Seen()
    for _ in range(2):
        assert len(capture({"m": live}, seen=seen).tensors) == 4
    live[moved].data = live[to].data
    for _ in range(2):
        assert len(capture({"m": live}, seen=seen).tensors) == 3
    live[moved].data = torch.zeros(2)
    assert len(capture({"m": live}, seen=seen).tensors) == 4
