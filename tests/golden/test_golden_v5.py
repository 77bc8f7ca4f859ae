"""Steps of version 5, written once and for all, are read with what they say of themselves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold import _core
from statehold.cli import main
from statehold.errors import FormatVersionError
from statehold.format import manifest
from statehold.format.entries import About, Origin
from statehold.format.manifest import Manifest
from support.faults import SMALL
from support.ranks import Ranks

GOLDEN = Path(__file__).parent / "v5"
ALONE, TOGETHER = 11, 12


def said(step: int) -> About:
    path = GOLDEN / f"step-{step:012d}" / "manifest.json"
    return Manifest.decode(path.read_bytes(), str(path)).about


def test_what_a_step_says_of_itself() -> None:
    about = said(ALONE)
    assert about.parent == Origin("/runs/base", 1000, "0123456789abcdef" * 4)
    assert about.tags == ("best", "für später")
    assert math.isnan(about.metrics["broken"])
    finite = {name: value for name, value in about.metrics.items() if name != "broken"}
    assert finite == {"val_loss": 1.25, "tokens": 1_000_000, "low": -math.inf}
    assert said(TOGETHER) == About(tags=("milestone",))


@pytest.mark.parametrize(("step", "name", "shape"), [(ALONE, "weight", (4, 3)),
                                                    (TOGETHER, "rows", (7, 2))])  # fmt: skip
def test_they_restore(step: int, name: str, shape: tuple[int, ...]) -> None:
    wanted = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    fs = _core.open_fs("threads")
    with Ranks(fs, 2, str(GOLDEN)) as ranks:
        states: list[Any] = [{"model": {name: torch.zeros(shape)}} for _ in range(2)]
        ranks.each(lambda rank: ranks.ckpts[rank].restore(states[rank], step=step))
    fs.close()
    assert all(torch.equal(state["model"][name], wanted) for state in states)
    assert main(["verify", str(GOLDEN / f"step-{step:012d}")]) == 0


@pytest.mark.parametrize("step", [ALONE, TOGETHER])
def test_an_older_reader_says_that_it_is_newer(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "VERSION", 4)
    with statehold.Checkpointer(GOLDEN, **SMALL) as ckpt, pytest.raises(FormatVersionError):
        ckpt.restore({}, step=step)
