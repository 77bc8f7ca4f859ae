"""Every update that torch makes in this process, seen before it runs; and what takes memory away.

An update is the step() of an optimizer, or the replay of a CUDA graph that holds one.

Owns: the one hook of step(); the watchers, held weakly, which are asked in the order in which they
came.
Invariants: no lock is held while somebody waits. A forked child asks nobody.
Not seen: a step() that was compiled in one graph, a CUDA graph of another library than torch (both:
`why_unseen`), updates that are no step(), and operators that resize in C++, such as
Tensor.resize_() to more elements.

Not here: replays of CUDA graphs (devices/graphs), what waits before an update
(checkpoint/save/gate).
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

from torch import UntypedStorage, compiler
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from statehold.tensors.devices import graphs
from statehold.tensors.devices.graphs import Wrapping
from statehold.tensors.storable import impl_of

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


# -- watchers --------------------------------------------------------------------------------------
# The first watcher puts the hooks on, and the last one takes them off. While a graph is captured an
# update does not run, and yet torch moves the version counters: watchers are asked to let that
# happen (`before_capture`).


class Watcher(Protocol):
    """Who wants to be asked before an update."""

    def before_update(self, optimizers: Iterable[Optimizer]) -> None:
        """These are about to step; none, where it is not known which."""

    def before_capture(self) -> None:
        """An update is about to be captured. What is enqueued here would be captured, too."""

    def before_memory_goes(self, storage: UntypedStorage) -> None:
        """A storage is about to lose its memory. On any thread."""


_guard = threading.RLock()  # the collector may end a Checkpointer inside
_switching = threading.RLock()  # who puts the hooks on or takes them off: it is all or none
_watchers: tuple[weakref.ref[Watcher], ...] = ()


def watch(watcher: Watcher) -> None:
    """Ask `watcher` before every update from now on. On the thread that trains."""
    global _watchers, _asks_ahead
    with _switching:
        with _guard:
            if watcher not in _living():
                _watchers = (*_watchers, weakref.ref(watcher))
            elif _asks_ahead:  # all of it is on, as at every save but the first
                return
        hook.put_on(_before_step)
        graphs.put_on(_ask)
        _wrapping.put_on()
        _asks_ahead = True


def why_unseen() -> list[str]:
    """Why updates may come that no watcher is asked about, and the way out. Empty: none may."""
    blind = ((_COMPILED, hook.has_blind_steps), (_CAPTURED, graphs.runs_blind()))
    return [why for why, holds in blind if holds]


def unwatch(watcher: Watcher) -> None:
    """Ask it no more. On the thread that trains."""
    global _asks_ahead
    with _switching:
        unwatch_later(watcher)
        if not _living():
            hook.action = None
            graphs.take_off()
            _wrapping.take_off()
            _asks_ahead = False


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


# -- memory that goes ------------------------------------------------------------------------------
# torch replaces the memory of a storage when the storage is resized (`untyped_storage().resize_()`,
# as systems that offload parameters do), and when it moves into shared memory (`share_memory_()`, a
# queue of torch.multiprocessing). It frees the old memory at once. Who still copies from there
# reads what others have written since, or ends the process by a segmentation fault.
#
# A thread may take memory away while another one looks for tensors to copy. So a move is noted
# first, and only then asked about: noted() shows it to a capture that was too early for the
# question.


_asks_ahead = False
_captures: tuple[list[int], ...] = ()


@contextlib.contextmanager
def noted() -> Iterator[list[int]]:
    """The storages, by impl_of(), that lose their memory meanwhile, on any thread. The numbers of
    storages that nobody keeps may be those of others later."""
    global _captures
    moved: list[int] = []
    _captures = (*_captures, moved)
    try:
        yield moved
    finally:
        _captures = tuple(each for each in _captures if each is not moved)


def _ahead(call: Callable[[], Any], storage: Any) -> Any:
    if _asks_ahead:
        for moved in _captures:
            moved.append(impl_of(storage))
        for watcher in _living():
            watcher.before_memory_goes(storage)
    return call()


def _forget() -> None:
    global _asks_ahead, _captures, _guard, _switching
    _asks_ahead, _captures = False, ()
    _guard, _switching = threading.RLock(), threading.RLock()  # a thread may have held those


os.register_at_fork(after_in_child=_forget)

_NAMES = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")
_wrapping = Wrapping(UntypedStorage, dict.fromkeys(_NAMES, _ahead))


# -- the hook of step() ----------------------------------------------------------------------------
# torch.compile traces the hooks of a step together with the step. A hook that is traced would run
# at the time of tracing, and not at each step. So the action runs outside of what is compiled:
# torch breaks the graph there, once, and compiles the update as without the hook. The graph has
# guards on the list of hooks: a step that was compiled before the hook was there is compiled again.
#
# Under fullgraph=True no break is possible, and so no action can run in such a step. The hook
# notices this while the step is traced. It calls the action once, then and there, and from then on
# `has_blind_steps` is true: steps may come that no action sees.
#
# Forward and backward happen in a closure: those of Lightning do. So the action comes after a
# closure, and only there if nothing can change parameters before it. That is so for a step() of
# torch.optim, which calls its closure first. Another step() may change parameters first, and so may
# a hook that runs after this one. Then the action comes twice: before everything, and after the
# closure.
#
# The hook stays, without an action, when nobody needs it any more: another thread may be going
# through torch's hooks then, and would raise RuntimeError. To take it off and put it on would also
# compile steps again.


class StepHook:
    """The one hook before each step() of every torch optimizer.

    action: what it calls, with the optimizer, or with None while a step is compiled in one graph:
    that step may run next. None while the hook is off. has_blind_steps: whether a step was compiled
    that cannot call it.
    """

    def __init__(self) -> None:
        self.action: Callable[[Optimizer | None], None] | None = None
        self.handle: Any = None
        self.has_blind_steps = False

    def put_on(self, action: Callable[[Optimizer | None], None]) -> None:
        self.action = action
        if self.handle is None:
            self.handle = register_optimizer_step_pre_hook(_hooked)
            _hooks_of_all().move_to_end(self.handle.id, last=False)  # others may change parameters

    def run(self, optimizer: Optimizer | None) -> None:
        action = self.action  # read once: another thread may take it off
        if action is not None:
            action(optimizer)


hook = StepHook()


def _hooked(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if compiler.is_dynamo_compiling():
        if not _is_traced_in_one_graph():
            _run(optimizer)
        return None
    if hook.action is None:
        return None
    step = _known(type(optimizer).step)
    is_named = "closure" in kwargs
    closure = kwargs["closure"] if is_named else args[1] if len(args) == 2 else None
    if closure is None or not (is_named or step.takes_closure):
        _run(optimizer)
        return None
    if not step.closes_first or _has_other_hooks(optimizer):
        _run(optimizer)
    closed = partial(_closed, closure, optimizer)
    return (args, {**kwargs, "closure": closed}) if is_named else ((args[0], closed), kwargs)


def _closed(closure: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    result = closure(*args, **kwargs)
    _run(optimizer)
    return result


class _Step(NamedTuple):
    """What is known of a step(). takes_closure: as its first argument. closes_first: it calls the
    closure before it changes anything."""

    takes_closure: bool
    closes_first: bool


@lru_cache(maxsize=64)
def _known(step: Callable[..., Any]) -> _Step:
    try:
        taken = list(inspect.signature(step).parameters)[1:2]
    except (TypeError, ValueError):  # it is not written in Python
        return _Step(takes_closure=False, closes_first=False)
    return _Step(taken == ["closure"], _is_of_torch(step))


def _is_of_torch(step: Callable[..., Any]) -> bool:
    """Whether step() and all that wraps it are torch's. A wrapper has the __module__ of what it
    wraps, but not its globals."""
    modules = []
    each: Any = step
    while each is not None:
        modules.append(getattr(each, "__globals__", {}).get("__name__", ""))
        each = getattr(each, "__wrapped__", None)
    is_torch = all(module.startswith("torch.") for module in modules)
    return is_torch and modules[-1].startswith("torch.optim.")


def _has_other_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks run after this one, and before step() begins."""
    return len(_hooks_of_all()) > 1 or bool(getattr(optimizer, "_optimizer_step_pre_hooks", True))


def _hooks_of_all() -> Any:
    """The hooks of all optimizers, in the order in which they run."""
    return hook.handle.hooks_dict_ref()


# Not torch.compiler.disable: that imports the compiler, which takes a second, and this waits until
# the first step. Constructing an optimizer has imported it by then.
@_disable_dynamo
def _run(optimizer: Optimizer) -> None:
    hook.run(optimizer)


def _is_traced_in_one_graph() -> bool:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    # What a future torch calls otherwise is taken for one graph: that is slow, and never wrong.
    if not getattr(InstructionTranslator.current_tx(), "one_graph", True):
        return False
    hook.has_blind_steps = True
    hook.run(None)
    return True


# torch.compiler.assume_constant_result, which would import the compiler, too: the compiler calls
# the function while it traces, and keeps the answer.
_is_traced_in_one_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]
