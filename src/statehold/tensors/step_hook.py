"""The hook before the step() of every torch optimizer, also where torch.compile traces the step.

torch.compile traces the hooks of a step together with the step. A hook that is traced would run at
the time of tracing, and not at each step. So the action runs outside of what is compiled: torch
breaks the graph there, once, and compiles the update as without the hook. The graph has guards on
the list of hooks: a step that was compiled before the hook was there is compiled anew.
Under fullgraph=True no break is possible, and so no action can run in such a step. The hook notices
this while the step is traced. It calls the action once, then and there, and from then on
`runs_blind()` is true: steps may come that no action sees.

Forward and backward happen in a closure: those of Lightning do. So the action comes after a
closure, and only there if nothing can change parameters before it. That is so for a step() of
torch.optim, which calls its closure first. Another step() may change parameters first, and so may a
hook that runs after this one. Then the action comes twice: before everything, and after the
closure.

Invariants: there is one hook a process, whatever its action does for how many. It stays, without
an action, when nobody needs it any more: another thread may be going through torch's hooks then,
and would raise RuntimeError. To take it off and put it on would also compile steps anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_pre_hook

Action = Callable[[torch.optim.Optimizer | None], None]


class _Hook:
    """The one hook; `action` is None while it is off."""

    def __init__(self) -> None:
        self.action: Action | None = None
        self.handle: Any = None
        self.has_blind_steps = False

    def run(self, optimizer: torch.optim.Optimizer | None) -> None:
        action = self.action  # read once: another thread may take it off
        if action is not None:
            action(optimizer)


_hook = _Hook()


def put_on(action: Action) -> None:
    """Call `action` with the optimizer before each step() of every torch optimizer.

    It is called with None while a step is compiled in one graph: that step may run next.
    """
    _hook.action = action
    if _hook.handle is None:
        _hook.handle = register_optimizer_step_pre_hook(_before_step)
        _hooks_of_all().move_to_end(_hook.handle.id, last=False)  # others may change parameters


def take_off() -> None:
    """Call nothing any more. The hook itself stays."""
    _hook.action = None


def runs_blind() -> bool:
    """Whether a step was compiled in one graph, which cannot call the action."""
    return _hook.has_blind_steps


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if torch.compiler.is_dynamo_compiling():
        if not _is_traced_in_one_graph():
            _run(optimizer)
        return None
    if _hook.action is None:
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


def _closed(
    closure: Callable[..., Any], optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
) -> Any:
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


def _has_other_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run after this one, and before step() begins."""
    return len(_hooks_of_all()) > 1 or bool(getattr(optimizer, "_optimizer_step_pre_hooks", True))


def _hooks_of_all() -> Any:
    """The hooks of all optimizers, in the order in which they run."""
    return _hook.handle.hooks_dict_ref()


# Not torch.compiler.disable: that imports the compiler, which takes a second, and this waits until
# the first step. Constructing an optimizer has imported it by then.
@_disable_dynamo
def _run(optimizer: torch.optim.Optimizer) -> None:
    _hook.run(optimizer)


def _is_traced_in_one_graph() -> bool:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    # What a future torch calls otherwise is taken for one graph: that is slow, and never wrong.
    if not getattr(InstructionTranslator.current_tx(), "one_graph", True):
        return False
    _hook.has_blind_steps = True
    _hook.run(None)
    return True


# torch.compiler.assume_constant_result, which would import the compiler, too: the compiler calls
# the function while it traces, and keeps the answer.
_is_traced_in_one_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]
