"""The hook before the step() of every torch optimizer, also where torch.compile traces the step.

torch.compile traces the hooks of a step together with the step. A hook that is traced would run at
the time of tracing, and not at each step. So the action runs outside of what is compiled: torch
breaks the graph there, once, and compiles the update as without the hook. The graph has guards on
the list of hooks: a step that was compiled before the hook was there is compiled anew.
Under fullgraph=True no break is possible, and so no action can run in such a step. The hook notices
this while the step is traced. It calls the action once, then and there, and from then on
`runs_blind()` is true: steps may come that no action sees.

A closure is called before the action, for forward and backward happen in it: those of Lightning do.
That is so for the optimizers of torch.optim, which call it before they change anything. Another
class may change parameters first, so there the action comes before step() begins.

Invariants: there is one hook a process, whatever its action does for how many. After a step was
compiled with it in one graph, the hook stays: to take it off and put it on would compile that step
anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["put_on", "runs_blind", "take_off"]

Action = Callable[[torch.optim.Optimizer | None], None]


class _Hook:
    """The one hook; `action` is None while it is off."""

    def __init__(self) -> None:
        self.action: Action | None = None
        self.handle: Any = None
        self.has_blind_steps = False

    def run(self, optimizer: torch.optim.Optimizer | None) -> None:
        if self.action is not None:
            self.action(optimizer)


_hook = _Hook()


def put_on(action: Action) -> None:
    """Call `action` with the optimizer before each step() of every torch optimizer.

    It is called with None while a step is compiled in one graph: that step may run next.
    """
    _hook.action = action
    if _hook.handle is None:
        _hook.handle = register_optimizer_step_pre_hook(_before_step)


def take_off() -> None:
    """Call nothing any more. On the thread that trains."""
    _hook.action = None
    if _hook.handle is not None and not _hook.has_blind_steps:
        _hook.handle.remove()
        _hook.handle = None


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
    closure = kwargs.get("closure", args[1] if len(args) == 2 else None)
    if closure is None or not type(optimizer).__module__.startswith("torch.optim."):
        _run(optimizer)
        return None
    return args[:1], {**kwargs, "closure": partial(_closed, closure, optimizer)}


def _closed(closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Any:
    result = closure()
    _run(optimizer)
    return result


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
