"""In which order a visit reads and uses subgroups, and what of them may be used elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from statehold import offload
from statehold.offload.pipeline import SubgroupPipeline
from statehold.offload.subgroups import Subgroup
from statehold.process.worker import Task
from support.faults import DEADLINE_S, must
from support.twins import state_of

SUBGROUPS, CACHED = 32, 5


class Inline:
    """An executor whose calls have ended when submit() returns."""

    def submit(self, call: Callable[..., Any], *arguments: Any, woken: Any = None) -> Task[Any]:
        found = Task[Any](lambda: call(*arguments), woken)
        found.make()
        return found

    def close(self) -> None:
        pass


@pytest.fixture
def pipeline(tmp_path: Path):
    """Of an optimizer whose state has been updated once."""
    param = torch.nn.Parameter(torch.ones(SUBGROUPS * 4096))
    tiers = [offload.Host(CACHED * 32_768), offload.Path(tmp_path)]
    with closing(offload.AdamW([param], tiers=tiers, subgroup_bytes=32_768)) as optimizer:
        param.grad = torch.ones_like(param)
        optimizer.step()
        yield state_of(optimizer).pipeline


def test_others_are_read_while_those_in_memory_are_used(
    pipeline: SubgroupPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_threads", Inline())
    in_memory = {i for i, place in enumerate(pipeline.places) if place.buffer is not None}
    order: list[tuple[str, int]] = []
    read = pipeline.store.read
    monkeypatch.setattr(
        pipeline.store,
        "read",
        lambda group, *rest: (order.append(("read", group.index)), read(group, *rest)),
    )
    pipeline.visit(
        range(SUBGROUPS), lambda group, *_: order.append(("use", group.index)), changes=False
    )
    last = max(order.index(("use", index)) for index in in_memory)
    before = sum(kind == "read" for kind, _ in order[:last])
    assert before == len(in_memory) - 1 > pipeline.exchanges


def test_others_are_used_while_one_is_used_elsewhere(pipeline: SubgroupPipeline) -> None:
    """Every fourth one ends when all others have been used; nothing is read into its buffer."""
    used, ended, may_end = set(), [], threading.Event()

    def use(group: Subgroup, memory: torch.Tensor, is_fresh: bool) -> Callable[[], None] | None:
        used.add(group.index)
        if group.index % 4:
            if len(used) == SUBGROUPS:
                may_end.set()
            return None
        memory.fill_(group.index)

        def end() -> None:
            must(may_end.wait(DEADLINE_S))
            must(bool((memory == group.index).all()))
            memory.fill_(-group.index)
            ended.append(group.index)

        if len(used) == SUBGROUPS:
            may_end.set()
        return end

    pipeline.visit(range(SUBGROUPS), use, changes=True)
    assert used == set(range(SUBGROUPS))
    assert sorted(ended) == list(range(0, SUBGROUPS, 4))
    found: dict[int, float] = {}
    pipeline.visit(
        range(0, SUBGROUPS, 4),
        lambda group, memory, _: found.update({group.index: float(memory[0])}),
        changes=False,
    )
    assert found == {index: -index for index in range(0, SUBGROUPS, 4)}


def test_what_fails_elsewhere_is_raised_when_all_has_ended(pipeline: SubgroupPipeline) -> None:
    ended = []

    def use(group: Subgroup, *_: Any) -> Callable[[], None]:
        def end() -> None:
            ended.append(group.index)
            if len(ended) == 2:
                raise OSError("elsewhere")

        return end

    with pytest.raises(OSError, match="elsewhere"):
        pipeline.visit(range(SUBGROUPS), use, changes=False)
    count = len(ended)
    assert count >= 2
    pipeline.visit(range(SUBGROUPS), lambda *_: None, changes=False)
    assert len(ended) == count
