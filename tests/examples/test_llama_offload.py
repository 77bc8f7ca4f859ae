"""`make demo OFFLOAD=1` in small: without a limit of memory, which is tested by itself.

With STATEHOLD_OFFLOAD_DEMO=1 it runs as people see it, under the limit, in two minutes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from support import scripts
from support.faults import DEADLINE_S, must
from support.llama import LLAMA, call, imported

torch = pytest.importorskip("torch")

MODULES = ("journal", "memory", "report", "report_offload", "story", "story_alone", "story_offload")
TINY = ("--dim=64", "--layers=2", "--heads=4", "--kv-heads=2", "--seq=16", "--subgroup=48KiB",
        "--threads=1")  # fmt: skip
FULL = os.environ.get("STATEHOLD_OFFLOAD_DEMO") == "1"


@pytest.fixture(scope="module")
def llama() -> Iterator[SimpleNamespace]:
    with imported(*MODULES) as modules:
        yield modules


def demo(llama: SimpleNamespace, out: Path, rate: str) -> object:
    paths = (f"{out}/one={rate}", f"{out}/other={rate}")
    options = (*TINY, "--data", str(LLAMA))
    return llama.story.Demo(out=out, steps=5, kill_at=3, options=options, offload=paths)


@pytest.mark.thorough
def test_the_story_in_small(llama, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(llama.story_offload, "call", call)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")
    monkeypatch.setattr(llama.story_offload.resource, "setrlimit", lambda *_: None)  # of this test
    llama.story_offload.carry_out(demo(llama, tmp_path / "demo", "5MB"))
    said = capfd.readouterr().out
    assert "now SIGKILL" in said
    assert re.search("killed in update 3, resumed from step [12], equal bit for bit", said)
    assert "weights, masters and moments are equal" in said
    assert (tmp_path / "demo/timeline.png").stat().st_size > 10_000

    log = tmp_path / "demo/run/log.jsonl"
    text = log.read_text()
    last = next(line for line in reversed(text.splitlines()) if '"state"' in line)
    log.write_text(text.replace(last, last.replace('"sha256": "', '"sha256": "x')))
    monkeypatch.setattr(llama.story_offload, "call", lambda *_: 0)
    with pytest.raises(llama.story.DemoError, match="states at the end differ"):
        llama.story_offload.compare_states(demo(llama, tmp_path / "demo", "5MB"), [])


LIMITED = """
import torch
from memory import data_bytes, limit_memory
torch.zeros(32 << 20)
limit_memory(data_bytes() + (64 << 20))
try:
    torch.zeros(32 << 20)
except RuntimeError as error:
    print("refused", error)
"""


def test_the_kernel_enforces_the_limit(llama, capfd) -> None:
    env = os.environ | {"PYTHONPATH": str(LLAMA)}
    must(scripts.start(["-c", LIMITED], env=env).wait(DEADLINE_S) == 0)
    assert "refused" in capfd.readouterr().out


@pytest.mark.skipif(not FULL, reason="STATEHOLD_OFFLOAD_DEMO=1")
def test_the_demo_as_people_see_it(tmp_path) -> None:
    words = [LLAMA / "demo.py", "--offload", "--out", tmp_path / "demo", "--steps", "4"]
    script = scripts.start(words, stdout=scripts.PIPE)
    said, _ = script.communicate(timeout=600)
    must(script.wait() == 0, said)
    assert "equal bit for bit" in said
