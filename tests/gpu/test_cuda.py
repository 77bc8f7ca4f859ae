"""The device path on a real device: what tests/checkpointer/test_device_path.py does with a stand-in.

Also what only a device can show: copies that are really asynchronous, memory that is really pinned,
kernels that are queued behind copies.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from statehold.errors import TornSnapshot
from support.training import Net, bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20
DEADLINE_S = 120.0
ROOMY = {"staging_bytes": "256MiB", "buffer_bytes": "4MiB"}
TIGHT = {"staging_bytes": "8MiB", "buffer_bytes": "4MiB"}
WIDE = 1024  # the hidden layer alone is 4 MiB


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def ckpt(run: Path) -> Iterator[statehold.Checkpointer]:
    with statehold.Checkpointer(run, **ROOMY) as ckpt:
        yield ckpt


class CudaTraining:
    """The training run of the other tests, on the device and with its numbers from there."""

    def __init__(self, seed: int = 0, width: int = WIDE, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = Net(width).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **options)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        self.progress: dict[str, Any] = {"tokens": 0}
        self.losses: list[float] = []

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler,
                "progress": self.progress, "rng": statehold.Rng()}  # fmt: skip

    def step(self) -> None:
        tokens = torch.randint(0, 64, (16,), device="cuda")
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(tokens), tokens)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.progress["tokens"] += tokens.numel()
        self.losses.append(loss.item())


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Embedding gradients are summed with atomics otherwise, in an order that is never the same.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_host(training: CudaTraining) -> dict[str, bytes]:
    torch.cuda.synchronize()
    return bits(_Host(training))  # type: ignore[arg-type]


class _Host:
    """A training's state copied to the host, in the shape that `bits` reads."""

    def __init__(self, training: CudaTraining) -> None:
        self.model = _State({k: v.cpu() for k, v in training.model.state_dict().items()})
        self.optimizer = _State({
            index: {key: value.cpu() for key, value in state.items()}
            for index, state in enumerate(training.optimizer.state.values())
        })  # fmt: skip
        self.scheduler, self.progress = training.scheduler, training.progress


class _State:
    def __init__(self, content: dict[Any, Any]) -> None:
        self.state = content

    def state_dict(self) -> dict[Any, Any]:
        return self.state


def keep_busy(cycles: int = 400_000_000) -> None:
    """Queue some tenths of a second of work on the current stream."""
    torch.cuda._sleep(cycles)


OPTIONS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True}, "fused": {"fused": True}, "capturable": {"capturable": True},
    "single": {"foreach": False}, "amsgrad": {"amsgrad": True},
}  # fmt: skip


@pytest.mark.parametrize("sizes", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_training_goes_on_bit_for_bit(run: Path, kind: str, sizes: dict[str, str]) -> None:
    whole = CudaTraining(**OPTIONS[kind])
    for _ in range(8):
        whole.step()
    first = CudaTraining(**OPTIONS[kind])
    with statehold.Checkpointer(run, **sizes) as ckpt:
        assert ckpt.restore(first.state) is None
        for step in range(1, 5):
            first.step()
            ckpt.save(step, first.state)
    resumed = CudaTraining(seed=1, **OPTIONS[kind])
    with statehold.Checkpointer(run, **sizes) as ckpt:
        assert ckpt.restore(resumed.state) == 4
    for _ in range(4):
        resumed.step()
    assert [x.hex() for x in resumed.losses] == [x.hex() for x in whole.losses[4:]]
    assert on_host(resumed) == on_host(whole)


def test_every_step_is_the_state_of_its_time(run: Path) -> None:
    training = CudaTraining()
    expected = {}
    with statehold.Checkpointer(run, **ROOMY) as ckpt:
        for step in range(1, 7):
            training.step()
            expected[step] = on_host(training)
            ckpt.save(step, training.state)
        for step in expected:
            fresh = CudaTraining(seed=9)
            ckpt.restore(fresh.state, step)
            assert without_host_rng(on_host(fresh)) == without_host_rng(expected[step])


def without_host_rng(raw: dict[str, bytes]) -> dict[str, bytes]:
    return {name: value for name, value in raw.items() if name != "rng"}


def test_restore_fills_the_tensors_where_they_are(ckpt: statehold.Checkpointer) -> None:
    training = CudaTraining()
    training.step()
    ckpt.save(1, training.state).wait("committed", DEADLINE_S)
    live = CudaTraining(seed=3)
    live.step()
    places = {name: t.data_ptr() for name, t in live.model.state_dict().items()}
    moments = [s["exp_avg"].data_ptr() for s in live.optimizer.state.values()]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ckpt.restore(live.state)
    assert torch.cuda.max_memory_allocated() - before < MIB
    assert {name: t.data_ptr() for name, t in live.model.state_dict().items()} == places
    assert [s["exp_avg"].data_ptr() for s in live.optimizer.state.values()] == moments
    assert on_host(live)["hidden.weight"] == on_host(training)["hidden.weight"]


def test_save_and_step_do_not_wait_for_the_device(ckpt: statehold.Checkpointer) -> None:
    training = CudaTraining()
    training.step()
    ckpt.save(1, training.state).wait("committed", DEADLINE_S)  # pins, warms up
    expected = on_host(training)
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.cuda.synchronize()

    keep_busy()
    still_busy = torch.cuda.Event()
    still_busy.record()
    save = ckpt.save(2, training.state)
    training.optimizer.step()
    assert not still_busy.query(), "save() or step() waited for the device"
    assert not save.done("staged")

    save.wait("committed", DEADLINE_S)
    fresh = CudaTraining(seed=9)
    ckpt.restore(fresh.state, 2)
    assert on_host(fresh)["hidden.weight"] == expected["hidden.weight"]
    assert on_host(training)["hidden.weight"] != expected["hidden.weight"]


def test_work_queued_before_the_save_is_part_of_it(ckpt: statehold.Checkpointer) -> None:
    weights = torch.zeros(4 * MIB, device="cuda")
    keep_busy()
    weights.fill_(3)
    ckpt.save(1, {"w": statehold.Gated(weights)})
    ckpt.gate(DEADLINE_S)
    weights.fill_(4)
    live = torch.zeros_like(weights)
    assert ckpt.restore({"w": live}, newest(ckpt)) == 1
    assert torch.all(live == 3)


def newest(ckpt: statehold.Checkpointer) -> int:
    deadline = time.monotonic() + DEADLINE_S
    while not ckpt.steps():
        assert time.monotonic() < deadline
    return ckpt.steps()[-1]


def test_buffers_may_change_at_once(ckpt: statehold.Checkpointer) -> None:
    training = CudaTraining()
    training.step()
    expected = on_host(training)["norm.running_mean"]
    keep_busy()
    save = ckpt.save(1, training.state)
    training.model(torch.randint(0, 64, (16,), device="cuda"))
    save.wait("committed", DEADLINE_S)
    fresh = CudaTraining(seed=9)
    ckpt.restore(fresh.state)
    assert on_host(fresh)["norm.running_mean"] == expected
    assert on_host(training)["norm.running_mean"] != expected


def test_a_change_past_the_gate_fails_the_save(ckpt: statehold.Checkpointer) -> None:
    training = CudaTraining()
    training.step()
    ckpt.save(1, training.state).wait("committed", DEADLINE_S)
    keep_busy()  # the copies of the save wait behind it
    save = ckpt.save(2, training.state)
    with torch.no_grad():
        training.model.hidden.weight.add_(1)
    with pytest.raises(TornSnapshot) as caught:
        save.wait("committed", DEADLINE_S)
    assert caught.value.facts["tensor"] == "model.hidden.weight"
    assert ckpt.steps() == [1]


def test_staging_memory_is_pinned_once(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, calls = torch.cuda.cudart(), []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(runtime, name)

    monkeypatch.setattr(torch.cuda, "cudart", Counted)
    with statehold.Checkpointer(run, **ROOMY) as ckpt:
        training = CudaTraining()
        for step in range(1, 4):
            training.step()
            ckpt.save(step, training.state)
        staging = torch.frombuffer(ckpt._opened().engine.staging, dtype=torch.uint8)
        assert staging.is_pinned()
        del staging
    assert calls.count("cudaHostRegister") == 1
    assert calls.count("cudaHostUnregister") == 1
    assert "not pinned" not in caplog.text


def test_every_layout_and_dtype(ckpt: statehold.Checkpointer) -> None:
    grid = torch.arange(24.0, device="cuda").reshape(2, 3, 4)
    state = {
        "transposed": grid.transpose(0, 2), "sliced": grid[:, ::2, 1:], "scalar": grid[0, 0, 1],
        "empty": torch.empty(0, 3, device="cuda"), "bool": grid > 5, "half": grid.half(),
        "bfloat": grid.bfloat16(), "fp8": grid.to(torch.float8_e4m3fn), "int": grid.long(),
        "complex": torch.complex(grid, grid), "conj": torch.complex(grid, grid).conj(),
        "channels": torch.randn(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last),
    }  # fmt: skip
    ckpt.save(1, state).wait("committed", DEADLINE_S)
    live = {key: torch.empty_like(value) for key, value in state.items()}
    places = {key: value.data_ptr() for key, value in live.items()}
    ckpt.restore(live)
    for key, value in state.items():
        assert torch.equal(live[key].cpu().float() if key == "fp8" else live[key].cpu(),
                           value.cpu().float() if key == "fp8" else value.cpu()), key  # fmt: skip
        assert live[key].data_ptr() == places[key]


def test_a_step_moves_between_device_and_host(ckpt: statehold.Checkpointer) -> None:
    on_device = torch.randn(3 * MIB // 4, device="cuda")
    ckpt.save(1, {"w": on_device}).wait("committed", DEADLINE_S)
    host = torch.zeros(3 * MIB // 4)
    ckpt.restore({"w": host})
    assert torch.equal(host, on_device.cpu())
    ckpt.save(2, {"w": host}).wait("committed", DEADLINE_S)
    back = torch.zeros_like(on_device)
    ckpt.restore({"w": back})
    assert torch.equal(back, on_device)


def test_temporaries_of_state_dict_are_told_apart(ckpt: statehold.Checkpointer) -> None:
    class Maker:
        """Every tensor is a temporary, which the caching allocator would place where the last was."""

        def __init__(self) -> None:
            self.loaded: list[float] = []

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {str(i): torch.full((MIB,), float(i), device="cuda") for i in range(8)}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.loaded = [state[str(i)].mean().item() for i in range(8)]

    ckpt.save(1, {"x": Maker()}).wait("committed", DEADLINE_S)
    live = Maker()
    ckpt.restore({"x": live})
    assert live.loaded == [float(i) for i in range(8)]


def test_the_next_use_of_a_restored_tensor_sees_the_restored_bytes(
    ckpt: statehold.Checkpointer,
) -> None:
    weights = torch.randn(8 * MIB, device="cuda")
    expected = weights.sum(dtype=torch.float64)
    ckpt.save(1, {"w": weights}).wait("committed", DEADLINE_S)
    keep_busy()
    weights.zero_()  # queued: the restore must come after it
    ckpt.restore({"w": weights})
    assert torch.equal(weights.sum(dtype=torch.float64), expected)


def test_a_named_generator_on_the_device_goes_on(ckpt: statehold.Checkpointer) -> None:
    generator = torch.Generator(device="cuda").manual_seed(5)
    torch.rand(10, generator=generator, device="cuda")
    ckpt.save(1, {"rng": statehold.Rng({"g": generator})}).wait("committed", DEADLINE_S)
    expected = [torch.rand(5, generator=generator, device="cuda"), torch.rand(5, device="cuda")]
    other = torch.Generator(device="cuda").manual_seed(6)
    ckpt.restore({"rng": statehold.Rng({"g": other})})
    assert torch.equal(torch.rand(5, generator=other, device="cuda"), expected[0])
    assert torch.equal(torch.rand(5, device="cuda"), expected[1])
