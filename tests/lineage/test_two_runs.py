"""Two runs that share files: each stands on its own names, whatever happens to the other."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from sim.crash_states import Sample
from statehold.checkpoint.levels.forking import fork
from statehold.cli import main
from statehold.errors import CorruptionError, StateholdError
from support.descended import Bits, Job, begin, check
from support.faults import DEADLINE_S, SMALL
from support.in_memory import SimFs, checkpointer_on
from support.levels import remove, step_path
from support.plain_runs import BASE, CHILD
from support.sharing import Tuned, names, same, whole_steps

STATES = os.environ.get("STATEHOLD_CRASH_STATES")
pytestmark = pytest.mark.usefixtures("small_shared_files")


# -- at once ---------------------------------------------------------------------------------------


class Played:
    """Two jobs on one recorded disk, and what each step of each run has to be."""

    def __init__(self, fs: SimFs) -> None:
        self.fs = fs
        self.bits: dict[tuple[str, int], Bits] = {}
        self.promised: list[tuple[int, str, int]] = []  # from this change on: run, newest step

    def save(self, run: str, job: Job, step: int) -> int:
        linked = job.linked(step)
        self.bits[run, step] = job.expected[step]
        self.promised.append((len(self.fs.recorded), run, step))
        return linked

    def newest(self, run: str, moment: int) -> int:
        return max(
            (step for at, of, step in self.promised if of == run and at <= moment), default=0
        )


def play(fs: SimFs) -> Played:
    """A base with keep=1 and its child, also with keep=1, save and retire in turn."""
    played = Played(fs)
    fs.record()
    base = Job(fs, BASE, keep=1)
    for step in (1, 2):
        played.save(BASE, base, step)
    fork(fs, step_path(BASE, 2), CHILD)
    played.bits[CHILD, 2] = played.bits[BASE, 2]
    played.promised.append((len(fs.recorded), CHILD, 2))
    child = Job(fs, CHILD, keep=1)
    linked = []
    for step in (3, 4, 5):
        linked += [played.save(BASE, base, step), played.save(CHILD, child, step)]
    assert min(linked) > 3 * child.model.head.nbytes  # the base, which no gradient changes
    with torch.no_grad():
        base.model.base[0].add_(1.0)  # its files go, and the child keeps them
    for step in (6, 7):
        played.save(BASE, base, step)
        played.save(CHILD, child, step)
    base.end()
    child.end()
    return played


def newest_whole(disk: SimFs, run: str, bits: dict[tuple[str, int], Bits]) -> int:
    """The newest step of a run, all of whose steps are whole."""
    mine = {step: each for (name, step), each in bits.items() if name == run}
    with checkpointer_on(disk, run, **SMALL) as ckpt:
        return max(whole_steps(ckpt, mine), default=0)


@pytest.mark.thorough
def test_a_crash_anywhere_leaves_both_runs_whole(fs: SimFs) -> None:
    """Between link and commit, between commit and release, and everywhere else."""
    played, states = play(fs), 0
    sample = Sample(int(STATES or 4), whole=STATES is not None, among=12)
    for moment, operation in enumerate(fs.recorded):
        for disk in sample.of(fs, moment):
            states += 1
            for run in (BASE, CHILD):
                newest = newest_whole(disk, run, played.bits)
                assert newest >= played.newest(run, moment), f"before {moment}: {operation}"
    assert states > len(fs.recorded) // 13


def test_both_prune_in_threads_of_their_own(tmp_path: Path) -> None:
    base, child = tmp_path / "base", tmp_path / "child"
    model = Tuned()
    with statehold.Checkpointer(base, **SMALL) as ckpt:
        ckpt.save(1, {"model": model})
    assert main(["fork", f"{base}@1", str(child)]) == 0
    failed: list[BaseException] = []
    begins = threading.Barrier(2)

    def train(run: Path) -> None:
        try:
            mine = Tuned()
            with statehold.Checkpointer(run, keep=1, **SMALL) as ckpt:
                ckpt.restore({"model": mine})
                begins.wait(DEADLINE_S)
                for step in range(2, 12):
                    ckpt.gate()
                    mine.train_once()
                    if step == 6:
                        mine.base[1].data.add_(1.0)
                    ckpt.save(step, {"model": mine}).wait("committed", DEADLINE_S)
                found = Tuned()
                assert ckpt.restore({"model": found}) == 11
                assert same(found.bits(), mine.bits())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=train, args=(run,)) for run in (base, child)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(2 * DEADLINE_S)
    assert failed == []
    for run in (base, child):
        assert main(["verify", str(run), "--all"]) == 0


def test_both_are_pruned_at_once_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, child, model = tmp_path / "base", tmp_path / "child", Tuned()
    with statehold.Checkpointer(base, **SMALL) as ckpt:
        for step in range(1, 6):
            ckpt.save(step, {"model": model}).wait("committed", DEADLINE_S)
    main(["fork", f"{base}@5", str(child)])
    with statehold.Checkpointer(child, **SMALL) as ckpt:
        ckpt.restore({"model": model})
        for step in range(6, 10):
            ckpt.save(step, {"model": model}).wait("committed", DEADLINE_S)
    codes: list[int] = []
    begins = threading.Barrier(2)

    def prune(run: Path) -> None:
        begins.wait(DEADLINE_S)
        codes.append(main(["prune", str(run), "--keep", "1", "--yes"]))

    threads = [threading.Thread(target=prune, args=(run,)) for run in (base, child)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(DEADLINE_S)
    assert codes == [0, 0]
    for run, newest in ((base, 5), (child, 9)):
        found = Tuned()
        with statehold.Checkpointer(run, **SMALL) as ckpt:
            assert ckpt.steps() == [newest]
            ckpt.restore({"model": found})
        assert same(found.bits(), model.bits())
    capsys.readouterr()


# -- a link to a file that is about to be used again -----------------------------------------------


class Interrupted:
    """A file system on which something happens before operation number `at`."""

    def __init__(self, fs: SimFs, at: int, act: Callable[[], None]) -> None:
        self._fs, self._left, self._act = fs, at, act
        self.happened = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._fs, name)
        if not callable(found):
            return found

        def call(*words: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left < 0 and not self.happened:
                self.happened = True
                self._act()
            return found(*words, **options)

        return call


def failure(act: Callable[[], object]) -> StateholdError | None:
    try:
        act()
    except StateholdError as error:
        return error
    return None


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [(3, 4, 5), (2,)], ids=["retired", "saved again"])
def test_a_fork_while_the_base_goes_on_with_its_files(steps: tuple[int, ...]) -> None:
    """Before each operation of the fork, the job of the base retires the step with keep=1, and uses
    its files again, or it saves the step again."""
    outcomes = []
    for at in range(1000):
        fs = SimFs(seed=1)
        expected = begin(fs)
        base = Job(fs, BASE, keep=1)

        def go_on(base: Job = base) -> None:
            base.model.base[0].data.add_(1.0)  # so that its files lose their last names
            for step in steps:
                base.save(step)

        disk = Interrupted(fs, at, go_on)
        error = failure(partial(fork, disk, step_path(BASE, 2), CHILD))  # type: ignore[arg-type]
        assert not isinstance(error, CorruptionError), at
        outcomes.append(error is None)
        mine = base.end()
        check_either(fs, CHILD, [expected[2], mine.get(2, expected[2])] if error is None else [])
        if disk.happened:
            check(fs, BASE, {steps[-1]: mine[steps[-1]]})
        fs.close()
        if not disk.happened:
            break
    assert True in outcomes[:-1]
    assert False in outcomes


def check_either(fs: SimFs, run: str, saves: list[Bits]) -> None:
    """The run has one of these saves as its step 2, or nothing."""
    with checkpointer_on(fs, run, **SMALL) as ckpt:
        assert bool(ckpt.steps()) is bool(saves)
        model = Tuned()
        if saves:
            assert ckpt.restore({"model": model}) == 2
            assert any(same(model.bits(), each) for each in saves)


# -- the parent ------------------------------------------------------------------------------------


def family_of(fs: SimFs) -> dict[int, Bits]:
    """A base with steps 1 and 2, and a child that has begun with 2 and saved 3."""
    expected = begin(fs)
    fork(fs, step_path(BASE, 2), CHILD)
    child = Job(fs, CHILD)
    child.save(3)
    return {2: expected[2], **child.end()}


def spoil_documents(fs: SimFs) -> None:
    for step in (1, 2):
        fs.write_file(f"{step_path(BASE, step)}/manifest.json", b"damaged")


def spoil_own_file(fs: SimFs) -> None:
    """The file of step 1 that nobody shares."""
    fs.corrupt(f"{step_path(BASE, 1)}/rank-00000-of-00001.safetensors", 9000, 1)


@pytest.mark.parametrize(
    "act",
    [
        lambda fs: remove(fs, BASE),
        lambda fs: remove(fs, step_path(BASE, 2)),
        lambda fs: fs.rename(BASE, "/runs/moved"),
        spoil_documents,
        spoil_own_file,
    ],
    ids=["deleted", "pruned", "moved", "documents damaged", "own file damaged"],
)
def test_the_child_stands_on_its_links(fs: SimFs, act: Callable[[SimFs], None]) -> None:
    expected = family_of(fs)
    act(fs)
    check(fs, CHILD, expected)
    again = Job(fs, CHILD)
    assert again.restored == 3
    assert again.linked(4) > again.model.base_bytes
    check(fs, CHILD, expected | again.end())


# -- a damaged shared file -------------------------------------------------------------------------


def shared_file(step: Path) -> Path:
    return next(each for each in sorted(step.iterdir()) if each.stat().st_nlink > 1)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def step_of(run: Path, step: int) -> Path:
    return run / f"step-{step:012d}"


def test_it_is_named_once_with_all_steps_that_hold_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model = tmp_path / "run", Tuned()
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"model": model}).wait("committed", DEADLINE_S)
    main(["fork", f"{run}@3", str(tmp_path / "child")])
    capsys.readouterr()
    assert main(["verify", str(run), "--all"]) == 0
    assert "share" not in capsys.readouterr().out
    flip(shared_file(step_of(run, 2)))
    assert main(["verify", str(run), "--all", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [step["intact"] for step in found["steps"]] == [False, False, False]
    name = found["steps"][0]["damage"][0]["file"]
    assert found["shared_damage"] == [
        {"run": str(run), "file": name, "steps": [1, 2, 3], "elsewhere": 1}
    ]
    assert main(["verify", str(run), "--all"]) == 1
    out = capsys.readouterr().out
    assert out.count("DAMAGE  ") == 1  # one table
    assert out.count("the same damaged file as in a step above") == 2
    line = f"one damaged file that steps share: {name}, in steps 1, 2, 3, and 1 name outside of"
    assert out.count(line) == 1
    assert main(["verify", f"{run}@2"]) == 1  # one step alone tells, too
    assert line in capsys.readouterr().out
    for step in (1, 2):
        shutil.rmtree(step_of(run, step))
    assert main(["verify", str(run)]) == 1
    assert f"{name}, in step 3, and 1 name outside of" in capsys.readouterr().out


def test_damage_of_one_step_alone_is_not_shared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model = tmp_path / "run", Tuned()
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        for step in (1, 2):
            model.train_once()
            ckpt.save(step, {"model": model}).wait("committed", DEADLINE_S)
            ckpt.gate()
    flip(step_of(run, 1) / "rank-00000-of-00001.safetensors")
    (shared_file(step_of(run, 2))).unlink()  # a name that is missing is damage of its step
    assert main(["verify", str(run), "--all", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["shared_damage"] == []
    assert [step["intact"] for step in found["steps"]] == [False, False]


def test_a_restore_takes_the_copy_of_another_level(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    levels = [
        statehold.Directory(),
        statehold.Directory(path=tmp_path / "far", every=1, name="far"),
    ]
    model = Tuned()
    with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
        for step in (1, 2):
            ckpt.gate()
            model.train_once()
            ckpt.save(step, {"model": model}).wait("committed", DEADLINE_S)
        ckpt.flush(DEADLINE_S)
    flip(shared_file(step_of(tmp_path / "run", 2)))
    found = Tuned()
    with statehold.Checkpointer(tmp_path / "run", levels=levels, **SMALL) as ckpt:
        assert ckpt.restore({"model": found}) == 2
    assert same(found.bits(), model.bits())
    assert "is not intact at level" in caplog.text


def test_a_restore_takes_an_older_step_that_does_not_hold_it(tmp_path: Path) -> None:
    run, model = tmp_path / "run", Tuned()
    expected: dict[int, Bits] = {}
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        for step in range(1, 11):
            ckpt.gate()
            model.train_once()
            if step == 3:  # from here on other files
                for each in model.base:
                    each.data.add_(1.0)
            expected[step] = model.bits()
            ckpt.save(step, {"model": model}).wait("committed", DEADLINE_S)
    damaged = shared_file(step_of(run, 10))
    holders = [
        step
        for step in range(1, 11)
        if any(each.samefile(damaged) for each in step_of(run, step).iterdir())
    ]
    flip(damaged)
    assert len(holders) > 1
    found = Tuned()
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        with pytest.warns(RuntimeWarning, match="is damaged"):
            restored = ckpt.restore({"model": found})
        assert restored == min(holders) - 1
        assert same(found.bits(), expected[restored])
        left = [each.name for each in run.iterdir() if each.name.endswith(".corrupt")]
        assert len(left) == len(holders)
    shutil.rmtree(run)


def test_the_pool_does_not_count_as_another_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model = tmp_path / "run", Tuned()
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"model": model}).wait("committed", DEADLINE_S)
        flip(shared_file(step_of(run, 1)))
        assert main(["verify", str(run), "--all", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["shared_damage"]
    assert (found["steps"], found["elsewhere"]) == ([1, 2], 0)


def test_nothing_is_left_over(fs: SimFs) -> None:
    family_of(fs)
    assert [name for name in names(fs, CHILD) if not name.startswith("step-")] == []
