"""Updates in CUDA graphs: a replay runs no hook and moves no version, and waits at the gate."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from checkpointer.test_torn import releasing
from devices.conftest import bits_on, restored_on, trained_on
from statehold.errors import UsageError
from support.cuda import Machine, copies_of
from support.faults import DEADLINE_S, SMALL, Holdup, must
from support.inside import passage, trainer
from support.training import Training

WIDE = 1024  # many times the staging memory
NOT_CAPTURED = {"progress", "scheduler"}


class Graphed:
    """A run whose update, and whose backward, are graphs. Built before or after a gate stands."""

    def __init__(self, machine: Machine, width: int = WIDE) -> None:
        self.machine = machine
        self.width = width
        self.training: Training = trained_on(machine, width)
        self.training.backward()
        self.update = self.capture(self.training.optimizer.step)
        self.other = self.capture(self.make_noise)

    def make_noise(self) -> None:
        for parameter in self.training.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1.5)

    def capture(self, work: Callable[[], object], graph: Any = None) -> Any:
        graph = graph or self.machine.cuda.CUDAGraph()
        with self.machine.cuda.graph(graph):
            work()
        return graph

    def bits(self) -> dict[str, bytes]:
        found = bits_on(self.machine, self.training)
        return {name: value for name, value in found.items() if name not in NOT_CAPTURED}

    def restored(self, ckpt: statehold.Checkpointer, step: int) -> dict[str, bytes]:
        found = restored_on(self.machine, ckpt, step, self.width)
        return {name: value for name, value in found.items() if name not in NOT_CAPTURED}

    def replay_held(self, ckpt: statehold.Checkpointer, graph: Any, step: int) -> Any:
        """A save that was held up until something waited for it during a replay, or after that."""
        holdup = Holdup(ckpt)
        save = ckpt.save(step, self.training.state)
        must(holdup.waiting.wait(DEADLINE_S))
        enqueued = copies_of(ckpt).enqueued
        passage(save).wait_ended = releasing(holdup, passage(save).wait_ended)
        enqueued.wait = releasing(holdup, enqueued.wait)
        graph.replay()
        self.machine.finish()
        holdup.release()
        save.wait("committed", DEADLINE_S)
        return save

    def check_waits(self, ckpt: statehold.Checkpointer, graph: Any, step: int = 1) -> None:
        """A replay while a save is held up changes nothing of what is saved."""
        expected = self.bits()
        save = self.replay_held(ckpt, graph, step)
        changed = self.bits()
        assert self.restored(ckpt, step) == expected
        assert changed["hidden.weight"] != expected["hidden.weight"]
        assert save.stats.gate_s > 0

    def check_passes(self, ckpt: statehold.Checkpointer, graph: Any, step: int = 1) -> None:
        """A replay while a save is held up does not wait for it."""
        holdup = Holdup(ckpt)
        save = ckpt.save(step, self.training.state)
        must(holdup.waiting.wait(DEADLINE_S))
        graph.replay()
        assert not save.done("staged")
        assert save.stats.gate_s == 0
        holdup.release()
        save.wait("committed", DEADLINE_S)


@pytest.fixture
def graphed(ckpt: statehold.Checkpointer, machine: Machine) -> Graphed:
    return Graphed(machine)


@pytest.mark.parametrize("of", [attrgetter("cuda.CUDAGraph"), attrgetter("accelerator.Graph")])
def test_the_replay_of_an_update_waits(
    ckpt: statehold.Checkpointer, graphed: Graphed, of: Any
) -> None:
    graph = graphed.capture(graphed.training.optimizer.step, of(graphed.machine)())
    graphed.check_waits(ckpt, graph)
    graphed.check_waits(ckpt, graph, 2)
    graphed.check_passes(ckpt, graphed.capture(graphed.make_noise, of(graphed.machine)()), 3)


def test_a_save_waits_where_a_graph_of_another_library_holds_an_update(
    ckpt: statehold.Checkpointer,
    graphed: Graphed,
    caplog: pytest.LogCaptureFixture,
) -> None:
    foreign = graphed.machine.cuda.ForeignGraph
    graphed.capture(graphed.make_noise, foreign())
    graphed.check_passes(ckpt, graphed.other)
    graph = graphed.capture(graphed.training.optimizer.step, foreign())
    for step in (2, 3):
        expected = graphed.bits()
        save = ckpt.save(step, graphed.training.state)
        assert save.done("staged")
        graph.replay()
        save.wait("committed", DEADLINE_S)
        assert graphed.bits()["hidden.weight"] != expected["hidden.weight"]
        assert graphed.restored(ckpt, step) == expected
    assert caplog.text.count("a CUDA graph that holds an update was captured by other means") == 1


def test_a_stream_waits_instead_of_the_host(ckpt: statehold.Checkpointer, machine: Machine) -> None:
    graphed = Graphed(machine, width=32)
    expected = graphed.bits()
    machine.timeline.may_finish.clear()
    machine.timeline.host_waits.clear()
    save = ckpt.save(1, graphed.training.state)
    must(copies_of(ckpt).enqueued.wait(DEADLINE_S))
    with machine.cuda.stream(machine.cuda.Stream()):
        graphed.update.replay()
    assert not save.done("staged")
    assert save.stats.gate_s == 0
    assert "MainThread" not in machine.timeline.host_waits
    machine.timeline.may_finish.set()
    save.wait("committed", DEADLINE_S)
    assert graphed.bits()["hidden.weight"] != expected["hidden.weight"]
    assert graphed.restored(ckpt, 1) == expected


def test_the_replay_of_forward_and_backward_does_not_wait(
    ckpt: statehold.Checkpointer, graphed: Graphed
) -> None:
    graphed.check_passes(ckpt, graphed.other)


def test_an_update_is_captured_when_saves_are_staged(
    ckpt: statehold.Checkpointer, graphed: Graphed
) -> None:
    """It changes nothing, but it moves version counters."""
    holdup = Holdup(ckpt)
    expected = graphed.bits()
    save = ckpt.save(1, graphed.training.state)
    must(holdup.waiting.wait(DEADLINE_S))
    passage(save).wait_ended = releasing(holdup, passage(save).wait_ended)
    graphed.capture(graphed.make_noise)
    assert not save.done("staged")
    graph = graphed.capture(graphed.training.optimizer.step)
    assert save.done("staged")
    save.wait("committed", DEADLINE_S)
    assert graphed.restored(ckpt, 1) == expected
    assert graphed.bits()["hidden.weight"] == expected["hidden.weight"]
    graphed.check_waits(ckpt, graph, 2)


def test_nothing_is_enqueued_in_a_capture(ckpt: statehold.Checkpointer, machine: Machine) -> None:
    graphed = Graphed(machine, width=32)
    expected = [len(graphed.update.work), len(graphed.other.work)]
    ckpt.save(1, graphed.training.state)
    made = [graphed.capture(graphed.training.optimizer.step), graphed.capture(graphed.make_noise)]
    assert [len(each.work) for each in made] == expected


def test_graphs_that_were_captured_before_wait(tmp_path: Path, machine: Machine) -> None:
    graphed = Graphed(machine)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        graphed.check_waits(ckpt, graphed.update)
    graph = graphed.capture(graphed.training.optimizer.step, graphed.other)  # nobody watches
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        graphed.check_waits(ckpt, graph, 2)


def test_what_counts_is_the_last_capture(ckpt: statehold.Checkpointer, graphed: Graphed) -> None:
    graph = graphed.capture(graphed.training.optimizer.step, graphed.other)
    graphed.check_waits(ckpt, graph)
    graph.reset()
    graphed.check_passes(ckpt, graphed.capture(graphed.make_noise, graph), 2)


def test_a_capture_that_fails_leaves_the_graph_unknown(
    ckpt: statehold.Checkpointer, graphed: Graphed
) -> None:
    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: operation failed due to a previous error")

    for number, operation in enumerate(("begin_capture", "end_capture")):
        graphed.capture(graphed.make_noise, graphed.other)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graphed.machine, operation, fail)
            with pytest.raises(torch.AcceleratorError):
                captured_alone(graphed.other)
        graphed.machine.current().capture = None
        graphed.machine.captures.clear()
        assert graphed.replay_held(ckpt, graphed.other, number).stats.gate_s > 0


def captured_alone(graph: Any) -> None:
    graph.capture_begin()
    graph.capture_end()


def test_a_graph_with_a_graph_that_holds_an_update_waits(
    ckpt: statehold.Checkpointer, graphed: Graphed
) -> None:
    graphed.check_waits(ckpt, graphed.capture(graphed.update.replay))
    graphed.check_passes(ckpt, graphed.capture(graphed.other.replay), 2)


def test_an_update_by_hand_is_noted_by_gate(ckpt: statehold.Checkpointer, graphed: Graphed) -> None:
    def update() -> None:
        ckpt.gate()
        with torch.no_grad():
            graphed.training.model.hidden.weight.add_(1)

    graphed.check_waits(ckpt, graphed.capture(update))


def test_a_replay_waits_at_every_gate(
    ckpt: statehold.Checkpointer, graphed: Graphed, tmp_path: Path
) -> None:
    with statehold.Checkpointer(tmp_path / "other", **SMALL) as other:
        graphed.check_waits(other, graphed.update)
        graphed.check_waits(ckpt, graphed.update)
    graphed.check_waits(ckpt, graphed.update, 2)


def test_the_optimizers_of_a_replay_have_stepped(
    ckpt: statehold.Checkpointer, graphed: Graphed
) -> None:
    trainer(ckpt).gate.stepping.take()
    graphed.update.replay()
    assert trainer(ckpt).gate.stepping.take() == [graphed.training.optimizer]


def test_the_methods_are_put_back(tmp_path: Path, machine: Machine) -> None:
    kind = machine.cuda.CUDAGraph
    before = {name: getattr(kind, name) for name in dir(kind)}
    first, second = (statehold.Checkpointer(tmp_path / name, **SMALL) for name in "ab")
    first.steps(), second.steps()
    assert kind.replay is not before["replay"]
    first.close()
    assert kind.replay is not before["replay"]
    second.close()
    assert {name: getattr(kind, name) for name in dir(kind)} == before
    assert "replay" not in vars(kind)


def test_a_wrapper_over_ours_stays_and_ours_is_idle(tmp_path: Path, machine: Machine) -> None:
    kind = machine.cuda.CUDAGraph
    graphed = Graphed(machine)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ours = kind.replay
        kind.replay = lambda graph: ours(graph)
        graphed.check_waits(ckpt, graphed.update)
    graphed.update.replay()
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        graphed.check_waits(ckpt, graphed.update, 2)
        assert kind.replay is not ours


def test_no_graph_and_no_optimizer_is_kept(ckpt: statehold.Checkpointer, machine: Machine) -> None:
    graphed = Graphed(machine, width=32)
    kept = [weakref.ref(each) for each in (graphed.update, graphed.training.optimizer)]
    machine.finish()
    del graphed
    gc.collect()
    assert [each() for each in kept] == [None, None]


@pytest.mark.parametrize("what", ["save", "restore"])
def test_nothing_is_done_during_a_capture(
    ckpt: statehold.Checkpointer, graphed: Graphed, what: str
) -> None:
    state = graphed.training.state
    ckpt.save(1, state).wait("committed", DEADLINE_S)
    launches = len(machine_queue(graphed.machine))
    call = (lambda: ckpt.save(2, state)) if what == "save" else (lambda: ckpt.restore(state))
    with pytest.raises(UsageError, match="while a CUDA graph is captured; nothing was done"):
        graphed.capture(call)
    assert len(machine_queue(graphed.machine)) == launches
    graphed.check_waits(ckpt, graphed.update, 2)
    assert ckpt.steps() == [1, 2]


def machine_queue(machine: Machine) -> list[object]:
    return [work for stream in machine.timeline.streams for work in stream.queue]


def stepped_on_another_stream(machine: Machine) -> Training:
    training = trained_on(machine)
    training.backward()
    machine.finish()
    with machine.cuda.stream(machine.cuda.Stream()):
        training.optimizer.step()
    return training


def test_updates_on_another_stream_are_in_the_save(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    training = stepped_on_another_stream(machine)
    ckpt.save(1, training.state).wait("committed", DEADLINE_S)
    assert restored_on(machine, ckpt, 1) == bits_on(machine, training)


def test_clones_come_after_updates_on_another_stream(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    training = stepped_on_another_stream(machine)
    ckpt.save(1, {"weights": training.model.state_dict()}).wait("committed", DEADLINE_S)
    expected = bits_on(machine, training)
    ckpt.restore({"weights": training.model.state_dict()})
    assert bits_on(machine, training) == expected


def test_a_restore_comes_after_updates_on_another_stream(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    training = trained_on(machine)
    expected = bits_on(machine, training)
    ckpt.save(1, training.state).wait("committed", DEADLINE_S)
    training.backward()
    with machine.cuda.stream(machine.cuda.Stream()):
        training.optimizer.step()
    ckpt.restore(training.state)
    assert bits_on(machine, training) == expected


def test_a_state_on_the_host_needs_no_order_on_a_device_that_has_failed(
    ckpt: statehold.Checkpointer, machine: Machine
) -> None:
    training = trained_on(machine)
    ckpt.save(1, {"host": torch.ones(8)}).wait("committed", DEADLINE_S)
    training.backward()
    with machine.cuda.stream(machine.cuda.Stream()):
        training.optimizer.step()
    machine.failure = "CUDA error: unspecified launch failure"
    ckpt.save(2, {"host": torch.ones(8)}).wait("committed", DEADLINE_S)
    assert ckpt.steps() == [1, 2]
