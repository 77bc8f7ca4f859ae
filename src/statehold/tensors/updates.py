"""Every update that torch makes in this process, seen before it runs: the step() of an optimizer,
and the replay of a CUDA graph that holds one; and what takes memory away (memory_moves).

Watchers are held weakly, and asked in the order in which they came. The first watcher puts the
hooks on, and the last one takes them off. While a graph is captured an update does not run, and yet
torch moves the version counters: watchers are asked to let that happen (`before_capture`).
Not seen: a step() that was compiled in one graph, a CUDA graph of another library than torch (both:
`why_unseen`), and updates that are no step().
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from statehold.tensors import memory_moves, step_hook
from statehold.tensors.devices import graphs

if TYPE_CHECKING:
    from torch import UntypedStorage
    from torch.optim import Optimizer

_COMPILED = (
    "an optimizer's step() was compiled with fullgraph=True, which lets no code run before the "
    "update: from now on save() returns only when everything is copied. To let it return early, "
    "compile step() without fullgraph=True, or compile only what step() calls"
)
_CAPTURED = (
    "a CUDA graph that holds an update was captured by other means than torch's classes, so no "
    "code runs before its replays: from now on save() returns only when everything is copied. To "
    "let it return early, capture the update with torch.cuda.CUDAGraph or torch.accelerator.Graph"
)


class Watcher(Protocol):
    """Who wants to be asked before an update."""

    def before_update(self, optimizers: Iterable[Optimizer]) -> None:
        """These are about to step; none, where it is not known which."""

    def before_capture(self) -> None:
        """An update is about to be captured. What is enqueued here would be captured, too."""

    def before_memory_goes(self, storage: UntypedStorage) -> None:
        """A storage is about to lose its memory. On any thread."""


_guard = threading.RLock()  # the collector may end a Checkpointer inside
_watchers: tuple[weakref.ref[Watcher], ...] = ()


def watch(watcher: Watcher) -> None:
    """Ask `watcher` before every update from now on. On the thread that trains."""
    global _watchers
    with _guard:
        if watcher not in _living():
            _watchers = (*_watchers, weakref.ref(watcher))
    step_hook.put_on(_before_step)
    graphs.put_on(_ask)
    memory_moves.put_on(_before_memory_goes)


def why_unseen() -> list[str]:
    """Why updates may come that no watcher is asked about, and the way out. Empty: none may."""
    blind = ((_COMPILED, step_hook.runs_blind()), (_CAPTURED, graphs.runs_blind()))
    return [why for why, holds in blind if holds]


def unwatch(watcher: Watcher) -> None:
    """Ask it no more. On the thread that trains."""
    unwatch_later(watcher)
    if not _living():
        step_hook.take_off()
        graphs.take_off()
        memory_moves.take_off()


def unwatch_later(watcher: Watcher) -> None:
    """Ask it no more. From any thread: the hooks stay until the next call of the others, because
    an optimizer may be going through its hooks now."""
    global _watchers
    with _guard:
        _watchers = tuple(each for each in _watchers if each() not in (None, watcher))


def _living() -> list[Watcher]:
    found = (each() for each in _watchers)
    return [watcher for watcher in found if watcher is not None]


def capture(optimizers: Iterable[Optimizer]) -> bool:
    """Note that the graph that is captured now gets an update; False if none is captured."""
    if not graphs.is_capturing():
        return False
    for watcher in _living():
        watcher.before_capture()
    graphs.note_update(optimizers)
    return True


def _before_step(optimizer: Optimizer | None) -> None:
    optimizers = [] if optimizer is None else [optimizer]
    if not capture(optimizers):
        _ask(optimizers)


def _ask(optimizers: Iterable[Optimizer]) -> None:
    for watcher in _living():
        watcher.before_update(optimizers)


def _before_memory_goes(storage: UntypedStorage) -> None:
    for watcher in _living():
        watcher.before_memory_goes(storage)
