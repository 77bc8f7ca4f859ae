"""An offloaded optimizer beside torch's own on float32 masters of the same parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from statehold import offload
from statehold.offload.state import OffloadedState

KINDS = {
    "AdamW": (offload.AdamW, torch.optim.AdamW),
    "Adam": (offload.Adam, torch.optim.Adam),
    "SGD": (offload.SGD, torch.optim.SGD),
}
Move = Callable[[torch.Tensor], torch.Tensor]
Shapes = Sequence[tuple[int, ...]]


class Twins:
    """Two optimizers that get the same gradients. `params` are offloaded, `masters` are not.

    place, read: bring values to where parameters are, and back.
    """

    def __init__(
        self,
        shapes: Shapes,
        dtypes: Sequence[torch.dtype],
        *,
        kind: str = "AdamW",
        seed: int = 0,
        groups: Sequence[dict[str, Any]] = ({},),
        options: dict[str, Any] | None = None,
        place: Move = torch.Tensor.detach,
        read: Move = torch.Tensor.detach,
        **offloading: Any,
    ) -> None:
        self.random, self._read = torch.Generator().manual_seed(seed), read
        values = [self._noise(shape).to(dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)]
        self.params = [torch.nn.Parameter(place(each)) for each in values]
        self.masters = [torch.nn.Parameter(each.float().clone()) for each in values]
        ours, torchs = KINDS[kind]
        given = {"lr": 1e-2, **(options or {})}
        self.ours = ours(_grouped(self.params, groups), **given, **offloading)
        self.torchs = torchs(_grouped(self.masters, groups), **given, fused=True)

    def _noise(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.random)

    def backward(self, *, skip: Sequence[int] = (), scale: float = 1.0) -> None:
        """Add a gradient to each parameter but those to skip."""
        for index, (param, master) in enumerate(zip(self.params, self.masters, strict=True)):
            if index not in skip:
                grad = (self._noise(tuple(param.shape)) * scale).to(param.dtype)
                param.grad = grad if param.grad is None else param.grad + grad
                master.grad = param.grad.to(torch.float32, copy=True)

    def step(self) -> None:
        """One update of both, from what backward() has added."""
        for each in (self.ours, self.torchs):
            each.step()
            each.zero_grad()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.step()

    def check(self) -> None:
        """The same bits, in parameters and state."""
        for param, master in zip(self.params, self.masters, strict=True):
            assert same_bits(self._read(param), master.detach().to(param.dtype))
        ours, torchs = self.ours.state_dict()["state"], self.torchs.state_dict()["state"]
        assert ours.keys() == torchs.keys()
        masters = [each for group in self.torchs.param_groups for each in group["params"]]
        for index, fields in torchs.items():
            assert ours[index].keys() - {"master"} == fields.keys()
            for name, value in fields.items():
                assert same_bits(ours[index][name], value), (index, name)
            if "master" in ours[index]:
                assert same_bits(ours[index]["master"], masters[index]), index


def _grouped(
    params: Sequence[torch.nn.Parameter], groups: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    return [
        {"params": list(params[i :: len(groups)]), **options} for i, options in enumerate(groups)
    ]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal dtype, shape and bits."""
    ints = {4: torch.int32, 2: torch.int16}
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    kind = ints[one.element_size()]
    return torch.equal(one.detach().view(kind), other.detach().view(kind))


def snapshot(twins: Twins) -> Callable[[], None]:
    """What puts both optimizers and their parameters back to where they are now."""
    states = [copy.deepcopy(each.state_dict()) for each in (twins.ours, twins.torchs)]
    values = [tensor.detach().clone() for tensor in (*twins.params, *twins.masters)]

    def restore() -> None:
        with torch.no_grad():
            for tensor, value in zip((*twins.params, *twins.masters), values, strict=True):
                tensor.copy_(value)
                tensor.grad = None
        twins.ours.load_state_dict(states[0])
        twins.torchs.load_state_dict(copy.deepcopy(states[1]))  # it keeps what it gets

    return restore


def state_of(optimizer: offload.AdamW | offload.Adam | offload.SGD) -> OffloadedState:
    """What an offloaded optimizer holds: its subgroups, and what moves and updates them."""
    return optimizer._opened
