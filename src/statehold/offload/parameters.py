"""The parameters of an offloaded optimizer: which can be offloaded, and their elements in a row.

Invariants:
- A float32 parameter is its own master: the update changes it in place. One in 16 bit has a master
  in float32 among its fields, and is rounded from it after each update.
- If somebody else has changed elements of a parameter in 16 bit since its last update, its master
  takes these elements. So loading or averaging weights between updates works as with torch.
Not here: the update (state).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from statehold.errors import UsageError
from statehold.offload.rules import Rule
from statehold.offload.subgroups import Extent
from statehold.tensors.storable import is_storable, local_of

__all__ = ["MASTER", "Parameter", "flat", "flat_as", "flat_grad", "parameters_of"]

MASTER = "master"
HALF = (torch.bfloat16, torch.float16)


@dataclass
class Parameter:
    """A parameter, the index of its group, and the fields that the rule keeps of it.

    step: how many updates it has had, in the form that the kernels take. version: of the tensor,
    after the last update; None: unknown.
    """

    tensor: torch.Tensor
    name: str
    group: int
    kept: tuple[str, ...]
    step: torch.Tensor
    version: int | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """All that is offloaded of it."""
        return (MASTER, *self.kept) if self.has_master else self.kept

    @property
    def has_master(self) -> bool:
        """Whether it has a master, and so is not its own."""
        return self.tensor.dtype in HALF

    @property
    def was_changed(self) -> bool:
        """Whether somebody else may have changed it since its last update, beside its master."""
        return self.has_master and self.version != self.tensor._version

    @property
    def is_started(self) -> bool:
        """Whether it has ever been updated."""
        return bool(self.step.item())

    @property
    def extent(self) -> Extent:
        """Its elements, for cutting. Rows are those of a tensor in the usual order."""
        shape = self.tensor.shape
        row = self.tensor.numel() // shape[0] if len(shape) > 1 and shape[0] else 1
        return Extent(self.tensor.numel(), row, self.fields)


def parameters_of(groups: Sequence[Mapping[str, Any]], rule: Rule) -> list[Parameter]:
    """The parameters in the order of the groups. Raises UsageError for what cannot be offloaded."""
    found: list[Parameter] = []
    for index, group in enumerate(groups):
        names = group.get("param_names", [None] * len(group["params"]))
        for tensor, given in zip(group["params"], names, strict=True):
            name = given or f"parameter {len(found)}"
            _check(tensor, name)
            found.append(
                Parameter(
                    tensor,
                    name,
                    index,
                    rule.fields(group),
                    torch.zeros((), dtype=torch.float32, device="cpu"),
                )
            )
            if not found[-1].fields:
                raise UsageError(
                    "this optimizer keeps no state for a parameter, so nothing can be offloaded",
                    facts={"parameter": name},
                    hint="use torch's optimizer for the parameters of this group",
                )
    _check_memory(found)
    return found


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of memory. Shares memory and version counter."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def flat_grad(parameter: Parameter) -> torch.Tensor:
    """The gradient in the order of the parameter's memory. Raises UsageError for a sparse one."""
    grad, tensor = parameter.tensor.grad, parameter.tensor
    if grad is None:
        raise AssertionError("a parameter without a gradient is updated")
    if grad.layout != torch.strided:
        raise UsageError(
            "a gradient is sparse, and this optimizer takes dense ones",
            facts={"parameter": parameter.name, "got": str(grad.layout)},
            hint="make the embedding with sparse=False, or give it to torch.optim.SparseAdam",
        )
    return flat_as(grad, tensor)


def flat_as(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The elements of `values` in the order of the memory of `like`, which has the same shape."""
    if values.stride() != like.stride():
        values = torch.empty_like(like, dtype=values.dtype, requires_grad=False).copy_(values)
    return flat(values)


def _check(tensor: torch.Tensor, name: str) -> None:
    if local_of(tensor) is not tensor:
        raise _refused(name, "a parameter that is sharded", f"{type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise _refused(name, "a parameter on a device", str(tensor.device))
    if not is_storable(tensor) or tensor.layout != torch.strided:
        raise _refused(name, "a parameter of this kind", f"{tensor.layout} {type(tensor).__name__}")
    if tensor.dtype not in (torch.float32, *HALF):
        raise _refused(name, "a parameter of this dtype", str(tensor.dtype))
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        raise _refused(name, "a parameter with gaps or overlaps", f"strides {tensor.stride()}")


def _check_memory(found: Sequence[Parameter]) -> None:
    """Refuse parameters that share memory: each would be updated from a state of its own."""
    ranges = sorted(
        (each.tensor.data_ptr(), each.tensor.data_ptr() + each.tensor.nbytes, each.name)
        for each in found
        if each.tensor.nbytes
    )
    for (_, end, first), (begin, _, second) in itertools.pairwise(ranges):
        if begin < end:
            raise UsageError(
                "two parameters share memory",
                facts={"parameters": f"{first}, {second}"},
                hint="give tied weights to the optimizer once; model.parameters() does",
            )


def _refused(name: str, what: str, got: str) -> UsageError:
    return UsageError(
        f"{what} cannot be offloaded",
        facts={
            "parameter": name,
            "expected": "a dense tensor on the host in float32, bfloat16 or float16",
            "got": got,
        },
    )
