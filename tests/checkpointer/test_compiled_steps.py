"""Steps under torch.compile wait at the gate, too; a step without a break makes save() wait."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import statehold
from checkpointer.test_torn import releasing
from statehold.tensors import updates
from support.faults import DEADLINE_S, SMALL, Holdup, must
from support.inside import passage

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
WIDE = 1024  # 4 MiB, twice the staging memory


class Descent(torch.optim.Optimizer):
    """An optimizer that torch.compile takes in one graph; those of torch break it themselves."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


class Compiled:
    """A model whose update is compiled; `compilations` counts the graphs."""

    def __init__(self, optimizer: Any = torch.optim.AdamW, **options: Any) -> None:
        self.compilations = 0
        self.model = nn.Linear(WIDE, WIDE)
        self.model(torch.ones(1, WIDE)).sum().backward()
        self.optimizer = optimizer(self.model.parameters())
        self.step: Callable[[], None] = torch.compile(
            self.optimizer.step, backend=self._compile, **options
        )

    def _compile(self, graph: Any, _: Any) -> Any:
        self.compilations += 1
        return graph.forward

    def check_held_step(self, ckpt: statehold.Checkpointer, number: int) -> None:
        """A step while a save is held up: the save has the bytes from before."""
        holdup = Holdup(ckpt)
        before = self.model.weight.detach().clone()
        save = ckpt.save(number, {"model": self.model})
        must(holdup.waiting.wait(DEADLINE_S))
        assert not save.done("staged")
        passage(save).wait_ended = releasing(holdup, passage(save).wait_ended)
        self.step()
        assert not torch.equal(self.model.weight, before)
        save.wait("committed", DEADLINE_S)
        assert save.stats.gate_s > 0
        self.check_saved(ckpt, number, before)

    def check_saved(
        self, ckpt: statehold.Checkpointer, number: int, expected: torch.Tensor
    ) -> None:
        saved = nn.Linear(WIDE, WIDE)
        assert ckpt.restore({"model": saved}) == number
        assert torch.equal(saved.weight, expected)


@pytest.fixture(autouse=True)
def no_traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(updates.hook, "has_blind_steps", False)
    yield
    torch._dynamo.reset()


@pytest.mark.thorough
@pytest.mark.parametrize("is_compiled_before", [True, False])
def test_a_compiled_step_waits(run: Path, is_compiled_before: bool) -> None:
    compiled = Compiled()
    if is_compiled_before:
        compiled.step()
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        if not is_compiled_before:
            compiled.step()
        compiled.check_held_step(ckpt, 1)
        compiled.check_held_step(ckpt, 2)
    assert not updates.hook.has_blind_steps


@pytest.mark.thorough
def test_no_step_is_compiled_anew_because_of_saves(run: Path) -> None:
    steps = [Compiled(), Compiled(torch.optim.SGD)]
    for number in (1, 2):
        with statehold.Checkpointer(run, **SMALL) as ckpt:
            for compiled in steps:
                compiled.step()
            graphs = [compiled.compilations for compiled in steps]
            frames = counters["frames"]["total"]
            steps[0].check_held_step(ckpt, number)
            steps[1].step()
            assert [compiled.compilations for compiled in steps] == graphs
            assert counters["frames"]["total"] == frames
    assert all(graphs)
    assert frames


@pytest.mark.thorough
@pytest.mark.parametrize("is_compiled_before", [True, False])
def test_a_save_waits_where_a_step_is_one_graph(
    run: Path, is_compiled_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = Compiled(Descent, fullgraph=True)
    if is_compiled_before:
        compiled.step()
    with statehold.Checkpointer(run, **SMALL) as ckpt, caplog.at_level(logging.WARNING):
        compiled.step()
        for number in (1, 2):
            before = compiled.model.weight.detach().clone()
            save = ckpt.save(number, {"model": compiled.model})
            assert save.done("staged")
            compiled.step()
            assert not torch.equal(compiled.model.weight, before)
            save.wait("committed", DEADLINE_S)
            compiled.check_saved(ckpt, number, before)
    assert caplog.text.count("fullgraph=True, which lets no code run") == 1


def test_a_save_under_way_is_waited_for_while_one_graph_is_traced(run: Path) -> None:
    compiled = Compiled(Descent, fullgraph=True)
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        compiled.check_held_step(ckpt, 1)
    assert updates.hook.has_blind_steps


def test_one_graph_is_not_compiled_anew_by_checkpointers_that_come_and_go(run: Path) -> None:
    compiled = Compiled(Descent, fullgraph=True)
    for number in range(1, 4):
        with statehold.Checkpointer(run, **SMALL) as ckpt:
            compiled.step()
            ckpt.save(number, {"model": compiled.model})
        compiled.step()
    assert compiled.compilations == 1


def test_a_held_step_without_the_compiler_in_between(run: Path) -> None:
    """The hook of a process outlives the Checkpointer that put it on, and serves the next."""
    compiled = Compiled(Descent, fullgraph=True)
    with statehold.Checkpointer(run, **SMALL):
        compiled.step()
    updates.hook.has_blind_steps = False
    compiled.step = compiled.optimizer.step
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        compiled.check_held_step(ckpt, 1)
