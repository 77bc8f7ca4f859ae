"""What is used here of the engine's jobs: buffers that are lent to Python, and come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

__all__ = ["FillJob", "Lent", "LentT", "Piece", "ReadyJob"]

Piece = tuple[int, int, int, int]  # segment, offset in it, offset in the buffer, bytes


class Lent(Protocol):
    """A buffer in the hands of Python."""

    @property
    def pieces(self) -> Sequence[Piece]: ...
    @property
    def view(self) -> memoryview: ...


LentT = TypeVar("LentT", bound=Lent)


class FillJob(Protocol[LentT]):
    """The side of the engine's WriteJob that is used here."""

    def next_fill(self, timeout: float | None) -> LentT | None: ...
    def filled(self, fill: LentT) -> None: ...
    def wait_eager(self, timeout: float | None) -> bool: ...
    @property
    def fills_left(self) -> int: ...


class ReadyJob(Protocol[LentT]):
    """The side of the engine's ReadJob that is used here."""

    def next_ready(self, timeout: float | None) -> LentT | None: ...
    def release(self, ready: LentT) -> None: ...
    @property
    def ready_left(self) -> int: ...
