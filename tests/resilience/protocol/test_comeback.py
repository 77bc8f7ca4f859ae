"""A replica that is soon out again waits longer and longer before it joins."""

from __future__ import annotations

from statehold.resilience.protocol.comeback import PAUSE_MAX_S, STAYS_S, Comeback


def test_one_that_was_out_once_joins_at_once() -> None:
    assert Comeback().pause(1e6) == 0


def test_one_that_is_soon_out_again_waits_twice_as_long_each_time() -> None:
    comeback, now, pauses = Comeback(), 0.0, []
    for _ in range(9):
        now += 5
        pauses.append(comeback.pause(now))
        now += pauses[-1]
    assert pauses == [0, 1, 2, 4, 8, 16, 32, PAUSE_MAX_S, PAUSE_MAX_S]


def test_the_pause_does_not_count_as_time_in_which_it_stayed() -> None:
    comeback = Comeback()
    comeback.pause(0)
    comeback.pause(STAYS_S)
    assert comeback.pause(2 * STAYS_S) == 2


def test_one_that_has_stayed_joins_at_once() -> None:
    comeback = Comeback()
    comeback.pause(0)
    assert comeback.pause(1) > 0
    assert comeback.pause(3 + STAYS_S) == 0
