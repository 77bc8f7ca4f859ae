"""cached: a property that is computed once for each instance, without a lock.

functools.cached_property of Python 3.10 and 3.11 has one lock for all instances of a class. A
thread that waits for slow storage inside would hold up all other threads, also those that read
from elsewhere.

Invariants: all threads get the same value, that of the thread that has ended first. Two threads may
both compute it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class cached(Generic[T]):
    """compute: makes the value of an instance."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> cached[T] | T:
        if instance is None:
            return self
        value: T = vars(instance).setdefault(self._name, self._compute(instance))
        return value
