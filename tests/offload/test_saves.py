"""A save takes the files of an offloaded optimizer as they are, and a step of them is as any other.

`Twins.torchs` is torch's optimizer with the same gradients: what a step holds is compared with it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import statehold
from statehold import offload
from statehold._core import open_fs
from statehold.checkpoint.telemetry.watch import Watch
from statehold.errors import (
    ChecksumError,
    MissingFileError,
    StorageError,
    TruncatedFileError,
    UsageError,
)
from statehold.offload import store
from statehold.offload.pipeline import Held
from statehold.offload.store import StateFiles, Stored, SubgroupStore
from statehold.tensors.placements import OWN
from statehold.tensors.stored import Role, SavedParameter, StoredState
from support import scripts
from support.faults import DEADLINE_S, SMALL, must
from support.inside import inside
from support.seeds import SEED
from support.twins import Twins, same_bits
from support.twins import state_of as state_of_optimizer
from support.wrapped import Extra, Holder, Imitating, Subclassing

BF16, F32 = torch.bfloat16, torch.float32
SHAPES = [(129, 64), (90_000,), (7,), (0, 4), (), (3, 64, 64)]
SUBGROUP = 98_304


def twins_at(folder: str | Path, dtypes: Any = (BF16,), seed: int = 0, **offloading: Any) -> Twins:
    tiers = offloading.pop("tiers", [offload.Path(folder)])
    offloading.setdefault("subgroup_bytes", SUBGROUP)
    return Twins(SHAPES, list(dtypes), seed=seed, tiers=tiers, **offloading)


def state_of(twins: Twins) -> dict[str, Any]:
    return {"params": {str(i): each for i, each in enumerate(twins.params)}, "opt": twins.ours}


def stored_of(twins: Twins) -> StoredState:
    """What a save takes from the paths."""
    saved = [SavedParameter(f"opt.state.{i}", OWN, Role.WRITES) for i in range(len(twins.params))]
    stored = twins.ours.stored_parameters(saved)
    assert stored is not None
    return stored


def check_equal(ours: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """The same groups and the same bits."""
    one, two = ours.state_dict(), other.state_dict()
    assert one["state"].keys() == two["state"].keys()
    for index, fields in one["state"].items():
        assert fields.keys() == two["state"][index].keys()
        assert all(same_bits(value, two["state"][index][name]) for name, value in fields.items())


def plain(twins: Twins) -> torch.optim.AdamW:
    return torch.optim.AdamW(twins.params, lr=1e-2)


@pytest.fixture
def folders(tmp_path: Path) -> Callable[[str], Path]:
    def made(name: str) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        return tmp_path / name

    return made


# -- what a save writes ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_save_links_what_is_on_storage(folders: Callable[[str], Path], dtype: Any) -> None:
    """It writes the weights, the buffers that have changed, and little else."""
    twins = twins_at(folders("opt"), [dtype])
    stats = twins.ours.stats
    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        for step in range(1, 4):
            twins.train(1)
            before = twins.ours.stats.paths[0].written_bytes
            done = ckpt.save(step, state_of(twins)).wait("committed", DEADLINE_S)
            in_memory = twins.ours.stats.paths[0].written_bytes - before
            weights = sum(each.nbytes for each in twins.params)
            assert done.stats.linked_bytes >= stats.state_bytes
            assert 0 < in_memory <= stats.cache_bytes + stats.buffer_bytes
            assert done.stats.written_bytes <= weights + 16_384  # its header
        twins.check()
        other = twins_at(folders("opt2"), [dtype], seed=1)
        assert ckpt.restore(state_of(other)) == 3
    check_equal(twins.ours, other.ours)
    assert all(map(same_bits, twins.params, other.params))


def test_files_are_linked_while_the_weights_are_written(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, they took half of a commit."""
    begun, stage = list[str](), Watch.stage

    def seen(watch: Watch, name: str, **facts: Any) -> Any:
        begun.append(name)
        return stage(watch, name, **facts)

    monkeypatch.setattr(Watch, "stage", seen)
    twins = twins_at(folders("opt"))
    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        twins.train(1)
        ckpt.save(1, state_of(twins)).wait("committed", DEADLINE_S)
    ours = [name for name in begun if name in ("open", "take in", "write", "commit")]
    assert ours == ["open", "take in", "write", "commit"]


@pytest.mark.thorough
def test_nothing_of_files_that_went_stays(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps stay, so each save takes the files for good, and the optimizer makes others."""
    monkeypatch.setattr(store, "LINKED_MAX", 4)
    twins, sizes = twins_at(folders("opt")), list[int]()
    owners = (state_of_optimizer(twins.ours).store, *state_of_optimizer(twins.ours).store.files)
    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        for step in range(1, 9):
            twins.train(1)
            ckpt.save(step, state_of(twins)).wait("committed", DEADLINE_S)
            inside(ckpt).pipeline.drain()
            held = (each for owner in owners for each in vars(owner).values())
            sizes.append(sum(len(each) for each in held if isinstance(each, dict | set | deque)))
    assert sizes[-1] - sizes[3] < twins.ours.stats.paths[0].subgroups  # not four times that


def test_only_the_first_save_writes_headers(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later files have theirs when they are written."""
    late, open_held = list[str](), StateFiles.open_held
    monkeypatch.setattr(
        StateFiles, "open_held", lambda *given: late.append(given[1]) or open_held(*given)
    )
    twins, counts = twins_at(folders("opt")), []
    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        for step in range(1, 4):
            twins.train(1)
            ckpt.save(step, state_of(twins)).wait("committed", DEADLINE_S)
            counts.append(len(late))
        assert 0 < counts[0] == counts[1] == counts[2]
        other = twins_at(folders("opt2"), seed=1)
        assert ckpt.restore(state_of(other)) == 3
    check_equal(twins.ours, other.ours)


@pytest.mark.thorough
@pytest.mark.parametrize("wrap", [Subclassing, Imitating, Holder, Extra])
def test_a_wrapper_that_passes_everything_on_changes_nothing(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, wrap: Any
) -> None:
    asked, state_dict = [], offload.AdamW.state_dict
    twins = twins_at(folders("opt"))
    twins.train(2)
    monkeypatch.setattr(
        offload.AdamW, "state_dict", lambda self: asked.append(self) or state_dict(self)
    )
    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        done = ckpt.save(1, {**state_of(twins), "opt": wrap(twins.ours)})
        done.wait("committed", DEADLINE_S)
        other = twins_at(folders("opt2"), seed=1)
        ckpt.restore({**state_of(other), "opt": wrap(other.ours)})
    assert bool(asked) == (wrap is Extra)
    check_equal(twins.ours, other.ours)
    if wrap is Extra:
        assert done.stats.linked_bytes == 0
    else:
        assert done.stats.linked_bytes >= twins.ours.stats.state_bytes


def test_another_file_system_gets_a_copy(folders: Callable[[str], Path], memory: Path) -> None:
    memory.mkdir(parents=True)
    twins = twins_at(memory)
    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        twins.train(2)
        done = ckpt.save(1, state_of(twins)).wait("committed", DEADLINE_S)
        assert done.stats.linked_bytes == 0
        assert done.stats.written_bytes > twins.ours.stats.state_bytes
        twins.train(2)
        other = twins_at(folders("opt2"), seed=1)
        ckpt.restore(state_of(other))
    twins.ours.close()
    other.train(1)


@pytest.mark.parametrize(
    "tiers", [[offload.Host("4MiB")], [offload.Host("1MiB"), offload.Path("far")]], ids=str
)
def test_other_tiers_and_cuts_take_a_step(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tiers: list[Any]
) -> None:
    twins = twins_at(folders("opt"))
    monkeypatch.chdir(folders("far").parent)
    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        twins.train(3)
        ckpt.save(3, state_of(twins)).wait("committed", DEADLINE_S)
        other = twins_at(".", seed=1, tiers=tiers, subgroup_bytes=3 * 49_152)
        ckpt.restore(state_of(other))
        check_equal(twins.ours, other.ours)
        ckpt.save(4, state_of(other)).wait("committed", DEADLINE_S)
        ckpt.restore(state_of(twins), step=4)
    check_equal(twins.ours, other.ours)


def test_torchs_optimizer_takes_a_step_and_gives_one(folders: Callable[[str], Path]) -> None:
    twins = twins_at(folders("opt"), [F32])
    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        twins.train(3)
        ckpt.save(3, state_of(twins)).wait("committed", DEADLINE_S)
        found = plain(twins)
        ckpt.restore({**state_of(twins), "opt": found})
        check_equal(twins.ours, found)
        ckpt.save(4, {**state_of(twins), "opt": found}).wait("committed", DEADLINE_S)
        other = twins_at(folders("opt2"), [F32], seed=1)
        ckpt.restore(state_of(other))
    check_equal(twins.ours, other.ours)


def test_two_optimizers_of_a_state_have_their_own_files(folders: Callable[[str], Path]) -> None:
    one, two = twins_at(folders("opt")), twins_at(folders("opt"), seed=5)
    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        one.train(1)
        two.train(2)
        ckpt.save(1, {"one": state_of(one), "two": state_of(two)}).wait("committed", DEADLINE_S)
        three, four = twins_at(folders("opt2"), seed=1), twins_at(folders("opt2"), seed=2)
        ckpt.restore({"one": state_of(three), "two": state_of(four)})
    check_equal(one.ours, three.ours)
    check_equal(two.ours, four.ours)


def test_rows_of_any_length_are_linked(folders: Callable[[str], Path]) -> None:
    model = torch.nn.Linear(1000, 70, bias=False)
    optimizer = offload.AdamW(
        model.parameters(), tiers=[offload.Path(folders("opt"))], subgroup_bytes=SUBGROUP * 2
    )
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        done = ckpt.save(1, {"model": model, "opt": optimizer}).wait("committed", DEADLINE_S)
    assert optimizer.stats.paths[0].subgroups > 2
    assert done.stats.linked_bytes >= 2 * 4 * 70_000


def test_memory_in_another_order_is_saved_as_ever(
    folders: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.nn.Parameter(torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last))
    optimizer = offload.AdamW([weight], tiers=[offload.Path(folders("opt"))])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        done = ckpt.save(1, {"opt": optimizer}).wait("committed", DEADLINE_S)
        assert done.stats.linked_bytes == 0
        assert "no step can have that of parameter 0 as it is" in caplog.text
        before = optimizer.state_dict()["state"][0]
        optimizer.step()
        ckpt.restore({"opt": optimizer})
    after = optimizer.state_dict()["state"][0]
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.thorough
def test_the_command_line_sees_an_ordinary_step(folders: Callable[[str], Path]) -> None:
    twins = twins_at(folders("opt"))
    run = folders("run")
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        for step in (1, 2):
            twins.train(1)
            ckpt.save(step, state_of(twins)).wait("committed", DEADLINE_S)
    one, two = (str(run / f"step-{step:012d}") for step in (1, 2))
    for words, status in ((["verify", two], 0), (["show", one], 0), (["diff", one, two], 1)):
        done = scripts.run(["-m", "statehold", *words], timeout=DEADLINE_S)
        assert (done.returncode, done.stderr) == (status, ""), words
        assert words[0] == "verify" or "opt.state.0.exp_avg" in done.stdout
        assert "padding" not in done.stdout


def test_a_step_has_the_same_names_and_bits_as_one_of_torchs_optimizer(
    folders: Callable[[str], Path],
) -> None:
    twins, run = twins_at(folders("opt"), [F32]), folders("run")
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        twins.train(2)
        done = ckpt.save(1, state_of(twins)).wait("committed", DEADLINE_S)
        assert done.stats.linked_bytes > 0
        torchs = plain(twins)
        ckpt.restore({**state_of(twins), "opt": torchs})
        ckpt.save(2, {**state_of(twins), "opt": torchs}).wait("committed", DEADLINE_S)
    one, two = (run / f"step-{step:012d}" for step in (1, 2))
    diff = scripts.run(["-m", "statehold", "diff", str(one), str(two)], timeout=DEADLINE_S)
    lines = diff.stdout.splitlines()
    assert not [line for line in lines if "exp_avg" in line], diff.stdout
    named = {name for file in two.glob("*.safetensors") for name in names_in(file)}
    linked = {name for file in one.glob("*-*-of-*-*.safetensors") for name in names_in(file)}
    moments = {name for name in named if ".exp_avg" in name and twins_numel(twins, name)}
    assert {name for name in linked if "padding" not in name} == moments


def names_in(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def twins_numel(twins: Twins, name: str) -> int:
    """The elements of the parameter of "opt.state.<index>.<field>"."""
    return twins.params[int(name.split(".")[2])].numel()


def test_a_parameter_that_was_never_updated_has_no_state(folders: Callable[[str], Path]) -> None:
    """A part of it lies in a subgroup of others, and the rest in subgroups that were never made.

    The second update writes a file with the header of the first save, which the next one replaces.
    """
    params = [torch.nn.Parameter(torch.randn(size)) for size in (5000, 150_000, 5000)]
    given: dict[str, Any] = {"subgroup_bytes": 98_304}
    optimizer = offload.AdamW(params, tiers=[offload.Path(folders("opt"))], **given)
    run, state = folders("run"), {"params": dict(zip("abc", params, strict=True)), "opt": optimizer}
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        for step, active in ((1, [0, 2]), (2, [0, 1, 2]), (3, [1])):
            for index in active:
                params[index].grad = torch.randn_like(params[index])
            optimizer.step()
            optimizer.zero_grad()
            done = ckpt.save(step, state).wait("committed", DEADLINE_S)
            assert done.stats.linked_bytes > 0
            expected = optimizer.state_dict()["state"]
            assert set(expected) == ({0, 2} if step == 1 else {0, 1, 2})
            torchs = torch.optim.AdamW(params)
            ckpt.restore({"params": state["params"], "opt": torchs}, step=step)
            found = torchs.state_dict()["state"]
            assert found.keys() == expected.keys()
            for index, fields in expected.items():
                assert all(same_bits(value, found[index][name]) for name, value in fields.items())


def test_another_name_for_a_saved_optimizer_is_saved_from_memory(
    folders: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    twins = twins_at(folders("opt"))
    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        twins.train(1)
        state = {**state_of(twins), "again": twins.ours}
        done = ckpt.save(1, state).wait("committed", DEADLINE_S)
        assert 0 < done.stats.linked_bytes < twins.ours.stats.state_bytes + done.stats.written_bytes
        assert done.stats.written_bytes > twins.ours.stats.state_bytes
        assert "called it opt.state.0, and this one again.state.0" in caplog.text
        for name in ("opt", "again"):
            other = twins_at(folders("opt2"), seed=1)
            ckpt.restore({"params": state_of(other)["params"], name: other.ours}, strict=False)
            check_equal(twins.ours, other.ours)
            other.ours.close()


def test_a_header_that_has_no_room_is_saved_from_memory(
    folders: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    twins = twins_at(folders("opt"), subgroup_bytes=49_152)
    name = "a" * 2000
    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        twins.train(1)
        done = ckpt.save(1, {name: twins.ours}).wait("committed", DEADLINE_S)
        assert done.stats.linked_bytes == 0
        assert "make it from model.named_parameters()" in caplog.text
        other = twins_at(folders("opt2"), seed=1)
        ckpt.restore({name: other.ours})
        check_equal(twins.ours, other.ours)


# -- what a restore reads --------------------------------------------------------------------------


def test_a_restore_reads_a_subgroup_at_a_time(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    twins, other = twins_at(folders("opt")), twins_at(folders("opt2"), seed=1)
    reads: list[int] = []
    load = offload.AdamW.load_stored

    def noted(optimizer: Any, state: Any, fill: Any) -> None:
        def counted(wanted: Any) -> None:
            reads.append(sum(each.memory.nbytes for each in wanted))
            fill(wanted)

        load(optimizer, state, counted)

    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        twins.train(2)
        ckpt.save(1, state_of(twins)).wait("committed", DEADLINE_S)
        with monkeypatch.context() as patched:
            for name in ("state_dict", "load_state_dict"):
                patched.setattr(offload.AdamW, name, None)
            patched.setattr(offload.AdamW, "load_stored", noted)
            ckpt.restore(state_of(other))
    check_equal(twins.ours, other.ours)
    assert len(reads) > 10
    assert max(reads) <= SUBGROUP


@pytest.mark.parametrize(
    ("kind", "saved", "own"),
    [
        ("AdamW", {"amsgrad": True}, {"amsgrad": False}),
        ("Adam", {"amsgrad": False}, {"amsgrad": True}),
        ("SGD", {"momentum": 0.9}, {"momentum": 0.0}),
        ("SGD", {"momentum": 0.0}, {"momentum": 0.9}),
    ],
)
def test_a_step_with_other_fields_is_refused_before_anything_changes(
    folders: Callable[[str], Path], kind: str, saved: dict[str, Any], own: dict[str, Any]
) -> None:
    """Else fields are dropped, and groups want what is not kept, so no update is possible."""
    twins, other = (
        twins_at(folders(name), seed=seed, kind=kind, options=options)
        for name, seed, options in (("opt", 0, saved), ("opt2", 1, own))
    )
    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        twins.train(2)
        ckpt.save(1, state_of(twins)).wait("committed", DEADLINE_S)
        other.train(1)
        with pytest.raises(UsageError, match="would change what is kept") as caught:
            ckpt.restore(state_of(other))
    assert caught.value.facts["parameter"] == "parameter 0"
    assert other.ours.param_groups[0].items() >= own.items()
    other.train(1)
    for param, master in zip(other.params, other.masters, strict=True):
        assert same_bits(param.detach(), master.detach().to(BF16))


def test_a_damaged_file_gives_way_to_the_step_before(folders: Callable[[str], Path]) -> None:
    """The optimizer has taken a part of the damaged step by then."""
    twins, other = twins_at(folders("opt")), twins_at(folders("opt2"), seed=1)
    run = folders("run")
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        twins.train(1)
        ckpt.save(1, state_of(twins)).wait("committed", DEADLINE_S)
        expected = twins.ours.state_dict()["state"]
        twins.train(1)
        ckpt.save(2, state_of(twins)).wait("committed", DEADLINE_S)
    twins.ours.close()
    file = run / f"step-{2:012d}" / "rank-00000-of-00001-9.safetensors"
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)
    with statehold.Checkpointer(run, **SMALL) as ckpt, pytest.warns(RuntimeWarning, match="step 2"):
        assert ckpt.restore(state_of(other)) == 1
    for index, fields in other.ours.state_dict()["state"].items():
        assert all(same_bits(value, expected[index][name]) for name, value in fields.items())


@pytest.mark.parametrize("case", ["as it is", "channels_last", "only", "skip"])
def test_a_restore_mends_an_optimizer_that_has_failed(
    folders: Callable[[str], Path], case: str
) -> None:
    """Also where the state of the step is not read a subgroup at a time."""
    torch.manual_seed(0)
    weight = torch.randn(64, 32, 9, 9)
    if case == "channels_last":
        weight = weight.to(memory_format=torch.channels_last)
    params = {"w": torch.nn.Parameter(weight), "b": torch.nn.Parameter(torch.randn(500))}
    tiers = [offload.Path(folders("opt"))]
    optimizer = offload.AdamW(params.values(), tiers=tiers, subgroup_bytes=SUBGROUP)
    state = {"params": params, "opt": optimizer, "other": 1}

    def step() -> None:
        for each in params.values():
            each.grad = torch.ones_like(each)
        optimizer.step()

    given: Any = {"only": {"only": ["params", "opt"]}, "skip": {"skip": ["other"]}}.get(case, {})
    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        step()
        ckpt.save(1, state).wait("committed", DEADLINE_S)
        expected = optimizer.state_dict()["state"]
        step()
        for file in folders("opt").rglob("*.state"):
            file.unlink()
        with pytest.raises(MissingFileError):
            step()
        if given:
            with pytest.raises(UsageError, match="belongs to no step"):
                ckpt.restore(state, only=["params", "opt.state.w"], strict=False)
        assert ckpt.restore(state, **given) == 1
    found = optimizer.state_dict()["state"]
    assert found.keys() == expected.keys()
    for index, fields in expected.items():
        assert all(same_bits(value, found[index][name]) for name, value in fields.items())
    step()


# -- the files of removed steps -----------------------------------------------------------


def test_files_of_removed_steps_are_written_again(folders: Callable[[str], Path]) -> None:
    """So there are as many files as the kept steps and the state have, and few more."""
    twins, opt = twins_at(folders("opt")), folders("opt")
    with statehold.Checkpointer(folders("run"), keep=2, **SMALL) as ckpt:
        for step in range(1, 11):
            twins.train(1)
            ckpt.save(step, state_of(twins)).wait("committed", DEADLINE_S)
            inside(ckpt).pipeline.drain(DEADLINE_S)
        twins.check()
        made = max(int(file.stem.split("-")[1]) for file in opt.rglob("*.state"))
        assert made <= 5 * twins.ours.stats.paths[0].subgroups
        for step in ckpt.steps():
            other = twins_at(folders("opt2"), seed=1)
            assert ckpt.restore(state_of(other), step=step) == step
            other.ours.close()


def test_a_step_that_stays_keeps_no_other_files(folders: Callable[[str], Path]) -> None:
    """Its files wait before those of later steps."""
    twins, opt = twins_at(folders("opt")), folders("opt")
    keep = statehold.Keep(last=1, best=1, metric="loss")
    with statehold.Checkpointer(folders("run"), keep=keep, **SMALL) as ckpt:
        for step in range(1, 13):
            twins.train(1)
            metrics = {"loss": 0.0 if step == 1 else 1.0}
            ckpt.save(step, state_of(twins), metrics=metrics).wait("committed", DEADLINE_S)
            inside(ckpt).pipeline.drain(DEADLINE_S)
        twins.check()
        files = list(opt.rglob("*.state"))
        assert len(files) <= 5 * twins.ours.stats.paths[0].subgroups
    twins.ours.close()


@pytest.mark.parametrize("order", ["of saves", "any"])
def test_the_space_of_removed_steps_is_used_again(
    folders: Callable[[str], Path], order: str
) -> None:
    """Beside more files of steps that stay than are looked at for one that is taken."""
    opt, random_of = folders("opt"), random.Random(SEED)
    steps, state = deque[list[Path]](), list[str]()
    with contextlib.closing(open_fs("threads")) as fs:
        files = StateFiles(fs, str(opt))
        for step in range(60):
            for _ in range(8):
                path, file = files.take(4096)
                file.close()
                if len(state) == 8:
                    files.give_back(state.pop(0))
                state.append(path)
            links = [folders("run") / f"{step}-{Path(path).name}" for path in state]
            for path, link in zip(state, links, strict=True):
                os.link(path, link)
            if step >= 20:  # those before stay
                steps.append(links)
            if len(steps) > 2:
                steps.rotate(0 if order == "of saves" else random_of.randrange(3))
                for link in steps.popleft():
                    link.unlink()
        assert len(list(opt.rglob("*.state"))) <= 8 * (20 + 2 + 1) + 2 * 8
        files.close()


def test_few_files_wait_for_their_steps(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statehold.offload.store.LINKED_MAX", 3)
    twins, opt = twins_at(folders("opt")), folders("opt")
    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        for step in range(1, 6):
            twins.train(1)
            ckpt.save(step, state_of(twins)).wait("committed", DEADLINE_S)
        twins.train(1)
        files = list(opt.rglob("*.state"))
        assert len(files) <= 3 * twins.ours.stats.paths[0].subgroups
        twins.check()
    twins.ours.close()


# -- updates during a save -------------------------------------------------------------------------


def test_files_of_a_save_stay_as_they_were(folders: Callable[[str], Path]) -> None:
    """However many updates come before the save has them."""
    twins = twins_at(folders("opt"), tiers=[offload.Host("200KiB"), offload.Path(folders("opt"))])
    twins.train(2)
    stored = stored_of(twins)
    twins.train(4)
    twins.check()
    content = {each.path: Path(each.path).read_bytes() for each in stored.files()}
    twins.train(4)
    assert content == {each.path: Path(each.path).read_bytes() for each in stored.files()}
    stored.release()
    twins.train(4)
    assert content != {path: Path(path).read_bytes() for path in content if Path(path).exists()}
    twins.check()


def saved_late(folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The save takes its files only after updates that have changed everything."""
    twins = twins_at(folders("opt"))
    may_go, files = threading.Event(), Held.files

    def late(held: Held, heads: Any) -> Any:
        must(may_go.wait(DEADLINE_S))
        return files(held, heads)

    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        twins.train(2)
        expected = twins.ours.state_dict()["state"]
        weights = [each.detach().clone() for each in twins.params]
        monkeypatch.setattr(Held, "files", late)
        save = ckpt.save(1, state_of(twins))
        twins.train(3)
        may_go.set()
        save.wait("committed", DEADLINE_S)
        other = twins_at(folders("opt2"), seed=1)
        ckpt.restore(state_of(other))
    assert all(map(same_bits, weights, other.params))
    for index, fields in other.ours.state_dict()["state"].items():
        assert all(same_bits(value, expected[index][name]) for name, value in fields.items())


def test_a_save_sees_no_later_update(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_late(folders, monkeypatch)


def test_files_that_nobody_holds_are_found(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test before can fail: the updates write into what the save is about to take."""
    monkeypatch.setattr(StateFiles, "hold", lambda self, path: None)
    monkeypatch.setattr(StateFiles, "release", lambda self, path: None)
    with pytest.raises((ChecksumError, TruncatedFileError)):
        saved_late(folders, monkeypatch)


def test_a_write_that_fails_fails_the_save_and_no_update(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = twins_at(folders("opt"))

    def failing(*_: Any) -> Stored:
        raise StorageError("write", errno=errno.EIO, path=str(folders("opt")))

    with statehold.Checkpointer(folders("run"), **SMALL) as ckpt:
        twins.train(2)
        with monkeypatch.context() as patched:
            patched.setattr(SubgroupStore, "write", failing)
            with pytest.raises(StorageError):  # of save(), if that still waits for copies
                ckpt.save(1, state_of(twins)).wait("committed", DEADLINE_S)
        twins.train(2)
        twins.check()
        ckpt.save(3, state_of(twins)).wait("committed", DEADLINE_S)
        assert ckpt.steps() == [3]
    twins.ours.close()


def test_close_waits_for_a_save_that_has_the_files(folders: Callable[[str], Path]) -> None:
    twins = twins_at(folders("opt"))
    twins.train(1)
    stored = stored_of(twins)
    paths = [Path(each.path) for each in stored.files()]
    closing = threading.Thread(target=twins.ours.close)
    closing.start()
    assert all(path.exists() for path in paths)
    stored.release()
    closing.join(DEADLINE_S)
    must(not closing.is_alive())
    assert not any(path.exists() for path in paths)
