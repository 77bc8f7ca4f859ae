"""Updates that a device was given: the graphs that hold one, and the streams that got one.

A capture of a CUDA graph executes nothing: it writes down what a stream is given. A replay executes
that, calls no hook of an optimizer, and moves no version counter. So `note_update` says during a
capture that the graph holds an update, and the methods of torch's classes of graphs are wrapped: an
action runs ahead of the replay of each graph that holds an update.
A graph whose capture was not watched from its begin to its end counts as one that holds an update,
for that cannot be ruled out. Nothing runs ahead of other graphs, such as forward and backward.
Other libraries capture graphs, too, and their replays come unseen. Once an update was captured
while no graph of torch was, `runs_blind()` is true.

Invariants: no graph and no optimizer is kept alive. Nothing here initializes CUDA.
Not seen: graphs of other libraries that were captured before there was an action.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch import accelerator, cuda
from torch.optim import Optimizer

from statehold.errors import UsageError

# Called with the optimizers whose steps are in the graph, as far as they are known.
Action = Callable[[Iterable[Any]], None]


def is_capturing() -> bool:
    """Whether what the current stream is given goes into a graph."""
    if not cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        return bool(cuda.is_current_stream_capturing())
    except RuntimeError:  # of a device that has failed: who needs it will say so
        return False


def refuse_in_capture(what: str) -> None:
    """Raise UsageError if `what` is called during a capture."""
    if is_capturing():
        raise UsageError(
            f"{what} was called while a CUDA graph is captured; nothing was done",
            hint=f"end the capture first, then call {what} outside of torch.cuda.graph(...)",
        )


class _Content:
    """What of a graph is known: the updates that its capture has shown."""

    def __init__(self) -> None:
        self.has_update = False
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def add(self, optimizers: Iterable[Optimizer]) -> None:
        self.has_update = True
        self.optimizers.update(optimizers)


def _kinds() -> list[Any]:
    """Torch's classes of graphs. torch 2.9 has one."""
    both = cuda.CUDAGraph, getattr(accelerator, "Graph", None)
    return [each for each in both if each is not None]


class _Graphs:
    """The graphs of torch, whose methods are wrapped as long as there is an action."""

    def __init__(self, kinds: list[Any]) -> None:
        self.kinds = kinds
        self.action: Action | None = None
        self.has_missed_one = False  # that holds an update
        self._guard = threading.Lock()
        self._open: weakref.WeakKeyDictionary[Any, _Content] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakKeyDictionary[Any, _Content] = weakref.WeakKeyDictionary()
        around = {
            "capture_begin": self._capture_begin,
            "capture_end": self._capture_end,
            "replay": self._replay,
        }
        self._wrappings = [Wrapping(kind, around) for kind in kinds]

    def wrap(self) -> None:
        for each in self._wrappings:
            each.put_on()

    def unwrap(self) -> None:
        self.action = None
        for each in self._wrappings:
            each.take_off()
        with self._guard:  # what is captured from now on is not watched
            self._open.clear()
            self._known.clear()

    def note_update(self, optimizers: Iterable[Optimizer]) -> None:
        """An update is captured. Into every graph that is open: which one is not told."""
        with self._guard:
            self.has_missed_one |= not self._open
            for content in self._open.values():
                content.add(optimizers)

    def _capture_begin(self, call: Callable[[], None], graph: Any) -> None:
        if self.action is None:
            return call()
        with self._guard:
            self._known.pop(graph, None)
            self._open[graph] = _Content()
        try:
            call()
        except BaseException:
            with self._guard:
                self._open.pop(graph, None)
            raise

    def _capture_end(self, call: Callable[[], None], graph: Any) -> None:
        with self._guard:
            content = self._open.pop(graph, None)
        call()
        if content is not None:
            with self._guard:
                self._known[graph] = content

    def _replay(self, call: Callable[[], None], graph: Any) -> None:
        if self.action is not None:
            with self._guard:
                content = self._known.get(graph)
                optimizers = [] if content is None else list(content.optimizers)
            if content is None or content.has_update:
                if is_capturing():  # it becomes a part of the graph that is captured
                    self.note_update(optimizers)
                else:
                    self.action(optimizers)
        call()


_graphs: _Graphs | None = None


def put_on(action: Action) -> None:
    """Call `action` before each replay of a graph that holds an update."""
    global _graphs
    kinds = _kinds()
    if _graphs is None or _graphs.kinds != kinds:
        _graphs = _Graphs(kinds)
    _graphs.wrap()
    _graphs.action = action


def take_off() -> None:
    """Call nothing any more, and forget what is known of graphs."""
    if _graphs is not None:
        _graphs.unwrap()


def runs_blind() -> bool:
    """Whether a graph was captured that holds an update, and whose replays call no action."""
    return _graphs is not None and _graphs.has_missed_one


def note_update(optimizers: Iterable[Optimizer]) -> None:
    """The graph that is captured now gets an update, of these optimizers."""
    if _graphs is not None:
        _graphs.note_update(optimizers)


# -- streams ---------------------------------------------------------------------------------------
# Updates need not have been given to the stream that is current in save().


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


# -- methods with something around each call -------------------------------------------------------
# A method that somebody else has wrapped in turn is left alone. What is around it here then does
# nothing more than call it.


# Called with the call that was made, and the object of the method. Returns what the call returns.
Around = Callable[[Callable[[], Any], Any], Any]


class Wrapping:
    """`around` each method of `kind`, by name, while this is on."""

    def __init__(self, kind: Any, around: Mapping[str, Around]) -> None:
        self.kind = kind
        self._around = around
        self._wrappers: dict[str, Any] = {}
        self._originals: dict[str, Any] = {}  # those that the class has itself

    def put_on(self) -> None:
        for name, around in self._around.items():
            if name not in self._wrappers:
                if name in vars(self.kind):
                    self._originals[name] = vars(self.kind)[name]
                self._wrappers[name] = _wrapper(getattr(self.kind, name), around)
                setattr(self.kind, name, self._wrappers[name])

    def take_off(self) -> None:
        """Put the methods back. A wrapper that somebody has wrapped in turn stays."""
        for name, wrapper in list(self._wrappers.items()):
            if vars(self.kind).get(name) is not wrapper:
                continue
            if name in self._originals:
                setattr(self.kind, name, self._originals.pop(name))
            else:
                delattr(self.kind, name)
            del self._wrappers[name]


def _wrapper(original: Any, around: Around) -> Any:
    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **options: Any) -> Any:
        return around(functools.partial(original, self, *args, **options), self)

    return wrapper
