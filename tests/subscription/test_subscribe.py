"""subscribe(): whole steps in place, only what changed is read, and what goes wrong meanwhile."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

import statehold
from statehold import _core
from statehold.errors import ClosedError, UsageError
from statehold.steps.nearest import Nearest
from statehold.subscription import levels as watching
from statehold.subscription import spare, subscribe
from support.faults import DEADLINE_S, SMALL, must
from support.interrupts import Interrupts, ends
from support.published import PIECE, applied, brought, content, data_files, flip, save, whole

DOCUMENTS_BYTES_MAX = 64 << 10


@pytest.mark.parametrize("timeout", ["5", True, float("nan")])
def test_a_time_to_wait_is_a_number(updates: statehold.Subscription, timeout: Any) -> None:
    with pytest.raises(UsageError, match="not a time to wait"):
        updates.wait(timeout)


@pytest.mark.parametrize("timeout", [float("inf"), 10**400])
def test_a_wait_without_an_end(
    ckpt: statehold.Checkpointer, updates: statehold.Subscription, timeout: float
) -> None:
    save(ckpt, 1)
    update = updates.wait(timeout)
    assert update is not None


# -- what an update is --------------------------------------------------------------------------


def test_a_step_is_in_place_after_apply_and_not_before(
    ckpt: statehold.Checkpointer, updates: statehold.Subscription, live: dict[str, Any]
) -> None:
    save(ckpt, 1)
    update = updates.wait(DEADLINE_S)
    assert update is not None
    assert (update.step, updates.step) == (1, None)
    assert not any(tensor.any() for tensor in live.values())
    update.apply()
    assert whole(live) == 1
    assert (updates.step, update.is_over) == (1, True)
    assert update.apply_s is not None
    assert update.lag_s >= update.apply_s > 0


def test_only_pieces_that_differ_are_read(
    ckpt: statehold.Checkpointer, updates: statehold.Subscription, live: dict[str, Any]
) -> None:
    whole_bytes = sum(tensor.nbytes for tensor in live.values())
    state = content(0)
    assert brought(ckpt, updates, 1, state).changed_bytes == whole_bytes
    state["c"][-1] = 99  # in the last piece of this tensor, or where it meets the next one
    update = brought(ckpt, updates, 2, state)
    assert 0 < update.changed_bytes <= 2 * PIECE
    assert update.read_bytes - update.changed_bytes < DOCUMENTS_BYTES_MAX
    assert all(torch.equal(live[name], state[name]) for name in state)
    assert brought(ckpt, updates, 3, state).changed_bytes == 0


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
def test_a_tensor_that_the_consumer_has_changed_is_read_as_a_whole(
    ckpt: statehold.Checkpointer, run: Path, mode: Callable[[], Any]
) -> None:
    with mode():  # tensors of inference have no counter of changes
        live = {name: torch.zeros_like(tensor) for name, tensor in content(0).items()}
    with statehold.subscribe(run, {"model": live}) as updates:
        state = content(0)
        brought(ckpt, updates, 1, state)
        with mode():
            live["a"].add_(1)
        state["b"][0] = 99
        update = brought(ckpt, updates, 2, state)
    assert update.changed_bytes >= live["a"].nbytes
    assert all(torch.equal(live[name], state[name]) for name in state)


def test_files_that_steps_share_cost_nothing(run: Path) -> None:
    def made() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(2048, 1536), torch.nn.Linear(1536, 64))

    model, served = made(), made()
    model[0].requires_grad_(False)
    with (
        statehold.Checkpointer(run, **SMALL) as ckpt,
        statehold.subscribe(run, {"model": served}) as updates,
    ):
        ckpt.save(1, {"model": model}).wait()
        applied(updates)
        with torch.no_grad():
            model[1].weight.add_(1)
        stats = ckpt.save(2, {"model": model})
        stats.wait()
        assert stats.stats.linked_bytes > 0
        update = applied(updates)
    assert update.changed_bytes <= model[1].weight.nbytes + model[1].bias.nbytes
    assert all(map(torch.equal, model.state_dict().values(), served.state_dict().values()))


def test_the_newest_step_counts(
    ckpt: statehold.Checkpointer, updates: statehold.Subscription, live: dict[str, Any]
) -> None:
    for step in range(1, 6):
        save(ckpt, step)
    assert applied(updates).step == 5
    assert updates.wait(0) is None
    assert whole(live) == 5


def test_ctrl_c_anywhere_in_wait_and_apply_leaves_a_subscription_that_goes_on(run: Path) -> None:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, {"w": torch.ones(5)}).wait()
    functions: list[Any] = [
        inspect.unwrap(each)
        for kind in (statehold.Subscription, statehold.Update)
        for each in vars(kind).values()
        if isinstance(each, FunctionType)
    ]
    places = set()
    for at in itertools.count():
        live, update = {"w": torch.zeros(5)}, None
        with statehold.subscribe(run, live) as updates:
            interrupts = Interrupts(functions, at, only_signals=True)
            with interrupts.armed(), contextlib.suppress(KeyboardInterrupt):
                update = updates.wait(DEADLINE_S)
                assert update is not None
                update.apply()
            if updates.step is None:
                if update is not None and not update.is_over:
                    update.skip()
                applied(updates)
            assert (updates.step, live["w"].sum()) == (1, 5), interrupts.fired
        if interrupts.fired is None:
            break
        places.add(interrupts.fired.partition(",")[0])
    assert {"wait", "apply", "_put"} <= places


def test_an_update_that_nobody_has_is_offered_again(
    ckpt: statehold.Checkpointer, updates: statehold.Subscription
) -> None:
    save(ckpt, 1)
    for _ in range(2):
        assert updates.wait(DEADLINE_S) is not None
    assert applied(updates).step == 1


def test_a_skipped_update_is_in_the_next_one(
    ckpt: statehold.Checkpointer, updates: statehold.Subscription, live: dict[str, Any]
) -> None:
    brought(ckpt, updates, 1)
    save(ckpt, 2)
    skipped = updates.wait(DEADLINE_S)
    assert skipped is not None
    with pytest.raises(UsageError, match="neither applied nor skipped"):
        updates.wait(0)
    skipped.skip()
    with pytest.raises(UsageError, match="already"):
        skipped.apply()
    assert whole(live) == 1
    brought(ckpt, updates, 3)
    assert whole(live) == 3


def test_a_consumer_may_begin_with_empty_dicts_and_modules_with_ties(run: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].weight = model[0].weight
    strided = torch.arange(48.0).view(6, 8)
    state = {"model": model, "other": {"strided": strided, "conj": torch.ones(4) * (1 + 2j)}}
    served = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    served[1].weight = served[0].weight
    into = {"strided": torch.empty(8, 6).t(), "conj": torch.zeros(4, dtype=torch.cfloat).conj()}
    empty: dict[str, Any] = {}
    with (
        statehold.Checkpointer(run, **SMALL) as ckpt,
        statehold.subscribe(run, {"model": served, "other": into}) as updates,
        statehold.subscribe(run, {"model": empty}) as others,
    ):
        for step in (1, 2):
            with torch.no_grad():
                model[0].weight.add_(1)
            strided.add_(1)
            ckpt.save(step, state).wait()
            applied(updates)
            applied(others)
            assert torch.equal(into["strided"], strided)
            assert torch.equal(into["conj"], state["other"]["conj"])
            for found in (served.state_dict(), empty):
                assert all(map(torch.equal, model.state_dict().values(), found.values()))


class Scaled(torch.nn.Linear):
    """A layer that keeps a number beside its tensors."""

    scale = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


def test_extra_state_of_modules_comes_along(run: Path) -> None:
    model, served = Scaled(4, 4), Scaled(4, 4)
    with (
        statehold.Checkpointer(run, **SMALL) as ckpt,
        statehold.subscribe(run, {"model": served}) as updates,
    ):
        for step in (1, 2):
            model.scale = step / 4
            ckpt.save(step, {"model": model}).wait()
            update = updates.wait(DEADLINE_S)
            assert update is not None
            before = served.scale
            update.apply()
            assert (before, served.scale) == ((step - 1) / 4 or 1.0, step / 4)


class Rescaled(Scaled):
    """Its weights are those of a step times the scale."""

    def set_extra_state(self, state: dict[str, float]) -> None:
        super().set_extra_state(state)
        with torch.no_grad():
            self.weight *= self.scale


def test_what_extra_state_makes_of_a_tensor_is_made_of_the_bytes_of_each_step(run: Path) -> None:
    model, served, restored = Scaled(4, 4), Rescaled(4, 4), Rescaled(4, 4)
    with (
        statehold.Checkpointer(run, **SMALL) as ckpt,
        statehold.subscribe(run, {"model": served}) as updates,
    ):
        for step in (1, 2):
            model.scale = float(1 + step)
            ckpt.save(step, {"model": model}).wait()
            assert applied(updates).step == step
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.restore({"model": restored})
    assert torch.equal(served.weight, model.weight * 3)
    assert torch.equal(served.weight, restored.weight)


def test_a_loop_ends_with_close_from_another_thread(
    ckpt: statehold.Checkpointer, updates: statehold.Subscription
) -> None:
    save(ckpt, 1)
    seen = []
    closing = threading.Thread(target=updates.close)
    for update in updates:
        update.apply()
        seen.append(update.step)
        closing.start()
    closing.join()
    assert seen == [1]
    with pytest.raises(ClosedError):
        updates.wait(0)


def test_a_consumer_may_come_first(run: Path, updates: statehold.Subscription) -> None:
    assert updates.wait(0) is None
    assert not run.exists()
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        save(ckpt, 1)
    assert applied(updates).step == 1


def test_without_inotify_the_run_is_looked_at_now_and_then(
    run: Path, ckpt: statehold.Checkpointer, monkeypatch: pytest.MonkeyPatch, live: dict[str, Any]
) -> None:
    monkeypatch.setattr(watching.Watching, "_opened", lambda self: -1)
    save(ckpt, 1)
    with statehold.subscribe(run, {"model": live}) as updates:
        applied(updates)
        saving = threading.Thread(target=save, args=(ckpt, 2))
        saving.start()
        assert applied(updates).step == 2
        saving.join()


def test_a_commit_ends_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "TOLD_POLL_S", 10 * DEADLINE_S)
    monkeypatch.setattr(
        watching, "_LOCAL", {*watching._LOCAL, watching.mount_of(str(tmp_path)).kind}
    )
    watch = watching.Watching()
    try:
        watch.watch([str(tmp_path)])
        (tmp_path / "step.partial").mkdir()
        (tmp_path / "step.partial").rename(tmp_path / "step")
        must(ends(lambda: watch.wait(None)), "the kernel did not tell of the commit")
        later = threading.Thread(target=watch.wait, args=(None,))
        later.start()
        later.join(0.05)
        assert later.is_alive(), "nothing has changed since"
        watch.wake()
        must(ends(later.join))
        watch.watch([str(tmp_path), str(tmp_path / "missing")])
        must(ends(lambda: watch.wait(None)), "a directory that is missing is not looked for")
    finally:
        watch.close()


# -- the run changes ----------------------------------------------------------------------------


def test_a_step_that_is_saved_again_is_an_update(
    ckpt: statehold.Checkpointer, updates: statehold.Subscription, live: dict[str, Any]
) -> None:
    save(ckpt, 4, content(1))
    applied(updates)
    save(ckpt, 4, content(2))
    assert applied(updates).step == 4
    assert whole(live) == 2


def test_the_tensors_go_back_with_the_run(
    ckpt: statehold.Checkpointer, updates: statehold.Subscription, live: dict[str, Any]
) -> None:
    save(ckpt, 1)
    brought(ckpt, updates, 2)
    ckpt.rewind(1)
    assert applied(updates).step == 1
    assert whole(live) == 1


def test_a_level_that_cannot_be_listed_is_no_way_back(
    run: Path,
    memory: Path,
    live: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    levels = [statehold.Memory(path=memory, agent=False), statehold.Directory(every=2)]
    with (
        statehold.Checkpointer(run, levels=levels, **SMALL) as ckpt,
        statehold.subscribe(run, {"model": live}) as updates,
    ):
        for step in (1, 2, 3):
            save(ckpt, step)
        assert applied(updates).step == 3
        (place, _) = subscribe.Places(_core.open_fs("threads"), subscribe.levels_of(str(run)))
        assert place.root == str(memory)
        asked = []

        def fails(store: Any) -> list[int]:
            asked.append(store.root)
            if store.root == str(memory):
                raise statehold.errors.storage_error("list", 5, store.root)
            return [2]

        monkeypatch.setattr("statehold.steps.shelf.DirectoryShelf.steps", fails)
        assert updates.wait(0) is None
        assert str(memory) in asked
    assert whole(live) == 3


def test_a_run_that_descends_from_another_begins_with_its_step(
    tmp_path: Path, ckpt: statehold.Checkpointer, run: Path, live: dict[str, Any]
) -> None:
    save(ckpt, 1)
    child = tmp_path / "child"
    with (
        statehold.Checkpointer(child, parent=f"{run}@1", **SMALL) as other,
        statehold.subscribe(child, {"model": live}) as updates,
    ):
        state = {"model": content(0), "more": torch.ones(3)}
        assert other.restore(state) == 1
        assert applied(updates).step == 1
        save(other, 2)
        update = applied(updates)
    assert whole(live) == 2
    assert update.changed_bytes < sum(tensor.nbytes for tensor in live.values())


def test_the_nearest_level_is_read(run: Path, memory: Path, live: dict[str, Any]) -> None:
    levels = [statehold.Memory(path=memory, agent=False), statehold.Directory(every=1000)]
    with (
        statehold.Checkpointer(run, levels=levels, **SMALL) as ckpt,
        statehold.subscribe(run, {"model": live}) as updates,
    ):
        save(ckpt, 1)
        save(ckpt, 2)
        assert not data_files(run, 2)
        applied(updates)
        assert whole(live) == 2
        shutil.rmtree(memory)  # the disk has an older step
        assert updates.wait(0) is None
        assert updates.step == 2


# -- faults -------------------------------------------------------------------------------------


def test_a_damaged_step_leaves_the_tensors_at_the_old_one(
    run: Path,
    ckpt: statehold.Checkpointer,
    updates: statehold.Subscription,
    live: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    brought(ckpt, updates, 1)
    save(ckpt, 2)
    (file,) = data_files(run, 2)
    for at in range(PIECE // 2, file.stat().st_size, PIECE):  # a piece that differs among them
        flip(file, at)
    with caplog.at_level(logging.WARNING, "statehold"):
        assert updates.wait(0) is None
        assert updates.wait(0) is None
    told = [each.getMessage() for each in caplog.records]
    assert sum("step 2" in text and "is damaged" in text for text in told) == 1
    assert (whole(live), updates.step) == (1, 1)
    brought(ckpt, updates, 3)
    assert whole(live) == 3


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000-of-00001.safetensors"])
def test_a_file_that_is_gone_is_damage(
    name: str,
    run: Path,
    ckpt: statehold.Checkpointer,
    updates: statehold.Subscription,
    live: dict[str, Any],
) -> None:
    brought(ckpt, updates, 1)
    save(ckpt, 2)
    (run / "step-000000000002" / name).unlink()
    assert updates.wait(0) is None
    assert whole(live) == 1


def test_damage_after_the_bytes_were_verified_reaches_nothing(
    run: Path,
    ckpt: statehold.Checkpointer,
    updates: statehold.Subscription,
    live: dict[str, Any],
) -> None:
    save(ckpt, 1)
    update = updates.wait(DEADLINE_S)
    assert update is not None
    (file,) = data_files(run, 1)
    for at in range(4096, file.stat().st_size, PIECE // 2):
        flip(file, at)
    update.apply()
    assert whole(live) == 1


def test_another_level_replaces_a_damaged_copy(
    run: Path, memory: Path, live: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    levels = [statehold.Memory(path=memory, agent=False), statehold.Directory()]
    with (
        statehold.Checkpointer(run, levels=levels, **SMALL) as ckpt,
        statehold.subscribe(run, {"model": live}) as updates,
    ):
        save(ckpt, 1)
        ckpt.flush()
        (file,) = data_files(memory, 1)
        flip(file, file.stat().st_size // 2)
        with caplog.at_level(logging.WARNING, "statehold"):
            applied(updates)
    assert whole(live) == 1
    assert any("not intact at level memory" in each.getMessage() for each in caplog.records)


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], name: str) -> list[str]:
    """Call `act` once, before the first call of a method of Nearest; the list says whether."""
    fired: list[str] = []
    method = getattr(Nearest, name)

    def called(nearest: Nearest, *arguments: Any) -> Any:
        if not fired:
            fired.append(name)
            act()
        return method(nearest, *arguments)

    monkeypatch.setattr(Nearest, name, called)
    return fired


@pytest.mark.parametrize("name", ["open", "find"])
@pytest.mark.parametrize("again", [1, 2])
def test_a_step_that_is_retired_or_saved_again_meanwhile_is_replaced_by_the_newest(
    name: str,
    again: int,
    run: Path,
    live: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        statehold.Checkpointer(run, keep=1, **SMALL) as ckpt,
        statehold.subscribe(run, {"model": live}) as updates,
    ):
        save(ckpt, 1, content(1))

        def act() -> None:
            for value in (2, 3, 4):  # the files of the first are overwritten
                save(ckpt, value if again == 1 else 1, content(value))

        fired = meanwhile(monkeypatch, act, name)
        applied(updates)
        assert fired
    assert whole(live) == 4


def test_files_that_are_read_are_not_overwritten(
    run: Path, live: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its files are open, a step stays whole, however often others are saved."""
    with (
        statehold.Checkpointer(run, keep=1, **SMALL) as ckpt,
        statehold.subscribe(run, {"model": live}) as updates,
    ):
        save(ckpt, 1)
        open_engine, fired = spare.open_engine, []

        def late(*given: Any) -> Any:
            fired.append(True)
            for step in (2, 3, 4):
                save(ckpt, step)
            return open_engine(*given)

        monkeypatch.setattr(spare, "open_engine", late)
        assert applied(updates).step == 1
        assert fired
        assert whole(live) == 1
        assert applied(updates).step == 4
    assert whole(live) == 4


def test_after_an_update_that_failed_everything_is_read_again(
    ckpt: statehold.Checkpointer,
    updates: statehold.Subscription,
    live: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brought(ckpt, updates, 1)
    save(ckpt, 2)
    update = updates.wait(DEADLINE_S)
    assert update is not None
    with monkeypatch.context() as patch:

        def fails(*_: object) -> None:
            raise torch.OutOfMemoryError("injected")

        patch.setattr(subscribe, "_put", fails)
        with pytest.raises(torch.OutOfMemoryError, match="injected"):
            update.apply()
    assert updates.step is None
    update = applied(updates)
    assert update.changed_bytes == sum(tensor.nbytes for tensor in live.values())
    assert whole(live) == 2
