"""Bad input and faults: the named error, what it says, and that the run stays restorable."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import statehold
from statehold import errors
from support.faults import DEADLINE_S, SMALL, spy_on
from support.in_memory import SimFs, checkpointer_on
from support.inside import inside
from support.training import Training, bits

DATA = "rank-00000-of-00001.safetensors"


@pytest.fixture
def three_steps(run: Path) -> tuple[Path, Training]:
    """A run with steps 1 to 3, and the training as it was at step 2."""
    training = Training()
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        for step in range(1, 4):
            training.step()
            if step == 2:
                ckpt.save(step, training.state).wait("committed", DEADLINE_S)
                second = bits(training)
            else:
                ckpt.save(step, training.state)
    return run, second


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def edit(path: Path, change: Callable[[dict], None]) -> None:
    """Change the manifest and keep its own digest right, as a hostile writer would."""
    import hashlib

    body = json.loads(path.read_bytes())
    body.pop("manifest_sha256")
    change(body)
    raw = json.dumps(body, separators=(",", ":")).encode()[:-1]
    digest = hashlib.sha256(raw).hexdigest()
    path.write_bytes(raw + f',"manifest_sha256":"{digest}"}}\n'.encode())


def truncate(step: Path) -> None:
    os.truncate(step / DATA, (step / DATA).stat().st_size - 1)


DAMAGE = {
    "truncated": (truncate, errors.TruncatedFileError),
    "longer": (lambda step: os.truncate(step / DATA, 1 << 20), errors.TruncatedFileError),
    "missing": (lambda step: (step / DATA).unlink(), errors.MissingFileError),
    "no manifest": (lambda step: (step / "manifest.json").unlink(), errors.MissingFileError),
    "flipped data": (lambda step: flip(step / DATA, -1 % (step / DATA).stat().st_size),
                     errors.ChecksumError),
    "flipped header": (lambda step: flip(step / DATA, 40), errors.ChecksumError),
    "flipped manifest": (lambda step: flip(step / "manifest.json", 90), errors.ManifestError),
    "empty manifest": (lambda step: (step / "manifest.json").write_bytes(b""),
                       errors.ManifestError),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_the_step_before_is_restored(three_steps, name: str) -> None:
    run, second = three_steps
    damage, expected = DAMAGE[name]
    damage(run / "step-000000000003")
    live = Training(seed=8)
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        with pytest.raises(expected) as caught:
            ckpt.restore(live.state, 3)
        assert caught.value.facts["step"] == 3
        assert caught.value.facts["other steps"] == "1, 2 (2 in all)"
        has_begun = "manifest" not in name
        assert ("the state" in caught.value.facts) is has_begun, "says what may be overwritten"
        with pytest.warns(RuntimeWarning, match="step 3 is damaged; step 2 was restored") as told:
            got = ckpt.restore(live.state)
        assert "overwritten" not in str(told[0].message), "the state is that of step 2"
        assert got == 2
        assert bits(live) == second
        assert ckpt.steps() == [1, 2]
        assert (run / "step-000000000003.corrupt").is_dir()
        ckpt.save(3, live.state).wait("committed", DEADLINE_S)
        assert ckpt.steps() == [1, 2, 3]


def test_a_flipped_bit_names_its_tensor(three_steps) -> None:
    run, _ = three_steps
    manifest = json.loads((run / "step-000000000003/manifest.json").read_bytes())
    begin = manifest["tensors"]["model.hidden.bias"]["chunks"][0]["begin"]
    flip(run / "step-000000000003" / DATA, begin + 5)
    with (
        statehold.Checkpointer(run, **SMALL) as ckpt,
        pytest.raises(errors.ChecksumError) as caught,
    ):
        ckpt.restore(Training().state, 3)
    assert caught.value.facts["tensor"] == "model.hidden.bias"


def test_when_every_step_is_damaged_it_raises_instead_of_starting_anew(three_steps) -> None:
    run, _ = three_steps
    for step in (1, 2, 3):
        truncate(run / f"step-{step:012d}")
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        with pytest.raises(errors.TruncatedFileError) as caught:
            ckpt.restore(Training().state)
        assert caught.value.facts["step"] == 3
        assert caught.value.facts["also damaged"] == "1, 2 (2 in all)"
    assert len(list(run.glob("step-????????????"))) == 3  # none was set aside


def test_when_the_only_step_is_damaged_no_other_one_is_said_to_be(run: Path) -> None:
    training = Training()
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        ckpt.save(1, training.state).wait("committed", DEADLINE_S)
        truncate(run / "step-000000000001")
        with pytest.raises(errors.TruncatedFileError) as caught:
            ckpt.restore(training.state)
    assert "also damaged" not in caught.value.facts


def test_newer_format_is_refused_and_nothing_is_passed_over(three_steps) -> None:
    run, _ = three_steps
    edit(run / "step-000000000003/manifest.json", lambda body: body.update(version=99))
    with statehold.Checkpointer(run, **SMALL) as ckpt, pytest.raises(errors.FormatVersionError):
        ckpt.restore(Training().state)


def test_a_manifest_of_another_step_is_refused(three_steps) -> None:
    run, _ = three_steps
    edit(run / "step-000000000003/manifest.json", lambda body: body.update(step=5))
    with (
        statehold.Checkpointer(run, **SMALL) as ckpt,
        pytest.raises(errors.ManifestError) as caught,
    ):
        ckpt.restore(Training().state, 3)
    assert caught.value.facts["got"] == "step 5"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "hidden", nn.Linear(32, 31)), ["hidden.weight", "[31, 32]"]),
        (lambda m: setattr(m, "extra", nn.Linear(2, 2)), ["model.extra.weight"]),
        (lambda m: delattr(m, "norm"), ["model.norm.weight"]),
        (lambda m: m.half(), ["model.hidden.weight", "F16"]),
    ],
)
def test_mismatches_are_listed_before_anything_changes(three_steps, change, words) -> None:
    run, _ = three_steps
    live = Training(seed=4)
    change(live.model)
    before = {name: t.clone() for name, t in live.model.state_dict().items()}
    with statehold.Checkpointer(run, **SMALL) as ckpt:
        with pytest.raises(errors.StateMismatchError) as caught:
            ckpt.restore({"model": live.model, "optimizer": live.optimizer}, 3)
        for word in words:
            assert word in str(caught.value)
    after = live.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("value", [object(), lambda: 0, torch.empty(2, device="meta")])
def test_values_that_no_step_can_hold_are_refused_with_their_path(small_ckpt, value) -> None:
    with pytest.raises(errors.UnsupportedValueError) as caught:
        small_ckpt.save(1, {"outer": {"inner": [0, value]}})
    assert "outer.inner.1" in str(caught.value)
    small_ckpt.save(1, {"x": 1}).wait("committed", DEADLINE_S)
    assert small_ckpt.steps() == [1]


def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        statehold.Checkpointer(tmp_path / "file" / "run", **SMALL) as ckpt,
        pytest.raises(errors.StorageError) as caught,
    ):
        ckpt.save(1, {"x": 1})
    assert caught.value.errno == errno.ENOTDIR
    assert str(tmp_path / "file") in caught.value.path


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_file_system(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(small)], check=True)
    try:
        training, big = Training(), {"w": torch.randn(4 << 20)}
        with statehold.Checkpointer(small / "run", **SMALL) as ckpt:
            ckpt.save(1, training.state).wait("committed", DEADLINE_S)
            with pytest.raises(errors.NoSpaceError) as caught:
                ckpt.save(2, big).wait("committed", DEADLINE_S)
            assert caught.value.facts["still safe"] == "step 1 and older"
            ckpt.save(3, training.state).wait("committed", DEADLINE_S)
            assert ckpt.steps() == [1, 3]
        assert sorted(os.listdir(small / "run")) == [
            ".lock", "step-000000000001", "step-000000000003"
        ]  # fmt: skip
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize(("operation", "has_begun"), [("read_file", False), ("read", True)])
def test_a_storage_that_fails_in_a_restore_says_whether_the_state_is_as_it_was(
    operation: str, has_begun: bool
) -> None:
    fs, training = SimFs(seed=1), Training()
    with checkpointer_on(fs, "/run", **SMALL) as ckpt:
        ckpt.save(1, training.state).wait("committed", DEADLINE_S)
        fs.fail_next(operation, errno.EIO)
        with pytest.raises(errors.StorageError) as caught:
            ckpt.restore(training.state)
        assert ("the state" in caught.value.facts) is has_begun


OPERATIONS = ["mkdir", "open_write", "write", "sync", "sync_dir", "write_file", "rename"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_may_fail_and_the_run_goes_on(operation: str) -> None:
    fs = SimFs(seed=1)
    training = Training()
    with checkpointer_on(fs, "/run", **SMALL) as ckpt:
        training.step()
        ckpt.save(1, training.state).wait("committed", DEADLINE_S)
        expected = bits(training)
        fs.fail_next(operation, errno.EIO)
        training.step()
        with pytest.raises(errors.StorageError) as caught:  # from save() if it is early enough
            ckpt.save(2, training.state).wait("committed", DEADLINE_S)
        assert caught.value.errno == errno.EIO
        assert fs.fired["injected"] == 1
        assert ckpt.steps() == [1]
        live = Training(seed=2)
        got = ckpt.restore(live.state)
        assert got == 1
        assert bits(live) == expected
        training.step()
        ckpt.save(3, training.state).wait("committed", DEADLINE_S)
        assert ckpt.steps() == [1, 3]


def test_a_simulated_full_disk() -> None:
    fs = SimFs(seed=1, capacity=3 << 20)
    with checkpointer_on(fs, "/run", **SMALL) as ckpt:
        ckpt.save(1, {"w": torch.randn(1 << 18)}).wait("committed", DEADLINE_S)
        with pytest.raises(errors.NoSpaceError):
            ckpt.save(2, {"w": torch.randn(1 << 20)}).wait("committed", DEADLINE_S)
        assert fs.fired["enospc"] >= 1
        ckpt.save(3, {"w": torch.randn(1 << 18)}).wait("committed", DEADLINE_S)
        assert ckpt.steps() == [1, 3]


def test_failing_to_remove_old_steps_does_not_fail_the_save(run, caplog) -> None:
    def refuse(operation: str, args: tuple) -> None:
        if operation == "rename" and args[1].endswith(".retired"):
            raise errors.storage_error("rename", errno.EIO, args[0])

    with statehold.Checkpointer(run, keep=1, **SMALL) as ckpt:
        ckpt.save(1, {"x": 1}).wait("committed", DEADLINE_S)
        spy_on(ckpt, refuse)
        ckpt.save(2, {"x": 2}).wait("committed", DEADLINE_S)
        inside(ckpt).pipeline.drain()
        assert ckpt.steps() == [1, 2]
    assert "could not remove old steps" in caplog.text


def test_an_error_inside_the_with_block_is_not_hidden(run) -> None:
    saves = []

    def train() -> None:
        with statehold.Checkpointer(run, **SMALL) as ckpt:
            saves.append(ckpt.save(1, {"x": 1}))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert saves[0].done("committed")


def test_closing_raises_what_nobody_was_told(run) -> None:
    def refuse(operation: str, args: tuple) -> None:
        if operation == "write_file":
            raise errors.storage_error("write a file", errno.EIO, args[0])

    ckpt = statehold.Checkpointer(run, **SMALL)
    spy_on(ckpt, refuse)
    ckpt.save(1, {"x": 1})
    with pytest.raises(errors.StorageError):
        ckpt.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckpt.close()
