"""Files of torch.save; other files raise an error; rename= is that of a Checkpointer."""

from __future__ import annotations

import json
import os
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import lr_scheduler

import statehold
from statehold.errors import (
    CorruptionError,
    MissingFileError,
    StateMismatchError,
    UnsupportedValueError,
    UsageError,
)
from statehold.integrations.dcp import restore_stock
from support.faults import SMALL
from support.inside import inside

pytestmark = pytest.mark.filterwarnings("ignore")


def trained(seed: int, *, is_fresh: bool = False) -> dict[str, Any]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01 * seed)
    if not is_fresh:
        net(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3 * seed)
    return {"model": net, "optim": optimizer, "sched": scheduler, "step": seed}


def handed(state: dict[str, Any]) -> dict[str, Any]:
    """What one gives to torch.save."""
    return {
        key: part.state_dict() if hasattr(part, "state_dict") else part
        for key, part in state.items()
    }


def assert_equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(other, one, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["c.pt", "c.pth", "c.bin", "c"])
@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_file_of_torch_save(tmp_path: Path, name: str, is_zip: bool, is_fresh: bool) -> None:
    saved, live = trained(1), trained(2, is_fresh=is_fresh)
    torch.save(handed(saved), tmp_path / name, _use_new_zipfile_serialization=is_zip)
    report = restore_stock(tmp_path / name, live)
    assert not report.missing
    assert_equal(handed(saved), handed(live))
    weights = {f"model.{each}" for each in saved["model"].state_dict()}
    assert weights <= set(report.loaded)


def test_names_are_those_of_a_checkpointer(tmp_path: Path) -> None:
    state = {"a": {"b": torch.ones(2), "list": [torch.ones(1), {"c": torch.ones(3)}]}, "n": [1, 2]}
    torch.save(state, tmp_path / "c.pt")
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(1, state).wait()
        ours = inside(ckpt).levels.store.open(1).tensors
    live = {"a": {"b": torch.zeros(2), "list": [torch.zeros(1), {"c": torch.zeros(3)}]}, "n": []}
    report = restore_stock(tmp_path / "c.pt", live)
    assert set(report.loaded) == {*ours, "n"}
    assert_equal(state, live)


def test_weights_alone_and_in_parts(tmp_path: Path) -> None:
    net = trained(1)["model"]
    torch.save(net.state_dict(), tmp_path / "pytorch_model.bin")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        other = trained(2)["model"]
        restore_stock(path, {"model": other})
        assert_equal(net.state_dict(), other.state_dict())
    parts = list(net.state_dict().items())
    names = {name: f"part-{index % 2}.bin" for index, (name, _) in enumerate(parts)}
    for index in range(2):
        torch.save(dict(parts[index::2]), tmp_path / f"part-{index}.bin")
    index = json.dumps({"weight_map": names})
    (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    other = trained(2)["model"]
    restore_stock(tmp_path, {"model": other})
    assert_equal(net.state_dict(), other.state_dict())
    os.unlink(tmp_path / "part-1.bin")
    with pytest.raises(MissingFileError):
        restore_stock(tmp_path, {"model": other})


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["HARM"],)


@pytest.mark.parametrize("is_zip", [True, False])
def test_no_code_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_zip: bool) -> None:
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    torch.save({"a": Harmful()}, tmp_path / "c.pt", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(UnsupportedValueError, match="mkdir") as caught:
        restore_stock(tmp_path / "c.pt", {"a": 1}, strict=False)
    assert "weights_only" not in str(caught.value), "torch's advice is to trust the file"
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("is_zip", [True, False])
def test_an_entry_that_is_no_data_is_refused_only_where_it_is_taken(
    tmp_path: Path, is_zip: bool
) -> None:
    saved = {"w": torch.ones(3), "n": np.float64(0.5), "a": np.arange(3), "args": Namespace(lr=1)}
    torch.save(saved, tmp_path / "c.pt", _use_new_zipfile_serialization=is_zip)
    live: dict[str, Any] = {"w": torch.zeros(3), "n": 0.0, "a": None}
    with pytest.raises(UnsupportedValueError) as caught:
        restore_stock(tmp_path / "c.pt", {**live, "args": None})
    assert not live["w"].any()
    assert caught.value.facts["path"] == "args"
    assert caught.value.facts["it holds"] == "argparse.Namespace"
    assert "torch.serialization.add_safe_globals([argparse.Namespace])" in caught.value.hint
    assert "args" in restore_stock(tmp_path / "c.pt", live).unexpected
    assert live["w"].all()
    assert live["n"] == 0.5
    assert live["a"].tolist() == [0, 1, 2]
    trusted: dict[str, Any] = {"args": None}
    with torch.serialization.safe_globals([Namespace]):
        restore_stock(tmp_path / "c.pt", trusted)
    assert trusted["args"] == Namespace(lr=1)


def test_a_whole_module_and_a_program_are_refused_by_name(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    torch.save(net, tmp_path / "module.pt")
    with pytest.raises(UnsupportedValueError, match=r"torch\.nn\.modules\.linear\.Linear"):
        restore_stock(tmp_path / "module.pt", {"model": net})
    torch.jit.script(net).save(tmp_path / "script.pt")
    with pytest.raises(UnsupportedValueError, match="TorchScript"):
        restore_stock(tmp_path / "script.pt", {"model": net})


def test_a_state_without_names_is_refused(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    torch.save(net.state_dict(), tmp_path / "c.pt")
    with pytest.raises(UsageError, match="must be a mutable mapping") as caught:
        restore_stock(tmp_path / "c.pt", net)  # type: ignore[arg-type]
    assert caught.value.facts["got"] == "Linear"


def test_what_is_no_dict_or_cut_short(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "one.pt")
    with pytest.raises(UsageError, match="has no names") as caught:
        restore_stock(tmp_path / "one.pt", {"a": torch.ones(3)}, strict=False)
    assert caught.value.facts["got"] == "Tensor"
    raw = (tmp_path / "one.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CorruptionError, match=r"cut\.pt"):
        restore_stock(tmp_path / "cut.pt", {"a": torch.ones(3)}, strict=False)
    save_file({"a": torch.ones(900)}, tmp_path / "m.safetensors")
    raw = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "m.safetensors").write_bytes(raw[:2000])
    with pytest.raises(CorruptionError, match=r"m\.safetensors"):
        restore_stock(tmp_path / "m.safetensors", {"a": torch.ones(900)}, strict=False)


def a_file(path: Path) -> Path:
    (path / "notes.txt").write_text("remember the milk, and more than a few other things")
    return path / "notes.txt"


def an_archive(path: Path) -> Path:
    with zipfile.ZipFile(path / "x.zip", "w") as archive:
        archive.writestr("readme", "no tensors")
    return path / "x.zip"


def a_directory(path: Path) -> Path:
    torch.save({}, path / "model.pt")
    (path / "log").write_text("")
    return path


def a_run(path: Path) -> Path:
    with statehold.Checkpointer(path, **SMALL) as ckpt:
        ckpt.save(1, {"a": torch.ones(3)}).wait()
    return path


def a_step(path: Path) -> Path:
    return a_run(path) / "step-000000000001"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: path / "nowhere", "no such checkpoint"),
        (a_file, "51 bytes that begins with b'remember the mil'"),
        (an_archive, "readme"),
        (lambda path: path, "nothing in it"),
        (a_directory, "name the file that is meant: model.pt"),
        (a_run, "Checkpointer(RUN).restore(state)"),
        (a_step, "a step of statehold"),
    ],
)
def test_what_is_no_checkpoint(tmp_path: Path, make: Any, told: str, strict: bool) -> None:
    with pytest.raises(UsageError) as caught:
        restore_stock(make(tmp_path), {"a": torch.zeros(3)}, strict=strict)
    assert told in str(caught.value)
    assert "expected" in caught.value.facts


@pytest.mark.parametrize("state", [{}, {"other": torch.zeros(3)}, {"net": nn.Linear(2, 2)}])
def test_nothing_in_common_is_an_error(tmp_path: Path, state: dict[str, Any]) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "c.pt")
    with pytest.raises(StateMismatchError, match="nothing of the state is in the checkpoint") as e:
        restore_stock(tmp_path / "c.pt", state, strict=False)
    assert e.value.facts["only there"] == "a"


RENAMES = {
    "a mapping": {"net.trunk": "model"},
    "a function": lambda name: name.replace("net.trunk", "model"),
}


@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES)
def test_rename(tmp_path: Path, rename: Any) -> None:
    net = trained(1)["model"]
    torch.save({"net": {"trunk": net.state_dict()}}, tmp_path / "c.pt")
    other = trained(2)["model"]
    report = restore_stock(tmp_path / "c.pt", {"model": other}, rename=rename)
    assert not report.unexpected
    assert_equal(net.state_dict(), other.state_dict())


def test_a_mapping_renames_parameters_of_optimizers(tmp_path: Path) -> None:
    saved, live = trained(1), trained(2, is_fresh=True)
    by_index = saved["optim"].state_dict()["state"]
    names = [f"net.{name}" for name, _ in saved["model"].named_parameters()]
    state = {name: by_index[index] for index, name in enumerate(names)}
    flat = {"net": saved["model"].state_dict(), "optim": {"state": state}}
    torch.save(flat, tmp_path / "c.pt")
    del live["sched"], live["step"]
    report = restore_stock(tmp_path / "c.pt", live, rename={"net": "model"})
    assert not report.unexpected
    assert_equal(by_index, live["optim"].state_dict()["state"])


def halves(net: nn.Module) -> list[dict[str, Any]]:
    return [{"params": net[2].parameters()}, {"params": net[0].parameters(), "lr": 0.25}]


def turned(net: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(group["params"])[::-1]} for group in halves(net)]


@pytest.mark.parametrize("now", [lambda net: net.parameters(), halves, turned])
def test_numbered_moments_go_to_no_other_parameters(tmp_path: Path, now: Any) -> None:
    net, other = trained(1)["model"], trained(2)["model"]
    before = list(net.parameters()) if now is halves else halves(net)
    optimizer = torch.optim.AdamW(before, lr=0.5)
    net(torch.randn(6, 4)).square().sum().backward()
    optimizer.step()
    torch.save(handed({"model": net, "optim": optimizer}), tmp_path / "c.pt")
    live = torch.optim.AdamW(now(other), lr=0.125)
    weights = handed({"": other})[""]["0.weight"].clone()
    with pytest.raises(StateMismatchError, match=r"optim.*expected (groups|the state) of"):
        restore_stock(tmp_path / "c.pt", {"model": other, "optim": live}, strict=False)
    assert not live.state
    assert live.param_groups[0]["lr"] == 0.125
    assert torch.equal(other[0].weight, weights)


@pytest.mark.parametrize("is_flat", [True, False])
def test_groups_are_found_by_the_names_of_parameters(tmp_path: Path, is_flat: bool) -> None:
    net, other = trained(1)["model"], trained(2)["model"]
    first, *others = net.parameters()
    optimizer = torch.optim.AdamW([{"params": [first], "lr": 0.25}, {"params": others}], 0.5)
    net(torch.randn(6, 4)).square().sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    saved = get_optimizer_state_dict(net, optimizer, options=options)
    saved = {f"optim.{key}": each for key, each in saved.items()} if is_flat else {"optim": saved}
    torch.save({"model": net.state_dict(), **saved}, tmp_path / "c.pt")
    first, *others = other.parameters()
    live = torch.optim.AdamW([{"params": others}, {"params": [first]}])
    assert not restore_stock(tmp_path / "c.pt", {"model": other, "optim": live}).missing
    assert [group["lr"] for group in live.param_groups] == [0.5, 0.25]
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert_equal(optimizer.state[one], live.state[two])
    live = torch.optim.AdamW(other.parameters())
    with pytest.raises(StateMismatchError, match="several groups, which differ in lr"):
        restore_stock(tmp_path / "c.pt", {"model": other, "optim": live})


def test_an_optimizer_that_the_checkpoint_lacks_is_missing(tmp_path: Path) -> None:
    saved = handed(trained(1))
    for key in ("other", "optim"):
        torch.save({"model": saved["model"], key: saved["optim"]}, tmp_path / "c.pt")
        live = trained(2, is_fresh=True)
        state = {"model": live["model"], "optim": live["optim"]}
        if key == "other":
            with pytest.raises(StateMismatchError, match=r"optim +not in the checkpoint"):
                restore_stock(tmp_path / "c.pt", state)
            assert restore_stock(tmp_path / "c.pt", state, strict=False).missing == ("optim",)
            assert not live["optim"].state
    assert not restore_stock(tmp_path / "c.pt", state).missing
    live["optim"].add_param_group({"params": [torch.ones(2, requires_grad=True)]})
    with pytest.raises(StateMismatchError, match="expected groups of 6, 1, got groups of 6"):
        restore_stock(tmp_path / "c.pt", state)


SCHEDULERS = [
    lambda each: lr_scheduler.OneCycleLR(each, 0.1, 20),
    lambda each: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(each, 0.9)]),
    lambda each: lr_scheduler.SequentialLR(
        each, [lr_scheduler.LinearLR(each), lr_scheduler.CosineAnnealingLR(each, 5)], [2]
    ),
]


@pytest.mark.parametrize("make", SCHEDULERS)
@pytest.mark.parametrize("is_dcp", [True, False])
@pytest.mark.parametrize(
    "rename", [None, {"old": "sched"}, lambda name: name.replace("old", "sched")]
)
def test_lists_in_the_state_of_an_object(
    tmp_path: Path, make: Any, is_dcp: bool, rename: Any
) -> None:
    saved, live = (
        make(torch.optim.SGD(nn.Linear(2, 2).parameters(), momentum=0.9)) for _ in range(2)
    )
    saved.optimizer.step()
    saved.step()
    state = {"old" if rename else "sched": saved.state_dict()}
    if is_dcp:
        dcp.save(state, checkpoint_id=tmp_path, storage_writer=dcp.FileSystemWriter(tmp_path))
    else:
        torch.save(state, tmp_path / "c.pt")
    path = tmp_path if is_dcp else tmp_path / "c.pt"
    report = restore_stock(path, {"sched": live}, rename=rename)
    assert (report.missing, report.unexpected) == ((), ())
    assert live.state_dict() == saved.state_dict()


def test_lists_in_the_state_of_an_optimizer(tmp_path: Path) -> None:
    def stepped(net: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(torch.ones(3, 4)).square().sum()
            loss.backward()
            return loss

        return float(optimizer.step(closure))

    net, other = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer, live = torch.optim.LBFGS(net.parameters()), torch.optim.LBFGS(other.parameters())
    stepped(net, optimizer)
    torch.save(handed({"model": net, "optim": optimizer}), tmp_path / "c.pt")
    report = restore_stock(tmp_path / "c.pt", {"model": other, "optim": live})
    assert "optim.state.weight.old_dirs" in report.loaded
    assert stepped(net, optimizer) == stepped(other, live)


@pytest.mark.parametrize(
    ("rename", "given", "near"),
    [
        ({"nte": "model"}, 'rename from "nte"', '"net"'),
        ({"net": "modle"}, 'rename to "modle"', '"model"'),
    ],
)
def test_a_prefix_that_matches_nothing(tmp_path: Path, rename: Any, given: str, near: str) -> None:
    torch.save({"net": nn.Linear(2, 2).state_dict()}, tmp_path / "c.pt")
    live = {"model": nn.Linear(2, 2)}
    with pytest.raises(UsageError, match="matches nothing") as caught:
        restore_stock(tmp_path / "c.pt", live, rename=rename, strict=False)
    assert near in caught.value.facts[given]


def test_the_names_of_a_tied_tensor_are_one(tmp_path: Path) -> None:
    net, file = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tmp_path / "c.safetensors"
    net[1].weight = nn.Parameter(net[0].weight.data)  # another parameter, of the same memory
    saved = {name: torch.randn_like(each) for name, each in net.state_dict().items()}
    save_file(saved, file)
    with pytest.raises(StateMismatchError) as caught:
        restore_stock(file, {"model": net})
    assert caught.value.facts["model.1.weight"] == (
        "expected one tensor, as it is tied, got other values than model.0.weight"
    )
    for left_out, kept in (("0.weight", "1.weight"), ("1.weight", "0.weight")):
        save_file({name: each for name, each in saved.items() if name != left_out}, file)
        report = restore_stock(file, {"model": net[0], "head": net[1]}, rename=RENAMED)
        assert not report.missing
        assert torch.equal(net[0].weight, saved[kept])
    save_file({**saved, "0.weight": saved["1.weight"].clone()}, file)
    restore_stock(file, {"model": net})
    assert torch.equal(net[0].weight, saved["1.weight"])


RENAMED = {"0": "model", "1": "head"}
