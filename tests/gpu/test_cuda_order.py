"""What only a device can show: work that is queued around a save or a restore, and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from support.faults import DEADLINE_S
from support.gpu import MIB, keep_busy, needs_cuda, pin_everything

pytestmark = needs_cuda

ROOMY = {"staging_bytes": "64MiB", "io": statehold.Io(buffer_bytes="4MiB")}


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[statehold.Checkpointer]:
    with statehold.Checkpointer(tmp_path / "run", **ROOMY) as ckpt:
        pin_everything(ckpt, 0)  # that, and making the streams, may wait for the device
        yield ckpt


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
def test_save_returns_while_the_device_is_busy(
    ckpt: statehold.Checkpointer, options: dict[str, Any]
) -> None:
    """Also with an optimizer that keeps `step` on the host, beside device tensors in one block."""
    model = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.ones(512, device="cuda")).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    ckpt.save(1, state).wait("committed", DEADLINE_S)  # loads the kernels that a save needs
    torch.cuda.synchronize()
    behind = keep_busy()
    save = ckpt.save(2, state)
    assert not behind.query(), "save() waited for the device"
    save.wait("committed", DEADLINE_S)


def test_work_queued_before_a_save_is_part_of_it(ckpt: statehold.Checkpointer) -> None:
    weights = torch.zeros(4 * MIB, device="cuda")
    keep_busy()
    weights.fill_(3)
    save = ckpt.save(1, {"w": statehold.Gated(weights)})
    ckpt.gate(DEADLINE_S)
    weights.fill_(4)
    save.wait("committed", DEADLINE_S)
    live = torch.zeros_like(weights)
    ckpt.restore({"w": live}, 1)
    assert torch.all(live == 3)
    assert torch.all(weights == 4)


def test_buffers_may_change_as_soon_as_save_returns(ckpt: statehold.Checkpointer) -> None:
    norm = nn.BatchNorm1d(64).cuda()
    expected = norm.running_mean.clone()
    keep_busy()
    save = ckpt.save(1, {"norm": norm})
    norm(torch.randn(16, 64, device="cuda"))
    save.wait("committed", DEADLINE_S)
    assert not torch.equal(norm.running_mean, expected)
    ckpt.restore({"norm": norm}, 1)
    assert torch.equal(norm.running_mean, expected)


def test_a_restore_comes_between_what_is_queued_before_and_after(
    ckpt: statehold.Checkpointer,
) -> None:
    weights = torch.randn(8 * MIB, device="cuda")
    expected = weights.cpu()
    ckpt.save(1, {"w": weights}).wait("committed", DEADLINE_S)
    keep_busy()
    weights.zero_()
    ckpt.restore({"w": weights}, 1)
    doubled = weights * 2
    assert torch.equal(doubled.cpu(), expected * 2)


def test_a_restore_makes_no_second_copy_on_the_device(ckpt: statehold.Checkpointer) -> None:
    model = nn.Linear(4096, 4096).cuda()  # 64 MiB
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4096, device="cuda")).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    ckpt.save(1, state).wait("committed", DEADLINE_S)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ckpt.restore(state, 1)
    assert torch.cuda.max_memory_allocated() - before < MIB


def test_temporaries_of_state_dict_are_told_apart(ckpt: statehold.Checkpointer) -> None:
    class Maker:
        """Makes tensors that the caching allocator would place where the last one was."""

        def __init__(self, value: float) -> None:
            self.value = value
            self.loaded = 0.0

        def state_dict(self) -> torch.Tensor:
            return torch.full((MIB,), self.value, device="cuda")

        def load_state_dict(self, state: torch.Tensor) -> None:
            self.loaded = state.mean().item()

    makers = [Maker(float(i)) for i in range(8)]
    ckpt.save(1, {"x": makers}).wait("committed", DEADLINE_S)
    ckpt.restore({"x": makers}, 1)
    assert [maker.loaded for maker in makers] == [float(i) for i in range(8)]


def layouts() -> dict[str, torch.Tensor]:
    grid = torch.arange(24.0, device="cuda").reshape(2, 3, 4)
    both = torch.complex(grid, grid + 1)
    return {
        "transposed": grid.transpose(0, 2), "sliced": grid[:, ::2, 1:], "scalar": grid[0, 0, 1],
        "empty": torch.empty(0, 3, device="cuda"), "bool": grid > 5, "half": grid.half(),
        "bfloat": grid.bfloat16(), "int": grid.long(), "complex": both, "conj": both.conj(),
        "channels": torch.randn(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last),
        "fp8": grid.to(torch.float8_e4m3fn),
    }  # fmt: skip


def test_every_layout_is_filled_where_it_is(ckpt: statehold.Checkpointer) -> None:
    saved = layouts()
    ckpt.save(1, saved).wait("committed", DEADLINE_S)
    live = layouts()
    for tensor in live.values():
        tensor.copy_(torch.zeros(tensor.shape, device="cuda").to(tensor.dtype))
    places = {name: tensor.data_ptr() for name, tensor in live.items()}
    ckpt.restore(live, 1)
    for name, tensor in saved.items():
        assert torch.equal(comparable(live[name]), comparable(tensor)), name
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == places


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 has no comparison of its own."""
    return tensor.float().cpu() if tensor.dtype is torch.float8_e4m3fn else tensor.cpu()


def test_a_named_generator_on_the_device_goes_on(ckpt: statehold.Checkpointer) -> None:
    generator = torch.Generator(device="cuda").manual_seed(5)
    torch.rand(10, generator=generator, device="cuda")
    rng = statehold.Rng({"g": generator})
    ckpt.save(1, {"rng": rng}).wait("committed", DEADLINE_S)
    expected = torch.rand(5, generator=generator, device="cuda")
    other = torch.Generator(device="cuda").manual_seed(6)
    ckpt.restore({"rng": statehold.Rng({"g": other})}, 1)
    assert torch.equal(torch.rand(5, generator=other, device="cuda"), expected)
