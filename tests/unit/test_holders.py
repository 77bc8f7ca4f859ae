"""Who still holds an object: somebody, or only tracebacks of old errors."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from statehold.checkpoint.keeper import is_only_in_tracebacks
from support.faults import must


class Thing:
    def use(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class Box:
    def __init__(self, content: object) -> None:
        self.content = content


def raised(function: Callable[..., Any], *args: Any) -> BaseException:
    try:
        function(*args)
    except ZeroDivisionError as error:
        return error
    raise AssertionError("did not raise")


def local(refs: list[Any]) -> None:
    thing = Thing()
    refs.append(weakref.ref(thing))
    deeper(thing)


def deeper(thing: Thing) -> None:
    box = Box([{"thing": thing}])
    box.content.append(box)  # a cycle, too
    raise ZeroDivisionError


def in_closure(refs: list[Any]) -> None:
    thing = Thing()
    refs.append(weakref.ref(thing))

    def fail() -> None:
        thing.use()
        raise ZeroDivisionError

    fail()


def in_generator(refs: list[Any]) -> None:
    thing = Thing()
    refs.append(weakref.ref(thing))

    def values() -> Iterator[int]:
        thing.use()
        yield 1
        raise ZeroDivisionError

    for _ in values():
        pass


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("function", [local, in_closure, in_generator])
def test_only_the_traceback_of_an_error_holds_it(function: Callable[..., Any]) -> None:
    refs: list[Any] = []
    kept = raised(function, refs)
    gc.collect()
    assert refs[0]() is not None
    assert is_only_in_tracebacks(refs[0])
    again = refs[0]()
    assert not is_only_in_tracebacks(refs[0])
    del again
    assert is_only_in_tracebacks(refs[0])
    del kept
    gc.collect()
    assert refs[0]() is None
    assert is_only_in_tracebacks(refs[0])


HELD: Any = None


def test_what_a_module_holds_is_in_use() -> None:
    global HELD
    HELD = Box(Thing())
    assert not is_only_in_tracebacks(weakref.ref(HELD.content))
    HELD = None


def test_what_a_running_function_holds_is_in_use() -> None:
    thing = Thing()
    assert not is_only_in_tracebacks(weakref.ref(thing))
    box = Box(thing)
    ref = weakref.ref(thing)
    del thing
    assert not is_only_in_tracebacks(ref)
    del box
    assert ref() is None


def test_what_only_a_with_statement_holds_is_in_use() -> None:
    refs = []

    def made() -> Thing:
        thing = Thing()
        refs.append(weakref.ref(thing))
        return thing

    with made():
        assert not is_only_in_tracebacks(refs[0])


def test_what_a_suspended_generator_holds_is_in_use() -> None:
    refs = []

    def values() -> Iterator[int]:
        thing = Thing()
        refs.append(weakref.ref(thing))
        yield 1
        thing.use()

    waiting = values()
    next(waiting)
    assert not is_only_in_tracebacks(refs[0])
    assert list(waiting) == []


def test_what_another_thread_holds_is_in_use() -> None:
    refs: list[Any] = []
    there, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        thing = Thing()
        refs.append(weakref.ref(thing))
        there.set()
        go_on.wait(60)
        thing.use()

    thread = threading.Thread(target=hold)
    thread.start()
    must(there.wait(60))
    assert not is_only_in_tracebacks(refs[0])
    go_on.set()
    thread.join()


def test_what_many_things_hold_counts_as_in_use() -> None:
    refs: list[Any] = []

    def fail() -> None:
        thing = Thing()
        refs.append(weakref.ref(thing))
        boxes = [Box(thing) for _ in range(1000)]
        boxes.append(Box(boxes))
        raise ZeroDivisionError

    kept = raised(fail)
    assert not is_only_in_tracebacks(refs[0])
    del kept
