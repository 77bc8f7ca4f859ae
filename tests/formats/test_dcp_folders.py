"""Directories of torch.distributed.checkpoint, out and in, bit for bit; shards come in whole."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import statehold
from statehold.encoding import values
from statehold.errors import CorruptionError, MissingFileError, UnsupportedValueError
from statehold.integrations.dcp.tree import nest
from statehold.integrations.formats import archives
from statehold.integrations.formats.streamed import nested
from statehold.integrations.formats.untrusted import dump_metadata, load_metadata
from support.faults import SMALL
from support.transfers import check_equal, saved, tensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def state() -> dict[str, Any]:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {
        "model": tensors(torch.complex128),
        "optimizer": {"state": {"w": optimizer.state_dict()["state"][0]}, "lr": [0.1, 0.2]},
        "list": [torch.ones(2), {"x": torch.zeros(3)}],
        "epoch": 3,
        "empty": {},
        "values": {"a": (1, 2), "b": None, "c": b"x"},
    }


@pytest.mark.thorough
@pytest.mark.parametrize("small_bytes", [archives.SMALL_BYTES, 50])
def test_a_state_goes_out_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_bytes: int
) -> None:
    monkeypatch.setattr(archives, "SMALL_BYTES", small_bytes)
    expected = state()
    step = saved(tmp_path / "run", 3, expected)
    with pytest.warns(RuntimeWarning, match=r"model\.tied\.again"):
        assert statehold.export_step(step, tmp_path / "dcp", "dcp") == ("model.tied.again",)
    statehold.import_step(tmp_path / "dcp", f"{tmp_path / 'new'}@9")
    check_equal(statehold.load(tmp_path / "new"), expected)


def test_stock_readers_load_it(tmp_path: Path) -> None:
    expected = state()
    step = saved(tmp_path / "run", 3, expected)
    with pytest.warns(RuntimeWarning):
        statehold.export_step(step, tmp_path / "dcp", "dcp")
    live = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in expected["model"].items()},
        "list": [torch.zeros(2), {"x": torch.ones(3)}],
        "epoch": 0,
        "values": {"a": None, "b": 1, "c": b""},
    }
    dcp.load(live, checkpoint_id=tmp_path / "dcp", no_dist=True)
    check_equal(live, {key: expected[key] for key in live})


def test_what_stock_writers_write_comes_in(tmp_path: Path) -> None:
    expected = {**state(), "cut": {"t": torch.randn(6, 8).t()[1:5], "v": torch.arange(20.0)[3:9]}}
    del expected["empty"]
    dcp.save(expected, checkpoint_id=tmp_path / "dcp", no_dist=True)
    statehold.import_step(tmp_path / "dcp", f"{tmp_path / 'run'}@1")
    check_equal(statehold.load(tmp_path / "run"), expected)


def halves(tensor: torch.Tensor, directory: Path, *, keep: int = 2) -> None:
    """The checkpoint of a tensor that two ranks have by rows, and of one by columns."""
    names = {f"rows.{i}": part for i, part in enumerate(tensor.chunk(2))}
    names |= {f"columns.{i}": part for i, part in enumerate(tensor.chunk(2, dim=1))}
    dcp.save(names, checkpoint_id=directory, no_dist=True)
    path = directory / ".metadata"
    metadata = load_metadata(path.read_bytes(), str(path))
    storage, found = dict(metadata.storage_data or {}), {}
    entries: dict[str, Any] = {}
    for name in ("rows", "columns"):
        chunks = []
        for i in range(keep):
            [index] = [each for each in storage if each.fqn == f"{name}.{i}"]
            entry = metadata.state_dict_metadata[index.fqn]
            assert isinstance(entry, TensorStorageMetadata)
            [chunk] = entry.chunks
            at = [i * 3, 0] if name == "rows" else [0, i * 4]
            chunk.offsets = torch.Size(at)
            chunks.append(chunk)
            found[type(index)(name, chunk.offsets, i)] = storage[index]
        entries[name] = TensorStorageMetadata(entry.properties, tensor.shape, chunks)
    metadata.state_dict_metadata = entries
    metadata.storage_data, metadata.planner_data = found, None
    path.write_bytes(dump_metadata(metadata))


def test_tensors_that_ranks_have_cut_come_in_whole(tmp_path: Path) -> None:
    tensor = torch.randn(6, 8, dtype=torch.float64)
    halves(tensor, tmp_path / "dcp")
    statehold.import_step(tmp_path / "dcp", f"{tmp_path / 'run'}@1")
    check_equal(statehold.load(tmp_path / "run"), {"rows": tensor, "columns": tensor})


def test_what_is_missing_or_damaged_is_refused(tmp_path: Path) -> None:
    run = f"{tmp_path / 'run'}@1"
    halves(torch.randn(6, 8), tmp_path / "cut", keep=1)
    with pytest.raises(CorruptionError, match=r"(?s)rows.*48 elements"):
        statehold.import_step(tmp_path / "cut", run)
    halves(torch.randn(6, 8), tmp_path / "dcp")
    file = tmp_path / "dcp" / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[1200:1400] = bytes(200)
    file.write_bytes(raw)
    with pytest.raises(CorruptionError):
        statehold.import_step(tmp_path / "dcp", run)
    file.unlink()
    with pytest.raises(MissingFileError):
        statehold.import_step(tmp_path / "dcp", run)


def test_keys_that_are_no_text_are_named_and_names_that_collide_refused(tmp_path: Path) -> None:
    step = saved(tmp_path / "run", 1, {"state": {0: torch.ones(1)}})
    with pytest.warns(RuntimeWarning, match=r"state\.0"):
        statehold.export_step(step, tmp_path / "dcp", "dcp")
    step = saved(tmp_path / "run", 2, {"a.b": 1, "a": {"b": 2}})
    with pytest.raises(UnsupportedValueError, match=r"a\.b"):
        statehold.export_step(step, tmp_path / "other", "dcp")


def test_dicts_of_another_kind_are_named(tmp_path: Path) -> None:
    state = {
        "ordered": OrderedDict(b=1, a=torch.ones(1)),
        "list": [Counter("aa")],
        "empty": OrderedDict(),
        "in": {"tuple": (Counter("b"),)},
    }
    step = saved(tmp_path / "run", 1, state)
    with pytest.warns(RuntimeWarning, match=r"as they were: ordered, list\.0$"):
        assert statehold.export_step(step, tmp_path / "dcp", "dcp") == ("ordered", "list.0")
    statehold.import_step(tmp_path / "dcp", f"{tmp_path / 'new'}@1")
    plain = {**state, "ordered": {"b": 1, "a": torch.ones(1)}, "list": [{"a": 2}]}
    check_equal(statehold.load(tmp_path / "new"), plain)
    statehold.export_step(step, tmp_path / "part", "dcp", name="ordered")  # the root is no entry


def test_a_key_of_numpy_becomes_text(tmp_path: Path) -> None:
    step = saved(tmp_path / "run", 1, {"m": {np.int64(3): torch.ones(1), (1, np.int64(2)): 5}})
    with pytest.warns(RuntimeWarning):
        left_out = statehold.export_step(step, tmp_path / "dcp", "dcp")
    assert left_out == ("m.3", "m.(1, np.int64(2))", "m.(1, 2)")
    live = {"m": {"3": torch.zeros(1), "(1, 2)": 0}}
    dcp.load(live, checkpoint_id=tmp_path / "dcp", no_dist=True)
    check_equal(live, {"m": {"3": torch.ones(1), "(1, 2)": 5}})


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}]
    return model, torch.optim.AdamW(groups)


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["by name", "flattened", "state_dict()"])
@pytest.mark.parametrize("below", [False, True])
def test_optimizers_of_dcp_restore_after_an_import(tmp_path: Path, form: str, below: bool) -> None:
    model, optimizer = trained()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    weights, moments = model.state_dict(), optimizer.state_dict()
    if form != "state_dict()":
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
        weights, moments = get_state_dict(model, optimizer, options=options)
    state = {"model": weights, "optim": moments}
    dcp.save({"app": state} if below else state, checkpoint_id=tmp_path / "dcp")
    statehold.import_step(tmp_path / "dcp", f"{tmp_path / 'run'}@100")
    again, its = trained()
    its.param_groups[1]["lr"] = 0.25
    live = {"model": again, "optim": its}
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        assert ckpt.restore({"app": live} if below else live) == 100
    assert its.param_groups[1]["lr"] == 0.5
    assert list(its.state) == list(again.parameters())
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
        check_equal(its.state[other], optimizer.state[one])


def test_a_conjugate_view_that_is_not_aligned_comes_in(tmp_path: Path) -> None:
    """The archives in a file of torch's DCP begin anywhere."""
    pairs = torch.complex(torch.arange(3.0), torch.arange(3.0) + 1)
    state = {"odd": torch.ones(3, dtype=torch.uint8), "w": torch.ones(5), "conj": pairs.conj()}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    statehold.import_step(tmp_path / "dcp", f"{tmp_path / 'run'}@1")
    found = statehold.load(tmp_path / "run")
    for name, value in state.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([("a", 0), ("a", 1)], {"a": [0, 1]}),
        ([("a", 1), ("a", 3)], {"a": {1: 0, 3: 1}}),  # whoever has planned it left items out
        ([("a", 10**12)], {"a": {10**12: 0}}),  # no list has room for them
        ([("a",), ("a", "b")], None),
        ([("a", "b"), ("a", "b")], None),
    ],
)
def test_a_tree_has_each_value_at_its_path(paths: list[Any], expected: Any) -> None:
    assert nested((path, number) for number, path in enumerate(paths)) == expected


def test_a_node_that_is_a_dict_is_no_place_for_another() -> None:
    nodes = {"a": {"$dict": []}, "b": 1}
    assert nest(nodes, {"a": ("a",), "b": ("a", "$dict")}) == values.mapping_of(nodes)
