"""Of files that are far, the ranges that are needed come near, and no others."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

import statehold
from statehold.checkpoint.restore.read_plan import ReadPlan
from statehold.errors import (
    ChecksumError,
    MissingFileError,
    NoSpaceError,
    StorageError,
    UnavailableError,
)
from statehold.io.objects.parallel import Extent
from statehold.layout.layout import Box
from statehold.process import file_locks
from statehold.process.file_locks import LockFile
from statehold.process.host_memory import SHARED_MEMORY
from statehold.steps import near_files
from statehold.steps.near_files import GAP_BYTES, PREFIX, NearFiles, coalesced
from statehold.units import MiB
from support.faults import DEADLINE_S, SMALL
from support.inside import inside

NAME = "rank-00000-of-00001.safetensors"
FAR = bytes(range(256)) * (64 << 10)  # 16 MiB


class Far:
    """A far file; counts what is fetched."""

    def __init__(self) -> None:
        self.fetched: list[tuple[int, int]] = []

    def __call__(self, targets: Sequence[Extent]) -> None:
        for begin, memory in targets:
            self.fetched.append((begin, begin + len(memory)))
            memory[:] = FAR[begin : begin + len(memory)]


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([], []),
        ([(5, 5)], []),
        ([(0, 1), (1, 2)], [(0, 2)]),
        ([(10, 20), (0, 5)], [(0, 5), (10, 20)]),
        ([(0, 5), (8, 9)], [(0, 9)]),
        ([(0, 5), (9, 10)], [(0, 5), (9, 10)]),
        ([(0, 10), (2, 3), (12, 13)], [(0, 13)]),
    ],
)
def test_ranges_that_are_close_are_one(ranges, expected) -> None:
    assert coalesced(ranges, gap_bytes=3) == expected


def test_only_what_is_needed_comes_and_is_where_it_was(tmp_path) -> None:
    near, far = NearFiles([str(tmp_path)]), Far()
    needed = [(0, 100), (5 * MiB, 6 * MiB), (6 * MiB + 10, 7 * MiB), (len(FAR) - 1, len(FAR))]
    path = Path(near.bring(1, NAME, len(FAR), needed, far))
    assert far.fetched == [(0, 100), (5 * MiB, 7 * MiB), (len(FAR) - 1, len(FAR))]
    content = path.read_bytes()
    assert len(content) == len(FAR)
    for begin, end in far.fetched:
        assert content[begin:end] == FAR[begin:end]
    assert not any(content[8192 : 5 * MiB])
    assert path.stat().st_blocks * 512 < 3 * MiB
    near.close()
    assert not list(tmp_path.iterdir())


def test_all_of_a_file_and_an_empty_one(tmp_path) -> None:
    near, far = NearFiles([str(tmp_path)]), Far()
    whole = Path(near.bring(1, NAME, len(FAR), None, far))
    assert whole.read_bytes() == FAR
    empty = Path(near.bring(1, "empty", 0, None, far))
    assert empty.read_bytes() == b""
    near.close()


def test_files_go_when_the_step_is_not_read_any_more(tmp_path) -> None:
    near, far = NearFiles([str(tmp_path)]), Far()
    with near.reading(1):
        with near.reading(1), near.reading(2):
            paths = [Path(near.bring(step, NAME, 100, None, far)) for step in (1, 2)]
        assert [path.exists() for path in paths] == [True, False]
        again = Path(near.bring(1, NAME, 100, None, far))  # the one before is of no use
        assert [again.exists(), paths[0].exists()] == [True, False]
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_fetched_leaves_nothing(tmp_path) -> None:
    def fails(_: Sequence[Extent]) -> None:
        raise UnavailableError("cannot read")

    near = NearFiles([str(tmp_path)])
    with pytest.raises(UnavailableError):
        near.bring(1, NAME, 1000, None, fails)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A memory file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_where_there_is_room_is_where_it_goes(small, tmp_path) -> None:
    near, far = NearFiles([str(small), str(tmp_path)]), Far()
    few = near.bring(1, NAME, len(FAR), [(0, 1000)], far)
    assert few.startswith(str(small))
    many = near.bring(2, NAME, len(FAR), None, far)
    assert not many.startswith(str(small))
    near.close()
    with pytest.raises(NoSpaceError, match="not enough space"):
        NearFiles([str(small)]).bring(1, NAME, len(FAR), None, far)


def test_room_that_others_take_meanwhile_is_an_error_and_no_signal(small, monkeypatch) -> None:
    much = os.statvfs("/dev/shm")
    monkeypatch.setattr(os, "statvfs", lambda _: much)
    with pytest.raises(NoSpaceError) as caught:
        NearFiles([str(small)]).bring(1, NAME, len(FAR), None, Far())
    assert caught.value.errno == errno.ENOSPC
    assert not list(small.iterdir())


def test_room_that_other_ranks_take_meanwhile_is_found_elsewhere(tmp_path, monkeypatch) -> None:
    first, second, allocate = tmp_path / "first", tmp_path / "second", os.posix_fallocate
    first.mkdir()
    second.mkdir()

    def full(fd: int, *extent: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(first)):
            raise OSError(errno.ENOSPC, "full")
        allocate(fd, *extent)

    monkeypatch.setattr(os, "posix_fallocate", full)
    near = NearFiles([str(first), str(second)])
    path = Path(near.bring(1, NAME, len(FAR), None, Far()))
    assert path.is_relative_to(second)
    assert path.read_bytes() == FAR
    assert not list(first.iterdir())
    near.close()


def test_a_directory_that_is_not_there_yet_is_made(tmp_path) -> None:
    near = NearFiles([str(tmp_path / "runs" / "new")])
    path = Path(near.bring(1, NAME, len(FAR), None, Far()))
    assert path.is_relative_to(tmp_path / "runs" / "new")
    assert path.read_bytes() == FAR
    near.close()


def test_a_directory_that_cannot_be_made_is_an_error_with_a_name(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        NearFiles([str(tmp_path / "file" / "nothing")]).bring(1, NAME, 10, None, Far())


KILLED = """
import os, signal, sys
from statehold.steps.near_files import NearFiles
print(os.getpid(), flush=True)
kill = lambda _: os.kill(os.getpid(), signal.SIGKILL)
NearFiles([sys.argv[1]]).bring(1, "data", 1000, None, kill)
"""


@pytest.mark.parametrize("where", ["memory", "run"])
def test_what_a_killed_process_has_left_goes_with_the_next_fetch(tmp_path, where: str) -> None:
    """The next fetch need not go to the same place: room in memory comes and goes."""
    place = SHARED_MEMORY if where == "memory" else str(tmp_path)
    left = Path(place).glob
    with contextlib.closing(NearFiles([place])) as live:
        kept = Path(live.bring(1, NAME, 1000, None, Far()))
        done = subprocess.run(
            [sys.executable, "-c", KILLED, place], capture_output=True, check=False
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        names = f"{PREFIX}{int(done.stdout)}-*"
        assert [each.name for folder in left(names) for each in folder.iterdir()] == ["data"]
        with contextlib.closing(NearFiles([SHARED_MEMORY, place])) as near:
            near.bring(1, NAME, 1000, None, Far())
        assert not list(left(names))
        assert kept.read_bytes() == FAR[:1000]
    assert not list(left(f"{PREFIX}{os.getpid()}-*"))


def test_what_other_hosts_have_fetched_into_a_shared_run_stays(tmp_path, monkeypatch) -> None:
    """Their locks cannot be seen here: they are in the memory of that host, or container."""
    run = tmp_path / "run"
    with contextlib.closing(NearFiles([str(run)])) as far:
        with monkeypatch.context() as patch:
            patch.setattr(near_files, "memory_path", lambda: str(tmp_path / "locks"))
            kept = Path(far.bring(1, NAME, 1000, None, Far()))
        with contextlib.closing(NearFiles([str(run)])) as near:
            near.bring(1, NAME, 1000, None, Far())
        assert kept.read_bytes() == FAR[:1000]


def test_locks_are_known_by_their_file_and_by_the_boot_of_the_host(tmp_path, monkeypatch) -> None:
    one, same, other = (LockFile(str(tmp_path / name)) for name in ("a", "a", "b"))
    assert one.host == same.host != other.host
    before = one.host
    monkeypatch.setattr(file_locks, "boot_id", lambda: "another")
    assert one.host != before
    for each in (one, same, other):
        each.close()


# -- of a step in an object store ------------------------------------------------------------------

ROWS, ROW_BYTES = 8, 4 * MiB


def content() -> dict[str, torch.Tensor]:
    numel = ROW_BYTES // 8
    return {
        "w": (torch.arange(ROWS * numel) * 31).reshape(ROWS, numel),
        "b": torch.arange(numel) * 7,
    }


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[statehold.Checkpointer]:
    """A run whose only copy left is in an object store."""
    pytest.importorskip("obstore")
    (tmp_path / "bucket").mkdir()
    store = statehold.ObjectStore(f"file://{tmp_path}/bucket/run")
    with statehold.Checkpointer(
        tmp_path / "run", levels=[statehold.Directory(), store], **SMALL
    ) as saving:
        saving.save(1, content()).wait("committed", DEADLINE_S)
    with statehold.Checkpointer(
        tmp_path / "other", levels=[statehold.Directory(), store], **SMALL
    ) as reading:
        yield reading


def test_a_run_that_is_new_on_its_host_takes_what_memory_has_no_room_for(
    ckpt, tmp_path, monkeypatch
) -> None:
    free = near_files.free_bytes
    monkeypatch.setattr(near_files, "free_bytes", lambda at: at != SHARED_MEMORY and free(at))
    assert not (tmp_path / "other").exists()
    state = {name: torch.zeros_like(tensor) for name, tensor in content().items()}
    assert ckpt.restore(state) == 1
    assert all(torch.equal(state[name], tensor) for name, tensor in content().items())


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes of data files came from the store, each time."""
    from statehold.io.objects.client import ObjectClient  # here, as it needs obstore

    found: list[int] = []
    fetch = ObjectClient.fetch

    def counted(self: ObjectClient, name: str, targets: Sequence[Extent]) -> None:
        found.extend(len(target) for _, target in targets)
        fetch(self, name, targets)

    monkeypatch.setattr(ObjectClient, "fetch", counted)
    return found


def test_a_restore_of_some_fetches_some(ckpt, fetched) -> None:
    live = {name: torch.zeros_like(tensor) for name, tensor in content().items()}
    got = ckpt.restore(live, only=["b"])
    assert got == 1
    assert torch.equal(live["b"], content()["b"])
    assert not live["w"].any()
    assert ROW_BYTES <= sum(fetched) <= ROW_BYTES + 2 * GAP_BYTES


def test_a_restore_of_all_fetches_all_once(ckpt, fetched) -> None:
    live = {name: torch.zeros_like(tensor) for name, tensor in content().items()}
    got = ckpt.restore(live)
    assert got == 1
    assert torch.equal(live["w"], content()["w"])
    total = (ROWS + 1) * ROW_BYTES
    assert total <= sum(fetched) <= total + GAP_BYTES


def test_a_rank_that_needs_a_half_fetches_a_half(ckpt, fetched) -> None:
    """As ranks do that share a tensor which one rank has saved."""
    opened, whole = inside(ckpt), content()["w"]
    steps = opened.levels.nearest(opened.pipeline.drain)
    with steps.protect(1):
        saved = steps.open(1)
        shape = tuple(whole.shape)
        (chunk,) = saved.chunks("w", Box.whole(shape), None)
        half = torch.zeros(ROWS // 2, shape[1], dtype=whole.dtype)
        plan = ReadPlan(saved)
        plan.place("w", chunk, Box((ROWS // 2, 0), tuple(half.shape)), half)
        plan.start(opened.runtime.engine, partial(steps.find, 1)).finish()
    assert torch.equal(half, whole[ROWS // 2 :])
    assert half.nbytes <= sum(fetched) <= half.nbytes + 2 * GAP_BYTES


def test_a_step_that_is_damaged_there_is_found_to_be(ckpt, tmp_path) -> None:
    (data,) = (tmp_path / "bucket").rglob("*.safetensors")
    raw = bytearray(data.read_bytes())
    raw[20 * MiB] ^= 1
    data.write_bytes(raw)
    live = {name: torch.zeros_like(tensor) for name, tensor in content().items()}
    with pytest.raises(ChecksumError):
        ckpt.restore(live)
    raw[20 * MiB] ^= 1
    data.write_bytes(raw[:-1])
    with pytest.raises(MissingFileError):
        ckpt.restore(live)
    assert not list(Path(SHARED_MEMORY).glob(f"{PREFIX}{os.getpid()}-*"))
