"""Clients of one engine, on every file system: what each gets, and what is refused."""

from __future__ import annotations

from functools import partial

import pytest

from statehold import _core
from statehold.io.clients import RESERVED_BUFFERS, Client, open_engine
from support.disks import BUFFER, DEADLINE_S, Disk, State, finish, random_arrays, restore, save
from support.faults import must

PAGE = 4096


def test_no_client_waits_for_the_buffers_of_another(disk: Disk) -> None:
    """A save without a file holds all that a save may hold; the others go on."""
    engine = open_engine(disk.fs, 3 * BUFFER, BUFFER, 2)
    stored = State(random_arrays(1, 5 * BUFFER))
    sums = save(engine, disk, "stored", stored)
    held_up = State(random_arrays(2, 20 * BUFFER))
    job = held_up.write(engine, client=Client.SAVE)
    while engine.client_stats(Client.SAVE)["buffers"] < 3:
        must(not job.wait_copied(0.001))
    for client in (Client.RESTORE, Client.OFFLOAD_READ):
        back = stored.cleared()
        must(back.read(engine, disk.path("stored"), sums, client=client).wait(DEADLINE_S))
        assert back.image == stored.image
    assert engine.client_stats(Client.SAVE)["buffers"] == 3
    job.attach(disk.fs.open_write(disk.path("f"), held_up.file_bytes, False))
    sums = finish(job, held_up)
    back = held_up.cleared()
    restore(engine, disk, "f", back, sums)
    assert back.image == held_up.image
    engine.close()


def test_what_is_moved_is_counted_by_client(disk: Disk) -> None:
    engine = open_engine(disk.fs, 3 * BUFFER, BUFFER, 2)
    state = State(random_arrays(1, 5 * BUFFER))
    job = state.write(engine, client=Client.PROMOTION)
    job.attach(disk.fs.open_write(disk.path("f"), state.file_bytes, False))
    finish(job, state)
    assert engine.client_stats(Client.PROMOTION)["written_bytes"] >= state.file_bytes
    assert engine.client_stats(Client.SAVE)["written_bytes"] == 0
    engine.close()


def test_each_client_may_use_what_was_asked_for(disk: Disk) -> None:
    engine = open_engine(disk.fs, 3 * BUFFER, BUFFER, 1)
    assert engine.buffer_count == 3 + RESERVED_BUFFERS * (len(Client) - 1)
    engine.close()


@pytest.mark.parametrize("table", [[], [(0, 1)], [(1, 0)], [(3, 1), (1, 1)]])
def test_tables_that_cannot_be_served_are_refused(disk: Disk, table: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="client"):
        _core.Engine(disk.fs, 3 * BUFFER, BUFFER, clients=table)


def test_a_client_that_there_is_not_is_refused(disk: Disk, engine: _core.Engine) -> None:
    state = State(random_arrays(1, 100))
    for client in (1, 2**32 - 1):
        for call in (
            partial(state.write, engine, client=client),
            partial(engine.client_stats, client),
            partial(engine.set_limit, 0, client, 100),
        ):
            with pytest.raises(ValueError, match="no such client"):
                call()


@pytest.mark.parametrize(("staging", "buffer"), [(2**63, PAGE), (PAGE, 2**63), (2**64 - 1, PAGE)])
def test_sizes_that_no_machine_has_are_refused(disk: Disk, staging: int, buffer: int) -> None:
    with pytest.raises(ValueError, match=r"at most 2\*\*46"):
        _core.Engine(disk.fs, staging, buffer)
