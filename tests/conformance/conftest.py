"""One suite over every implementation of the file-system seam: io_uring, threads and sim."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from statehold import _core
from support.disks import BUFFER, Disk, open_or_skip
from support.in_memory import SimFs


@pytest.fixture(params=["io_uring", "threads", "sim"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    if request.param == "sim":
        fs: _core.Fs = SimFs(seed=1, short_io=0.3)
        fs.mkdir("run")
        root = "run"
    else:
        fs = open_or_skip(request.param)
        root = str(tmp_path)
    yield Disk(fs, root)
    fs.close()


@pytest.fixture
def engine(disk: Disk) -> Iterator[_core.Engine]:
    engine = _core.Engine(disk.fs, 3 * BUFFER, BUFFER)
    yield engine
    engine.close()
