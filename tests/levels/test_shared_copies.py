"""A copy of a step links the shared files that its level has already."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch

from statehold.layout.plan import file_of
from support.faults import DEADLINE_S
from support.in_memory import SimFs
from support.levels import FAR, LATER, NEAR, files, only, opened_on, remove, step_path
from support.sharing import Tuned, TunedRun, whole_steps
from support.travelled import Travelled

pytestmark = pytest.mark.usefixtures("small_shared_files")


@pytest.fixture
def travelled(monkeypatch: pytest.MonkeyPatch) -> Travelled:
    return Travelled(monkeypatch)


class Run(TunedRun):
    """Saves a model step by step to the near level, and copies steps to the far one."""

    def __init__(self, fs: SimFs, **far: Any) -> None:
        super().__init__(opened_on(fs, far=far), Tuned())

    def copy(self, step: int) -> None:
        self.save(step)
        self.ckpt.flush(DEADLINE_S)

    def check(self, fs: SimFs) -> None:
        reader = only(fs, FAR)
        assert whole_steps(reader, self.expected)
        reader.close()


def data_bytes(fs: SimFs, root: str, step: int) -> int:
    found = files(fs, root, step)
    return sum(len(each) for name, each in found.items() if name.endswith(".safetensors"))


@pytest.mark.parametrize("keep", [None, 1])
def test_only_what_changed_travels(fs: SimFs, travelled: Travelled, keep: int | None) -> None:
    run = Run(fs, keep=keep)
    run.copy(1)
    assert travelled.nbytes == data_bytes(fs, NEAR, 1) > run.model.base_bytes
    for step in (2, 3, 4):
        travelled.reads.clear()
        run.copy(step)
        assert travelled.nbytes < run.model.head.nbytes + 8192
        assert files(fs, FAR, step) == files(fs, NEAR, step)
    run.ckpt.close()
    run.check(fs)


def test_a_level_that_got_none_of_the_steps_between_links_what_it_has(
    fs: SimFs, travelled: Travelled
) -> None:
    run = Run(fs, **LATER)
    for step in range(1, 5):
        run.save(step)
    run.ckpt.flush(DEADLINE_S)
    at_far = only(fs, FAR)
    assert at_far.steps() == [1, 4]
    at_far.close()
    assert travelled.nbytes < run.model.base_bytes + 4 * run.model.head.nbytes + 16384
    run.ckpt.close()
    run.check(fs)


def test_files_that_the_level_does_not_know_or_cannot_link_are_copied(
    fs: SimFs, travelled: Travelled
) -> None:
    run = Run(fs)
    run.copy(1)
    fs.write_file(f"{step_path(FAR, 1)}/manifest.json", b"damaged")
    travelled.reads.clear()
    run.copy(2)
    assert travelled.nbytes > run.model.base_bytes
    travelled.reads.clear()
    # The save links its files, and the copy does not.
    shared = [name for name in files(fs, NEAR, 2) if (file_of(name) or (0, 0, 0))[2]]
    fs.fail_next("link", errno.EXDEV, 1 << 20, len(shared))
    run.copy(3)
    assert fs.fired["injected link"] == len(shared) > 0
    assert travelled.nbytes > run.model.base_bytes
    fs.set_faults()
    run.ckpt.close()
    remove(fs, step_path(FAR, 1))
    run.check(fs)


def test_a_file_is_not_another_with_one_bit_changed(fs: SimFs, travelled: Travelled) -> None:
    run = Run(fs)
    run.copy(1)
    run.copy(2)
    run.model.base[0].detach().view(torch.int32)[0, 0] ^= 1
    travelled.reads.clear()
    run.copy(3)
    assert 16384 < travelled.nbytes < run.model.base_bytes
    assert files(fs, FAR, 3) == files(fs, NEAR, 3)
    run.ckpt.close()
    run.check(fs)
