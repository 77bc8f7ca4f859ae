"""No live staging buffer is ever handed out twice, in any order of acquire and release."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statehold import _core
from statehold.errors import InvariantError

BUFFER_BYTES = 4096

# True: acquire; a number: release the lease at that position (modulo how many are live).
Actions = st.lists(st.one_of(st.none(), st.integers(0, 63)), max_size=300)


@given(count=st.integers(1, 8), actions=Actions)
def test_no_live_buffer_is_handed_out_twice(count: int, actions: list[int | None]) -> None:
    pool = _core.BufferPool(count, BUFFER_BYTES)
    live: list[tuple[int, int, int]] = []
    for action in actions:
        if action is None:
            lease = pool.acquire_nowait()
            assert (lease is None) == (len(live) == count)
            if lease is not None:
                live.append(lease)
        elif live:
            index, generation, _ = live.pop(action % len(live))
            pool.release(index, generation)
        begins = sorted(address for _, _, address in live)
        assert all(b - a >= BUFFER_BYTES for a, b in itertools.pairwise(begins)), (
            "two live buffers overlap"
        )
        assert len({index for index, _, _ in live}) == len(live)
        assert pool.free_count + len(live) == count


@pytest.mark.thorough
@given(count=st.integers(1, 4), cycles=st.integers(1, 50), data=st.data())
def test_a_released_lease_is_dead(count: int, cycles: int, data: st.DataObject) -> None:
    pool = _core.BufferPool(count, BUFFER_BYTES)
    dead: list[tuple[int, int]] = []
    for _ in range(cycles):
        lease = pool.acquire_nowait()
        assert lease is not None
        assert lease[:2] not in dead
        pool.release(*lease[:2])
        dead.append(lease[:2])
        with pytest.raises(InvariantError):
            pool.release(*data.draw(st.sampled_from(dead)))
    assert pool.free_count == count


def test_addresses_are_aligned_and_the_pool_does_not_grow() -> None:
    pool = _core.BufferPool(3, 2 * BUFFER_BYTES)
    leases = [pool.acquire_nowait() for _ in range(3)]
    assert all(lease is not None and lease[2] % BUFFER_BYTES == 0 for lease in leases)
    assert pool.acquire_nowait() is None
