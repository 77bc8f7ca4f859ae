"""Objects that give and take their state themselves: schedulers, data loaders, and whatever has
state_dict() and load_state_dict(). What they accept they decide.

Owns: also objects whose state lies in files (stored), or has pieces (placements).
Invariants: an object is one name, and is restored as a whole.
Not here: what the loaders in an object leave out of its state (loaders).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from statehold.errors import noting
from statehold.tensors.captured import Capturing
from statehold.tensors.kinds import loaders
from statehold.tensors.matching import ABSENT, Matching, Walk
from statehold.tensors.placements import Pieced
from statehold.tensors.storable import is_stateful
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
    with noting(
        f'while "{path}" was restored; other parts may be restored already. '
        f'skip=["{path}"] leaves it out'
    ):
        take(live, value)
