"""Steps share the files of tensors on a device, and each step is what was saved.

These bytes are compared on their way to staging memory, so nothing of them waits for the storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.checkpoint.save import shared, sharing
from statehold.checkpoint.save.writes import Segments
from statehold.errors import ChecksumError, TornSnapshot
from statehold.tensors import captured
from support.cuda import Machine, copies_of
from support.faults import DEADLINE_S, SMALL, must, small
from support.inside import inside
from support.sharing import Tuned, same, small_files

LAYERS = 12  # with WIDTH, 3 MiB: more than all staging memory
WIDTH = 256
State = Callable[["Run"], dict[str, Any]]


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small_files(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "FILE_BYTES", 2 << 20)  # two buffers and the header
        yield


def module(run: Run) -> dict[str, Any]:
    return {"model": run.model}


def state_dict(run: Run) -> dict[str, Any]:
    """Copied, or under way on the device, before save() returns."""
    return {"model": run.model.state_dict()}


class Run:
    """Saves a model on a device step by step, and remembers what each step has to be."""

    def __init__(self, machine: Machine, path: Path, state: State = module, **options: Any) -> None:
        self.machine, self.path, self.state = machine, path, state
        self.ckpt = statehold.Checkpointer(path, **{**SMALL, **options})
        self.model = machine.module(Tuned(LAYERS, WIDTH))
        self.expected: dict[int, dict[str, torch.Tensor]] = {}

    def save(self, step: int, wait: bool = True) -> statehold.Save:
        self.ckpt.gate(DEADLINE_S)
        self.model.train_once()
        with self.machine.still():
            self.expected[step] = self.model.bits()
        save = self.ckpt.save(step, self.state(self))
        if wait:
            save.wait("committed", DEADLINE_S)
            inside(self.ckpt).pipeline.drain(DEADLINE_S)
        return save

    def change(self, layer: int, place: int = 77) -> None:
        """One bit of the base, by something that counts no change."""
        self.ckpt.gate(DEADLINE_S)
        self.machine.finish()
        block = self.machine.memory.block_of(self.model.base[layer])
        assert block is not None
        block.bytes[place] ^= 1

    def check(self) -> None:
        """Every step restores bit for bit, on a device and in a new process's eyes."""
        self.ckpt.close()
        with statehold.Checkpointer(self.path, **SMALL) as reader:
            assert reader.steps()
            for step in reader.steps():
                model = self.machine.module(Tuned(LAYERS, WIDTH))
                run = Run.__new__(Run)
                run.model = model
                assert reader.restore(self.state(run), step) == step
                with self.machine.still():
                    assert same(model.bits(), self.expected[step]), step


@pytest.fixture
def begun(machine: Machine, tmp_path: Path) -> Callable[..., Run]:
    def begin(**options: Any) -> Run:
        return Run(machine, tmp_path / "run", **options)

    return begin


def test_what_needs_no_gradient_is_written_once(begun: Callable[..., Run]) -> None:
    run = begun()
    first = run.save(1).stats
    assert first.written_bytes > run.model.base_bytes
    for step in (2, 3, 4):
        stats = run.save(step).stats
        assert stats.linked_bytes > run.model.base_bytes
        assert stats.written_bytes < run.model.head.nbytes + 16384
        assert stats.files == first.files > 1
    run.check()


@pytest.mark.thorough
@pytest.mark.parametrize("cloned_bytes", [0, captured.CLONED_BYTES_MAX], ids=["ordered", "cloned"])
def test_so_is_what_stays_the_same_in_a_state_dict(
    begun: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, cloned_bytes: int
) -> None:
    monkeypatch.setattr(captured, "CLONED_BYTES_MAX", cloned_bytes)
    run = begun(state=state_dict)
    linked = [run.save(step).stats.linked_bytes for step in range(1, 7)]
    assert linked[:3] == [0, 0, 0]  # written, compared, written to files of their own
    assert all(each > run.model.base_bytes for each in linked[3:])
    run.check()


def inodes(run: Run, step: int) -> set[int]:
    """Of the files that the step shares with others."""
    files = [path.stat() for path in (run.path / f"step-{step:012d}").glob("*.safetensors")]
    return {file.st_ino for file in files if file.st_nlink > 1}


@pytest.mark.thorough
@pytest.mark.parametrize("state", [module, state_dict])
@pytest.mark.parametrize("changes", [False, True], ids=["same", "changed"])
def test_a_job_that_is_started_again_links_the_very_files(
    begun: Callable[..., Run], state: State, changes: bool
) -> None:
    run = begun(state=state)
    for step in range(1, 6):
        run.save(step)
    run.ckpt.close()
    again = begun(state=state)
    assert again.ckpt.restore(again.state(again)) == 5
    if changes:
        again.change(3)
    stats = again.save(6).stats
    common = inodes(again, 6) & inodes(again, 5)
    if changes:
        assert set() < common < inodes(again, 5)
        assert stats.written_bytes > again.model.head.nbytes + 65536
    else:
        assert common == inodes(again, 5) != set()
        assert stats.written_bytes < again.model.head.nbytes + 16384
    again.expected |= run.expected
    again.check()


@pytest.mark.thorough
@pytest.mark.parametrize("state", [module, state_dict])
@pytest.mark.parametrize("layers", [(3,), range(LAYERS)], ids=["one layer", "all layers"])
def test_a_change_that_nothing_counts_is_found(
    begun: Callable[..., Run], state: State, layers: Any
) -> None:
    run = begun(state=state)
    for step in range(1, 5):
        run.save(step)
    for layer in layers:
        run.change(layer)
    stats = run.save(5).stats
    assert (stats.linked_bytes > 0) is (len(layers) < LAYERS)
    assert stats.written_bytes > run.model.head.nbytes + 65536
    for step in range(6, 11):  # it has to be the same for twice as long
        last = run.save(step).stats
    assert last.linked_bytes > 0
    run.check()


def test_a_comparison_that_believes_everything_would_be_found(
    begun: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun()
    for step in (1, 2):
        run.save(step)
    monkeypatch.setattr(Segments, "can_be_read_in_place", True)
    monkeypatch.setattr(shared, "refuted", lambda claims, _: [set() for _ in claims])
    run.change(2)
    run.save(3)
    with pytest.raises(AssertionError):
        run.check()


def test_two_saves_at_once_share_files(begun: Callable[..., Run]) -> None:
    """Each has more to compare than there is staging memory, and every third one is refuted."""
    run = begun(keep=2)
    for step in range(1, 10):
        if step % 3 == 0:
            run.change(step % LAYERS)
        run.save(step, wait=False)
    run.check()


def test_an_update_waits_for_copies_alone(begun: Callable[..., Run], machine: Machine) -> None:
    """The update is given to the device while copies for the comparison are under way there."""
    run = begun(staging_bytes="16MiB")
    for step in (1, 2):
        run.save(step)
    run.change(1)
    machine.timeline.may_finish.clear()
    save = run.ckpt.save(3, run.state(run))
    must(copies_of(run.ckpt).enqueued.wait(DEADLINE_S))
    assert copies_of(run.ckpt).passing()
    with torch.no_grad():
        for each in (*run.model.base, run.model.head):
            each.add_(1.0)
    assert not save.done("staged")
    machine.timeline.may_finish.set()
    save.wait("committed", DEADLINE_S)
    assert 0 < save.stats.linked_bytes < run.model.base_bytes
    run.expected[3] = run.expected[2] | {
        "base.1": _changed(run.expected[2]["base.1"], 77),
    }
    run.check()


def _changed(tensor: torch.Tensor, place: int) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(torch.uint8).view(-1)[place] ^= 1
    return changed


def test_a_change_before_the_gate_fails_the_save(
    begun: Callable[..., Run], machine: Machine
) -> None:
    run = begun()
    for step in (1, 2):
        run.save(step)
    machine.timeline.may_finish.clear()
    save = run.ckpt.save(3, run.state(run))
    with torch.no_grad():
        run.model.base[0].add_(1)
    machine.timeline.may_finish.set()
    with pytest.raises(TornSnapshot) as caught:
        save.wait("committed", DEADLINE_S)
    assert caught.value.facts["tensor"] == "model.base.0"
    run.save(4)
    run.check()


def test_a_damaged_file_fails_the_save_that_needs_it(begun: Callable[..., Run]) -> None:
    """The bytes of a refuted file that have not changed come from storage."""
    run = begun(**small(copy_threads=1))  # what is hashed first is compared first
    for step in (1, 2):
        run.save(step)
    for path in (run.path / ".shared").iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    run.change(7, -1)  # the last one of a file
    with pytest.raises(ChecksumError):
        run.save(3)
    del run.expected[3]
    inside(run.ckpt).pipeline.drain(DEADLINE_S)
    run.save(4)  # whole, by itself
    run.save(5)
    run.ckpt.close()
    with statehold.Checkpointer(run.path, **SMALL) as reader:
        for step in (4, 5):
            model = run.machine.module(Tuned(LAYERS, WIDTH))
            reader.restore({"model": model}, step)
            with run.machine.still():
                assert same(model.bits(), run.expected[step])


def test_a_memory_level_shares_files_too(
    begun: Callable[..., Run], memory: Path, tmp_path: Path
) -> None:
    run = begun(levels=[statehold.Memory(path=memory, keep=2), statehold.Directory(every=2)])
    linked = []
    for step in range(1, 9):
        if step == 6:
            run.change(4)
        linked.append(run.save(step).stats.linked_bytes)
    assert 0 < linked[5] < linked[4]
    assert all(linked[1:])
    run.ckpt.close()
