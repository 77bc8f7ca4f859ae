"""The figures of one save, and the events that it reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from statehold.layout.share import Balance
from statehold.units import format_bytes, format_seconds

Event = Literal["staged", "written", "committed"]
EVENTS: tuple[Event, ...] = get_args(Event)


@dataclass(frozen=True, slots=True)
class SaveStats:
    """Figures of one save. Seconds count from the call of save(); None means not yet.

    Attributes:
        step: the step.
        state_bytes: what this rank holds.
        eager_bytes: the part of state_bytes that was copied before save() returned.
        written_bytes: what this rank writes.
        linked_bytes: of files that were on storage before, and that the step holds without a copy.
        tensors: how many tensors this rank holds.
        files: the files of this rank, those that were on storage before included.
        reused: whether the save overwrote the file of an earlier step.
        blocked_s: how long save() itself took.
        waited_s: the part of blocked_s spent waiting for an earlier save.
        gate_s: how long optimizers (or gate()) waited for this save.
        staged_s: when every byte was copied.
        written_s: when this rank's bytes were durable.
        committed_s: when the step was published.
        balance: how evenly all ranks and their hosts write, known when committed.
    """

    step: int
    state_bytes: int = 0
    eager_bytes: int = 0
    written_bytes: int = 0
    linked_bytes: int = 0
    tensors: int = 0
    files: int = 0
    reused: bool = False
    blocked_s: float = 0.0
    waited_s: float = 0.0
    gate_s: float = 0.0
    staged_s: float | None = None
    written_s: float | None = None
    committed_s: float | None = None
    balance: Balance | None = None

    def __str__(self) -> str:
        text = f"step {self.step}: {format_bytes(self.state_bytes)}"
        text += f", blocked {format_seconds(self.blocked_s + self.gate_s)}"
        for event in EVENTS:
            seconds = getattr(self, f"{event}_s")
            text += f", {event} " + ("not yet" if seconds is None else format_seconds(seconds))
        return text
