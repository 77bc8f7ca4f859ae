"""A job links the shared files of the step that it goes on from: its own, or that of its parent."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch

from statehold.checkpoint.levels.forking import fork
from statehold.checkpoint.save import sharing
from statehold.checkpoint.save.sharing import known_files
from statehold.steps.store import Store
from support.descended import Job, begin, check
from support.faults import DEADLINE_S, SMALL, small
from support.in_memory import SimFs, checkpointer_on
from support.inside import inside
from support.levels import remove, step_path
from support.plain_runs import BASE, CHILD
from support.ranks import Ranks
from support.sharing import Tuned, names, same

pytestmark = pytest.mark.usefixtures("small_shared_files")


@pytest.mark.parametrize("is_loose", [False, True], ids=["in place", "through buffers"])
def test_a_job_that_is_started_again_links_what_it_has_saved_before(
    fs: SimFs, is_loose: bool
) -> None:
    """Whatever the steps were that wrote the files: their number is in the header of each."""
    expected = begin(fs, steps=5, is_loose=is_loose)
    for first in (6, 8):
        again = Job(fs, BASE, is_loose=is_loose)
        assert again.restored == first - 1
        for step in (first, first + 1):
            assert again.linked(step) > again.model.base_bytes
            assert again.written < again.model.head.nbytes + 8192
        expected |= again.end()
    check(fs, BASE, expected)
    assert names(fs, f"{BASE}/.shared") == []


def test_without_that_all_is_written(fs: SimFs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: this job does not know the files."""
    monkeypatch.setattr(sharing, "known_files", lambda *_: [])
    begin(fs)
    job = Job(fs, BASE)
    assert job.linked(3) == 0
    job.end()


def test_a_child_links_the_files_of_its_parent(fs: SimFs) -> None:
    expected = begin(fs)
    fork(fs, step_path(BASE, 2), CHILD)
    child = Job(fs, CHILD)
    assert child.linked(3) > child.model.base_bytes
    assert child.linked(4) > child.model.base_bytes
    mine = child.end()
    remove(fs, BASE)
    check(fs, CHILD, {2: expected[2], **mine})
    begin(fs, "/runs/other")
    direct = Job(fs, "/runs/direct", parent="/runs/other@2")
    assert direct.restored == 2
    assert direct.linked(3) > direct.model.base_bytes
    direct.end()


@pytest.mark.thorough
@pytest.mark.parametrize("is_loose", [False, True], ids=["in place", "through buffers"])
@pytest.mark.parametrize("layer", range(4))
def test_what_has_changed_since_the_restore_is_written(
    fs: SimFs, layer: int, is_loose: bool
) -> None:
    expected = begin(fs, steps=5, is_loose=is_loose)
    job = Job(fs, BASE, is_loose=is_loose)
    job.model.base[layer].detach().numpy()[3, 3] += 1.0  # counted by nobody
    linked = job.linked(6)
    assert 0 < linked < job.model.base_bytes
    assert job.written > job.model.head.nbytes + job.model.base_bytes / 2
    for step in range(7, 12):
        job.save(step)
    check(fs, BASE, expected | job.end())


@pytest.mark.parametrize("is_loose", [False, True], ids=["in place", "through buffers"])
def test_a_file_with_another_header_is_written_again(
    fs: SimFs, is_loose: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of another version of this library, or of a tensor that was a part of another."""
    expected = begin(fs, steps=5, is_loose=is_loose)
    real = sharing.KnownFile

    def another(*, header: bytes, **of_the_file: Any) -> Any:
        other = header.replace(b'"format":"pt"', b'"format":"pp"')
        assert other != header
        return real(header=other, **of_the_file)

    monkeypatch.setattr(sharing, "KnownFile", another)
    job = Job(fs, BASE, is_loose=is_loose)
    assert job.linked(6) == 0
    check(fs, BASE, expected | job.end())


def test_another_structure_takes_the_files_that_fit(fs: SimFs) -> None:
    begin(fs)
    job = Job(fs, "/runs/more")
    job.end()
    with checkpointer_on(fs, BASE, **SMALL) as ckpt:
        model = Tuned(2)  # half of the layers: one of two files
        assert ckpt.restore({"model": model}, strict=False) == 2
        stats = ckpt.save(3, {"model": model}).wait("committed", DEADLINE_S).stats
        assert 0 < (stats.linked_bytes or 0) < 4 * model.head.nbytes
        assert ckpt.restore({"model": Tuned(2)}, 3) == 3


def test_bits_of_another_dtype_are_another_tensor(fs: SimFs) -> None:
    begin(fs)
    with checkpointer_on(fs, BASE, **SMALL) as ckpt:
        model = Tuned()
        ckpt.restore({"model": model})
        state = {
            "model": {
                name: value.detach().view(torch.int32) for name, value in model.state_dict().items()
            }
        }
        stats = ckpt.save(3, state).wait("committed", DEADLINE_S).stats
        assert stats.linked_bytes == 0
        live = {"model": {name: torch.zeros_like(each) for name, each in state["model"].items()}}
        assert ckpt.restore(live, 3) == 3
        assert same(live["model"], state["model"])


@pytest.mark.parametrize("code", [errno.EMLINK, errno.EXDEV, errno.ENOENT, errno.EIO])
def test_a_file_that_gets_no_name_is_written(fs: SimFs, code: int) -> None:
    expected = begin(fs)
    job = Job(fs, BASE)
    fs.fail_next("link", code, 2)  # of the two files
    assert job.linked(3) == 0
    assert fs.fired["injected link"] == 2
    assert job.linked(4) > job.model.base_bytes
    check(fs, BASE, expected | job.end())


def test_a_step_that_is_retired_before_the_first_save(fs: SimFs) -> None:
    begin(fs)
    job = Job(fs, BASE)
    remove(fs, step_path(BASE, 2))
    assert job.linked(3) == 0
    job.end()


def test_it_can_be_switched_off(fs: SimFs) -> None:
    begin(fs)
    job = Job(fs, BASE, **small(share_files=False))
    assert job.linked(3) == 0
    job.end()


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_link_their_own_files(fs: SimFs, ranks: int) -> None:
    """Replicas find out in their first saves who writes what, and then link the old files."""
    expected: dict[int, dict[str, torch.Tensor]] = {}
    first, linked = 1, list[int]()
    for saves in (5, 4):
        with Ranks(fs, ranks, BASE) as job:
            torch.manual_seed(5)
            models = [Tuned(layers=6) for _ in range(ranks)]
            for model in models:
                model.load_state_dict(models[0].state_dict())
            job.each(lambda rank, m=models: job.ckpts[rank].restore({"model": m[rank]}))
            for step in range(first, first + saves):
                for model in models:
                    model.train_once()
                expected[step] = models[0].bits()
                done = job.save(step, lambda rank, m=models: {"model": m[rank]})
                job.each(lambda rank, j=job: inside(j.ckpts[rank]).pipeline.drain(DEADLINE_S))
                linked.append(sum(save.stats.linked_bytes or 0 for save in done))
        first += saves
    assert linked[0] == 0
    assert linked[5] > 0
    with Ranks(fs, 2, BASE) as job:
        for step, bits in expected.items():
            found = [Tuned(layers=6) for _ in range(2)]
            job.each(lambda rank, s=step, f=found: job.ckpts[rank].restore({"model": f[rank]}, s))
            assert all(same(each.bits(), bits) for each in found)


def test_what_is_known_is_what_was_saved(fs: SimFs) -> None:
    begin(fs)
    store = Store(fs, BASE)
    known = known_files(store, 2, None, 1)
    assert len(known) == 2
    assert sorted(key[0] for each in known for key in each.keys) == [
        f"model.base.{index}" for index in range(4)
    ]
    assert known_files(store, 3, None, 1) == []
    assert known_files(store, 2, 0, 2) == []
    fs.write_file(f"{step_path(BASE, 2)}/manifest.json", b"damaged")
    assert known_files(store, 2, None, 1) == []
