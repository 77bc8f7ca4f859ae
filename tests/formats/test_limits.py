"""Exports and imports that are killed go on, appear whole or not at all, and take little memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

import statehold
from statehold.errors import RunBusyError
from statehold.integrations.formats import archives
from statehold.integrations.formats.partial import Journal, OutFile, PartialExport
from statehold.integrations.formats.streamed import MappedFile
from statehold.units import MiB, parse_bytes
from support import scripts
from support.transfers import check_equal, saved

# What is done until the kill, then the kill; and what is found when it goes on.
KILLED = """
import os, signal, sys
from statehold.integrations.formats import archives, partial
import statehold
partial.SYNC_BYTES = 1 << 20
archives.SMALL_BYTES = 1 << 19
def kill(done, total):
    if done >= total * 3 // 4:
        os.kill(os.getpid(), signal.SIGKILL)
kind, source, target = sys.argv[1:]
if kind == "import":
    statehold.import_step(source, target, report=kill)
else:
    statehold.export_step(source, target, kind, report=kill)
"""

MEASURED = """
import re, sys
import torch, statehold
from statehold.integrations.formats import convert
def field(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
kind, source, target = sys.argv[1:]
open("/proc/self/clear_refs", "w").write("5")
before = field("VmRSS")
if kind == "import":
    statehold.import_step(source, target)
else:
    statehold.export_step(source, target, kind)
print(field("VmHWM") - before)
"""


def run_script(code: str, *words: object) -> tuple[int | None, str]:
    script = scripts.start(["-c", code, *map(str, words)], stdout=scripts.PIPE)
    out, _ = script.communicate()
    return script.returncode, out


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each write from now on."""
    sizes: list[int] = []
    write = OutFile.write

    def counting(self: OutFile, data: bytes | memoryview, offset: int) -> None:
        sizes.append(len(data))
        write(self, data, offset)

    monkeypatch.setattr(OutFile, "write", counting)
    return sizes


def state() -> dict[str, object]:
    torch.manual_seed(1)
    return {"model": {f"w{i}": torch.randn(1 << 18) for i in range(8)}}


@pytest.mark.parametrize("kind", ["hf", "torch", "dcp"])
def test_an_export_that_is_killed_goes_on(
    tmp_path: Path, kind: str, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "SMALL_BYTES", 1 << 19)
    step = saved(tmp_path / "run", 1, state())
    code, _ = run_script(KILLED, kind, step, tmp_path / "out")
    assert code == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    journal = (tmp_path / "out.partial" / ".journal").read_text()
    assert journal.count("\n") > 2
    statehold.export_step(step, tmp_path / "out", kind)
    assert sum(written) < 5 * MiB
    assert not (tmp_path / "out.partial").exists()
    statehold.import_step(tmp_path / "out", f"{tmp_path / 'back'}@1")
    check_equal(statehold.load(tmp_path / "back", "model"), statehold.load(step, "model"))


KILLED_AS_IT_CLEARS = """
import os, signal, sys
import statehold
os.unlink = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
statehold.export_step(*sys.argv[1:], "hf")
"""


def test_an_export_that_is_killed_as_it_clears_another_keeps_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = saved(tmp_path / "run", 1, {"model": {"a": torch.ones(9)}})

    def killed(_: PartialExport) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PartialExport, "commit", killed)
        with pytest.raises(KeyboardInterrupt):
            statehold.export_step(step, tmp_path / "out", "dcp")
    assert len(os.listdir(tmp_path / "out.partial")) > 1
    code, _ = run_script(KILLED_AS_IT_CLEARS, step, tmp_path / "out")
    assert code == -signal.SIGKILL
    statehold.export_step(step, tmp_path / "out", "hf")
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


def test_an_import_that_is_killed_goes_on(tmp_path: Path, written: list[int]) -> None:
    step = saved(tmp_path / "run", 1, state())
    statehold.export_step(step, tmp_path / "hf", "hf")
    code, _ = run_script(KILLED, "import", tmp_path / "hf", f"{tmp_path / 'new'}@5")
    assert code == -signal.SIGKILL
    assert statehold.open(tmp_path / "new").steps() == []
    written.clear()
    statehold.import_step(tmp_path / "hf", f"{tmp_path / 'new'}@5")
    assert sum(written) < 5 * MiB
    check_equal(statehold.load(tmp_path / "new", "model"), statehold.load(step, "model"))


def test_work_goes_on_with_the_same_source_only(tmp_path: Path) -> None:
    tmp_path.joinpath("work").mkdir()
    directory = str(tmp_path / "work")
    with contextlib.closing(Journal(directory, "one")) as journal:
        assert journal.is_fresh
        journal.begin()
        journal.note("a", "sum")
        journal.flush()
        journal.note("b", "never flushed")
        with pytest.raises(RunBusyError):
            Journal(directory, "one")
    with open(tmp_path / "work" / ".journal", "a") as file:
        file.write('["c", "cu')
    with contextlib.closing(Journal(directory, "one")) as journal:
        assert not journal.is_fresh
        assert [journal.get(key) for key in "abc"] == ["sum", None, None]
    with contextlib.closing(Journal(directory, "two")) as journal:
        assert journal.is_fresh
        assert journal.get("a") is None


# The engine's buffers, one part on each side, and what Python itself takes.
MEMORY_MAX = 128 * MiB
STATE_BYTES = parse_bytes(os.environ.get("STATEHOLD_TRANSFER_BYTES", "512MiB"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    weights = torch.zeros(STATE_BYTES // 2, dtype=torch.bfloat16)
    return saved(tmp_path_factory.mktemp("large") / "run", 1, {"model": {"w": weights}})


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["hf", "torch", "dcp"])
def test_memory_does_not_grow_with_the_state(tmp_path: Path, large: str, kind: str) -> None:
    code, kib = run_script(MEASURED, kind, large, tmp_path / "out")
    assert code == 0
    print(f"{kind}: {int(kib) >> 10} MiB for {STATE_BYTES // MiB} MiB, out")
    assert int(kib) * 1024 < MEMORY_MAX < STATE_BYTES
    code, kib = run_script(MEASURED, "import", tmp_path / "out", f"{tmp_path / 'back'}@1")
    assert code == 0
    print(f"{kind}: {int(kib) >> 10} MiB for {STATE_BYTES // MiB} MiB, in")
    assert int(kib) * 1024 < MEMORY_MAX
    shutil.rmtree(tmp_path)  # so that the two sides of several formats fit on a small disk


NO_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"


@pytest.mark.skipif(NO_OVERCOMMIT, reason="this host gives no map that is larger than its memory")
def test_a_file_may_be_larger_than_the_memory_of_the_host(tmp_path: Path) -> None:
    told = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    memory, swap = (int(told[name].split()[0]) << 10 for name in ("MemTotal", "SwapTotal"))
    size, path = memory + swap + (1 << 30), tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(size)  # a hole, which takes no space
    found = MappedFile(str(path)).streamed(torch.uint8, (4,), size - 4)
    assert bytes(next(found.views())) == bytes(4)
