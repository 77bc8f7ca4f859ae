"""Cyclic garbage is not collected inside, and as before after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from statehold.process.garbage import uncollected


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_is_off_inside_and_on_after_an_error_too() -> None:
    seen = []

    def fail() -> None:
        with uncollected():
            with uncollected():
                pass
            seen.append(gc.isenabled())
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert seen == [False]
    assert gc.isenabled()


def test_a_program_that_has_turned_it_off_keeps_it_off() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()
