"""The parameters of an offloaded optimizer: which can be offloaded, and their elements in a row.

Invariants:
- A float32 parameter is its own master: the update changes it in place. One in 16 bit has a master
  in float32 among its fields, and is rounded from it after each update.
- If somebody else has changed elements of a parameter in 16 bit since its last update, its master
  takes these elements. So loading or averaging weights between updates works as with torch.
- A DTensor is a box of a parameter: this rank offloads its local tensor, as if there was no more.
  Values in another placement are redistributed to the parameter's, which is what torch's fused
  kernels do with gradients. All ranks of the mesh take part in that, in the order of parameters.
Not here: the update (state).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from statehold.errors import UsageError
from statehold.offload.rules import Rule
from statehold.offload.subgroups import Extent
from statehold.tensors import placements
from statehold.tensors.placements import Placed
from statehold.tensors.storable import empty_on, is_dtensor, is_storable, local_of, version_of

MASTER = "master"
HALF = (torch.bfloat16, torch.float16)
Look = tuple[torch.dtype, torch.Size, torch.device, tuple[int, ...]]


@dataclass
class Parameter:
    """A parameter, the index of its group, and the fields that the rule keeps of it.

    tensor: as the program has it. step: how many updates it has had, in the form that the kernels
    take. version: of the tensor, after the last update; None: unknown. mirrored: the weights of one
    on a device, on the host. made_as: what look() gave when the state was cut.
    """

    tensor: torch.Tensor
    name: str
    group: int
    kept: tuple[str, ...]
    step: torch.Tensor
    version: int | None = None
    mirrored: torch.Tensor | None = None
    made_as: Look = field(init=False)

    def __post_init__(self) -> None:
        self.made_as = self.look()

    def look(self) -> Look:
        """What its state was cut for, as the tensor is now. A dimension of one has any stride."""
        local = self.local
        strides = tuple(each for each, n in zip(local.stride(), local.shape, strict=True) if n > 1)
        return self.tensor.dtype, self.tensor.shape, self.tensor.device, strides

    @property
    def weights(self) -> torch.Tensor:
        """Its elements where the host updates them, in the order of memory."""
        return flat(self.local) if self.mirrored is None else self.mirrored

    @property
    def local(self) -> torch.Tensor:
        """The elements that this rank updates: of a DTensor its local tensor."""
        return local_of(self.tensor)

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
        return self.has_master and self.version != self.version_now

    @property
    def is_started(self) -> bool:
        """Whether it has ever been updated."""
        return bool(self.step.item())

    @property
    def extent(self) -> Extent:
        """Its shape, for cutting. In another order of memory it has no rows."""
        shape = tuple(self.local.shape) if self.is_in_order else (self.local.numel(),)
        return Extent(shape, self.fields)

    @property
    def kind(self) -> str:
        """Parameters of one kind lie on the same ranks in the same way."""
        spec = _spec(self.tensor) if is_dtensor(self.tensor) else None
        return "" if spec is None else f"{spec.mesh} {spec.placements}"

    @property
    def is_in_order(self) -> bool:
        """Whether its elements lie in memory in the order of their indices."""
        return self.local.is_contiguous()

    def place(self, rank: int | None) -> Placed:
        """The box that the local tensor is of a global one, and its layout.

        rank: this one in a job of several, None in a job of one. The optimizer does not know which
        plain tensors DistributedDataParallel replicates; they are this rank's own here.
        """
        return placements.placed(self.tensor, self.name, rank)

    def note_update(self) -> None:
        """It was updated just now: changes from here on are somebody else's."""
        self.version = self.version_now

    def empty_field(self) -> torch.Tensor:
        """Memory for a field, in the kind of tensor that torch keeps beside this parameter: on the
        host, unless it is sharded."""
        if self.mirrored is not None and not is_dtensor(self.tensor):
            like = self.tensor
            return empty_on(torch.device("cpu"), like.shape, torch.float32, like.stride())
        return torch.empty_like(self.tensor, dtype=torch.float32, requires_grad=False)

    def gradient(self) -> torch.Tensor:
        """The gradient in the order of the local tensor's memory. Refuses what does not fit()."""
        grad = self.tensor.grad
        if grad is None:
            raise AssertionError("a parameter without a gradient is updated")
        if grad.layout != torch.strided:
            raise UsageError(
                "a gradient is sparse, and this optimizer takes dense ones",
                facts={"parameter": self.name, "got": str(grad.layout)},
                hint="make the embedding with sparse=False, or give it to torch.optim.SparseAdam",
            )
        if not self.fits(grad):
            raise UsageError(
                "a gradient does not lie on the ranks of its parameter",
                facts={
                    "parameter": self.name,
                    "expected": described(self.tensor),
                    "got": described(grad),
                },
                hint="make it a DTensor on the parameter's mesh; any placement will do",
            )
        return self.flat_of(grad)

    def flat_of(self, values: torch.Tensor) -> torch.Tensor:
        """The elements of `values`, which fit(), in the order of the local tensor's memory."""
        if is_dtensor(self.tensor) and _spec(values).placements != _spec(self.tensor).placements:
            spec = _spec(self.tensor)
            values = values.redistribute(spec.mesh, spec.placements)  # type: ignore[attr-defined]
        like, values = self.local, local_of(values)
        if values.stride() != like.stride():
            values = values.new_empty_strided(like.shape, like.stride()).copy_(values.detach())
        return flat(values)

    def fits(self, values: torch.Tensor) -> bool:
        """Whether `values` has an element for each of the parameter, on the same ranks."""
        if values.shape != self.tensor.shape or is_dtensor(values) != is_dtensor(self.tensor):
            return False
        return not is_dtensor(values) or _spec(values).mesh == _spec(self.tensor).mesh

    @property
    def version_now(self) -> int:
        """The version of the tensor."""
        return version_of(self.local, self.tensor if is_dtensor(self.tensor) else None)


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


def by_kind(parameters: Sequence[Parameter]) -> list[int]:
    """Their indices, those of one kind together. Else a save that has to gather some of them would
    read the subgroups of all."""
    kinds = [each.kind for each in parameters]
    first = {kind: place for place, kind in enumerate(dict.fromkeys(kinds))}
    return sorted(range(len(parameters)), key=lambda index: first[kinds[index]])


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of memory. Shares memory and version counter."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def described(value: Any) -> str:
    """What a value is, for an error about one that fits() no parameter."""
    if not isinstance(value, torch.Tensor):
        return "nothing" if value is None else f"a {type(value).__name__}"
    kind = "DTensor" if is_dtensor(value) else "tensor"
    mesh = f" on {getattr(value, 'device_mesh', None)}" if is_dtensor(value) else ""
    return f"a {kind} of shape {tuple(value.shape)}{mesh}"


def _check(parameter: torch.Tensor, name: str) -> None:
    if is_dtensor(parameter) and any(each.is_partial() for each in _spec(parameter).placements):
        got = ", ".join(map(repr, _spec(parameter).placements))
        raise _refused(name, "a parameter that is a sum over ranks", got)
    tensor = local_of(parameter)
    if not is_storable(tensor) or tensor.layout != torch.strided:
        raise _refused(
            name,
            "a parameter of this kind",
            f"{type(tensor).__name__}, {tensor.layout}, {tensor.device}",
        )
    if tensor.dtype not in (torch.float32, *HALF):
        raise _refused(name, "a parameter of this dtype", str(tensor.dtype))
    if tensor.numel() and torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        raise _refused(name, "a parameter with gaps or overlaps", f"strides {tensor.stride()}")


def _check_memory(found: Sequence[Parameter]) -> None:
    """Refuse parameters that share memory: each would be updated from a state of its own."""
    ranges = sorted(
        (local.data_ptr(), local.data_ptr() + local.nbytes, each.name)
        for each in found
        if (local := each.local).nbytes
    )
    for (_, end, first), (begin, _, second) in itertools.pairwise(ranges):
        if begin < end:
            raise UsageError(
                "two parameters share memory",
                facts={"parameters": f"{first}, {second}"},
                hint="give tied weights to the optimizer once; model.parameters() does",
            )


def _spec(tensor: torch.Tensor) -> Any:
    """The mesh and the placements of a DTensor."""
    return tensor._spec  # type: ignore[attr-defined]


def _refused(name: str, what: str, got: str) -> UsageError:
    return UsageError(
        f"{what} cannot be offloaded",
        facts={
            "parameter": name,
            "expected": "a dense tensor in float32, bfloat16 or float16",
            "got": got,
        },
    )
