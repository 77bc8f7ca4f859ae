"""What a capture holds: each tensor of a state with its spec, as it was then; and copies of some.

Owns: what is external, what is eager and when.
Not here: which tensors a state has, and which of them are eager (capture); what is known of each,
and whether it has changed since (columns).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from statehold.layout.plan import TensorSpec
from statehold.tensors.columns import CapturedTensor as CapturedTensor
from statehold.tensors.columns import Structure, Tensors, described
from statehold.tensors.scalers import Number
from statehold.tensors.storable import (
    is_external,
    is_view_of_other_values,
    local_of,
    storage_of,
)
from statehold.tensors.stored import StoredState
from statehold.units import format_bytes

# Parameters handed over without their module are worth a line in the log from here on.
TOLD_BYTES_MIN = 64 << 20

# Eager tensors of devices are cloned while they are no more than this in all: then save() waits for
# nobody. The clones live until their bytes are copied.
CLONED_BYTES_MAX = 256 << 20


@dataclass(slots=True)
class Capture:
    """A state at the time of `capture`. `tensors` are distinct in memory; ties are in the tree.

    note: what the user could hand over so that save() returns earlier; "" if nothing.
    doubts: what a restore will not put back, and what the user can do about it now.
    numbers: what of the tree lies on devices, to be filled in before the save is staged.
    stored: the parts of the state that lie in files.
    frozen: the names of the modules' parameters that need no gradient; None without a module.
    """

    tensors: Tensors
    tree: Any
    note: str = ""
    doubts: list[str] = field(default_factory=list)
    numbers: list[Number] = field(default_factory=list)
    stored: list[StoredState] = field(default_factory=list)
    frozen: tuple[str, ...] | None = None
    _settled: set[bool] = field(default_factory=set)  # True: eager ones; False: lazy ones
    # Looked up when it is made: a simulation has locks of its own.
    _guard: threading.Lock = field(default_factory=lambda: threading.Lock())

    @property
    def structure(self) -> Structure:
        return self.tensors.structure

    @property
    def eager(self) -> Sequence[int]:
        """The indices of those that are copied before save() returns."""
        return self.structure.eager

    def release(self) -> None:
        """Give the files of stored parts back to their objects, unless they were handed over."""
        for stored in self.handed_over():
            stored.release()

    def handed_over(self) -> list[StoredState]:
        """The stored parts. Who takes them has to release them."""
        stored, self.stored = self.stored, []
        return stored

    def settle(self, *, eager: bool = False) -> str | None:
        """Declare that lazy (or eager) tensors may change from now on, because they are copied; the
        name of one that already has.

        Asked from the stage thread; for lazy ones from the gate, and for eager ones from save(),
        too. The first to find all unchanged decides, and what changes later was let through.
        """
        with self._guard:
            moved = None if eager in self._settled else self.moved(eager=eager)
            if moved is None:
                self._settled.add(eager)
            return moved

    def moved(self, *, eager: bool) -> str | None:
        """The name of an eager (or of a lazy) tensor that changed since capture, or None."""
        chosen = self.structure.eager if eager else self.structure.lazy
        index = self.tensors.first_moved(chosen)
        return None if index is None else self.tensors.specs[index].name

    def named(self, names: Set[str]) -> list[CapturedTensor]:
        """The tensors of these names, as they are now: `tensor` is an alias that stays so."""
        if not names:
            return []
        specs = enumerate(self.tensors.specs)
        found = [self.tensors[index] for index, spec in specs if spec.name in names]
        return [each._replace(tensor=each.alias) for each in found]


def captured(
    tensor: torch.Tensor,
    spec: TensorSpec,
    eager: bool,
    owned: bool = False,
    wrapper: torch.Tensor | None = None,
    is_gated: bool = False,
) -> CapturedTensor:
    if is_view_of_other_values(tensor):
        tensor, owned = tensor.resolve_conj().resolve_neg(), True
    if tensor.is_inference():
        is_gated, eager = False, True
    if spec.eager is not eager:
        spec = replace(spec, eager=eager)
    return described(
        spec,
        tensor,
        external=is_external(tensor),
        owned=owned,
        is_gated=is_gated and eager,
        wrapper=None if owned else wrapper,
    )


def _owned_copy(each: CapturedTensor) -> CapturedTensor:
    """The same tensor, copied now; a copy on a device is made in the order of its stream."""
    copy = each.tensor.detach().clone(memory_format=torch.contiguous_format)
    return described(each.spec, copy, external=each.external, owned=True)


def clone_what_waits_for_no_device(tensors: Tensors) -> None:
    """Copy small host tensors (columns.SMALL_BYTES) and eager device tensors now; the latter if
    they are small in all and there is memory."""
    structure = tensors.structure
    others, numbers = structure.small_on_host
    copies = {index: _owned_copy(tensors[index]) for index in others}
    eager = [index for index in structure.eager if structure.external[index]]
    if sum(structure.specs[index].nbytes for index in eager) <= CLONED_BYTES_MAX:
        with suppress(torch.OutOfMemoryError):  # then none at all: save() waits in any case
            copies |= {index: _owned_copy(tensors[index]) for index in eager}
    # A clone of each number takes three times as long.
    with torch.no_grad():
        stacks = [torch.stack([tensors.live[index] for index in some]) for some in numbers]
    tensors.copied(copies, list(zip(numbers, stacks, strict=True)))


# A parameter of the optimizer at a path, which no module of the state has, by its number there.
Nameless = tuple[str, str, torch.Tensor]


def lost_of(nameless: Sequence[Nameless], tensors: Tensors) -> Iterator[str]:
    """A doubt for each parameter whose values are not among the captured ones either."""
    held = {each.data_ptr() for each in tensors.storages} if nameless else set()
    for path, number, parameter in nameless:
        if storage_of(local_of(parameter)) not in held:
            yield (
                f'the values of a parameter of "{path}" are not saved: number {number}, of shape '
                f"{list(parameter.shape)}, is in no module of the state. Put the module that has "
                "it into the state"
            )


def note_of(parameters: Sequence[TensorSpec]) -> str:
    """The note of a Capture (see there) that was given these without their module."""
    nbytes = sum(spec.nbytes for spec in parameters)
    if nbytes < TOLD_BYTES_MIN:
        return ""
    return (
        f"{format_bytes(nbytes)} of parameters, such as {parameters[0].name}, are copied before "
        "save() returns, because the state has tensors of a state_dict(): pass the module itself "
        "to copy them while training continues"
    )
