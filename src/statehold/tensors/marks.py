"""Marks that a user puts around a part of the state, to say what changes it and when.

Owns: `Volatile` and `Gated`, two transparent boxes around one object. Capture and restore look
through them, so a step saved with a mark restores into a state without it.
Without a mark, module parameters and the tensors of an optimizer are copied lazily; the gate in
front of `optimizer.step()` protects them. Everything else is copied before `save` returns.
No torch here: a state can be marked before torch is imported.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Mark(Generic[T]):
    """A box around `value`. Restore replaces `value` only if it cannot be restored in place."""

    __slots__ = ("value",)

    def __init__(self, value: T, /) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"


class Volatile(Mark[T]):
    """`value` changes outside optimizers, as EMA weights do: `save` copies it before it returns.

    This wins over `Gated`, and over a module or an optimizer that shares its memory.
    """

    __slots__ = ()


class Gated(Mark[T]):
    """`value` changes only after `Checkpointer.gate()` or a gated `step()`: it is copied lazily.

    Module buffers inside stay eager, because forward changes them, and not every kernel raises
    their version counter.
    """

    __slots__ = ()


def bare(value: Any) -> Any:
    """What is inside of marks."""
    while isinstance(value, Mark):
        value = value.value
    return value
