"""Live tensors that share memory: the step has the same values for all of it, or restore raises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.errors import StateMismatchError
from support.faults import DEADLINE_S, SMALL

LARGE = 1_500_001  # of several blocks of a file, and not a multiple of one


def restored(run: Path, saved: dict[str, Any], live: dict[str, Any]) -> dict[str, Any]:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, saved).wait("committed", DEADLINE_S)
        ckpt.restore(live)
    return live


def refused(run: Path, saved: dict[str, Any], live: dict[str, Any]) -> StateMismatchError:
    """The error of a restore, which changes nothing, also of a tensor that shares no memory."""
    saved, live = {**saved, "alone": torch.ones(9)}, {"alone": torch.zeros(9), **live}
    before = {name: tensor.clone() for name, tensor in live.items()}
    with pytest.raises(StateMismatchError, match="share memory") as caught:
        restored(run, saved, live)
    assert "nothing was changed" in str(caught.value)
    assert all(torch.equal(live[name], tensor) for name, tensor in before.items())
    return caught.value


def flat(size: int, *parts: slice) -> dict[str, Any]:
    whole = torch.zeros(size)
    return {"whole": whole, **{str(index): whole[part] for index, part in enumerate(parts)}}


@pytest.mark.parametrize("order", [["whole", "0"], ["0", "whole"]])
@pytest.mark.parametrize("part", [slice(0, 2), slice(1, 4), slice(0, 4, 2)])
def test_different_values_for_one_memory_are_refused(
    tmp_path: Path, order: list[str], part: slice
) -> None:
    live = flat(4, part)
    saved = {"whole": torch.arange(4.0), "0": torch.full(live["0"].shape, 9.0)}
    live = {name: live[name] for name in order}
    assert refused(tmp_path / "run", saved, live).facts["tensor"] == "0"


@pytest.mark.parametrize("parts", [[slice(0, 2)], [slice(0, 3), slice(1, 4)], [slice(0, 4, 2)]])
def test_a_state_that_shares_memory_comes_back(tmp_path: Path, parts: list[slice]) -> None:
    saved, live = flat(4, *parts), flat(4, *parts)
    saved["whole"].copy_(torch.tensor([1.0, 2.0, float("nan"), 4.0]))
    restored(tmp_path / "run", saved, live)
    for name, tensor in saved.items():
        assert torch.equal(live[name].nan_to_num(-1), tensor.nan_to_num(-1)), name


def test_columns_of_one_matrix_share_nothing(tmp_path: Path) -> None:
    matrix = torch.zeros(3, 4)
    live = {"q": matrix[:, :2], "k": matrix[:, 2:]}
    restored(tmp_path / "run", {"q": torch.ones(3, 2), "k": torch.full((3, 2), 2.0)}, live)
    assert matrix.tolist() == [[1.0, 1.0, 2.0, 2.0]] * 3


@pytest.mark.parametrize("is_equal", [True, False])
def test_large_tensors_that_are_tied_now_are_compared_wherever_they_lie_in_the_file(
    tmp_path: Path, is_equal: bool
) -> None:
    values = torch.arange(float(LARGE))
    saved = {"a": values, "pad": torch.ones(5), "b": values.clone()}
    if not is_equal:
        saved["b"][-1] = -1.0
    one = torch.zeros(LARGE)
    live = {"a": one, "pad": torch.zeros(5), "b": one}
    if is_equal:
        restored(tmp_path / "run", saved, live)
        assert torch.equal(one, values)
    else:
        refused(tmp_path / "run", saved, live)


@pytest.mark.parametrize("other", [torch.conj, lambda x: x.conj().imag])
@pytest.mark.parametrize("is_equal", [True, False])
def test_a_view_that_shows_other_values_shares_its_memory(
    tmp_path: Path, other: Callable[[torch.Tensor], torch.Tensor], is_equal: bool
) -> None:
    values = torch.arange(3) * (1 + 2j)
    saved = {"whole": values, "view": other(values) if is_equal else other(values + 1j).clone()}
    whole = torch.zeros_like(values)
    live = {"whole": whole, "view": other(whole)}
    if is_equal:
        restored(tmp_path / "run", saved, live)
        assert torch.equal(whole, values)
    else:
        refused(tmp_path / "run", saved, live)


def test_a_view_that_shows_other_values_comes_back_alone(tmp_path: Path) -> None:
    whole = torch.zeros(4, dtype=torch.complex64)
    live = {"view": whole.conj()[1:3]}
    restored(tmp_path / "run", {"view": torch.tensor([1j, 2j])}, live)
    assert whole.tolist() == [0, -1j, -2j, 0]


def test_a_conversion_into_memory_that_is_shared_in_part_is_refused(tmp_path: Path) -> None:
    saved = {"whole": torch.arange(4.0).bfloat16(), "0": torch.full((2,), 9.0).bfloat16()}
    live = flat(4, slice(0, 2))
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, saved).wait("committed", DEADLINE_S)
        with pytest.raises(StateMismatchError, match="nothing was changed") as caught:
            ckpt.restore(live, cast=True)
    assert "memory that it shares" in caught.value.facts["0"]
    assert not live["whole"].any()


def test_a_subscription_refuses_it_too(tmp_path: Path) -> None:
    saved = {"whole": torch.arange(4.0), "0": torch.full((2,), 9.0)}
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, saved).wait("committed", DEADLINE_S)
    live = flat(4, slice(0, 2))
    with statehold.subscribe(tmp_path / "run", live) as subscription:
        update = subscription.wait(DEADLINE_S)
        assert update is not None
        with pytest.raises(StateMismatchError, match="share memory"):
            update.apply()
