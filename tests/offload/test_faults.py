"""Storage that fails, fills up or rots: nothing wrong trains, and no state is mixed."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from statehold import offload
from statehold._core import Fs, open_fs
from statehold.errors import (
    ChecksumError,
    MissingFileError,
    NoSpaceError,
    StateholdError,
    StorageError,
    UsageError,
)
from statehold.offload.store import StateFiles
from support import scripts
from support.faults import DEADLINE_S, must
from support.in_memory import SimFs
from support.twins import Twins, snapshot, state_of

BF16 = torch.bfloat16
SHAPES = [(80_000,), (129, 65)]
SMALL = 49_152


def simulated(**faults: Any) -> SimFs:
    fs = SimFs(seed=1, **faults)
    fs.mkdir("opt")
    return fs


def twins_on(fs: SimFs) -> Twins:
    return Twins(SHAPES, [BF16], tiers=[offload.Path("opt")], subgroup_bytes=SMALL, fs=fs)


@pytest.mark.parametrize("seed", range(4))
def test_short_and_reordered_transfers_change_nothing(seed: int) -> None:
    fs = SimFs(seed=seed, short_io=0.3, slow=0.3)
    fs.mkdir("opt")
    twins = twins_on(fs)
    twins.train(3)
    twins.check()
    must(fs.fired["short"])


@pytest.mark.thorough
@pytest.mark.parametrize("skip", range(6))
@pytest.mark.parametrize("operation", ["read", "write", "open_read", "open_write"])
def test_an_update_that_fails_leaves_a_state_that_refuses(operation: str, skip: int) -> None:
    """Nothing goes on from a state with a part that is one update ahead. A load makes it whole."""
    fs = simulated()
    twins = twins_on(fs)
    twins.train(2)
    restore = snapshot(twins)
    fs.fail_next(operation, errno.EIO, skip=skip)
    with pytest.raises(StorageError) as caught:
        twins.train(1)
    assert caught.value.errno == errno.EIO
    assert fs.fired[f"injected {operation}"] == 1
    for call in (twins.ours.step, twins.ours.state_dict):
        with pytest.raises(UsageError, match="belongs to no step"):
            call()
    restore()
    twins.train(2)
    twins.check()
    twins.ours.close()


def state_files(fs: SimFs) -> list[str]:
    folder = "opt/optimizer-0"
    return [f"{folder}/{name}" for name, _ in fs.listdir(folder) if name.endswith(".state")]


def test_a_flipped_bit_at_rest_is_found_before_it_trains() -> None:
    fs = simulated()
    twins = twins_on(fs)
    twins.train(2)
    restore = snapshot(twins)
    twins.train(1)
    before = [each.detach().clone() for each in twins.params]
    for file in state_files(fs):
        with contextlib.suppress(StorageError):  # a spare file without bytes
            fs.corrupt(file, 8192, 0x10)
    with pytest.raises(ChecksumError, match="restore the newest committed step") as caught:
        twins.train(1)
    assert "parameter 0 [" in caught.value.facts["parameters"]
    assert caught.value.facts["file"].startswith("opt/optimizer-0/subgroup-")
    must(fs.damaged)
    # What was in memory has been updated by then. What was read has not.
    unchanged = [(now == old).sum() for now, old in zip(twins.params, before, strict=True)]
    assert sum(int(count) for count in unchanged) > 40_000 * 3 // 10
    restore()
    twins.train(2)
    twins.check()


def test_a_file_that_is_lost_is_named() -> None:
    fs = simulated()
    twins = twins_on(fs)
    twins.train(2)
    for file in state_files(fs):
        fs.unlink(file)
    with pytest.raises(MissingFileError, match="opt/optimizer-0/subgroup-"):
        twins.train(1)


def test_space_is_taken_at_construction() -> None:
    fs = simulated(capacity=10 * SMALL)
    with pytest.raises(NoSpaceError):
        twins_on(fs)
    assert not state_files(fs)
    fs.set_faults(capacity=None)
    twins = twins_on(fs)  # the refused one holds nothing
    files = state_files(fs)
    fs.set_faults(capacity=sum(fs.stat_bytes(path) or 0 for path in files))
    twins.train(5)
    twins.check()
    assert len(state_files(fs)) == len(files)


@pytest.mark.thorough
def test_a_fork_that_ends_leaves_the_state_of_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, sys, torch; from statehold import offload\n"
        "weight = torch.nn.Parameter(torch.ones(100_000))\n"
        f"optimizer = offload.AdamW([weight], tiers=[offload.Path({str(tmp_path)!r})],"
        " subgroup_bytes=49152)\n"
        "weight.grad = torch.ones(100_000)\n"
        "optimizer.step()\n"
        "child = os.fork()\n"
        "if child == 0: sys.exit()\n"
        "os.waitpid(child, 0)\n"
        "optimizer.step()\n"
        f"print(len(os.listdir({str(tmp_path / 'optimizer-0')!r})))"
    )
    done = scripts.run(["-c", code], timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 10
    assert not list(tmp_path.rglob("*.state"))  # the end of the program has removed them


def test_a_file_with_a_second_name_is_never_written(tmp_path: Path) -> None:
    """The other name may be part of a step."""
    path, step = tmp_path / "opt", tmp_path / "step"
    path.mkdir()
    step.mkdir()
    twins = Twins(SHAPES, [BF16], tiers=[offload.Path(path)], subgroup_bytes=SMALL)
    twins.train(2)
    for file in path.rglob("*.state"):
        os.link(file, step / file.name)
    kept = {file.name: file.read_bytes() for file in step.iterdir()}
    twins.train(4)
    twins.check()
    assert {file.name: file.read_bytes() for file in step.iterdir()} == kept
    twins.ours.close()
    assert {file.name: file.read_bytes() for file in step.iterdir()} == kept


def test_files_that_somebody_reads_are_replaced(tmp_path: Path) -> None:
    """They have one name, so they would wait for nothing. A reader keeps the bytes."""
    twins = Twins(SHAPES, [BF16], tiers=[offload.Path(tmp_path)], subgroup_bytes=SMALL)
    twins.train(1)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.state")}
    with contextlib.ExitStack() as readers:
        opened = [readers.enter_context(file.open("rb")) for file in before]
        twins.train(4)
        twins.check()
        assert len(list(tmp_path.rglob("*.state"))) == len(before)
        assert [file.read() for file in opened] == list(before.values())
    twins.ours.close()


class NoLeases:
    """A file system that refuses leases, as NFS, CephFS and FUSE do."""

    def __init__(self, fs: Fs) -> None:
        self.fs = fs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fs, name)

    def can_reuse(self, path: str) -> bool:
        return False


@pytest.mark.parametrize("is_saved", [False, True])
def test_files_do_not_gather_where_there_are_no_leases(tmp_path: Path, is_saved: bool) -> None:
    """A file is given up for each new one, so what was reserved stays reserved."""
    opt, run = tmp_path / "opt", tmp_path / "run"
    opt.mkdir()
    run.mkdir()
    with contextlib.closing(open_fs("threads")) as fs:
        files = StateFiles(cast("Fs", NoLeases(fs)), str(opt))
        files.reserve([4096] * 10)
        state, found = list[str](), list[int]()
        for _ in range(20):
            for _ in range(8):
                path, file = files.take(4096)
                file.close()
                if len(state) == 8:
                    files.give_back(state.pop(0))
                state.append(path)
            found.append(len(list(opt.rglob("*.state"))))
            for link in run.iterdir() if is_saved else ():
                link.unlink()
            for path in state if is_saved else ():
                os.link(path, run / Path(path).name)
        assert found[-1] == found[len(found) // 2]
        assert 10 <= found[-1] <= (26 if is_saved else 10)
        files.close()


def test_a_spare_file_that_is_open_elsewhere_is_passed_over(tmp_path: Path) -> None:
    """On a full disk it cost the space that a new file needs."""
    with contextlib.closing(open_fs("threads")) as fs:
        files = StateFiles(fs, str(tmp_path))
        files.reserve([4096] * 2)
        first, second = sorted(map(str, tmp_path.rglob("*.state")))
        if not fs.can_reuse(first):
            pytest.skip("this file system has no leases")
        with open(first, "rb"):
            path, file = files.take(4096)
            file.close()
            assert path == second
            files.give_back(path)
        assert sorted(map(str, tmp_path.rglob("*.state"))) == [first, second]
        path, file = files.take(4096)
        file.close()
        assert path in (first, second)
        files.close()


def test_a_directory_that_is_replaced_is_found(tmp_path: Path) -> None:
    path = tmp_path / "opt"
    path.mkdir()
    twins = Twins(SHAPES, [BF16], tiers=[offload.Path(path)], subgroup_bytes=SMALL)
    twins.train(2)
    restore = snapshot(twins)
    path.rename(tmp_path / "moved")
    (path / "optimizer-0").mkdir(parents=True)
    with pytest.raises(StorageError, match="unmounted, replaced or removed") as caught:
        twins.train(1)
    assert caught.value.errno == errno.ESTALE
    assert not list(path.rglob("*.state"))
    (path / "optimizer-0").rmdir()
    path.rmdir()
    (tmp_path / "moved").rename(path)
    restore()
    twins.train(1)
    twins.check()
    twins.ours.close()


def test_an_interrupt_leaves_a_state_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(SHAPES, [BF16], tiers=[offload.Path(tmp_path)], subgroup_bytes=SMALL)
    twins.train(2)
    kernel = state_of(twins.ours).rule.update
    calls: list[int] = []

    def interrupted(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        kernel(*arguments)

    monkeypatch.setattr(state_of(twins.ours).rule, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        twins.train(1)
    with pytest.raises(UsageError, match="belongs to no step"):
        twins.ours.step()
    twins.ours.close()


def test_errors_are_of_this_package(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StateholdError, match="not a directory"):
        offload.AdamW([torch.nn.Parameter(torch.ones(3))], tiers=[offload.Path(blocked)])
