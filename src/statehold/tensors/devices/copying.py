"""The device copies of one save, on the stage thread; and when an update may pass before they end.

Invariants:
- The side stream starts after everything that the current stream had been given when save() ran,
  and the current stream has been made to wait for updates on others.
- A buffer is given back only after the copies into it have completed, also when the save fails.
- A source is kept alive until then. No tensor is kept alive once the save is staged, or has failed:
  the gate may know the copies for longer.
- An update is let through before that only if every copy is enqueued, nothing has changed so far,
  and the updating stream has been made to wait for the last copy.
- save() returns only when the current stream is after the copies of eager tensors that have no
  clone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress

import torch

from statehold.errors import StateholdError
from statehold.process.worker import Flag
from statehold.tensors.captured import Capture
from statehold.tensors.columns import CapturedTensor
from statehold.tensors.devices.backends import Event
from statehold.tensors.devices.fingerprinting import Fingerprinting
from statehold.tensors.devices.gathering import Gathering
from statehold.tensors.devices.jobs import Fills, JobSource, Lent
from statehold.tensors.devices.mover import Mover
from statehold.tensors.devices.relay import named_failures, relay


class DeviceCopies:
    """The device copies of one save: `run` on a thread of their own, `passing` from the gate.

    job: what lends the buffers. eager_under_way: set once every copy that save() waits for is
    enqueued, enqueued: once every copy is. Both are set when the save fails, too.
    """

    def __init__(
        self,
        sources: Sequence[JobSource],
        captured: Capture,
        compared: Sequence[CapturedTensor],
        mover: Mover,
    ) -> None:
        """sources: of the jobs of a save, in the order in which they were started."""
        self.job = Fills(sources)
        self._numbered = list(self.job.numbered(sources))
        self._eager = set[int]()
        self._eager_bytes_left = 0
        for first, tensors in self._numbered:
            structure = tensors.structure
            eager = [index for index in structure.eager if structure.external[index]]
            self._eager.update(first + index for index in eager)
            self._eager_bytes_left += sum(tensors.live.tensors[index].nbytes for index in eager)
        self.eager_under_way = Flag()
        self._after_eager: list[Event] = []
        self._compared = compared
        if not self._eager_bytes_left and not any(each.eager for each in compared):
            self.eager_under_way.set()
        self._captured: Capture | None = captured
        self._fingerprinting = Fingerprinting(mover)
        self.fingerprints: dict[str, int] = {}  # of what is compared, by name; after run()
        self._mover = mover
        self.enqueued = Flag()
        self._streams_suffice = not captured.tensors.structure.has_lazy_on_host

    def run(self) -> None:
        """Fill every buffer the engine lends, then the numbers of the tree; returns when all that
        the side streams were given has completed, also where this raises."""
        captured = self._captured
        mover, job = self._mover, self.job
        gathering = Gathering(self._external(), mover)  # alive until then, also if the save fails
        compared = self._compared

        def fill(lent: Sequence[Lent]) -> list[Event]:
            events = mover.move(lent, gathering.enqueue)
            self._note_eager(lent, compared)
            self._note_progress(compared)
            return events

        with named_failures(), mover.pinned(), mover.using(), mover.finishing():
            self._note_eager((), compared)
            self._note_progress(compared)
            relay(mover, job.next_fills, fill, job.filled_all, lambda: job.fills_left)
            mover.wait()
            if captured is not None:
                mover.read(captured.numbers)
            self.fingerprints = self._fingerprinting.read()

    @property
    def waits_since(self) -> float | None:
        """Since when run() waits for a device that does nothing, on the monotonic clock."""
        return self._mover.waits_since

    def let_go(self) -> None:
        """Keep no tensor alive: all are copied, or the save has failed. From any thread."""
        self._numbered, self._compared, self._captured = [], [], None
        self.eager_under_way.set()  # nobody need wait for what has failed
        self.enqueued.set()

    def wait_eager(self) -> None:
        """Have the current streams wait for the copies of eager tensors, once they are enqueued.
        Returns at once where the save has failed. On the trainer's thread. Raises DeviceError."""
        self.eager_under_way.wait()
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
                self._streams_suffice and self.enqueued.wait(timeout) and self.job.wait_eager(0)
            ):
                return False
        except (StateholdError, ValueError):  # ValueError: a checksum of the engine
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
        found: dict[int, torch.Tensor] = {}
        for first, tensors in self._numbered:  # none if the save has failed
            indices = list(compress(range(len(tensors)), tensors.structure.external))
            segments = [first + index for index in indices]
            found |= zip(segments, tensors.aliases(indices), strict=True)
        return found

    def _note_eager(self, lent: Sequence[Lent], compared: Sequence[CapturedTensor]) -> None:
        """Let save() go on if this was the last of eager tensors."""
        if self.eager_under_way.is_set:
            return
        pieces = chain.from_iterable(buffer.pieces for buffer in lent)
        moved = (nbytes for segment, _, _, nbytes in pieces if segment in self._eager)
        self._eager_bytes_left -= sum(moved)
        if not self._eager_bytes_left:
            self._fingerprinting.enqueue(each for each in compared if each.eager)
            self._after_eager = self._mover.newest()
            self.eager_under_way.set()

    def _note_progress(self, compared: Sequence[CapturedTensor]) -> None:
        """Let updates go on if this was the last of all."""
        if self.job.fills_left == 0:
            self._fingerprinting.enqueue(each for each in compared if not each.eager)
            self.enqueued.set()
