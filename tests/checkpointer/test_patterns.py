"""A pattern that matches nothing, and a restore that would load nothing, are errors that say what
may have been meant; nothing is changed before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from statehold.errors import StateMismatchError, UsageError
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs
from support.ranks import Ranks
from support.training import Training, bits


@pytest.fixture
def saved(run) -> Training:
    training = Training()
    training.step()
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(7, training.state).wait("committed", DEADLINE_S)
    return training


@pytest.fixture
def ckpt(run, saved: Training) -> Iterator[statehold.Checkpointer]:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        yield ckpt


WRONG = [
    ({"only": ["modle"]}, 'only "modle"', '"model"'),
    ({"only": ["model", "optimzer"]}, 'only "optimzer"', '"optimizer"'),
    ({"only": ["hidden.weight"]}, 'only "hidden.weight"', '"model.hidden.weight"'),
    ({"skip": ["model.hiden"]}, 'skip "model.hiden"', '"model.hidden"'),
    ({"skip": ["*.biass"]}, 'skip "*.biass"', '"*.bias"'),
    ({"skip": ["data"]}, 'skip "data"', '"model", "optimizer"'),
    ({"skip": ["scheduler.last_epoch"]}, 'skip "scheduler.last_epoch"', ""),
    ({"only": ["model"], "skip": ["optimizer.state.modle"]}, 'skip "optimizer.state.modle"', ""),
    ({"rename": {"modle": "model"}}, 'rename from "modle"', '"model"'),
    ({"rename": {"model": "modle"}, "strict": False}, 'rename to "modle"', '"model"'),
    ({"only": ["model"], "rename": {"optimizer": "modle"}}, 'rename to "modle"', '"model"'),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("options", "given", "near"), WRONG)
@pytest.mark.parametrize("step", [None, 7])
def test_a_pattern_that_matches_nothing(
    ckpt, options: dict[str, Any], given: str, near: str, step: int | None
) -> None:
    live = Training(seed=1)
    before = bits(live)
    with pytest.raises(UsageError, match="a pattern matches nothing") as caught:
        ckpt.restore(live.state, step, **options)
    assert near in caught.value.facts[given]
    assert caught.value.facts["step"] == 7
    assert bits(live) == before
    assert ckpt.restored is None
    assert ckpt.restore(live.state) == 7


RIGHT = [
    {"only": ["model", "model.hidden"]},  # one within the other
    {"only": ["model"], "skip": ["optimizer.state.model.hidden.weight.exp_avg"]},
    {"skip": ["optimizer.param_groups.0.lr", "*.exp_avg_sq", "rng"]},
    {"skip": ["progress.best"]},
    {"rename": {"model.hidden": "model.hidden"}},
]


@pytest.mark.parametrize("options", RIGHT)
def test_patterns_that_match_are_taken(ckpt, options: dict[str, Any]) -> None:
    got = ckpt.restore(Training(seed=1).state, **options)
    assert got == 7


def test_what_only_the_state_or_only_the_step_has_can_be_skipped(ckpt) -> None:
    live = Training(seed=1)
    state = {**live.state, "head": nn.Linear(2, 2)}
    del state["progress"]
    assert ckpt.restore(state, skip=["head", "progress"]) == 7
    assert ckpt.restore({**live.state, "head": {"w": torch.ones(1)}}, skip=["head"]) == 7


@pytest.mark.parametrize("state", [{}, {"other": torch.ones(3)}, {"net": nn.Linear(3, 3)}])
def test_a_restore_that_would_load_nothing(ckpt, state: Any) -> None:
    with pytest.raises(StateMismatchError, match="nothing of the step would be restored"):
        ckpt.restore(state, strict=False)
    assert ckpt.restored is None


@pytest.mark.parametrize("choice", [{"only": ["model"], "skip": ["model"]}, {"skip": ["*"]}])
def test_what_is_selected_and_skipped_at_once_is_nothing(ckpt, choice: Any) -> None:
    """Other names would not help."""
    with pytest.raises(StateMismatchError, match="nothing of the step would be restored") as caught:
        ckpt.restore(Training(1).state, **choice)
    assert "skip= leaves out" in str(caught.value.hint)
    assert "rename=" not in str(caught.value.hint)


def test_an_empty_step_is_restored_into_an_empty_state(run) -> None:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(3, {}).wait("committed", DEADLINE_S)
        assert ckpt.restore({}) == 3


def test_a_module_without_tensors_has_a_name(run) -> None:
    state = {"act": nn.ReLU(), "empty": {}, "x": 1}
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(3, state).wait("committed", DEADLINE_S)
        assert ckpt.restore(state, skip=["act", "empty"]) == 3


def test_weights_only_is_what_the_hint_says(ckpt, saved: Training) -> None:
    live = Training(seed=1)
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore({"model": live.model})
    assert caught.value.hint is not None
    assert 'only=["model"]' in caught.value.hint
    assert ckpt.restore({"model": live.model}, only=["model"]) == 7
    assert torch.equal(live.model.hidden.weight, saved.model.hidden.weight)
    with pytest.raises(StateMismatchError) as caught:  # more than a part is another matter
        ckpt.restore({"model": nn.Linear(2, 2)})
    assert "only=" not in str(caught.value.hint)


# -- on several ranks ------------------------------------------------------------------------------


def stage(rank: int, value: float = 0.0) -> dict[str, Any]:
    """A stage of a pipeline: each rank has names of its own."""
    return {f"stage{rank}": {"w": torch.full((5,), value + rank)}, "all": torch.full((3,), value)}


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    fs = SimFs(seed=1)
    with Ranks(fs, 3) as ranks:
        ranks.save(4, lambda rank: stage(rank, 10.0))
        yield ranks


def restored(ranks: Ranks, states: list[dict[str, Any]], **options: Any) -> list[Any]:
    return ranks.outcomes(lambda rank: ranks.ckpts[rank].restore(states[rank], **options))


def test_a_pattern_may_be_of_another_rank(ranks) -> None:
    states = [stage(rank) for rank in range(3)]
    assert restored(ranks, states, only=["stage2"]) == [4] * 3
    assert states[2]["stage2"]["w"].tolist() == [12.0] * 5
    assert states[0]["stage0"]["w"].tolist() == [0.0] * 5
    assert restored(ranks, states, skip=["stage0.w", "all"]) == [4] * 3
    assert states[1]["stage1"]["w"].tolist() == [11.0] * 5
    for rank, state in enumerate(states):  # only rank 1 has this, and no step has it
        if rank == 1:
            state["stage1"]["new"] = torch.ones(1)
    assert restored(ranks, states, skip=["stage1.new"]) == [4] * 3


@pytest.mark.parametrize("options", [{"only": ["stage3"]}, {"rename": {"stage9": "stage0"}}])
def test_a_pattern_of_no_rank_is_an_error_on_all(ranks, options: dict[str, Any]) -> None:
    states = [stage(rank) for rank in range(3)]
    for outcome in restored(ranks, states, **options):
        assert isinstance(outcome, UsageError), outcome
        assert "stage1" in str(outcome)
    assert all(not state["all"].any() for state in states)
    assert restored(ranks, states) == [4] * 3


def test_a_wrong_pattern_of_one_rank_is_an_error_on_all(ranks) -> None:
    def restore(rank: int) -> Any:
        skip = ["alll"] if rank == 1 else None
        return ranks.ckpts[rank].restore(stage(rank), skip=skip)

    for outcome in ranks.outcomes(restore):
        assert isinstance(outcome, UsageError), outcome
        assert '"all"' in outcome.facts['skip "alll"']


def test_a_part_is_what_the_hint_says_on_ranks_too(ranks) -> None:
    states = [{"all": torch.zeros(3)} for _ in range(3)]
    for outcome in restored(ranks, states):
        assert isinstance(outcome, StateMismatchError), outcome
        assert 'only=["all"]' in str(outcome.hint)
    assert restored(ranks, states, only=["all"]) == [4] * 3


def test_nothing_on_any_rank_is_an_error_on_all(ranks) -> None:
    for outcome in restored(ranks, [{} for _ in range(3)], strict=False):
        assert isinstance(outcome, StateMismatchError), outcome
    states = [stage(rank) if rank == 1 else {} for rank in range(3)]
    assert restored(ranks, states, strict=False) == [4] * 3


def test_stages_that_have_changed_places_are_found_without_strictness(ranks) -> None:
    """Each rank looks at its own record first, which has the stage of another one now."""
    states = [stage((rank + 1) % 3) for rank in range(3)]
    assert restored(ranks, states, strict=False) == [4] * 3
    for rank, state in enumerate(states):
        now = (rank + 1) % 3
        assert state[f"stage{now}"]["w"].tolist() == [10.0 + now] * 5
        assert ranks.ckpts[rank].restored.missing == ()
