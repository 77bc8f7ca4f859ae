"""What Python's collector has to look at: of a commit nothing, of a restore little for each tensor.

A collector that goes through all objects of a program does so again once a quarter more of them is
there. So each object for each of tens of thousands of tensors costs a restore as much as making it
several times.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.checkpoint.restore import read_plan
from statehold.checkpoint.save import writes
from support.faults import DEADLINE_S, SMALL, spy_on


def test_the_document_of_a_step_is_gone_when_its_bytes_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, seen, at_the_write = writes.Manifest, [], []

    def watched(**members: Any) -> Any:
        manifest = build(**members)
        seen.append(weakref.ref(manifest))
        return manifest

    def before(operation: str, _: tuple[Any, ...]) -> None:
        if operation == "write_file" and seen:
            at_the_write.append(seen[-1]() is None)

    monkeypatch.setattr(writes, "Manifest", watched)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        spy_on(ckpt, before)
        ckpt.save(1, {"w": torch.ones(8)}).wait("committed", DEADLINE_S)
    assert len(seen) == 1
    assert at_the_write[0]


def containers_of(tensors: int, run: Path) -> int:
    """How many containers a restore of so many tensors and steps of their optimizer has made before
    the first byte is read."""
    model = torch.nn.ParameterList([torch.ones(2) for _ in range(tensors)])
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model_of = {"model": model, "optimizer": optimizer}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    found = list[int]()

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **more: Any) -> Any:
            gc.collect()  # which leaves tuples of numbers alone from then on
            found.append(len(gc.get_objects()))
            return function(*given, **more)

        return counted

    with statehold.Checkpointer(run, **SMALL) as ckpt, pytest.MonkeyPatch.context() as patch:
        ckpt.save(1, model_of).wait("committed", DEADLINE_S)
        patch.setattr(read_plan.ReadPlan, "start", counting(read_plan.ReadPlan.start))
        counting(ckpt.restore)(model_of)
    return found[1] - found[0]


def test_a_restore_makes_few_containers_for_each_tensor(tmp_path: Path) -> None:
    few, many = (containers_of(n, tmp_path / str(n)) for n in (100, 600))
    assert (many - few) / 1000 < 6.5
