"""Streams of an emulated device: work that is queued, and done as late as its events allow.

A Timeline knows all streams. Work runs when somebody waits for it, or at moments that a seed
chooses (`drift`), and not before. Whoever forgets to wait, or waits too late, gets wrong bytes.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Work = Callable[[], None]


@dataclass(eq=False)
class Stream:
    """A queue of one device. `given` and `done` count its work."""

    device: torch.device
    timeline: Timeline
    queue: deque[Work | Event] = field(default_factory=deque)
    given: int = 0
    done: int = 0
    capture: Any = None  # the graph that takes the work instead
    cuda_stream: int = 0  # its address

    def wait_event(self, event: Event) -> None:
        if event.capture is not self.capture:
            self._join(event)
        self.timeline.give(self, event)

    def _join(self, event: Event) -> None:
        """Who waits for a stream that is captured is captured with it."""
        if self.capture is not None:
            raise torch.AcceleratorError(
                "CUDA error: dependency created on uncaptured work in another stream"
            )
        self.capture = event.capture

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        if not self.query():
            self.record_event().synchronize()
        self.timeline.check("cudaStreamSynchronize")

    def query(self) -> bool:
        return self.given == self.done


class Event:
    """A place in the work of a stream; complete before it was recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.stream: Stream | None = None
        self.place = 0
        self.asked = 0
        self.capture: Any = None  # of its stream, when it was recorded

    @property
    def device(self) -> torch.device | None:
        return self.stream and self.stream.device

    def record(self, stream: Stream) -> None:
        stream.timeline.check("cudaEventRecord")
        self.stream, self.place, self.asked = stream, stream.given, 0
        self.capture = stream.capture

    def query(self) -> bool:
        return self.stream is None or self.stream.timeline.query(self)

    @property
    def is_over(self) -> bool:
        return self.stream is None or self.stream.done >= self.place

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.timeline.synchronize(self)


class Timeline:
    """The order of all work. `check` is called before everything that a device is asked for."""

    def __init__(self, seed: int | None, check: Callable[[str], None]) -> None:
        self.check = check
        self.streams: list[Stream] = []
        self.by_number: dict[int, Stream] = {}
        self.may_finish = threading.Event()  # cleared: nothing that a host waits for completes
        self.may_finish.set()
        self.host_waits: list[str] = []  # names of the threads that waited, once a wait
        self.launches = 0
        self._guard = threading.RLock()
        self._random = None if seed is None else random.Random(seed)

    def stream(self, device: torch.device) -> Stream:
        stream = Stream(device, self)
        with self._guard:
            self.streams.append(stream)
            stream.cuda_stream = len(self.streams)
            self.by_number[stream.cuda_stream] = stream
        return stream

    def give(self, stream: Stream, work: Work | Event) -> None:
        """Queue work, or the wait for an event."""
        self.check("a launch")
        with self._guard:
            self.launches += 1
            if stream.capture is not None:
                stream.capture.append(work)
                return
            stream.queue.append(work if callable(work) else _copy(work))
            stream.given += 1
            if self._random is not None and self._random.random() < 0.5:
                self._drift(self._random)

    def bury(self, stream: Stream, work: Work) -> None:
        """Have something done in the order of a stream, by nobody's call. From a finalizer, on any
        thread."""
        with self._guard:
            stream.queue.append(work)
            stream.given += 1

    def synchronize(self, event: Event) -> None:
        """Return once an event is complete; its host waits."""
        self.check("cudaEventSynchronize")
        self.host_waits.append(threading.current_thread().name)
        if not self.may_finish.wait(60):
            raise TimeoutError("the test never let the device finish")
        self._dawdle()
        with self._guard:
            self._reach(event)
        self.check("cudaEventSynchronize")

    def run(self, stream: Stream) -> None:
        """Do all work of one stream, and what it waits for."""
        with self._guard:
            self._until(stream, stream.given)

    def finish(self) -> None:
        """Do all work that there is."""
        with self._guard:
            for stream in list(self.streams):
                self._until(stream, stream.given)

    def query(self, event: Event) -> bool:
        """Whether an event is complete. A device goes on by itself: who asks often sees it."""
        self.check("cudaEventQuery")
        if self.may_finish.is_set():
            event.asked += 1
            with self._guard:
                if event.asked > 1:
                    self._reach(event)
        return event.is_over

    def _dawdle(self) -> None:
        """Now and then the device takes its time, and other threads go on."""
        if self._random is not None:
            with self._guard:
                pause_s = self._random.choice((0, 0, 0.001, 0.005))
            time.sleep(pause_s)

    def _drift(self, chance: random.Random) -> None:
        """Do some work of some stream, as far as it does not wait for another one."""
        stream = chance.choice(self.streams)
        for _ in range(chance.choice((1, 2, 8))):
            if not stream.queue:
                return
            head = stream.queue[0]
            if isinstance(head, Event) and not head.is_over:
                return
            self._until(stream, stream.done + 1)

    def _reach(self, event: Event) -> None:
        if event.stream is not None:
            self._until(event.stream, event.place)

    def _until(self, stream: Stream, place: int) -> None:
        while stream.done < place:
            work = stream.queue.popleft()
            if isinstance(work, Event):
                self._reach(work)
            else:
                work()
            stream.done += 1


def _copy(event: Event) -> Event:
    """An event may be recorded again; who waits for it waits for what it was."""
    copy = Event()
    copy.stream, copy.place = event.stream, event.place
    return copy
