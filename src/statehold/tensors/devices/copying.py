"""The device copies of one save, on the stage thread; and when an update may pass before they have
completed.

Invariants: what the package says of a save. No tensor is kept alive once the save is staged, or has
failed: the gate may know the copies for longer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch

from statehold.errors import StateholdError
from statehold.tensors.captured import Capture
from statehold.tensors.columns import CapturedTensor, Tensors
from statehold.tensors.devices.backends import Event
from statehold.tensors.devices.fingerprinting import Fingerprinting
from statehold.tensors.devices.gathering import gatherer
from statehold.tensors.devices.jobs import FillJob, Lent
from statehold.tensors.devices.mover import Mover
from statehold.tensors.devices.relay import named_failures, relay

__all__ = ["DeviceCopies"]


class DeviceCopies:
    """The device copies of one save: `run` on a thread of their own, `passing` from the gate."""

    def __init__(
        self,
        job: FillJob[Any],
        captured: Capture,
        ordered: Tensors,
        compared: Sequence[CapturedTensor],
        mover: Mover,
    ) -> None:
        """Segment i + 1 of the job is ordered[i]."""
        structure = ordered.structure
        eager = [index for index in structure.eager if structure.external[index]]
        self._job = job
        self._ordered: Tensors | None = ordered
        self._eager = {index + 1 for index in eager}
        self._eager_bytes_left = sum(ordered.live[index].nbytes for index in eager)
        self._eager_under_way = threading.Event()
        self._after_eager: list[Event] = []
        self._compared = compared
        if not self._eager_bytes_left and not any(each.eager for each in compared):
            self._eager_under_way.set()
        self._captured: Capture | None = captured
        self._fingerprinting = Fingerprinting(mover)
        self.fingerprints: dict[str, int] = {}  # of what is compared, by name; after run()
        self._mover = mover
        self._enqueued = threading.Event()
        self._streams_suffice = not captured.structure.has_lazy_on_host

    def run(self) -> None:
        """Fill every buffer the engine lends, then the numbers of the tree; returns when all that
        the side streams were given has completed, also where this raises."""
        captured = self._captured
        mover, job = self._mover, self._job
        gather = gatherer(self._external())  # alive until then, also when the save fails
        compared = self._compared

        def fill(lent: Lent) -> list[Event]:
            events = mover.move(lent, gather)
            self._note_eager(lent, compared)
            self._note_progress(compared)
            return events

        with named_failures(), mover.using(), mover.finishing():
            self._note_eager(None, compared)
            self._note_progress(compared)
            relay(mover, job.next_fill, fill, job.filled, lambda: job.fills_left)
            if captured is not None:
                mover.read(captured.numbers)
            self.fingerprints = self._fingerprinting.read()

    def let_go(self) -> None:
        """Keep no tensor alive: all are copied, or the save has failed. From any thread."""
        self._ordered, self._compared, self._captured = None, [], None
        self._eager_under_way.set()  # nobody need wait for what has failed
        self._enqueued.set()

    def wait_eager(self) -> None:
        """Have the current streams wait for the copies of eager tensors, once they are enqueued.
        Returns at once where the save has failed. On the trainer's thread. Raises DeviceError."""
        self._eager_under_way.wait()
        with named_failures():
            self._mover.make_current_wait(self._after_eager)

    def passing(self, timeout: float | None = 0) -> bool:
        """Let updates on the current stream through, if they can be ordered after the copies.

        Waits up to `timeout` seconds (None: for ever) until no copy is still to be enqueued. Not
        for states with lazy tensors on the host, whose copying no stream waits for; nor if
        something has changed, which fails the save.
        """
        try:
            if not (
                self._streams_suffice and self._enqueued.wait(timeout) and self._job.wait_eager(0)
            ):
                return False
        except StateholdError:
            return False  # the save has failed, and its handle is about to say so
        captured = self._captured
        if captured is None or captured.settle() is not None:
            return False  # the save is staged, or has failed
        try:
            self._mover.make_current_wait(self._mover.newest())
        except RuntimeError:
            return False  # the device has failed, and so will the save
        return True

    def _external(self) -> dict[int, torch.Tensor]:
        """The tensors of devices as they were at capture, by segment."""
        ordered = self._ordered
        if ordered is None:
            return {}  # the save has failed
        indices = list(compress(range(len(ordered)), ordered.structure.external))
        segments = [index + 1 for index in indices]
        return dict(zip(segments, ordered.aliases(indices), strict=True))

    def _note_eager(self, lent: Lent | None, compared: Sequence[CapturedTensor]) -> None:
        """Let save() go on if this was the last of eager tensors."""
        if self._eager_under_way.is_set():
            return
        pieces = lent.pieces if lent else []
        moved = (nbytes for segment, _, _, nbytes in pieces if segment in self._eager)
        self._eager_bytes_left -= sum(moved)
        if not self._eager_bytes_left:
            self._fingerprinting.enqueue(each for each in compared if each.eager)
            self._after_eager = self._mover.newest()
            self._eager_under_way.set()

    def _note_progress(self, compared: Sequence[CapturedTensor]) -> None:
        """Let updates go on if this was the last of all."""
        if self._job.fills_left == 0:
            self._fingerprinting.enqueue(each for each in compared if not each.eager)
            self._enqueued.set()
