"""restore(cast=True): into another float dtype, on request only, verified, block by block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from statehold.errors import CorruptionError, StateMismatchError, UsageError
from statehold.tensors import casts
from support.faults import DEADLINE_S, SMALL

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
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
    convert = casts._convert

    def watched(batch: Any, fill: Any) -> None:
        found.append(sum(wanted.memory.nbytes for _, wanted in batch))
        convert(batch, fill)

    monkeypatch.setattr(casts, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(casts, "_convert", watched)
    return found


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


def test_nothing_is_converted_where_the_dtypes_are_equal(tmp_path: Path, blocks: list[int]) -> None:
    saved(tmp_path / "run", trained(torch.float32))
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.restore(made(torch.float32, 2), cast=True)
        assert not ckpt.restored.cast
    assert not blocks


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_other_dtypes_stay_an_error(tmp_path: Path, dtype: torch.dtype) -> None:
    saved(tmp_path / "run", {"x": torch.ones(3)})
    with (
        statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt,
        pytest.raises(StateMismatchError) as caught,
    ):
        ckpt.restore({"x": torch.zeros(3).to(dtype)}, cast=True)
    assert "cast" not in caught.value.hint


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
