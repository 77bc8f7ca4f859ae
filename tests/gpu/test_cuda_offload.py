"""Offloaded optimizers whose parameters are on a real device: the bits of the host's kernel."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from statehold import offload
from statehold.offload import on_device as updates_there
from support.gpu import MIB, keep_busy, needs_cuda
from support.twins import Twins, same_bits

pytestmark = needs_cuda

SHAPES = [(300, 5000), (7,), (), (129, 64)]


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cuda()


@pytest.mark.parametrize("drains", [False, True], ids=["step", "backward"])
def test_training_has_the_bits_of_the_host(tmp_path: Path, drains: bool) -> None:
    """Two backwards before each update, while the device is busy with other work."""
    twins = Twins(SHAPES, [torch.bfloat16, torch.float32], place=on_device,
                  read=lambda each: each.detach().cpu(), tiers=[offload.Path(tmp_path)],
                  subgroup_bytes=70_000, drain_gradients=drains)  # fmt: skip
    for step in range(1, 4):
        for param, master in zip(twins.params, twins.masters, strict=True):
            grad = torch.linspace(-1, 1, param.numel(), device="cpu").reshape(param.shape) * step
            grad = grad.to(param.dtype)
            keep_busy() if step == 1 and param is twins.params[0] else None
            for _ in range(2):
                (param * grad.cuda()).sum().backward()
            master.grad = (grad + grad).float()
        twins.step()
        assert all(param.grad is None for param in twins.params)
    twins.check()


def test_the_host_does_not_wait_for_weights() -> None:
    weight = torch.nn.Parameter(torch.zeros(16 * MIB, device="cuda", dtype=torch.bfloat16))
    optimizer = offload.AdamW([weight], lr=1.0, tiers=[offload.Host("1GiB")])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    seen = weight.detach() + 0  # no synchronization in between
    assert torch.all(seen == -1)
    optimizer.close()


def test_drained_gradients_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates_there, "DRAINING_BYTES_MAX", 64 * MIB)

    def peak(**options: bool) -> int:
        params = [torch.nn.Parameter(torch.zeros(8 * MIB, device="cuda")) for _ in range(16)]
        optimizer = offload.SGD(
            params, lr=0.1, momentum=0.9, tiers=[offload.Host("1GiB")], **options
        )
        backward: list[Callable[[], None]] = [(each * 2).sum().backward for each in params]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for each in backward:
            each()
        found = torch.cuda.max_memory_allocated() - before
        optimizer.close()
        return found

    assert peak(drain_gradients=True) < 192 * MIB < 512 * MIB <= peak(drain_gradients=False)


def test_an_update_on_another_stream_keeps_the_weights_of_the_last_one() -> None:
    weight = torch.nn.Parameter(torch.zeros(MIB, device="cuda", dtype=torch.bfloat16))
    master = torch.nn.Parameter(torch.zeros(MIB, device="cpu"))
    optimizer = offload.SGD([weight], lr=0.5, momentum=0.9, tiers=[offload.Host("64MiB")])
    plain = torch.optim.SGD([master], lr=0.5, momentum=0.9, fused=True)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            weight.grad, master.grad = torch.ones_like(weight), torch.ones_like(master)
            optimizer.step()
        plain.step()
    torch.cuda.synchronize()
    assert same_bits(weight.detach().cpu(), master.detach().bfloat16())
    optimizer.close()


# -- updates on the device ------------------------------------------------------------------------


def trained(every: int | str | None, folder: Path, *, drains: bool = False) -> list[torch.Tensor]:
    """Weights after three updates, while the device is busy with other work."""
    random = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=random, device="cpu") for shape in SHAPES]
    dtypes = itertools.cycle([torch.bfloat16, torch.float32])
    params = [torch.nn.Parameter(each.to("cuda", next(dtypes))) for each in values]
    optimizer = offload.AdamW(params, lr=1e-2, tiers=[offload.Path(folder)], subgroup_bytes=70_000,
                              drain_gradients=drains, device_every=every)  # fmt: skip
    for _ in range(3):
        keep_busy()
        for param in params:
            grad = torch.randn(param.shape, generator=random, device="cpu").to("cuda", param.dtype)
            (param * grad).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [each.detach().cpu() for each in params]
    assert (optimizer.stats.device_updates > 0) is isinstance(every, int)
    optimizer.close()
    return found


@pytest.mark.parametrize("drains", [False, True], ids=["step", "backward"])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_updates_on_the_device_are_repeatable_and_right(
    tmp_path: Path, every: int, drains: bool
) -> None:
    """The same bits each time, and the host's values but for rounding."""
    first, again = (trained(every, tmp_path, drains=drains) for _ in range(2))
    host = trained(None, tmp_path)
    for one, other, expected in zip(first, again, host, strict=True):
        assert same_bits(one, other)
        torch.testing.assert_close(one, expected, rtol=1e-2, atol=1e-5)


def test_updates_on_the_device_alone_are_those_of_torch_there() -> None:
    start = torch.linspace(-1, 1, 3 * MIB, device="cpu")
    weight = torch.nn.Parameter(start.to("cuda", torch.bfloat16))
    master = torch.nn.Parameter(weight.detach().float())
    ours = offload.AdamW([weight], lr=1e-2, tiers=[offload.Host("1GiB")], device_every=1)
    plain = torch.optim.AdamW([master], lr=1e-2, fused=True)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        master.grad = torch.ones_like(master)
        ours.step()
        plain.step()
    torch.testing.assert_close(weight.detach(), master.detach().bfloat16(), rtol=1e-2, atol=0)
    ours.close()


def test_memory_on_the_device_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.nn.Parameter(torch.zeros(16 * MIB, device="cuda", dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with caplog.at_level(logging.INFO, "statehold"):
        optimizer = offload.AdamW([weight], tiers=[offload.Host("1GiB")], device_every=2)
    assert "The link carries" in caplog.text
    optimizer.step()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    assert optimizer.stats.device_bytes <= taken <= optimizer.stats.device_bytes + MIB
    optimizer.close()
    assert torch.cuda.memory_allocated() <= before
