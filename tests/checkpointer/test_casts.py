"""restore(cast=True): into another float dtype, on request only, verified, block by block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from statehold.errors import CorruptionError, StateMismatchError, UsageError
from statehold.tensors import destinations
from statehold.tensors.stored import Fill, Wanted
from support.faults import DEADLINE_S, SMALL

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PAIRS = [(one, other) for one in FLOATS for other in FLOATS if one is not other]


def made(dtype: torch.dtype, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 3)).to(dtype)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), eps=1e-2),
        "across": torch.randn(5, 7, dtype=dtype).t(),
        "count": torch.tensor(seed),
        "scalar": torch.randn((), dtype=dtype),
    }


def trained(dtype: torch.dtype) -> dict[str, Any]:
    state = made(dtype, 1)
    state["model"](torch.randn(4, 64, dtype=dtype)).sum().backward()
    state["optimizer"].step()
    return state


def saved(run: Path, state: dict[str, Any]) -> None:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, state).wait("committed", DEADLINE_S)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that are held at once, with blocks of 4 KiB."""
    found: list[int] = []
    convert = destinations.Casts.fill

    def watched(casts: destinations.Casts, fill: Fill) -> None:
        def noted(batch: list[Wanted]) -> None:
            found.append(sum(wanted.memory.nbytes for wanted in batch))
            fill(batch)

        convert(casts, noted)

    monkeypatch.setattr(destinations, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(destinations.Casts, "fill", watched)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_each_tensor_is_converted(
    tmp_path: Path, blocks: list[int], one: Any, other: Any, is_reversed: bool
) -> None:
    state, live = trained(one), made(other, 2)
    saved(tmp_path / "run", state)
    given = dict([*live.items()][::-1]) if is_reversed else live
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        with pytest.raises(StateMismatchError) as caught:
            ckpt.restore(given)
        assert "cast=True" in caught.value.hint
        assert ckpt.restore(given, cast=True) == 1
        report = ckpt.restored
    assert {"model.0.weight", "across", "optimizer.state.model.0.weight.exp_avg"} <= set(
        report.cast
    )
    assert not {"count", "model.1.num_batches_tracked"} & set(report.cast)
    assert max(blocks) <= 4096 < sum(blocks)
    pairs = list(
        zip(state["model"].state_dict().values(), live["model"].state_dict().values(), strict=True)
    )
    pairs += [(state[name], live[name]) for name in ("across", "scalar", "count")]
    for before, after in zip(state["model"].parameters(), live["model"].parameters(), strict=True):
        ours, theirs = state["optimizer"].state[before], live["optimizer"].state[after]
        pairs += [(ours[key], theirs[key]) for key in ("exp_avg", "exp_avg_sq")]
        assert float(theirs["step"]) == 1
        assert theirs["exp_avg"].dtype == other
    for before, after in pairs:
        assert torch.equal(before.to(after.dtype), after)
    live["model"](torch.randn(4, 64, dtype=other)).sum().backward()
    live["optimizer"].step()


EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@pytest.mark.thorough
@pytest.mark.parametrize("eight", EIGHT_BITS)
@pytest.mark.parametrize("other", [*FLOATS, torch.float8_e5m2])
def test_floats_of_eight_bits_are_converted_both_ways(
    tmp_path: Path, eight: torch.dtype, other: torch.dtype
) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 5) * 100
    for at, (one, two) in enumerate([(eight, other), (other, eight)]):
        run, before, live = tmp_path / f"{at}", values.to(one), torch.zeros(3, 5).to(two)
        saved(run, {"x": before})
        with statehold.Checkpointer(run, **SMALL) as ckpt:
            ckpt.restore({"x": live}, cast=True)
        assert live.dtype == two
        assert torch.equal(live.float(), before.to(two).float())


def test_what_is_uninitialized_gets_its_own_dtype(tmp_path: Path) -> None:
    saved(tmp_path / "run", {"model": nn.Linear(3, 2, dtype=torch.float64)})
    live = nn.LazyLinear(2, dtype=torch.bfloat16)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.restore({"model": live}, cast=True)
    assert {parameter.dtype for parameter in live.parameters()} == {torch.bfloat16}
    assert live.weight.shape == (2, 3)
    assert live.weight.abs().sum() > 0


def test_nothing_is_converted_where_the_dtypes_are_equal(tmp_path: Path, blocks: list[int]) -> None:
    saved(tmp_path / "run", trained(torch.float32))
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.restore(made(torch.float32, 2), cast=True)
        assert not ckpt.restored.cast
    assert not blocks


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e8m0fnu])
def test_only_floats_are_converted_and_the_error_says_so(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    saved(tmp_path / "run", {"x": torch.ones(3), "y": torch.ones(3).to(dtype)})
    x, y = torch.zeros(3), torch.zeros(3)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        for live, name in (({"x": x.to(dtype), "y": y.to(dtype)}, "x"), ({"x": x, "y": y}, "y")):
            with pytest.raises(StateMismatchError) as caught:
                ckpt.restore(live, cast=True)
            assert "cast=True converts only floats to floats" in caught.value.facts[name]
            assert "cast" not in caught.value.hint
        with pytest.raises(StateMismatchError) as caught:
            ckpt.restore({"x": x, "y": torch.zeros(4).to(dtype)}, cast=True)
    assert "cast" not in str(caught.value)  # it would not help


def test_bytes_are_verified_before_they_are_converted(tmp_path: Path) -> None:
    saved(tmp_path / "run", {"x": torch.full((300,), 2.5)})
    [file] = (tmp_path / "run" / "step-000000000001").glob("*.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    live = {"x": torch.zeros(300, dtype=torch.bfloat16)}
    with (
        statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt,
        pytest.raises(CorruptionError),
    ):
        ckpt.restore(live, step=1, cast=True)
    assert not live["x"].any()


def test_what_is_no_flag(tmp_path: Path) -> None:
    with (
        statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt,
        pytest.raises(UsageError, match="cast is True or False"),
    ):
        ckpt.restore({}, cast="bfloat16")  # type: ignore[arg-type]
