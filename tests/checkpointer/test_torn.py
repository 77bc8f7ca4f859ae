"""Never torn: each promise of docs/durability.md, with a test that fails without it.

The state is larger than the staging memory and the data file is held up, so that bytes are certain
to be uncopied while the test interferes.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from statehold.checkpoint.save import call
from statehold.checkpoint.save.handle import Passage, Work
from statehold.checkpoint.save.writes import start_write
from statehold.checkpoint.telemetry.watch import Event
from statehold.errors import TornSnapshot
from statehold.tensors.captured import Capture
from support.faults import DEADLINE_S, SMALL, Holdup, must
from support.inside import inside, passage
from support.training import Training, bits

WIDE = 1024  # the hidden layer alone is 4 MiB, twice the staging memory


def restored(ckpt: statehold.Checkpointer, step: int | None = None, width: int = WIDE) -> Training:
    training = Training(seed=99, width=width)
    ckpt.restore(training.state, step)
    return training


def test_the_optimizer_waits_until_the_state_is_copied(
    small_ckpt: statehold.Checkpointer, holdup: Holdup
) -> None:
    training = Training(width=WIDE)
    training.step()
    expected = bits(training)
    save = small_ckpt.save(1, training.state)
    training.backward()
    stepping = threading.Thread(target=training.optimizer.step)
    at_the_gate = threading.Event()
    wait_ended = passage(save).wait_ended

    def observed(*args: object) -> bool:
        at_the_gate.set()
        return wait_ended(*args)

    passage(save).wait_ended = observed
    stepping.start()
    must(at_the_gate.wait(DEADLINE_S), "the optimizer stepped without asking the gate")
    assert not save.done("staged")
    holdup.release()
    stepping.join(DEADLINE_S)
    save.wait("committed", DEADLINE_S)
    assert save.stats.gate_s > 0
    assert bits(restored(small_ckpt)) | {"rng": b""} == expected | {"rng": b""}
    assert bits(training)["hidden.weight"] != expected["hidden.weight"]


def test_an_optimizer_outside_the_state_waits_too(
    small_ckpt: statehold.Checkpointer, holdup: Holdup
) -> None:
    """A fused one, which changes parameters without moving their version counters."""
    model = nn.Linear(WIDE, WIDE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    expected = model.weight.detach().clone()
    save = small_ckpt.save(1, {"model": model})
    model(torch.ones(1, WIDE)).sum().backward()
    passage(save).wait_ended = releasing(holdup, passage(save).wait_ended)
    optimizer.step()
    save.wait("committed", DEADLINE_S)
    assert not torch.equal(model.weight, expected)
    small_ckpt.restore({"model": model})
    assert torch.equal(model.weight, expected)


def releasing(holdup: Holdup, wait_ended: Callable[..., bool]) -> Callable[..., bool]:
    """Lets the held-up save go on only once somebody waits for it."""

    def wait(*args: object) -> bool:
        holdup.release()
        return wait_ended(*args)

    return wait


def test_gate_holds_back_updates_outside_optimizers(run) -> None:
    weights = torch.randn(1 << 20)
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        expected = weights.clone()
        save = ckpt.save(1, {"weights": statehold.Gated([weights])})
        ckpt.gate(DEADLINE_S)
        assert save.done("staged")
        weights.add_(1)
        save.wait("committed", DEADLINE_S)
        fresh = torch.zeros(1 << 20)
        ckpt.restore({"weights": [fresh]})
    assert torch.equal(fresh, expected)


def test_gate_times_out_with_a_named_error(
    small_ckpt: statehold.Checkpointer, holdup: Holdup
) -> None:
    save = small_ckpt.save(1, {"w": statehold.Gated(torch.randn(1 << 20))})
    with pytest.raises(statehold.errors.WaitTimeout) as caught:
        small_ckpt.gate(0.01)
    assert "step 1" in str(caught.value)
    holdup.release()
    save.wait("committed", DEADLINE_S)


def test_buffers_are_copied_before_save_returns(
    small_ckpt: statehold.Checkpointer, holdup: Holdup
) -> None:
    training = Training(width=WIDE)
    training.step()
    expected = bits(training)
    save = small_ckpt.save(1, training.state)
    assert not save.done("staged")
    training.backward()  # forward moves the running mean of the batch norm
    assert bits(training)["norm.running_mean"] != expected["norm.running_mean"]
    holdup.release()
    save.wait("committed", DEADLINE_S)
    assert bits(restored(small_ckpt))["norm.running_mean"] == expected["norm.running_mean"]


def test_volatile_items_are_copied_before_save_returns(
    small_ckpt: statehold.Checkpointer, holdup: Holdup
) -> None:
    model, ema = nn.Linear(WIDE, WIDE), nn.Linear(256, 256)
    expected = ema.weight.detach().clone()
    state = {"model": model, "ema": statehold.Volatile(ema)}
    save = small_ckpt.save(1, state)
    assert not save.done("staged")
    with torch.no_grad():
        ema.weight.mul_(0.5)
    holdup.release()
    save.wait("committed", DEADLINE_S)
    small_ckpt.restore(state)
    assert torch.equal(ema.weight, expected)


def test_staged_bytes_are_never_read_from_live_memory(run) -> None:
    tensor = torch.randn(1 << 18)
    expected = tensor.clone()
    with statehold.Checkpointer(run, **{**SMALL, "staging_bytes": "8MiB"}) as ckpt:
        holdup = Holdup(ckpt)
        save = ckpt.save(1, {"w": statehold.Gated(tensor)})
        save.wait("staged", DEADLINE_S)
        tensor.zero_()
        holdup.release()
        save.wait("committed", DEADLINE_S)
        ckpt.restore({"w": tensor})
    assert torch.equal(tensor, expected)


def test_a_change_past_the_gate_fails_the_save(
    small_ckpt: statehold.Checkpointer, holdup: Holdup
) -> None:
    training = Training(width=WIDE)
    training.step()
    holdup.release()
    small_ckpt.save(1, training.state).wait("committed", DEADLINE_S)
    holdup.go_on.clear()
    save = small_ckpt.save(2, training.state)
    with torch.no_grad():
        training.model.hidden.weight.add_(1)
    holdup.release()
    with pytest.raises(TornSnapshot) as caught:
        save.wait("committed", DEADLINE_S)
    assert caught.value.facts["tensor"] == "model.hidden.weight"
    assert caught.value.facts["still safe"] == "step 1 and older"
    assert small_ckpt.steps() == [1]


def test_a_failure_is_raised_at_the_next_call(
    small_ckpt: statehold.Checkpointer, holdup: Holdup
) -> None:
    training = Training(width=WIDE)
    save = small_ckpt.save(1, training.state)
    with torch.no_grad():
        training.model.hidden.weight.add_(1)
    holdup.release()
    must(passage(save).wait_ended("committed", DEADLINE_S))
    with pytest.raises(TornSnapshot):
        small_ckpt.save(2, training.state)
    small_ckpt.save(2, training.state).wait("committed", DEADLINE_S)
    assert small_ckpt.steps() == [2]


def test_replaced_storage_is_noticed(small_ckpt: statehold.Checkpointer) -> None:
    training = Training(width=WIDE)
    training.step()
    small_ckpt.save(1, training.state).wait("committed", DEADLINE_S)
    training.model.hidden.weight.data = torch.full_like(training.model.hidden.weight, 7.0)
    small_ckpt.save(2, training.state).wait("committed", DEADLINE_S)
    fresh = restored(small_ckpt)
    assert torch.equal(fresh.model.hidden.weight, training.model.hidden.weight)


def test_tensors_live_until_they_are_copied(
    small_ckpt: statehold.Checkpointer, holdup: Holdup
) -> None:
    training = Training(width=WIDE)
    expected = bits(training)
    storage = weakref.ref(training.model.hidden.weight.untyped_storage())
    save = small_ckpt.save(1, training.state)
    del training
    gc.collect()
    churn = [torch.zeros(WIDE, WIDE) for _ in range(4)]  # would land on freed memory
    holdup.release()
    save.wait("committed", DEADLINE_S)
    fresh = restored(small_ckpt)
    assert bits(fresh)["hidden.weight"] == expected["hidden.weight"]
    assert len(churn) == 4
    assert storage is not None


def test_gradient_accumulation_and_several_optimizers(run) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    optimizers = [torch.optim.SGD(first.parameters(), 0.1, momentum=0.9),
                  torch.optim.AdamW(second.parameters(), 0.1)]  # fmt: skip
    state = {"first": first, "second": second, "optimizers": optimizers}
    history = {}
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        for step in range(1, 6):
            for _ in range(3):
                (second(first(torch.randn(8, 64))).square().mean() / 3).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            history[step] = [first.weight.detach().clone(), second.weight.detach().clone()]
            ckpt.save(step, state)
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        for step, weights in history.items():
            ckpt.restore(state, step)
            assert torch.equal(first.weight, weights[0])
            assert torch.equal(second.weight, weights[1])


def test_saves_queue_in_order_within_bounded_memory(
    small_ckpt: statehold.Checkpointer, holdup: Holdup, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(width=256)
    saves, expected = [], {}
    reach, reached = Passage.reach, list[tuple[str, int]]()

    def noted(save: Passage, event: Event) -> None:
        reached.append((event, save.step))
        reach(save, event)

    monkeypatch.setattr(Passage, "reach", noted)
    finished = threading.Event()

    def train() -> None:
        for step in range(1, 5):
            training.step()
            expected[step] = bits(training)
            saves.append(small_ckpt.save(step, training.state))
        finished.set()

    trainer = threading.Thread(target=train)
    trainer.start()
    must(holdup.waiting.wait(DEADLINE_S))
    assert len(saves) <= 2, "a third save began while two were not committed"
    holdup.release()
    must(finished.wait(DEADLINE_S))
    trainer.join()
    for save in saves:
        save.wait("committed", DEADLINE_S)
    assert [step for event, step in reached if event == "committed"] == [1, 2, 3, 4]
    for step in expected:
        assert bits(restored(small_ckpt, step, width=256)) == expected[step]


def test_structure_may_change_between_saves(small_ckpt: statehold.Checkpointer) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    small_ckpt.save(1, {"model": model}).wait("committed", DEADLINE_S)
    model.append(nn.Linear(8, 4))
    small_ckpt.save(2, {"model": model}).wait("committed", DEADLINE_S)
    expected = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    small_ckpt.restore({"model": model})
    assert all(map(torch.equal, model.parameters(), expected))


def test_a_change_before_save_has_looked_is_never_committed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background is done before the thread that saves looks whether eager tensors changed."""
    tensor = torch.zeros(1000)
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        pipeline = inside(ckpt).pipeline
        wait_eager = pipeline.wait_eager

        def late(work: Work, captured: Capture) -> None:
            pipeline.drain(DEADLINE_S)
            wait_eager(work, captured)

        def changed(*args: Any, **options: Any) -> Any:
            found = start_write(*args, **options)
            must(found.wait_copied(DEADLINE_S))
            tensor.add_(1)
            return found

        monkeypatch.setattr(pipeline, "wait_eager", late)
        monkeypatch.setattr(call, "start_write", changed)
        with pytest.raises(TornSnapshot):
            ckpt.save(1, {"w": tensor})
        monkeypatch.undo()
        assert ckpt.steps() == []


def test_a_change_after_everything_was_copied_is_none(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background has found all unchanged when another thread changes an eager tensor."""
    tensor = torch.zeros(1000)
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        pipeline = inside(ckpt).pipeline
        wait_eager = pipeline.wait_eager

        def late(work: Work, captured: Capture) -> None:
            pipeline.drain(DEADLINE_S)
            tensor.add_(1)
            wait_eager(work, captured)

        monkeypatch.setattr(pipeline, "wait_eager", late)
        ckpt.save(1, {"w": tensor})
        assert ckpt.steps() == [1]
        back = torch.ones(1000)
        ckpt.restore({"w": back})
    assert torch.equal(back, torch.zeros(1000))
