"""Saving and restoring a whole training run: the resumed run equals the uninterrupted one."""

from __future__ import annotations

import contextlib
import itertools
import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.optim.optimizer import _global_optimizer_pre_hooks

import statehold
from statehold.errors import ClosedError, StepNotFoundError, UsageError
from statehold.tensors import updates
from support.faults import DEADLINE_S, SMALL, small
from support.interrupts import Interrupts
from support.training import Training, bits


@pytest.mark.parametrize("backend", ["auto", "threads"])
def test_resumed_run_equals_the_uninterrupted_one(run, backend: str) -> None:
    whole = Training()
    for _ in range(8):
        whole.step()

    first = Training()
    with statehold.Checkpointer(run, **small(backend=backend)) as ckpt:
        got = ckpt.restore(first.state)
        assert got is None
        for step in range(1, 5):
            first.step()
            ckpt.save(step, first.state)

    resumed = Training(seed=1)
    with statehold.Checkpointer(run, **small(backend=backend)) as ckpt:
        got = ckpt.restore(resumed.state)
        assert got == 4
        for _ in range(4):
            resumed.step()
    assert [x.hex() for x in resumed.losses] == [x.hex() for x in whole.losses[4:]]
    assert bits(resumed) == bits(whole)


def test_restore_keeps_storage_and_ties(small_ckpt: statehold.Checkpointer) -> None:
    saved = Training()
    saved.step()
    small_ckpt.save(1, saved.state).wait("committed", DEADLINE_S)
    live = Training(seed=5)
    live.step()
    before = {name: tensor.data_ptr() for name, tensor in live.model.state_dict().items()}
    progress = live.progress
    small_ckpt.restore(live.state)
    assert {name: t.data_ptr() for name, t in live.model.state_dict().items()} == before
    assert live.model.out.weight is live.model.embed.weight
    assert live.progress is progress
    assert progress == saved.progress


def test_a_step_is_plain_safetensors(run) -> None:
    training = Training()
    training.step()
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(7, training.state)
    directory = run / "step-000000000007"
    assert sorted(p.name for p in directory.iterdir()) == [
        "manifest.json",
        "rank-00000-of-00001.safetensors",
    ]
    with safe_open(directory / "rank-00000-of-00001.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("model.hidden.weight"), training.model.hidden.weight)
        assert "model.out.weight" not in file.keys()  # noqa: SIM118 - not a dict: tied, once
        assert int(file.metadata()["statehold.step"]) == 7
    assert json.loads((directory / "manifest.json").read_bytes())["step"] == 7


def test_plain_values_come_back_with_their_types(small_ckpt: statehold.Checkpointer) -> None:
    values = {
        "int": 3, "big": 2**80, "float": 1.0, "nan": float("nan"), "inf": float("-inf"),
        "text": "ä", "bytes": b"\x00\xff", "none": None, "bool": True, "tuple": (1, (2.0, "x")),
        "list": [1, [2]], 5: "int key", "$odd": {"$tensor": "not a tensor"}, "complex": 1 + 2j,
    }  # fmt: skip
    small_ckpt.save(1, {"values": dict(values)}).wait("committed", DEADLINE_S)
    live: dict[object, object] = {}
    small_ckpt.restore({"values": live})
    assert repr(live) == repr(values)
    assert list(map(type, live.values())) == list(map(type, values.values()))


def test_two_saves_of_one_step_leave_the_second(run) -> None:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, {"x": 1})
        ckpt.save(1, {"x": 2}).wait("committed", DEADLINE_S)
        live = {"x": 0}
        ckpt.restore(live)
        assert live == {"x": 2}
        assert ckpt.steps() == [1]


def test_empty_states_and_empty_tensors(small_ckpt: statehold.Checkpointer) -> None:
    for step, state in enumerate([{}, {"e": torch.empty(0, 3)}, {"z": torch.tensor(4)}], 1):
        small_ckpt.save(step, state).wait("committed", DEADLINE_S)
    live = torch.tensor(0)
    small_ckpt.restore({"z": live})
    assert live.item() == 4


def test_stats_and_events(small_ckpt: statehold.Checkpointer) -> None:
    training = Training()
    save = small_ckpt.save(1, training.state)
    returned = save.wait("committed", DEADLINE_S)
    assert returned is save
    stats = save.stats
    assert 0 < stats.staged_s <= stats.written_s <= stats.committed_s
    plain = {"scheduler", "progress", "rng", "out.weight"}  # the last one is tied: written once
    assert stats.state_bytes == sum(
        len(raw) for name, raw in bits(training).items() if name not in plain
    )
    with pytest.raises(UsageError):
        save.wait("saved")


def test_restore_while_saving(small_ckpt: statehold.Checkpointer) -> None:
    training = Training(width=512)
    training.step()
    small_ckpt.save(1, training.state).wait("committed", DEADLINE_S)
    expected = bits(training)
    other = Training(seed=3, width=512)
    save = small_ckpt.save(2, other.state)
    small_ckpt.restore(training.state, 1)
    assert bits(training) == expected
    save.wait("committed", DEADLINE_S)


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", 10**12])
def test_bad_steps_are_refused(small_ckpt: statehold.Checkpointer, step: object) -> None:
    with pytest.raises(UsageError):
        small_ckpt.save(step, {})


def test_unknown_step_names_the_known_ones(small_ckpt: statehold.Checkpointer) -> None:
    small_ckpt.save(3, {"x": 1}).wait("committed", DEADLINE_S)
    with pytest.raises(StepNotFoundError) as caught:
        small_ckpt.restore({"x": 1}, 4)
    assert "3 (1 in all)" in str(caught.value)


def test_closed_checkpointers_say_so(run) -> None:
    ckpt = statehold.Checkpointer(run, **SMALL)
    ckpt.close()
    ckpt.close()
    with pytest.raises(ClosedError):
        ckpt.save(1, {})


@pytest.mark.parametrize(
    "options",
    [{"keep": 0}, {"keep": True}, {"io": "threads"}, {"staging_bytes": "1MiB"},
     {"nodes": 0},
     {"coordination": "mpi"}, {"peer_timeout_s": 0}, {"peer_timeout_s": float("nan")},
     {"peer_timeout_s": float("inf")}, {"peer_timeout_s": True}, {"peer_timeout_s": "60"}],
)  # fmt: skip
def test_bad_options_are_refused_at_once(run, options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        statehold.Checkpointer(run, **options)


@pytest.mark.parametrize(
    "given",
    [{"backend": "aio"}, {"buffer_bytes": 4096}, {"queue_depth": 0}, {"copy_threads": -1},
     {"profile": 1}, {"reuse_files": 1}, {"address": ""}],
)  # fmt: skip
def test_bad_settings_of_io_are_refused_at_once(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        statehold.Io(**given)


def test_one_hook_stays_and_does_nothing_after_close(run) -> None:
    """Another thread may be going through the hooks of torch: to take one out would end it."""
    training = Training()
    updates.hook.put_on(lambda _: None)
    hooks = set(_global_optimizer_pre_hooks)
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, training.state)
        ckpt.save(2, training.state)
    assert set(_global_optimizer_pre_hooks) == hooks
    assert updates.hook.action is None


def test_a_run_that_cannot_be_opened_leaves_no_hook(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise UsageError("the run cannot be opened")

    monkeypatch.setattr("statehold.checkpoint.checkpointer.open_session", refuse)
    ckpt = statehold.Checkpointer(run, **SMALL)
    with pytest.raises(UsageError, match="cannot be opened"):
        ckpt.steps()
    assert updates.hook.action is None


def test_ctrl_c_while_a_run_is_opened_leaves_no_session_without_a_gate(run) -> None:
    for at in itertools.count():
        ckpt = statehold.Checkpointer(run, **SMALL)
        assert updates.hook.action is None
        opened = vars(statehold.Checkpointer)["_opened"]
        interrupts = Interrupts([opened], at, only_signals=True)
        with interrupts.armed(), contextlib.suppress(KeyboardInterrupt):
            ckpt.steps()
        ckpt.steps()
        assert updates.hook.action is not None, interrupts.fired
        ckpt.close()
        if interrupts.fired is None:
            break
