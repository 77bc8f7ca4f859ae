"""Work on side streams of devices, by lane, and the events of what was given last.

Invariants: work of a lane follows what the current stream of its device has been given before.
What a lane has been given before an error has an event, too, because it may be under way.
Not here: which work (mirror, on_device), the streams themselves (tensors/devices).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from statehold.tensors.devices.backends import Event, StreamBackend
from statehold.tensors.devices.devices import backend_for
from statehold.tensors.devices.relay import named_failures


class Lanes:
    """The lanes of one owner, on any devices. Raises DeviceError for a device that has failed."""

    def __init__(self) -> None:
        self._newest: dict[tuple[torch.device, str], Event] = {}

    @contextmanager
    def on(self, device: torch.device, lane: str) -> Iterator[None]:
        """Inside, work of this thread on the device is the lane's."""
        with _entered(device) as backend:
            stream = backend.fork(device, lane)
            try:
                with backend.on(stream):
                    yield
            finally:
                self._newest[device, lane] = backend.record(stream)

    def newest(self, device: torch.device, lane: str) -> Event | None:
        """The event of what the lane has been given so far; None: nothing."""
        return self._newest.get((device, lane))

    def is_complete(self, device: torch.device, event: Event) -> bool:
        """Whether an event of newest() has completed."""
        with _entered(device) as backend:
            return backend.is_complete(event)

    def synchronize(self, device: torch.device, event: Event) -> None:
        """Return when an event of newest() has completed. On any thread."""
        with _entered(device) as backend:
            backend.synchronize(event)

    def wait(self, lane: str) -> None:
        """Return when a lane has done its work on all devices."""
        for (device, its_lane), event in self._newest.items():
            if its_lane == lane:
                self.synchronize(device, event)

    def go_before(self, lane: str) -> None:
        """Order what the current streams are given next after the work of a lane."""
        for (device, its_lane), event in self._newest.items():
            if its_lane == lane:
                with _entered(device) as backend:
                    backend.make_current_wait(event)


@contextmanager
def _entered(device: torch.device) -> Iterator[StreamBackend]:
    backend = backend_for(device)
    with named_failures(), backend.using(device):
        yield backend
