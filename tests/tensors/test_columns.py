"""What a capture knows of the tensors that it holds, whatever becomes of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from statehold.errors import TornSnapshot
from statehold.tensors.columns import Tensors
from statehold.tensors.found import Seen
from statehold.tensors.kinds import capture

COUNT = 5


def module() -> nn.Module:
    parameters = [torch.full((2, 3), float(i)) for i in range(COUNT)]
    return nn.ParameterList([nn.Parameter(each) for each in parameters])


def recognised(live: nn.Module) -> Tensors:
    """The tensors of a capture that recognises all of them."""
    seen = Seen()
    for _ in range(2):
        found = capture({"m": live}, seen=seen)
    return found.tensors


def nth(live: nn.Module, index: int) -> nn.Parameter:
    return list(live.parameters())[index]


@torch.no_grad()
def in_place(live: nn.Module) -> None:
    nth(live, 3).add_(1)


def swapped(live: nn.Module) -> None:
    """With a tensor that has the same version."""
    torch.utils.swap_tensors(nth(live, 3), nn.Parameter(torch.zeros(2, 3)))


@torch.no_grad()
def other_memory(live: nn.Module) -> None:
    nth(live, 3).set_(torch.zeros(2, 3))


@pytest.mark.parametrize("change", [in_place, swapped, other_memory])
def test_the_tensor_that_changed_is_found(change: Callable[[nn.Module], None]) -> None:
    live = module()
    tensors = recognised(live)
    assert tensors.first_moved(range(COUNT)) is None
    change(live)
    assert tensors.first_moved(range(COUNT)) == 3
    assert tensors.first_moved([0, 1, 2, 4]) is None


def other_data(live: nn.Module) -> None:
    nth(live, 3).data = torch.zeros(2, 3)


def other_shape(live: nn.Module) -> None:
    nth(live, 3).data = torch.zeros(6)


def other_sign(live: nn.Module) -> None:
    nth(live, 3).data = torch._neg_view(nth(live, 3).data)


def transposed(live: nn.Module) -> None:
    nth(live, 3).data = nth(live, 3).data.t()


@pytest.mark.parametrize("before", [0, 1], ids=["first", "again"])
@pytest.mark.parametrize(
    "change", [other_data, other_shape, other_sign, transposed, swapped, other_memory]
)
def test_aliases_show_the_memory_as_it_was(
    change: Callable[[nn.Module], None], before: int
) -> None:
    live = module()
    tensors = recognised(live)
    for _ in range(before):
        tensors.aliases(range(COUNT))
    assert len(tensors.structure.shown) == before
    change(live)
    gc.collect()
    for index, alias in enumerate(tensors.aliases(range(COUNT))):
        assert alias.tolist() == torch.full((2, 3), float(index)).tolist()
        assert alias.data_ptr() == tensors.live.addresses[index]


def test_other_data_is_no_change_of_what_is_saved() -> None:
    live = module()
    tensors = recognised(live)
    other_data(live)
    assert tensors.first_moved(range(COUNT)) is None


def test_memory_that_is_gone_is_never_shown() -> None:
    live = module()
    tensors = recognised(live)
    nth(live, 3).untyped_storage().resize_(0)
    with pytest.raises(TornSnapshot, match="given back"):
        tensors.aliases(range(COUNT))


def test_a_capture_keeps_no_graph_alive() -> None:
    start = torch.ones(2, 3, requires_grad=True)
    seen = Seen()
    for _ in range(3):
        found = capture({"m": {"x": start * 2, "y": start * 3}}, seen=seen)
        assert all(each.tensor.grad_fn is None for each in found.tensors)


def test_a_capture_keeps_memory_and_not_the_tensors_data() -> None:
    live = module()
    tensors = recognised(live)
    before = weakref.ref(tensors.live.storages[3])
    other_data(live)
    gc.collect()
    assert before() is not None
    del tensors
    gc.collect()


def test_equal_captures_share_a_structure() -> None:
    live, seen = module(), Seen()
    structures = [capture({"m": live}, seen=seen).tensors.structure for _ in range(4)]
    in_place(live)
    structures.append(capture({"m": live}, seen=seen).tensors.structure)
    assert len(set(map(id, structures))) == 1
    other_shape(live)
    assert capture({"m": live}, seen=seen).tensors.structure is not structures[0]
