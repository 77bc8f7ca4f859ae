"""Methods of a class with something around each call, put on and taken off again.

Invariants: a method that somebody else has wrapped in turn is left alone, and what is around it
here then does nothing more than call it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

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
