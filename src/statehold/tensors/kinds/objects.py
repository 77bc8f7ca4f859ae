"""Objects that give and take their state themselves: schedulers, data loaders, and whatever has
state_dict() and load_state_dict(). What they accept they decide.

Owns: also objects whose state lies in files (stored), or has pieces (placements), and gradient
scalers, whose state is taken without a wait for the device.
Invariants: an object is one name, and is restored as a whole.
Not here: what the loaders in an object leave out of its state (loaders).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from statehold.errors import annotate
from statehold.tensors.captured import Capturing, Number
from statehold.tensors.kinds import loaders
from statehold.tensors.matching import ABSENT, Matching, Walk
from statehold.tensors.placements import Pieced
from statehold.tensors.storable import is_external, is_stateful
from statehold.tensors.stored import StoredObject


def of(value: Any) -> Any | None:
    """Also what should give its state, and does not: a loader that cannot."""
    return value if is_stateful(value) or loaders.are_in(value) else None


def capture(to: Capturing, value: Any, path: str) -> Any | None:
    if isinstance(value, StoredObject):
        return to.inside(value, partial(_stored, to, value), path)
    if not to.own and loaders.found_in(value):
        return {}
    if (refusal := loaders.refusal(value, path)) is not None:
        raise refusal
    if not is_stateful(value):
        return None
    if isinstance(value, GradScaler) and _waits(value):
        return _captured_scaler(to, value, path)
    return to.inside(value, lambda: loaders.state_of(value, partial(to.tell, path)), path)


def _stored(to: Capturing, value: StoredObject) -> Any:
    to.stored.append(value.stored_state())
    return to.stored[-1].tree


def names(_: Walk, __: Any, ___: Any, path: str) -> Iterator[str]:
    yield path


def match(to: Matching, live: Any, node: Any, path: str) -> None:
    if not is_stateful(live):
        to.plain(live, node, path, loaders.refusal(live, path))
    elif to.takes(path) and not to.differs(node, path):
        value: list[Any] = []
        # Modules come first: an object may lend out memory of theirs until it is loaded.
        to.later.append(lambda: value.append(_fitted(to, live, node, path)))
        to.restoration.objects.append(lambda: load(loaders.load, live, value.pop(), path))
        to.restoration.doubted.append((path, partial(loaders.doubts, live)))


def _fitted(to: Matching, live: Any, node: Any, path: str) -> Any:
    """The value to load."""
    value = to.rebuild(_to_fill(to, live, node), node)
    try:
        return loaders.fitted(live, value)
    except loaders.PositionRefused as refused:
        to.problem(path, *refused.args)


def _to_fill(to: Matching, live: Any, node: Any) -> Any:
    """The live state of an object, whose tensors are filled."""
    if loaders.found_in(live):
        return ABSENT  # its state_dict() would make an iterator, and start its workers
    return live.state_to_fill(to.outlined(node)) if isinstance(live, Pieced) else live.state_dict()


def load(take: Callable[[Any, Any], None], live: Any, value: Any, path: str) -> None:
    """Have `take` give a value to the live object at `path`."""
    try:
        take(live, value)
    except Exception as error:
        when = f'while "{path}" was restored; other parts may be restored already. '
        annotate(error, when + f'skip=["{path}"] leaves it out')
        raise


# -- gradient scalers ------------------------------------------------------------------------------
# state_dict() of a torch.amp.GradScaler gives numbers that lie on a device, and waits for the
# device twice. So the numbers are cloned there, in the order of the device's work, and read on the
# stage thread. What a step has is what state_dict() gives. The nodes of such numbers hold what the
# scaler began with until they are filled in, before the save is staged. A scaler that is disabled
# or was not used yet has no numbers on a device, and a subclass may give its state in its own way:
# both are asked for state_dict().


_ON_DEVICE = {"scale": "_scale", "_growth_tracker": "_growth_tracker"}
_OF_THE_STATE = ("state_dict", "get_scale", "_get_scale_async", "_get_growth_tracker")


def _waits(scaler: GradScaler) -> bool:
    """Whether its state_dict() waits for a device."""
    kind = type(scaler)
    if any(getattr(kind, name) is not getattr(GradScaler, name, None) for name in _OF_THE_STATE):
        return False
    held = [getattr(scaler, name, None) for name in _ON_DEVICE.values()]
    on_device = all(isinstance(each, torch.Tensor) and is_external(each) for each in held)
    return on_device and scaler.is_enabled()


def _captured_scaler(to: Capturing, scaler: GradScaler, path: str) -> Any:
    to.values.check_depth(scaler, path, 2)  # an infinity that is filled in is a node
    alike = object.__new__(type(scaler))
    vars(alike).update(vars(scaler), **dict.fromkeys(_ON_DEVICE.values()))
    node = to.values.encode(alike.state_dict(), path)
    to.numbers += [
        Number(getattr(scaler, name).clone(), node, key)
        for key, name in _ON_DEVICE.items()
        if key in node
    ]
    return node
