"""Every flipped bit of a step is found on restore, and the right tensor or file is blamed.

Every byte of every file of a step is flipped, by turns, in one of its bits: of steps of one rank
and of two, restored by Checkpointers and read by a StorageReader. Where that takes long, the
everyday run takes some of them; STATEHOLD_FLIPS=all takes every byte.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from statehold import Io
from statehold.encoding import header
from statehold.errors import ChecksumError, CorruptionError, ManifestError, PeerFailedError
from statehold.integrations.dcp import StorageReader
from support.endpoints import machine_of
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs, checkpointer_on
from support.ranks import RUN, Ranks

ALL = os.environ.get("STATEHOLD_FLIPS") == "all"
STEP = f"{RUN}/step-000000000007"
BYTES_MAX = 1 << 20
HEADER = "none: the header of the file"
Blame = dict[str, Any]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def state(rank: int, filled: bool = True) -> dict[str, Any]:
    def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        made = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape) + rank
        return (made if filled else torch.zeros(shape)).to(dtype)

    return {
        "w": tensor(torch.float32, 4, 3),
        "b": tensor(torch.int64, 2),
        "small": tensor(torch.uint8, 3),
        "values": {"epoch": 3, "odd": (1, 2.5)},
    }


class Image:
    """The files of a step on a simulated disk, and whose each byte is."""

    def __init__(self, fs: SimFs) -> None:
        self.fs = fs
        names = [name for name, _ in fs.listdir(STEP)]
        self.files = {name: fs.read_file(f"{STEP}/{name}", BYTES_MAX) for name in names}

    def flips(self, stride: int, padding_stride: int) -> Iterator[tuple[str, int, Blame]]:
        """Flip one bit after the other, and put each back; what an error must say."""
        for name, raw in self.files.items():
            is_data = name.endswith(".safetensors")
            text_end = 8 + len(raw[8:4096].rstrip()) if is_data else len(raw)
            rest = range(text_end, 4096, padding_stride) if is_data else range(0)
            data = range(4096, len(raw)) if is_data else range(0)
            places = [*range(0, text_end, stride), *rest, *data]
            owners = self._owners(name, raw) if is_data else {}
            for at in places:
                self.fs.corrupt(f"{STEP}/{name}", at, 1 << at % 8)
                blame = {"file": f"{STEP}/{name}"}
                if is_data:
                    blame["tensor"] = owners.get(at, HEADER)
                yield name, at, blame
                self.fs.corrupt(f"{STEP}/{name}", at, 1 << at % 8)
            assert self.fs.read_file(f"{STEP}/{name}", BYTES_MAX) == raw

    @staticmethod
    def _owners(name: str, raw: bytes) -> dict[int, str]:
        entries, _, begin = header.decode(raw, len(raw), name)
        return {begin + at: entry.name for entry in entries for at in range(entry.begin, entry.end)}


def judge(error: Exception, blame: Blame) -> None:
    expected = ChecksumError if "tensor" in blame else ManifestError
    assert type(error) is expected, error
    assert {name: error.facts[name] for name in blame} == blame


def flipped(restore: Callable[[], None], image: Image, stride: int, padding_stride: int) -> int:
    count = 0
    for _, _, blame in image.flips(stride, padding_stride):
        with pytest.raises(CorruptionError) as caught:
            restore()
        judge(caught.value, blame)
        count += 1
    return count


@pytest.mark.thorough
def test_a_step_of_one_rank(record_property: Callable[[str, object], None]) -> None:
    fs = SimFs(seed=1)
    with checkpointer_on(fs, RUN, **SMALL) as ckpt:
        ckpt.save(7, state(0)).wait("committed", DEADLINE_S)
        live, image = state(0, False), Image(fs)

        def restore() -> None:
            ckpt.restore(live, 7)

        count = flipped(restore, image, 1, 1)
        record_property("flips", count)
        restore()
    assert count > 5000
    assert live["w"].equal(state(0)["w"])


def reader_on(fs: SimFs) -> StorageReader:
    reader = StorageReader(STEP, staging_bytes="2MiB", io=Io(buffer_bytes="1MiB", copy_threads=1))
    machine_of(reader).borrowed_fs = fs
    return reader


def load(fs: SimFs, into: dict[str, Any]) -> None:
    reader = reader_on(fs)
    reader.read_metadata()  # torch wraps what this raises in an assertion
    try:
        dcp.load(into, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        [cause] = error.failures.values()
        raise cause[0] from None


@pytest.mark.thorough
def test_a_step_of_one_rank_by_a_storage_reader() -> None:
    fs = SimFs(seed=1)
    with checkpointer_on(fs, RUN, **SMALL) as ckpt:
        ckpt.save(7, state(0)).wait("committed", DEADLINE_S)
    wanted = {name: torch.zeros_like(state(0)[name]) for name in ("w", "b", "small")}
    count = flipped(lambda: load(fs, wanted), Image(fs), *((1, 1) if ALL else (7, 1009)))
    assert count > 200
    load(fs, wanted)
    assert wanted["w"].equal(state(0)["w"])


@pytest.mark.thorough
def test_a_step_of_two_ranks() -> None:
    fs = SimFs(seed=1)
    with Ranks(fs, 2) as ranks:
        ranks.save(7, state)
        image, count = Image(fs), 0
        live = [state(rank, False) for rank in range(2)]
        for name, _, blame in image.flips(*((1, 1) if ALL else (3, 211))):
            errors = ranks.outcomes(lambda rank: ranks.ckpts[rank].restore(live[rank], 7))
            finders = [each for each in errors if isinstance(each, ChecksumError | ManifestError)]
            assert finders, (name, errors)
            for each in finders:
                judge(each, blame)
            for each in errors:
                assert isinstance(each, CorruptionError | PeerFailedError), each
            count += 1
        assert count > 900
        got = ranks.each(lambda rank: ranks.ckpts[rank].restore(live[rank], 7))
        assert got == [7, 7]
    assert live[1]["w"].equal(state(1)["w"])
