"""Memory that a save copies from and torch takes away: the one who takes it waits until staged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import torch.multiprocessing  # teaches ForkingPickler about tensors

import statehold
from statehold.checkpoint.save import gate
from statehold.errors import TornSnapshot
from statehold.tensors.captured import Capture
from statehold.tensors.kinds import capture
from support.faults import DEADLINE_S, SMALL, Holdup, must
from support.inside import passage

MiB = 1 << 20
ELEMENTS = 8 * MiB // 4  # four times the staging memory

Move = Callable[[torch.Tensor], object]


def share(tensor: torch.Tensor) -> object:
    return tensor.share_memory_()


def put_into_a_queue(tensor: torch.Tensor) -> object:
    return ForkingPickler.dumps(tensor)


def free(tensor: torch.Tensor) -> object:
    return tensor.untyped_storage().resize_(0)


class Waiter:
    """Moves the memory of a tensor on a thread, and knows when that waits."""

    def __init__(self, save: statehold.Save, move: Callable[[], object]) -> None:
        self.waits = threading.Event()
        self._wait_ended = passage(save).wait_ended
        passage(save).wait_ended = self._observed
        self.thread = threading.Thread(target=move)
        self.thread.start()

    def _observed(self, stage: str, timeout: float | None = None) -> bool:
        self.waits.set()
        return self._wait_ended(stage, timeout)  # type: ignore[arg-type]


@pytest.mark.thorough
@pytest.mark.parametrize("move", [share, put_into_a_queue, free])
@pytest.mark.parametrize("form", ["whole", "a view into the middle"])
def test_who_takes_the_memory_waits_until_it_is_copied(run: Path, move: Move, form: str) -> None:
    whole = torch.randn(3 * ELEMENTS)
    tensor = whole if form == "whole" else whole[ELEMENTS : 2 * ELEMENTS]
    expected = tensor.clone()
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        holdup = Holdup(ckpt)
        save = ckpt.save(1, {"w": statehold.Gated(tensor)})
        address = whole.untyped_storage().data_ptr()
        waiter = Waiter(save, lambda: move(whole))
        must(waiter.waits.wait(DEADLINE_S))
        assert whole.untyped_storage().data_ptr() == address
        holdup.release()
        save.wait("committed", DEADLINE_S)
        waiter.thread.join(DEADLINE_S)
        assert whole.untyped_storage().data_ptr() != address  # it was taken away then
        back = torch.zeros_like(expected)
        ckpt.restore({"w": back})
    assert torch.equal(back, expected)


def test_memory_that_no_save_copies_moves_at_once(run: Path) -> None:
    other = torch.randn(ELEMENTS)
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        holdup = Holdup(ckpt)
        ckpt.save(1, {"w": statehold.Gated(torch.randn(ELEMENTS))})
        assert other.share_memory_().is_shared()
        other.untyped_storage().resize_(0)
        holdup.release()


def test_memory_that_goes_during_the_capture_fails_the_save(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.randn(ELEMENTS)

    def captured(*args: object, **options: object) -> Capture:
        found = capture(*args, **options)  # type: ignore[arg-type]
        thread = threading.Thread(target=tensor.share_memory_)
        thread.start()
        thread.join(DEADLINE_S)
        assert tensor.is_shared()
        return found

    with statehold.Checkpointer(run, **SMALL) as ckpt:
        with monkeypatch.context() as patched:
            patched.setattr(gate, "capture", captured)
            with pytest.raises(TornSnapshot, match="another thread"):
                ckpt.save(1, {"w": tensor})
        ckpt.gate(timeout=0)  # holds nothing
        ckpt.save(2, {"w": tensor}).wait("committed", DEADLINE_S)


def test_the_methods_of_torch_are_its_own_again(run: Path) -> None:
    names = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")
    before = [vars(torch.UntypedStorage).get(name) for name in names]
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, {"w": torch.zeros(1)})
        assert [vars(torch.UntypedStorage).get(name) for name in names] != before
    assert [vars(torch.UntypedStorage).get(name) for name in names] == before


def test_storages_without_memory_are_not_asked_about(run: Path) -> None:
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, {"w": torch.zeros(1)})
        torch.empty(10, device="meta").untyped_storage().resize_(0)
        torch.empty(0).untyped_storage().resize_(40)
