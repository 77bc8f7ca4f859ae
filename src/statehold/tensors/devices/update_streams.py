"""The streams that updates were given to, which need not be the one that is current in save().

Invariants: nothing here initializes CUDA.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from torch import cuda


class UpdateStreams:
    """The current streams of the updates since the last save. `saw` is called on any thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._seen: set[cuda.Stream] = set()
        self._joined: list[cuda.Stream] = []

    def saw(self) -> None:
        """The current streams are about to be given an update, each that of one device."""
        if cuda.is_initialized():  # type: ignore[no-untyped-call]
            current = [cuda.current_stream(index) for index in range(cuda.device_count())]
            with self._guard:
                self._seen.update(current)

    def join(self) -> None:
        """Order what the current streams are given next after the updates. Without an update since
        the last call, after what the streams of the last ones were given."""
        with self._guard:
            if self._seen:
                self._joined = list(self._seen)
                self._seen.clear()
        for stream in self._joined:
            _order(cuda.current_stream(stream.device), stream)

    def follow(self) -> None:
        """Order what the streams of the last join() are given next after what the current streams
        have: a forward there changes buffers that are copied here."""
        for stream in self._joined:
            _order(stream, cuda.current_stream(stream.device))


def _order(later: cuda.Stream, earlier: cuda.Stream) -> None:
    """What `later` is given next comes after what `earlier` has been given. A graph that is being
    captured has no work yet to come after: who waits for its stream is captured, too."""
    if later != earlier:
        # A device that has failed keeps no order. Who needs the device will say so; states on the
        # host do not.
        with suppress(RuntimeError):
            if not (_is_captured(later) or _is_captured(earlier)):
                later.wait_stream(earlier)


def _is_captured(stream: cuda.Stream) -> bool:
    with cuda.stream(stream):
        return bool(cuda.is_current_stream_capturing())
