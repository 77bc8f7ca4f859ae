"""restore(source=..., prefix=True): the first layers come from a step of another run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from statehold.errors import (
    CorruptionError,
    PeerFailedError,
    StateholdError,
    StateMismatchError,
    StepNotFoundError,
    UsageError,
)
from statehold.format.entries import Origin, sha256
from statehold.lineage import Graph
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs, checkpointer_on
from support.levels import remove, step_path
from support.networks import mlp
from support.plain_runs import BASE, CHILD, manifest_of
from support.ranks import Ranks


def state_of(model: nn.Module, *, recorded: bool = True, lr: float = 0.1) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 7}
    return {**state, "graph": Graph(model)} if recorded else state


def train(state: dict[str, Any]) -> None:
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()


def save(fs: SimFs, run: str, step: int, state: dict[str, Any]) -> None:
    train(state)
    with checkpointer_on(fs, run, **SMALL) as ckpt:
        ckpt.save(step, state).wait("committed", DEADLINE_S)


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("recorded", [True, False], ids=["graph", "tensors"])
def test_the_shared_layers_are_transferred_and_the_others_stay(fs: SimFs, recorded: bool) -> None:
    base = state_of(mlp(8, 16, 16, 4), recorded=recorded)
    save(fs, BASE, 40, base)
    live = state_of(mlp(8, 16, 16, 5))
    live["epoch"] = 0
    fresh, saved = bits(live["model"]), bits(base["model"])
    with checkpointer_on(fs, CHILD, **SMALL) as ckpt:
        assert ckpt.restore(live, source=f"{BASE}@40", prefix=True) == 40
        report = ckpt.restored
        assert report is not None
    names = "model.0.weight", "model.0.bias", "model.2.weight", "model.2.bias"
    assert report.loaded == names
    assert set(report.kept) == {"model.4.weight", "model.4.bias", "optimizer", "epoch", "graph"}
    assert (report.missing, report.unexpected, report.source) == ((), (), BASE)
    assert str(report).startswith(f"step 40 of {BASE}: 4 loaded")
    for name, value in live["model"].state_dict().items():
        expected = saved if f"model.{name}" in names else fresh
        assert torch.equal(value, expected[name]), name
    assert live["epoch"] == 0
    assert not live["optimizer"].state  # moments belong to the gradients of the old model
    train(live)


def test_layers_are_found_under_other_names(fs: SimFs) -> None:
    base = state_of(mlp(8, 16, 16, 4))
    save(fs, BASE, 1, base)
    model = nn.Sequential()
    model.add_module("first", nn.Linear(8, 16))
    model.add_module("act", nn.ReLU())
    model.add_module("0", nn.Linear(16, 16))  # a name that another layer of the step has
    live = {"net": {"student": model}, "graph": Graph(model)}
    with checkpointer_on(fs, CHILD, **SMALL) as ckpt:
        ckpt.restore(live, source=f"{BASE}@1", prefix=True)
        assert ckpt.restored is not None
        assert len(ckpt.restored.loaded) == 4
    saved, found = base["model"].state_dict(), model.state_dict()
    for old, new in (("0", "first"), ("2", "0")):
        assert torch.equal(found[f"{new}.weight"], saved[f"{old}.weight"])
        assert torch.equal(found[f"{new}.bias"], saved[f"{old}.bias"])


def test_nothing_shared_changes_nothing(fs: SimFs) -> None:
    save(fs, BASE, 1, state_of(mlp(8, 16, 4)))
    live = state_of(mlp(9, 16, 4))
    before = bits(live["model"])
    with checkpointer_on(fs, CHILD, **SMALL) as ckpt:
        with pytest.raises(StateMismatchError, match="shares no layer") as caught:
            ckpt.restore(live, source=f"{BASE}@1", prefix=True)
        ckpt.save(1, live).wait("committed", DEADLINE_S)
    assert caught.value.facts["models of the step"] == "model (traced)"
    assert all(torch.equal(value, before[name]) for name, value in bits(live["model"]).items())
    assert manifest_of(fs, CHILD, 1).about.parent is None


def test_a_step_of_the_run_itself_gives_a_prefix_too(fs: SimFs) -> None:
    base = state_of(mlp(8, 16, 4))
    save(fs, BASE, 3, base)
    live = state_of(mlp(8, 16, 5))
    with checkpointer_on(fs, BASE, **SMALL) as ckpt:
        assert ckpt.restore(live, prefix=True) == 3
        assert ckpt.restored is not None
        assert ckpt.restored.source is None
    assert torch.equal(live["model"][0].weight, base["model"][0].weight)


def test_a_whole_step_of_another_run(fs: SimFs) -> None:
    base = state_of(mlp(8, 16, 4))
    save(fs, BASE, 3, base)
    save(fs, BASE, 5, base)
    live = state_of(mlp(8, 16, 4), lr=0.2)
    with checkpointer_on(fs, CHILD, **SMALL) as ckpt:
        assert ckpt.restore(live) is None
        assert ckpt.restore(live, source=BASE) == 5
        assert ckpt.steps() == []
        assert live["optimizer"].param_groups[0]["lr"] == 0.1
        assert ckpt.restore(live, 3, source=BASE, only=["model"]) == 3
        ckpt.save(1, live).wait("committed", DEADLINE_S)
        assert ckpt.restore(live) == 1
    raw = fs.read_file(f"{step_path(BASE, 3)}/manifest.json", 1 << 20)
    assert manifest_of(fs, CHILD, 1).about.parent == Origin(BASE, 3, sha256(raw))


def test_the_best_step_of_another_run(fs: SimFs) -> None:
    base = state_of(mlp(8, 16, 4))
    with checkpointer_on(fs, BASE, **SMALL) as ckpt:
        for step, loss in ((1, 2.0), (2, 0.5), (3, 1.0)):
            ckpt.save(step, base, metrics={"loss": loss}, tags=[f"number {step}"])
    live = state_of(mlp(8, 16, 4))
    with checkpointer_on(fs, CHILD, **SMALL) as ckpt:
        assert ckpt.restore(live, source=BASE, best="loss") == 2
        assert ckpt.restore(live, source=BASE, tag="number 1", prefix=True) == 1
        with pytest.raises(StepNotFoundError, match="this metric"):
            ckpt.restore(live, source=BASE, best="accuracy")
        with pytest.raises(UsageError, match="twice"):
            ckpt.restore(live, source=f"{BASE}@1", best="loss")


def test_a_run_with_steps_keeps_its_own_descent(fs: SimFs) -> None:
    save(fs, BASE, 3, state_of(mlp(8, 16, 4)))
    live = state_of(mlp(8, 16, 4))
    save(fs, CHILD, 1, live)
    with checkpointer_on(fs, CHILD, **SMALL) as ckpt:
        ckpt.restore(live, source=f"{BASE}@3")
        ckpt.save(2, live).wait("committed", DEADLINE_S)
    assert manifest_of(fs, CHILD, 2).about.parent is None


def test_the_source_is_only_read(fs: SimFs) -> None:
    save(fs, BASE, 3, state_of(mlp(8, 16, 4)))
    with checkpointer_on(fs, BASE, **SMALL) as busy:  # its job goes on, and has the lock
        busy.save(4, state_of(mlp(8, 16, 4))).wait("committed", DEADLINE_S)
        with checkpointer_on(fs, CHILD, **SMALL) as ckpt:
            fs.record()
            assert ckpt.restore(state_of(mlp(8, 16, 5)), source=f"{BASE}@3", prefix=True) == 3
            changes = [each for each in fs.recorded if BASE in each]
    assert changes == []


def data_file(fs: SimFs, run: str, step: int) -> str:
    folder = step_path(run, step)
    name = next(name for name, _ in fs.listdir(folder) if name.endswith(".safetensors"))
    return f"{folder}/{name}"


def test_every_byte_is_verified(fs: SimFs) -> None:
    state = state_of(mlp(8, 16, 4))
    save(fs, BASE, 3, state)
    save(fs, BASE, 4, state)
    path = data_file(fs, BASE, 4)
    fs.corrupt(path, (fs.stat_bytes(path) or 0) // 2, 1)
    live = state_of(mlp(8, 16, 4))
    with checkpointer_on(fs, CHILD, **SMALL) as ckpt:
        with pytest.raises(CorruptionError):
            ckpt.restore(live, source=f"{BASE}@4")
        with pytest.warns(RuntimeWarning, match="step 4 of .* is damaged; step 3 was restored"):
            assert ckpt.restore(live, source=BASE) == 3
        assert ckpt.restored is not None
        assert ckpt.restored.step == 3
    assert [name for name, _ in fs.listdir(BASE) if "corrupt" in name] == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_ranks_take_the_same_prefix(fs: SimFs, ranks: int) -> None:
    base = [state_of(mlp(8, 16, 4)) for _ in range(ranks)]
    for each in base:
        each["model"].load_state_dict(bits(base[0]["model"]))
    with Ranks(fs, ranks, BASE) as job:
        job.save(1, lambda rank: base[rank])
    with Ranks(fs, 2, CHILD) as job:
        live = [state_of(mlp(8, 16, 5)) for _ in range(2)]
        assert job.each(
            lambda rank: job.ckpts[rank].restore(live[rank], source=f"{BASE}@1", prefix=True)
        ) == [1, 1]
        job.save(1, lambda rank: live[rank])
    for each in live:
        assert torch.equal(each["model"][0].weight, base[0]["model"][0].weight)
    raw = fs.read_file(f"{step_path(CHILD, 1)}/manifest.json", 1 << 20)
    assert f'"run":"{BASE}"'.encode() in raw.replace(b" ", b"")


def test_a_rank_that_cannot_stops_all(fs: SimFs) -> None:
    save(fs, BASE, 1, state_of(mlp(8, 16, 4)))
    with Ranks(fs, 2, CHILD) as job:
        live = [state_of(mlp(8, 16, 4)), {"no": 1, "model": 2}]
        found = job.outcomes(
            lambda rank: job.ckpts[rank].restore(live[rank], source=f"{BASE}@1", prefix=True)
        )
    assert isinstance(found[0], PeerFailedError)
    assert isinstance(found[1], UsageError)


def test_ranks_that_share_nothing_all_raise(fs: SimFs) -> None:
    save(fs, BASE, 1, state_of(mlp(8, 16, 4)))
    with Ranks(fs, 2, CHILD) as job:
        live = [state_of(mlp(9, 16, 4)) for _ in range(2)]
        found = job.outcomes(
            lambda rank: job.ckpts[rank].restore(live[rank], source=f"{BASE}@1", prefix=True)
        )
    assert all(isinstance(each, StateMismatchError) for each in found)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"source": "s3://bucket/run"}, UsageError),
        ({"source": ""}, UsageError),
        ({"source": f"{BASE}@1", "step": 1}, UsageError),
        ({"source": f"{BASE}@9"}, StepNotFoundError),
        ({"source": "/runs/nowhere"}, StepNotFoundError),
        ({"source": "/runs/nowhere@3"}, StepNotFoundError),
        ({"source": CHILD}, UsageError),
        ({"source": f"{CHILD}@1"}, UsageError),
        ({"source": f"{BASE}@1", "prefix": 1}, UsageError),
        ({"source": f"{BASE}@1", "prefix": True, "only": ["model"]}, UsageError),
        ({"source": f"{BASE}@1", "prefix": True, "strict": False}, UsageError),
        ({"source": f"{BASE}@1", "prefix": True, "rename": {"a": "b"}}, UsageError),
    ],
)
def test_what_is_no_source(fs: SimFs, options: dict[str, Any], error: type[Exception]) -> None:
    save(fs, BASE, 1, state_of(mlp(8, 16, 4)))
    live = state_of(mlp(8, 16, 4))
    before = bits(live["model"])
    with checkpointer_on(fs, CHILD, **SMALL) as ckpt, pytest.raises(error) as caught:
        ckpt.restore(live, **options)
    assert isinstance(caught.value, StateholdError)
    assert all(torch.equal(value, before[name]) for name, value in bits(live["model"]).items())


def test_which_model_is_meant(fs: SimFs) -> None:
    base = state_of(mlp(8, 16, 4), recorded=False)
    base["ema"] = mlp(8, 16, 4)
    save(fs, BASE, 1, base)
    model, other = mlp(8, 16, 4), mlp(8, 16, 4)
    with checkpointer_on(fs, CHILD, **SMALL) as ckpt:
        with pytest.raises(UsageError, match="needs to know the model"):
            ckpt.restore({"a": model, "b": other}, source=f"{BASE}@1", prefix=True)
        with pytest.raises(UsageError, match="needs to know the model"):
            ckpt.restore({"a": 1}, source=f"{BASE}@1", prefix=True)
        live = {"a": model, "ema": other, "graph": Graph(other)}
        ckpt.restore(live, source=f"{BASE}@1", prefix=True)
    assert torch.equal(other[0].weight, base["ema"][0].weight)  # the one with the same name
    assert not torch.equal(model[0].weight, base["model"][0].weight)


def test_a_source_that_is_deleted_meanwhile_is_not_there(fs: SimFs) -> None:
    save(fs, BASE, 1, state_of(mlp(8, 16, 4)))
    remove(fs, BASE)
    with checkpointer_on(fs, CHILD, **SMALL) as ckpt, pytest.raises(StepNotFoundError):
        ckpt.restore(state_of(mlp(8, 16, 4)), source=f"{BASE}@1", prefix=True)


def test_the_graph_of_a_resumed_run_is_that_of_its_model(fs: SimFs) -> None:
    save(fs, BASE, 1, state_of(mlp(8, 16, 4)))
    live = state_of(mlp(8, 16, 4))
    graph = live["graph"].state_dict()
    with checkpointer_on(fs, BASE, **SMALL) as ckpt:
        assert ckpt.restore(live) == 1
        assert live["graph"].state_dict() == graph
