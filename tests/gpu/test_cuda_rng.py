"""The generators of CUDA devices: what a restore does, but for the Rng, leaves no trace in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import statehold
from statehold.tensors.kinds.rng import unchanged
from support.faults import DEADLINE_S, SMALL
from support.gpu import needs_cuda

pytestmark = needs_cuda


def drawn() -> list[float]:
    return [float(torch.rand((), device=device)) for device in ("cpu", "cuda")]


def test_a_block_leaves_no_trace() -> None:
    torch.manual_seed(3)
    expected = drawn()
    torch.manual_seed(3)
    with unchanged():
        assert drawn() == expected
    assert drawn() == expected


class Drawing:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        drawn()


def test_objects_that_draw_are_restored_after_the_generators(tmp_path: Path) -> None:
    state = {"rng": statehold.Rng(), "it": Drawing()}
    torch.manual_seed(5)
    drawn()
    with statehold.Checkpointer(tmp_path, **SMALL) as ckpt:
        ckpt.save(1, state).wait("committed", DEADLINE_S)
        expected = drawn()
        for name in ("rng", "it"):
            ckpt.restore({name: state[name]}, only=[name])
    assert drawn() == expected
