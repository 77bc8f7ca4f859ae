"""Ranks that restore while another job saves the same step again: all read one save of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from statehold.steps.nearest import Nearest
from support.faults import must
from support.in_memory import SimFs
from support.levels import FAR, NEAR, step_path, two
from support.rank_states import blank, check, state
from support.ranks import Ranks

SIZE = 2


def saved(fs: SimFs, step: int, content: int, **options: object) -> None:
    with Ranks(fs, SIZE, run="/run", **options) as ranks:  # type: ignore[arg-type]
        ranks.save(step, lambda rank: state(rank, content))


@pytest.fixture
def fs() -> SimFs:
    fs = SimFs(seed=1)
    for step in (1, 2):
        saved(fs, step, step)
    return fs


class Once:
    """Lets rank `rank` do something before its next call of a method of Nearest."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, method: str, rank: int, act: Callable[[], None]
    ) -> None:
        self.happened = threading.Event()
        before = getattr(Nearest, method)

        def late(steps: Nearest, *arguments: object) -> object:
            is_it = threading.current_thread().name.endswith(f"-{rank}")
            if is_it and not self.happened.is_set():
                self.happened.set()
                act()
            return before(steps, *arguments)

        monkeypatch.setattr(Nearest, method, late)


def restored(fs: SimFs, content: int, **options: object) -> list[object]:
    """Restore on all ranks, and compare with what was saved as `content`."""
    with Ranks(fs, SIZE, run="/run", **options) as ranks:  # type: ignore[arg-type]
        found = [blank() for _ in range(SIZE)]

        def restore(rank: int) -> int | None:
            threading.current_thread().name = f"rank-{rank}"
            return ranks.ckpts[rank].restore(found[rank])

        outcomes = ranks.outcomes(restore)
    for rank, outcome in enumerate(outcomes):
        must(isinstance(outcome, int), repr(outcome))
        check(found[rank], rank, content)
    return outcomes


@pytest.mark.thorough
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("method", ["open", "find"])
def test_all_ranks_read_the_same_save(fs, monkeypatch, rank: int, method: str, caplog) -> None:
    once = Once(monkeypatch, method, rank, lambda: saved(fs, 2, 22))
    assert restored(fs, 22) == [2] * SIZE
    assert once.happened.is_set()
    assert "not intact" not in caplog.text
    names = [name for name, _ in fs.listdir("/run") if name.startswith("step-")]
    assert names == ["step-000000000001", "step-000000000002"]


def rot(fs: SimFs, path: str) -> None:
    fs.corrupt(path, (fs.stat_bytes(path) or 0) * 2 // 3, 0x04)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("damage", [rot, SimFs.unlink])
@pytest.mark.parametrize(
    "name", ["manifest.json", "rank-00001-of-00002.json", "rank-00001-of-00002.safetensors"]
)
def test_another_save_of_a_step_stands_in_for_one_that_is_damaged_everywhere(
    name: str, damage: Callable[[SimFs, str], None]
) -> None:
    """Near has a later save of step 2, damaged; far the earlier one, intact: it is a step, and is
    neither passed over nor set aside. A file of one save never stands in for that of the other."""
    fs = SimFs(seed=1)
    levels = two()
    saved(fs, 1, 1, levels=levels)
    saved(fs, 2, 2, levels=levels)
    saved(fs, 2, 22, levels=two()[:1])
    damage(fs, f"{step_path(NEAR, 2)}/{name}")
    assert restored(fs, 2, levels=levels) == [2] * SIZE
    assert fs.is_dir(step_path(NEAR, 2))
    assert fs.is_dir(step_path(FAR, 2))


def test_a_step_whose_two_saves_are_damaged_is_passed_over() -> None:
    """Near lost a file of the later save of step 2, and far one of the earlier save."""
    fs = SimFs(seed=1)
    levels = two()
    saved(fs, 1, 1, levels=levels)
    saved(fs, 2, 2, levels=levels)
    saved(fs, 2, 22, levels=two()[:1])
    fs.unlink(f"{step_path(NEAR, 2)}/rank-00000-of-00002.json")
    rot(fs, f"{step_path(FAR, 2)}/rank-00001-of-00002.json")
    with pytest.warns(RuntimeWarning, match="step 2"):
        assert restored(fs, 1, levels=levels) == [1] * SIZE
