"""The first iterator of a data loader whose state was restored.

Owns: one call of a loader's `_get_iterator()`, the first one after the loader has taken a state.
Every iterator of torch.utils.data draws a seed when it is made, and sets or draws from the
generators of the loader and of its samplers. In the run that saved the state that had happened
before the save: the saved generators have those draws behind them. So this iterator must leave no
trace, and every later one draws as ever.
Invariants: only the one loader is touched, by an attribute that is gone once the iterator exists.
If making it fails, it stays for the next attempt.

Why not make the iterator in restore(): users call sampler.set_epoch() between restore() and the
loop, and it would come too late. Why not wrap iter(loader): at the end of an epoch it makes two
iterators, the saved one, which is used up, and the next one, which has to draw.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from statehold.tensors.rng import unchanged

_MAKER = "_get_iterator"


def is_supported(loader: Any) -> bool:
    """Whether a loader tells an iterator of a restored state from a new one: torchdata's do."""
    return hasattr(loader, _MAKER) and "next_iter_state" in vars(loader)


def is_due(loader: Any) -> bool:
    """Whether the next iterator of a loader is one of a restored state."""
    return is_supported(loader) and loader.next_iter_state is not None


def leave_no_trace(loader: Any, *, own: bool) -> None:
    """Let the iterator that is due leave no trace.

    own: neither in the loader's own generator, which was restored, too. Otherwise nothing is known
    of that generator, and torchdata's best effort stands.
    """
    vars(loader)[_MAKER] = _FirstIterator(loader, own)


class _FirstIterator:
    """Stands for `_get_iterator` of one loader."""

    def __init__(self, loader: Any, own: bool) -> None:
        self._loader = loader
        self._own = own

    def __call__(self) -> Any:
        if not is_due(self._loader):  # the user has given up the restored state
            return self._made()
        with unchanged(), _unchanged(self._loader.generator if self._own else None):
            return self._made()

    def _made(self) -> Any:
        iterator = getattr(type(self._loader), _MAKER)(self._loader)
        vars(self._loader).pop(_MAKER, None)
        return iterator


@contextlib.contextmanager
def _unchanged(generator: Any) -> Iterator[None]:
    state = None if generator is None else generator.get_state()
    try:
        yield
    finally:
        if generator is not None:
            generator.set_state(state)
