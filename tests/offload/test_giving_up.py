"""A path that fails is given up: what is in memory goes elsewhere, what is lost needs a load."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import random
import re
import struct
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import statehold
from statehold import offload
from statehold._core import open_fs
from statehold.errors import MissingFileError, NoSpaceError, StorageError, UsageError
from statehold.offload import pipeline
from statehold.offload.store import StateFiles
from statehold.planners import placement
from support.faults import DEADLINE_S, must
from support.in_memory import SimFs, checkpointer_on
from support.mounts import ext4, nearly_full, tmpfs, why_no_ext4, why_no_tmpfs
from support.seeds import SEED
from support.twins import Twins, snapshot

BF16 = torch.bfloat16
SHAPES = [(80_000,), (129, 65)]
SMALL = 49_152
FAULTS = int(os.environ.get("STATEHOLD_OFFLOAD_FAULTS", "4"))
EXT4_SHUTDOWN, EXT4_SHUTDOWN_NO_LOG = 0x8004587D, 2  # EXT4_IOC_SHUTDOWN
T = TypeVar("T")
needs_tmpfs = pytest.mark.skipif(why_no_tmpfs() is not None, reason=str(why_no_tmpfs()))


@pytest.mark.skipif(why_no_ext4() is not None, reason=str(why_no_ext4()))
def test_files_are_reserved_all_or_none(tmp_path: Path) -> None:
    with ext4(tmp_path, 16 << 20) as root, contextlib.closing(open_fs("threads")) as fs:
        files = StateFiles(fs, str(root))
        files.reserve([4 << 20])
        before = taken(root)
        with pytest.raises(NoSpaceError):
            files.reserve([4 << 20] * 4)
        with pytest.raises(NoSpaceError):
            files.take(64 << 20)  # the file from before was to grow
        assert taken(root) == before
        path, file = files.take(4 << 20)
        file.close()
        files.give_back(path)
        assert taken(root) == before
        files.close()


def taken(root: Path) -> list[tuple[str, int]]:
    """The files below, and what each takes."""
    return [(str(each), each.stat().st_size) for each in root.rglob("*.state")]


@pytest.fixture(autouse=True)
def _no_path_is_found_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """So faults meet the transfers that they are for, and not files of a new placement."""
    monkeypatch.setattr(placement, "MOVES_PAY_AT", 2.0)


def simulated() -> SimFs:
    fs = SimFs(seed=1)
    fs.mkdir("one")
    fs.mkdir("two")
    return fs


def twins_on(*paths: str | Path, fs: SimFs | None = None) -> Twins:
    tiers = [offload.Path(path) for path in paths]
    return Twins(SHAPES, [BF16], tiers=tiers, subgroup_bytes=SMALL, fs=fs)


def given_up(twins: Twins) -> dict[str, str]:
    return {each.path: each.given_up for each in twins.ours.stats.paths if each.given_up}


def written(twins: Twins) -> dict[str, int]:
    return {each.path: each.written_bytes for each in twins.ours.stats.paths}


@pytest.mark.thorough
@pytest.mark.parametrize("operation", ["write", "open_write"])
@pytest.mark.parametrize(
    "code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.ENODEV, errno.ESTALE, errno.EDQUOT]
)
def test_a_write_that_fails_goes_to_another_path(
    operation: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    fs = simulated()
    twins = twins_on("one", "two", fs=fs)
    twins.train(2)
    fs.fail_next(operation, code, skip=3)
    with caplog.at_level(logging.WARNING, "statehold"):
        twins.train(1)
    must(fs.fired[f"injected {operation}"] == 1)
    ((path, why),) = given_up(twins).items()
    (record,) = caplog.records
    assert f"gives up its path {path}" in record.getMessage()
    assert f" to {path} failed: " in why
    assert errno.errorcode[code] in why
    before = written(twins)
    twins.train(3)
    twins.check()
    assert written(twins)[path] == before[path]
    assert {each.path for each in twins.ours.stats.paths if each.subgroups == 0} == {path}
    twins.ours.close()
    assert not [name for each in ("one", "two") for name, _ in fs.listdir(f"{each}/optimizer-0")]


@pytest.mark.parametrize("skip", range(0, 6, 2))
def test_a_read_that_fails_needs_a_load_and_then_goes_on(skip: int) -> None:
    fs = simulated()
    twins = twins_on("one", "two", fs=fs)
    twins.train(2)
    restore = snapshot(twins)
    fs.fail_next("read", errno.EIO, skip=skip)
    with pytest.raises(StorageError) as caught:
        twins.train(1)
    must(fs.fired["injected read"] == 1)
    assert caught.value.errno == errno.EIO
    ((path, why),) = given_up(twins).items()
    assert f" from {path} failed: " in why
    restore()
    before = written(twins)
    twins.train(3)
    twins.check()
    assert written(twins)[path] == before[path]


def test_a_restart_sees_an_update_of_all_subgroups_or_of_none(tmp_path: Path) -> None:
    """An update that a read has ended belongs to no step. The committed one is whole."""
    fs = simulated()
    twins = twins_on("one", "two", fs=fs)
    fs.mkdir("run")
    state = {"weights": list(twins.params), "optimizer": twins.ours}
    with checkpointer_on(fs, "run") as ckpt:
        twins.train(2)
        ckpt.save(2, state).wait("committed")
        back = snapshot(twins)
        twins.train(1)
        fs.fail_next("read", errno.EIO, skip=2)
        with pytest.raises(StorageError):
            twins.train(1)
        must(fs.fired["injected read"] == 1)
        with pytest.raises(UsageError, match="belongs to no step"):
            ckpt.save(4, state)
        back()  # both of the twins; and now ours from storage
        for weight in twins.params:
            torch.nn.init.zeros_(weight)
        assert ckpt.restore(state) == 2
        twins.check()
        twins.train(3)
        twins.check()
        ckpt.save(5, state).wait("committed")
    assert len(given_up(twins)) == 1


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_state_dict_that_fails_changes_nothing(operation: str) -> None:
    fs = simulated()
    twins = twins_on("one", fs=fs)
    twins.train(2)
    fs.fail_next(operation, errno.EIO)
    with pytest.raises(StorageError):
        twins.ours.state_dict()
    must(fs.fired[f"injected {operation}"] == 1)
    twins.check()
    twins.train(2)
    twins.check()


def test_a_path_that_has_lost_its_files_is_given_up(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    twins = twins_on(tmp_path / "one", tmp_path / "two")
    twins.train(2)
    restore = snapshot(twins)
    lost = list((tmp_path / "two").rglob("*.state"))
    for file in lost:
        file.unlink()
    must(lost)
    with pytest.raises(MissingFileError):
        twins.train(1)
    assert list(given_up(twins)) == [str(tmp_path / "two")]
    restore()
    twins.train(2)
    twins.check()
    twins.ours.close()


def test_the_last_path_is_not_given_up(caplog: pytest.LogCaptureFixture) -> None:
    fs = simulated()
    twins = twins_on("one", "two", fs=fs)
    twins.train(2)
    restore = snapshot(twins)
    fs.fail_next("write", errno.EIO)
    twins.train(1)
    fs.fail_next("write", errno.ENOSPC)
    with pytest.raises(StorageError, match="none is left, so this one is not given up"):
        twins.train(1)
    must(fs.fired["injected write"] == 2)
    assert len(given_up(twins)) == 1
    restore()
    twins.train(2)  # the path works again
    twins.check()


@needs_tmpfs
def test_a_file_system_that_fills_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps may hold its files by second names, so every update needs space for new ones."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with tmpfs(tmp_path, 64 << 20) as memory:
        (memory / "opt").mkdir()
        (memory / "step").mkdir()
        twins = twins_on(memory / "opt", disk)
        twins.train(2)
        for file in (memory / "opt").rglob("*.state"):
            os.link(file, memory / "step" / file.name)
        with nearly_full(memory, 2 * SMALL):
            twins.train(3)
        twins.check()
        assert errno.errorcode[errno.ENOSPC] in given_up(twins)[str(memory / "opt")]
        assert "Committed steps are safe" in caplog.text
        twins.ours.close()


@pytest.mark.thorough
@needs_tmpfs
def test_the_only_path_fills_up_with_kept_steps(tmp_path: Path) -> None:
    """The error says what is to be done, and a restore goes on from the committed step."""
    with tmpfs(tmp_path, 64 << 20) as memory:
        (memory / "opt").mkdir()
        twins = twins_on(memory / "opt")
        state = {"weights": list(twins.params), "optimizer": twins.ours}
        with statehold.Checkpointer(memory / "run") as ckpt:
            twins.train(2)
            ckpt.save(2, state).wait("committed", DEADLINE_S)
            with nearly_full(memory, 2 * SMALL), pytest.raises(NoSpaceError) as caught:
                twins.train(2)
            failed = rf"writing subgroup \d+ to {memory}/opt: its file needs [\d.]+ KiB"
            assert re.fullmatch(failed, caught.value.facts["failed"])
            assert caught.value.facts["path"].startswith(f"{memory}/opt/optimizer-")
            assert "free space" in (caught.value.hint or "")
            assert "committed steps are untouched" in (caught.value.hint or "")
            with pytest.raises(UsageError, match="belongs to no step"):
                ckpt.save(3, state)
            assert not given_up(twins)
            assert ckpt.restore(state) == 2
            other = twins_on(tmp_path)
            assert ckpt.restore({"weights": list(other.params), "optimizer": other.ours}) == 2
            for each in (twins, other):
                each.random.manual_seed(3)
                each.ours.zero_grad()
                for _ in range(2):
                    each.backward()
                    each.ours.step()
                    each.ours.zero_grad()
            assert all(map(torch.equal, twins.params, other.params))
            ckpt.save(4, state).wait("committed", DEADLINE_S)
        twins.ours.close()


@needs_tmpfs
def test_a_path_that_is_unmounted_is_found(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with tmpfs(tmp_path, 64 << 20) as memory:
        twins = twins_on(disk, memory)
        twins.train(2)
        restore = snapshot(twins)
        subprocess.run(["umount", "-l", str(memory)], check=True)
        (memory / "optimizer-0").mkdir()  # what is below looks alike
        with pytest.raises(StorageError, match="unmounted, replaced or removed"):
            twins.train(1)
        assert list(given_up(twins)) == [str(memory)]
        restore()
        twins.train(2)
        twins.check()
        twins.ours.close()
        assert not list(memory.rglob("*.state"))
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(memory)], check=True)


def test_a_stalled_path_is_named_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = simulated()
    twins = twins_on("one", "two", fs=fs)
    twins.train(2)
    warned, said = threading.Event(), []

    def warning(*words: Any) -> None:
        said.append(words)
        warned.set()

    monkeypatch.setattr(pipeline, "STALL_S", 0.01)
    monkeypatch.setattr(pipeline.logger, "warning", warning)
    fs.hold()
    update = threading.Thread(target=twins.train, args=(1,))
    update.start()
    must(warned.wait(DEADLINE_S))
    while update.is_alive():
        if fs.waiting:
            fs.complete(0)
        update.join(0.001)
    text, what, seconds = said[0]
    assert re.fullmatch(r"(reading subgroup \d+ from|writing subgroup \d+ to) (one|two)", what)
    assert (text % (what, seconds)).startswith(f"an update waits: {what} takes ")
    assert seconds > 0


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(SEED, SEED + FAULTS))
def test_whatever_fails_no_bit_is_wrong(seed: int) -> None:
    """Random errors on three paths: each call succeeds, or can be repeated after a load."""
    chance = random.Random(seed)
    fs = SimFs(seed=seed, short_io=0.1, slow=0.1)
    names = ("one", "two", "three")
    for name in names:
        fs.mkdir(name)
    tiers = [offload.Path(name) for name in names]
    twins = Twins([(200_000,)], [BF16], tiers=tiers, subgroup_bytes=SMALL, fs=fs)
    twins.train(2)
    restore = snapshot(twins)
    for _ in range(8):
        operation = chance.choice(["read", "write", "open_read", "open_write"])
        code = chance.choice([errno.EIO, errno.ENOSPC, errno.ESTALE])
        count = chance.choice([1, 1, 3])
        fs.fail_next(operation, code, count=count, skip=chance.randrange(30))
        try:
            twins.train(1)
        except StorageError:
            again(restore)
        if chance.random() < 0.5:
            restore = again(lambda: snapshot(twins))
    fs.set_faults()
    twins.train(1)
    twins.check()
    must(sum(count for name, count in fs.fired.items() if name.startswith("injected")) >= 4)
    assert 1 <= len(given_up(twins)) <= 2
    twins.ours.close()


def again(call: Callable[[], T]) -> T:
    """What a call returns, once no error comes in between."""
    while True:
        with contextlib.suppress(StorageError):
            return call()


@pytest.mark.skipif(why_no_ext4() is not None, reason=str(why_no_ext4()))
def test_a_file_system_that_the_kernel_shuts_down(tmp_path: Path) -> None:
    """As after an error of its device: from then on, all that it is asked gets EIO."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with ext4(tmp_path, 32 << 20) as broken:
        twins = twins_on(disk, broken)
        twins.train(2)
        restore = snapshot(twins)
        fd = os.open(broken, os.O_RDONLY)
        fcntl.ioctl(fd, EXT4_SHUTDOWN, struct.pack("I", EXT4_SHUTDOWN_NO_LOG))
        os.close(fd)
        with pytest.raises(StorageError) as caught:
            twins.train(1)
        assert caught.value.errno == errno.EIO
        assert "EIO" in given_up(twins)[str(broken)]
        restore()
        twins.train(2)
        twins.check()
        twins.ours.close()
