"""Saves with no update between them share the staging memory: the older one always goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import statehold
from statehold import Io
from support.faults import DEADLINE_S
from support.inside import inside

MIB = 1 << 18  # float32 elements


class Net(nn.Module):
    """Parameters that are copied lazily, and a buffer that save() copies before it returns."""

    def __init__(self, lazy_mib: int, eager_mib: int) -> None:
        super().__init__()
        tensors = (torch.randn(MIB) for _ in range(lazy_mib))
        self.weights = nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)
        self.average: torch.Tensor
        self.register_buffer("average", torch.randn(eager_mib * MIB))


def run_to_its_end(ckpt: statehold.Checkpointer, body: Callable[[], None]) -> None:
    """A body that hangs fails the test: closing the engine below it fails its saves, which ends
    it."""
    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            body()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(DEADLINE_S)
    is_stuck = thread.is_alive()
    if is_stuck:
        inside(ckpt).runtime.engine.close()
    thread.join()
    assert not is_stuck, "the saves do not end"
    if raised:
        raise raised[0]


@pytest.mark.parametrize(("lazy_mib", "eager_mib", "buffers"), [(8, 8, 4), (8, 2, 2), (2, 8, 3)])
def test_an_eager_copy_leaves_an_older_save_its_buffers(
    tmp_path: Path, lazy_mib: int, eager_mib: int, buffers: int
) -> None:
    net = Net(lazy_mib, eager_mib)
    state = {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
    sizes = {"staging_bytes": f"{buffers}MiB", "io": Io(buffer_bytes="1MiB", profile=None)}
    with statehold.Checkpointer(tmp_path / "run", keep=3, **sizes) as ckpt:

        def save_all() -> None:
            for save in [ckpt.save(step, state) for step in range(3)]:
                save.wait("committed")

        run_to_its_end(ckpt, save_all)
        assert ckpt.steps() == [0, 1, 2]
        expected = net.average.clone()
        net.average.zero_()
        assert ckpt.restore(state) == 2
        assert torch.equal(net.average, expected)
