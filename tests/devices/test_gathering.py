"""Pieces of tensors with any strides, gathered into a buffer: the right bytes, in few launches."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import statehold
from statehold.tensors.devices import elements
from statehold.tensors.devices.gathering import Gathering
from statehold.tensors.devices.jobs import Piece
from support.cuda import Machine, copies_of
from support.faults import DEADLINE_S, SMALL, Holdup, must
from support.inside import trainer
from support.seeds import SEED

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.bool, torch.complex64,
          torch.float8_e4m3fn, torch.int16]  # fmt: skip


def gather(
    tensors: Mapping[int, torch.Tensor], host: torch.Tensor, pieces: Sequence[Piece]
) -> None:
    """By torch, on the current stream."""
    mover: Any = SimpleNamespace(call=None, backend=None)
    Gathering(tensors, mover).enqueue(None, [(host, pieces)])


def random_tensor(chance: random.Random) -> torch.Tensor:
    """With any strides, at any place of its storage, of 0 to 4 dims."""
    dims = [chance.randint(1, 6) for _ in range(chance.randint(0, 4))]
    dtype = chance.choice(DTYPES)
    values = torch.randint(0, 2, [size + chance.randint(0, 2) for size in dims]).to(dtype)
    for dim, size in enumerate(dims):
        values = values.narrow(dim, chance.randint(0, values.shape[dim] - size), size)
    return values.permute(chance.sample(range(len(dims)), len(dims)))


def in_order_of_widths(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """As in a data file, where every tensor is aligned to its dtype."""
    return sorted(tensors, key=lambda tensor: -tensor.element_size())


@pytest.mark.parametrize("number", range(30))
def test_any_pieces_of_any_tensors(number: int) -> None:
    seed = SEED + number
    print(f"seed {seed}")
    chance = random.Random(seed)
    torch.manual_seed(seed)
    tensors = in_order_of_widths([random_tensor(chance) for _ in range(12)])
    expected, pieces, at = bytearray(), [], 0
    for segment, tensor in enumerate(tensors):
        content = bytes(elements.flat(tensor.contiguous(), 0, tensor.nbytes).tolist())
        size, item = tensor.numel(), tensor.element_size()
        begin = chance.randint(0, size - 1) * item
        end = chance.randint(begin // item + 1, size) * item
        gap = 8 * chance.choice((0, 0, 1))  # what the host has there
        expected += bytes(gap) + content[begin:end]
        pieces.append((segment, begin, at + gap, end - begin))
        at += gap + end - begin
        left = -at % item
        expected += bytes(left)
        at += left
    host = torch.zeros(at, dtype=torch.uint8)
    gather(dict(enumerate(tensors)), host, pieces)
    assert bytes(host.tolist()) == bytes(expected)


@pytest.mark.parametrize(
    "shapes",
    [[(2, 3), (1, 3), (4, 3)], [(2, 3), (3, 2)], [(3,), (), (1, 2, 3)], [(), ()], [(2, 0), (3, 0)]],
)
def test_whole_tensors_are_joined_whatever_their_shapes(shapes: list[tuple[int, ...]]) -> None:
    tensors = {index: torch.randn(shape) for index, shape in enumerate(shapes)}
    ends = list(accumulate(each.nbytes for each in tensors.values()))
    pieces = [
        (index, 0, end - each.nbytes, each.nbytes)
        for end, (index, each) in zip(ends, tensors.items(), strict=True)
    ]
    host = torch.zeros(ends[-1], dtype=torch.uint8)
    gather(tensors, host, pieces)
    assert torch.equal(host.view(torch.float32), torch.cat([t.view(-1) for t in tensors.values()]))


@pytest.mark.parametrize("count", [1, 2])
def test_strides_of_dims_with_one_element_mean_nothing(count: int) -> None:
    one = torch.arange(8.0).reshape(2, 4)[:1, 1::2][:, :1].as_strided((1, 1), (7, 3), 5)
    assert one.is_contiguous()
    host = torch.zeros(4 * count, dtype=torch.uint8)
    gather(dict.fromkeys(range(count), one), host, [(i, 0, 4 * i, 4) for i in range(count)])
    assert host.view(torch.float32).tolist() == [5.0] * count


def test_large_pieces_go_alone_and_small_ones_together(machine: Machine) -> None:
    size = elements.SMALL_BYTES
    counts = [16] * 100 + [size, 2 * size] + [16] * 100
    tensors = {
        index: machine.put(torch.ones(n, dtype=torch.uint8)) for index, n in enumerate(counts)
    }
    begins = [sum(counts[:index]) for index in range(len(counts))]
    pieces = [(index, 0, begins[index], n) for index, n in enumerate(counts)]
    host = torch.zeros(sum(counts), dtype=torch.uint8)
    before = machine.timeline.launches
    machine.pins.add(host.data_ptr(), host.nbytes)
    gather(tensors, host, pieces)
    assert machine.timeline.launches - before == 2 + 2 + 2  # each run: together, then to the host
    machine.finish()
    machine.pins.remove(host.data_ptr())
    assert host.min() == 1


def test_moments_are_copied_together_although_their_numbers_are_on_the_host(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    model = machine.module(torch.nn.ParameterList([torch.ones(64, device="cpu")] * 50))
    optimizer = stepped(model)
    machine.finish()
    before = machine.timeline.launches
    ckpt.save(1, {"model": model, "optimizer": optimizer}).wait("committed", DEADLINE_S)
    assert machine.timeline.launches - before < 5  # and not one for each of 50 numbers


def channels_last(machine: Machine, layers: int = 6) -> torch.nn.Module:
    convs = [torch.nn.Conv2d(64, 64, 3, bias=False) for _ in range(layers)]
    model = torch.nn.Sequential(*convs).to(memory_format=torch.channels_last)
    module: torch.nn.Module = machine.module(model)
    must(all(not each.is_contiguous() for each in module.parameters()))
    return module


def stepped(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_nothing_lazy_is_cloned_whatever_its_strides(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    """Weights in channels_last, and their moments: 6 x 3 x 144 KiB, which is 2.6 MiB."""
    model = channels_last(machine)
    optimizer = stepped(model)
    machine.finish()
    before = machine.bytes_on()
    machine.reset_peak()
    holdup = Holdup(ckpt)
    save = ckpt.save(1, {"model": model, "optimizer": optimizer})
    must(holdup.waiting.wait(DEADLINE_S))
    holdup.release()
    save.wait("staged", DEADLINE_S)
    assert machine.peak_on() - before <= 1 << 20  # the scratch of a buffer
    save.wait("committed", DEADLINE_S)
    again = channels_last(machine)
    got = ckpt.restore({"model": again, "optimizer": stepped(again)})
    assert got == 1
    with machine.still():
        for saved, live in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(saved, live)


def test_a_strided_tensor_that_changes_before_the_gate_fails_the_save(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    model = channels_last(machine, layers=1)
    machine.timeline.may_finish.clear()
    save = ckpt.save(1, {"model": model})
    must(copies_of(ckpt).enqueued.wait(DEADLINE_S))
    with torch.no_grad():
        next(model.parameters()).add_(1)
    machine.timeline.may_finish.set()
    with pytest.raises(statehold.errors.TornSnapshot):
        save.wait("committed", DEADLINE_S)


def test_updates_pass_while_strided_tensors_are_under_way(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    model = channels_last(machine, layers=2)
    optimizer = stepped(model)
    with machine.still():
        expected = [each.detach().clone() for each in model.parameters()]
    machine.timeline.may_finish.clear()
    save = ckpt.save(1, {"model": model, "optimizer": optimizer})
    must(copies_of(ckpt).enqueued.wait(DEADLINE_S))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert save.stats.gate_s == 0
    machine.timeline.may_finish.set()
    save.wait("committed", DEADLINE_S)
    again = channels_last(machine, layers=2)
    ckpt.restore({"model": again}, 1, only=["model"])
    with machine.still():
        for saved, live in zip(expected, again.parameters(), strict=True):
            assert torch.equal(saved, live)


@pytest.mark.thorough
def test_launches_are_counted_by_buffers_and_not_by_tensors(
    tmp_path: Path, machine: Machine
) -> None:
    state = {str(i): statehold.Gated(machine.put(torch.full((64,), i))) for i in range(3000)}
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        before = machine.timeline.launches
        ckpt.save(1, state).wait("committed", DEADLINE_S)
        buffers = -(-trainer(ckpt).watched[0].stats.written_bytes >> 20)
        assert buffers == 2
        # Each: what is together in scratch, and its copy. And the stream that waits at the fork.
        assert machine.timeline.launches - before <= 2 * buffers + 1
        live = {name: machine.put(torch.zeros(64, dtype=torch.int64)) for name in state}
        ckpt.restore(live)
    with machine.still():
        assert all((live[name] == int(name)).all() for name in state)


def test_scratch_that_finds_no_memory_is_not_needed(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    """Device memory is full: small tensors are copied one by one."""
    state = {str(i): statehold.Gated(machine.put(torch.full((64,), i))) for i in range(20)}
    machine.memory.limits[0] = machine.bytes_on()
    ckpt.save(1, state).wait("committed", DEADLINE_S)
    machine.memory.limits.clear()
    live = {name: machine.put(torch.zeros(64, dtype=torch.int64)) for name in state}
    ckpt.restore(live)
    with machine.still():
        assert all((live[name] == int(name)).all() for name in state)


def test_strided_tensors_make_do_with_less_scratch(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    """Device memory is almost full: one that is not contiguous is copied in parts."""
    values = torch.arange(1 << 16).reshape(256, 256)  # 512 KiB
    live = machine.put(values.t())
    assert not live.is_contiguous()
    machine.memory.limits[0] = machine.bytes_on() + (130 << 10)
    ckpt.save(1, {"t": statehold.Gated(live)}).wait("committed", DEADLINE_S)
    machine.memory.limits[0] = machine.bytes_on() + 1000
    with pytest.raises(statehold.errors.DeviceError, match="a device failed"):
        ckpt.save(2, {"t": statehold.Gated(live)}).wait("committed", DEADLINE_S)
    machine.memory.limits.clear()
    loaded = machine.put(torch.zeros_like(values).t())
    ckpt.restore({"t": loaded})
    assert torch.equal(machine.read(loaded), values.t())
