"""A level with room for the data of a step and none for its documents: the save goes to the next
level, on all ranks, before a byte is written."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold._core import open_fs
from statehold.errors import NoSpaceError
from support.faults import DEADLINE_S, SMALL, must, spy_on
from support.in_memory import SimFs
from support.levels import FAR, LATER, NEAR, opened_on, save, settle, steps_at, two
from support.mounts import nearly_full, tmpfs, why_no_tmpfs
from support.rank_states import blank, check, state
from support.ranks import Ranks

SIZE = 3


class NoRoom:
    """From now on a document of this name finds no room, unless its file is there already."""

    def __init__(self, ckpt: statehold.Checkpointer, fs: SimFs, ending: str) -> None:
        self.refused = 0
        self._fs, self._ending = fs, ending
        spy_on(ckpt, self._before)

    def _before(self, operation: str, arguments: tuple[Any, ...]) -> None:
        if operation not in ("open_write", "write_file") or not self._ending:
            return
        path = str(arguments[0])
        if path.endswith(self._ending) and self._fs.stat_bytes(path) is None:
            self.refused += 1
            raise NoSpaceError(f"cannot {operation}", errno=errno.ENOSPC, path=path)

    def stop(self) -> None:
        self._ending = ""


@pytest.mark.parametrize(
    "document", ["manifest.json", "rank-00000-of-00003.json", "rank-00002-of-00003.json"]
)
def test_all_ranks_go_to_the_next_level_when_a_document_finds_no_room(document: str) -> None:
    fs = SimFs(seed=1)
    rank = 2 if "00002-of" in document else 0
    with Ranks(fs, SIZE, run="/run", levels=two(far=LATER)) as ranks:

        def saved(step: int) -> None:
            ranks.save(step, lambda rank: state(rank, step))
            ranks.each(lambda rank: settle(ranks.ckpts[rank]))

        saved(1)
        no_room = NoRoom(ranks.ckpts[rank], fs, document)
        saved(2)
        assert no_room.refused == 1
        assert (steps_at(fs, NEAR), steps_at(fs, FAR)) == ([1], [1, 2])
        no_room.stop()
        saved(3)
        assert (steps_at(fs, NEAR), steps_at(fs, FAR)) == ([1, 3], [1, 2])
        found = [blank() for _ in range(SIZE)]
        got = ranks.each(lambda rank: ranks.ckpts[rank].restore(found[rank], 2))
        assert got == [2] * SIZE
        for rank, each in enumerate(found):
            check(each, rank, 2)
    assert not [name for root in (NEAR, FAR) for name, _ in fs.listdir(root) if "partial" in name]


def test_the_first_save_finds_no_room_for_its_manifest(caplog) -> None:
    fs = SimFs(seed=1)
    with opened_on(fs, far=LATER) as ckpt:
        no_room = NoRoom(ckpt, fs, "manifest.json")
        save(ckpt, 1, {"w": torch.arange(1000)})
        settle(ckpt)
        assert no_room.refused == 1
        assert (steps_at(fs, NEAR), steps_at(fs, FAR)) == ([], [1])
    assert caplog.text.count("level near cannot take step 1; saves go to level far") == 1


def test_a_document_has_its_exact_size_in_the_end(tmp_path: Path) -> None:
    levels = [statehold.Directory(), statehold.Directory(path=tmp_path / "far", name="far")]
    with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
        for step in (1, 2):
            save(ckpt, step, {"w": torch.arange(1000)})
    for step in (1, 2):
        raw = (tmp_path / f"run/step-{step:012d}/manifest.json").read_bytes()
        assert raw.endswith(b"}\n")


@pytest.mark.skipif(why_no_tmpfs() is not None, reason=str(why_no_tmpfs()))
def test_memory_that_is_full_but_for_the_file_that_is_used_again(tmp_path: Path) -> None:
    with tmpfs(tmp_path, 64 << 20) as memory:
        levels = [
            statehold.Memory(path=memory / "steps", agent=False, keep=1),
            statehold.Directory(every=1),
        ]
        with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:

            def saved(step: int) -> bool:
                state = {"w": torch.full((4 << 20,), step, dtype=torch.uint8)}
                done = ckpt.save(step, state).wait("committed", DEADLINE_S)
                settle(ckpt)
                return done.stats.reused

            reused = [saved(step) for step in (1, 2, 3, 4)]
            assert reused[-1]  # so that its data fits whatever else does
            with nearly_full(memory, 0):
                saved(5)
                assert [level.newest for level in ckpt.levels()] == [4, 5]
            saved(6)
            assert [level.newest for level in ckpt.levels()] == [6, 6]
        live = {"w": torch.zeros(4 << 20, dtype=torch.uint8)}
        with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
            got = ckpt.restore(live, 5)
        assert (got, int(live["w"].min()), int(live["w"].max())) == (5, 5, 5)


@pytest.mark.skipif(why_no_tmpfs() is not None, reason=str(why_no_tmpfs()))
def test_room_that_was_taken_stays_taken_while_others_fill_the_memory(tmp_path: Path) -> None:
    """Who writes the document does not give its blocks back first."""
    fs = open_fs("threads", 1, 1)
    document, full, stopped = b"d" * (1 << 20), threading.Event(), threading.Event()
    with tmpfs(tmp_path, 8 << 20) as memory:

        def fill() -> None:
            with (memory / "ballast").open("ab", buffering=0) as ballast:
                while not stopped.is_set():
                    try:
                        ballast.write(bytes(4096))
                    except OSError:
                        full.set()

        fs.open_write(f"{memory}/document", len(document) * 2).close()
        thread = threading.Thread(target=fill)
        thread.start()
        try:
            must(full.wait(DEADLINE_S))
            fs.write_file(f"{memory}/document", document)
        finally:
            stopped.set()
            thread.join()
        assert (memory / "document").read_bytes() == document
    fs.close()
