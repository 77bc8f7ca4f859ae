"""Steps that vLLM takes while it serves: only what changed, and all or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from statehold.errors import CorruptionError, PeerFailedError, StepNotFoundError, UsageError
from statehold.kv.vllm import opening, weights
from statehold.kv.vllm.loader import StepReader, load_into
from statehold.kv.vllm.opening import PagesOptions
from statehold.kv.vllm.weights import (
    RunInfo,
    StepInfo,
    StepWeights,
    check_tiers,
    layer_of,
)
from statehold.process.host_memory import Room
from support.faults import must


class Served(nn.Module):
    """A model that takes weights as vLLM's do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in "abc")
        self.head = nn.Linear(8, 8)
        self.taken: list[str] = []
        self.fails_behind: int | None = None

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        own = self.state_dict()
        for number, (name, tensor) in enumerate(weights):
            if number == self.fails_behind:
                raise RuntimeError("CUDA out of memory")
            self.taken.append(name)
            own[name].copy_(tensor)


class Connected:
    def __init__(self) -> None:
        self.identities: list[bytes] = []

    def weights_changed(self) -> None:
        self.identities.append(PagesOptions.of({"path": "p"}).identity_of("m"))


class Engine(StepWeights):
    def __init__(self, run: Path) -> None:
        self.model, self.connected = Served(), Connected()
        self.model_config = SimpleNamespace(enable_sleep_mode=False)
        self.calls: list[str] = []
        load_into(self.model.load_weights, {"run": f"{run}@1", "name": "model"}, 1)
        self.watch_loads()
        self.model.taken.clear()
        self.init_transfer_engine(RunInfo(str(run), "model"))

    def _connectors(self) -> Iterator[Any]:
        yield self.connected

    def _begin(self) -> None:
        self.calls.append("begin")

    def _end(self) -> None:
        self.calls.append("end")

    def ahead(self, step: int) -> BaseException | None:
        """Read a step ahead, to the end; what that has raised."""
        self.start_weight_update()
        self.receive_weights(StepInfo(step, ahead=True))
        assert self._ahead is not None
        return self._ahead[1].error()

    def take(self, step: int, *, ahead: bool = False) -> list[str]:
        self.model.taken.clear()
        self.start_weight_update()
        if ahead:
            must(self.ahead(step) is None)
        self.receive_weights(StepInfo(step))
        self.finish_weight_update()
        return self.model.taken


@pytest.fixture(autouse=True)
def _others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test loads is served until it ends."""
    monkeypatch.setattr(opening, "_serves", [])
    monkeypatch.setattr(opening, "_sums", {})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = Served()
    with statehold.Checkpointer(tmp_path / "run", keep=None) as ckpt:
        ckpt.save(1, {"model": model}).wait("committed")
        model.layers[1][1].bias.data += 0.375
        ckpt.save(2, {"model": model}).wait("committed")
        model.head.weight.data += 1
        ckpt.save(3, {"model": model}).wait("committed")
    return tmp_path / "run"


def values(run: Path, step: int) -> Any:
    return statehold.load(run, "model", step=step)


def same(model: nn.Module, right: Any) -> bool:
    own = model.state_dict()
    return own.keys() == right.keys() and all(torch.equal(own[n], right[n]) for n in own)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_brings_the_layers_that_changed(run: Path, ahead: bool) -> None:
    engine = Engine(run)
    must(same(engine.model, values(run, 1)))
    changed = [f"layers.1.{n}" for n in ("0.weight", "0.bias", "1.weight", "1.bias")]
    assert engine.take(2, ahead=ahead) == changed
    assert same(engine.model, values(run, 2))
    assert engine.take(3, ahead=ahead) == ["head.weight"]
    assert same(engine.model, values(run, 3))
    assert len(engine.take(1, ahead=ahead)) == 5  # back
    assert same(engine.model, values(run, 1))
    assert engine.take(1, ahead=ahead) == []


def test_a_step_is_whole_when_its_update_returns(run: Path) -> None:
    """Requests run between the calls of an update: over HTTP, each call is one of its own."""
    engine = Engine(run)
    engine.start_weight_update()
    engine.receive_weights(StepInfo(2))
    assert engine.calls == ["begin", "end"]
    taken = engine.connected.identities[-1]
    engine.finish_weight_update()
    assert engine.connected.identities[-1] == taken
    assert same(engine.model, values(run, 2))
    assert engine.take(2) == []
    assert engine.calls == ["begin", "end"]  # nothing differs: the model is not touched


def test_an_update_without_a_run_says_what_is_missing() -> None:
    with pytest.raises(UsageError, match="init_weight_transfer_engine"):
        StepWeights().start_weight_update()


@pytest.mark.parametrize("given", [{"step": "2"}, {"step": True}, {"step": 2, "ahead": "no"}])
def test_what_is_no_step_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="number of a step"):
        StepInfo(**given)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each read of a step has."""
    reads, read = list[int](), StepReader.read

    def counting(reader: StepReader, parts: list[Any]) -> list[torch.Tensor]:
        reads.append(len(parts))
        return read(reader, parts)

    monkeypatch.setattr(StepReader, "read", counting)
    return reads


def test_a_step_that_was_read_ahead_is_not_read_in_the_update(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And until the update, the engine serves what it has served before."""
    engine, reads = Engine(run), counted(monkeypatch)
    must(engine.ahead(2) is None)
    assert reads == [4]
    assert same(engine.model, values(run, 1))
    assert not engine.connected.identities
    assert len(engine.take(2)) == 4
    assert reads == [4]
    assert same(engine.model, values(run, 2))
    engine.take(1)
    assert len(engine.take(2)) == 4
    assert reads == [4, 4, 4]  # it was taken once


def test_what_was_read_ahead_counts_for_the_next_update_alone(run: Path) -> None:
    """Another step comes between: what differs from it is not what differed before."""
    engine = Engine(run)
    must(engine.ahead(2) is None)
    assert len(engine.take(3)) == 5
    assert engine.take(2) == ["head.weight"]
    assert same(engine.model, values(run, 2))
    engine.start_weight_update()
    engine.receive_weights(StepInfo(3))
    must(engine.ahead(1) is None)  # before the update ends
    engine.finish_weight_update()
    engine.take(1)
    assert same(engine.model, values(run, 1))


def test_a_step_that_is_saved_again_is_read_again(run: Path, tmp_path: Path) -> None:
    engine, other = Engine(run), Served()
    must(engine.ahead(2) is None)
    other.load_state_dict(values(run, 3))
    with statehold.Checkpointer(tmp_path / "again") as ckpt:
        ckpt.save(2, {"model": other}).wait("committed")
    (now,) = run.glob("step-000000000002")
    shutil.rmtree(now)
    shutil.copytree(tmp_path / "again" / now.name, now)
    assert len(engine.take(2)) == 5
    assert same(engine.model, values(run, 3))


def test_without_room_in_memory_the_update_reads_the_step(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, reads = Engine(run), counted(monkeypatch)
    nbytes = sum(t.nbytes for n, t in values(run, 2).items() if n.startswith("layers.1."))
    engine.ranks = 2
    monkeypatch.setattr(weights, "spare_memory", lambda: Room(2 * nbytes - 1, "a test's"))
    must(engine.ahead(2) is None)
    assert reads == [0]
    assert f"no memory to read {nbytes} bytes ahead" in caplog.text
    assert len(engine.take(2)) == 4
    assert same(engine.model, values(run, 2))
    assert reads == [0, 4]
    monkeypatch.setattr(weights, "spare_memory", lambda: Room(2 * nbytes, "a test's"))
    must(engine.ahead(1) is None)
    assert reads == [0, 4, 4]


def test_what_pages_depend_on_is_the_step(run: Path) -> None:
    """And no step while it is not whole."""
    engine = Engine(run)
    for step in (2, 3, 2):
        engine.take(step)
    _, two, half, three, _, again = engine.connected.identities
    assert two == again != three
    assert half not in (two, three)


@pytest.mark.parametrize("ending", ["no finish", "an error", "another step"])
def test_an_update_that_does_not_end_is_read_again(run: Path, ending: str) -> None:
    engine = Engine(run)
    engine.start_weight_update()
    if ending == "an error":
        engine.model.fails_behind = 4
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.receive_weights(StepInfo(3))
        engine.model.fails_behind = None
    else:
        engine.receive_weights(StepInfo(3))
    must(not same(engine.model, values(run, 1)))
    if ending == "another step":
        engine.receive_weights(StepInfo(1))
        engine.finish_weight_update()
    else:
        engine.take(1)
    assert same(engine.model, values(run, 1))
    assert len(set(engine.connected.identities)) > 1


def test_updates_beside_tiers_that_do_not_learn_of_them_are_refused() -> None:
    tiers = {"secondary_tiers": [{"type": "statehold", "path": "/nvme/kv"}]}
    with pytest.raises(UsageError, match="StateholdConnector"):
        check_tiers(SimpleNamespace(kv_connector_extra_config=tiers))
    check_tiers(SimpleNamespace(kv_connector_extra_config={}))
    check_tiers(None)


@pytest.mark.parametrize("fault", ["flipped bit", "retired"])
@pytest.mark.parametrize("ahead", ["", "before the fault", "behind the fault"])
def test_a_step_that_cannot_be_read_changes_nothing(run: Path, fault: str, ahead: str) -> None:
    engine = Engine(run)
    if ahead == "before the fault":
        must(engine.ahead(2) is None)
    (data,) = run.glob("step-000000000002/*.safetensors")
    if fault == "retired":
        shutil.rmtree(data.parent)
    else:
        raw = bytearray(data.read_bytes())
        raw[raw.index(values(run, 2)["layers.1.1.bias"].numpy().tobytes())] ^= 1
        data.write_bytes(raw)
    if ahead == "behind the fault":
        must(isinstance(engine.ahead(2), CorruptionError | StepNotFoundError))
    if (fault, ahead) == ("flipped bit", "before the fault"):
        assert len(engine.take(2)) == 4  # these bytes were right when they were read
        return
    engine.start_weight_update()
    with pytest.raises((CorruptionError, StepNotFoundError)):
        engine.receive_weights(StepInfo(2))
    engine.finish_weight_update()
    assert same(engine.model, values(run, 1))
    assert not engine.connected.identities
    if ahead:  # a read that has failed does not stop another step
        must(isinstance(engine.ahead(2), CorruptionError | StepNotFoundError))
    assert len(engine.take(3)) == 5  # the next one has the changes of both
    assert same(engine.model, values(run, 3))


@pytest.mark.parametrize("other", [("no route to the disk", "None"), ("", "another save")])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_another_rank_does_not_have_changes_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, other: tuple[str, str], ahead: bool
) -> None:
    engine = Engine(run)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_told", lambda mine: [mine, other])
        with pytest.raises(PeerFailedError, match="rank 1 failed") as raised:
            engine.take(2, ahead=ahead)
    assert other[0] in raised.value.reason
    assert not engine.model.taken
    assert not engine.connected.identities
    assert len(engine.take(3)) == 5
    assert same(engine.model, values(run, 3))


def test_a_load_that_fails_on_another_rank_is_an_error_here_and_read_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(run)

    def told(mine: tuple[str, str]) -> list[tuple[str, str]]:
        return [mine, ("CUDA out of memory", mine[1]) if engine.model.taken else mine]

    with monkeypatch.context() as patched:
        patched.setattr(engine, "_told", told)
        with pytest.raises(PeerFailedError, match="rank 1 failed"):
            engine.take(2)
    must(same(engine.model, values(run, 2)))
    engine.finish_weight_update()
    assert len(engine.connected.identities) == 1  # no whole step
    assert len(engine.take(1)) == len(values(run, 1))  # nobody knows what the model has


def test_a_step_of_another_model_is_refused(run: Path) -> None:
    engine = Engine(run)
    with statehold.Checkpointer(run, keep=None) as ckpt:
        ckpt.save(9, {"model": nn.Linear(2, 2)}).wait("committed")
    engine.start_weight_update()
    with pytest.raises(UsageError, match="other tensors"):
        engine.receive_weights(StepInfo(9))
    assert not engine.model.taken


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("ahead", ["", "before the load", "behind the load"])
def test_what_another_loader_of_vllm_has_loaded_is_replaced(
    run: Path, step: int, ahead: str
) -> None:
    """Such as its reload_weights, which gives the model all that the directory has."""
    engine = Engine(run)
    if ahead == "before the load":
        must(engine.ahead(step) is None)
    torch.manual_seed(1)
    engine.model.load_weights(iter(Served().state_dict().items()))
    must(not same(engine.model, values(run, step)))
    assert len(engine.take(step, ahead=ahead == "behind the load")) == len(values(run, step))
    assert same(engine.model, values(run, step))
    assert engine.take(step) == []


@pytest.mark.parametrize("ahead", [False, True])
def test_with_sleep_mode_an_update_brings_all_tensors(run: Path, ahead: bool) -> None:
    """A sleep may have discarded them, and nobody says so."""
    engine = Engine(run)
    engine.model_config.enable_sleep_mode = True
    for each in engine.model.parameters():
        each.data.fill_(torch.nan)
    assert len(engine.take(1, ahead=ahead)) == len(values(run, 1))
    assert same(engine.model, values(run, 1))


def test_a_step_of_another_model_is_refused_also_behind_another_load(run: Path) -> None:
    engine = Engine(run)
    engine.model.load_weights(iter(()))
    with statehold.Checkpointer(run, keep=None) as ckpt:
        ckpt.save(9, {"model": nn.Linear(2, 2)}).wait("committed")
    engine.start_weight_update()
    with pytest.raises(UsageError, match="other tensors"):
        engine.receive_weights(StepInfo(9))


def test_layers_are_taken_whole() -> None:
    assert layer_of("model.layers.3.mlp.experts.7.w1") == "model.layers.3"
    assert layer_of("model.embed_tokens.weight") == "model.embed_tokens.weight"
