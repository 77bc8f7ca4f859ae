"""Files of torch.save, out and in, bit for bit; what is damaged, foreign or not to be trusted."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import zipfile
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import statehold
from statehold.errors import CorruptionError, UnsupportedValueError, UsageError
from statehold.integrations.formats import archives, untrusted
from statehold.process.host_memory import Room
from support.interrupts import Interrupts
from support.transfers import check_equal, saved, tensors


def state() -> dict[str, Any]:
    return {
        "model": tensors(torch.complex128),
        "nested": [{"a": torch.ones(2)}, (torch.zeros(1), 3), [1, 2.5, None, b"x", "y", True]],
        "ordered": OrderedDict(z=1, a=torch.ones(3)),
        "count": Counter("abca"),
        7: {"size": torch.Size([1, 2]), "dtype": torch.bfloat16, "at": torch.device("cpu")},
        "big": 10**30,
        "odd": [float("inf"), 1j, {1, 2}],
    }


def test_all_of_a_state_goes_out_and_comes_back(tmp_path: Path) -> None:
    expected = state()
    step = saved(tmp_path / "run", 3, expected)
    assert statehold.export_step(step, tmp_path / "all.pt", "torch") == ()
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    check_equal(found, expected)
    assert found["model"]["tied.first"].data_ptr() == found["model"]["tied.again"].data_ptr()
    with zipfile.ZipFile(tmp_path / "all.pt") as archive:
        assert archive.testzip() is None
    check_equal(torch.load(tmp_path / "all.pt", weights_only=True, mmap=True), expected)
    statehold.import_step(tmp_path / "all.pt", f"{tmp_path / 'new'}@9")
    back = statehold.load(tmp_path / "new")
    check_equal(back, expected)
    assert back["model"]["tied.first"] is back["model"]["tied.again"]


def test_what_torch_writes_comes_in(tmp_path: Path) -> None:
    base = torch.arange(40.0)
    model, wide = torch.nn.Linear(3, 2), torch.randn(4, dtype=torch.complex64)
    expected = {
        **tensors(torch.complex128),
        "views": [base[3:9], base.view(5, 8).t(), base.view(4, 10)[1:3, 2:9:3], base[7]],
        "parameter": model.state_dict(),
        "conjugate": wide.conj(),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
        "expanded": torch.ones(1).expand(5),
    }
    torch.save(expected, tmp_path / "x.pt")
    statehold.import_step(tmp_path / "x.pt", f"{tmp_path / 'run'}@1")
    found = statehold.load(tmp_path / "run")
    for key in ("conjugate", "negative"):
        plain: Any = expected.pop(key)
        assert torch.equal(found.pop(key), plain.resolve_conj().resolve_neg())
    check_equal(found, expected)


def test_the_older_format_comes_in_if_there_is_memory_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "old.pt"
    expected = {"w": torch.arange(5), "lr": 0.1}
    torch.save(expected, file, _use_new_zipfile_serialization=False)
    statehold.import_step(file, f"{tmp_path / 'run'}@1")
    check_equal(statehold.load(tmp_path / "run"), expected)
    monkeypatch.setattr(archives, "available", lambda: Room(10, "a test"))
    with pytest.raises(UnsupportedValueError, match=r"(?s)before torch 1\.6.*10 bytes \(a test"):
        statehold.import_step(file, f"{tmp_path / 'run'}@2")


def test_shards_of_pytorch_model_come_in(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    torch.save({"a": torch.ones(2)}, tmp_path / "hf" / "pytorch_model-1.bin")
    torch.save({"b": torch.zeros(2)}, tmp_path / "hf" / "pytorch_model-2.bin")
    index = '{"weight_map": {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}}'
    (tmp_path / "hf" / "pytorch_model.bin.index.json").write_text(index)
    statehold.import_step(tmp_path / "hf", f"{tmp_path / 'run'}@1")
    found = statehold.load(tmp_path / "run", "model")
    check_equal(found, {"a": torch.ones(2), "b": torch.zeros(2)})


class Unknown:
    pass


@pytest.mark.filterwarnings("ignore:Validating sparse tensor:UserWarning")  # torch 2.15
def test_what_is_not_to_be_trusted_or_damaged_is_refused(tmp_path: Path) -> None:
    run = f"{tmp_path / 'run'}@1"
    torch.save({"x": Unknown()}, tmp_path / "code.pt")
    with pytest.raises(UnsupportedValueError, match="Unknown"):
        statehold.import_step(tmp_path / "code.pt", run)
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(UsageError, match="no names"):
        statehold.import_step(tmp_path / "list.pt", run)
    torch.save({"w": torch.ones(4).to_sparse()}, tmp_path / "sparse.pt")
    with pytest.raises(UnsupportedValueError):
        statehold.import_step(tmp_path / "sparse.pt", run)
    torch.save({"w": torch.arange(1000)}, tmp_path / "flip.pt")
    raw = bytearray((tmp_path / "flip.pt").read_bytes())
    raw[raw.index(torch.arange(1000).numpy().tobytes()) + 5] ^= 1
    (tmp_path / "flip.pt").write_bytes(raw)
    with pytest.raises(CorruptionError, match="damaged"):
        statehold.import_step(tmp_path / "flip.pt", run)
    (tmp_path / "flip.pt").write_bytes(raw[:-100])
    with pytest.raises(CorruptionError, match="damaged"):
        statehold.import_step(tmp_path / "flip.pt", run)
    assert (
        statehold.load(statehold.import_step(tmp_path / "list.pt", run, name="x"), "x.0").sum() == 2
    )


def test_what_torch_cannot_check_without_elements_is_no_damage() -> None:
    """torch 2.15 looks at the elements of a sparse tensor, whatever device it is loaded to."""
    fault = NotImplementedError("Cannot copy out of meta tensor; no data!")
    found = untrusted.refused("sparse.pt", fault)
    assert isinstance(found, UnsupportedValueError)
    assert "sparse tensor" in str(found)
    assert isinstance(untrusted.refused("x.pt", NotImplementedError("other")), CorruptionError)


def test_values_that_weights_only_refuses_are_named(tmp_path: Path) -> None:
    values = {"d": deque([1, 2]), "f": frozenset({3}), "n": np.float32(1.5), "a": np.arange(3)}
    step = saved(tmp_path / "run", 1, values)
    with pytest.warns(RuntimeWarning, match="d, f, n, a"):
        statehold.export_step(step, tmp_path / "x.pt", "torch")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert (found["d"], found["f"], found["n"], found["a"].tolist()) == (
        [1, 2],
        {3},
        1.5,
        [0, 1, 2],
    )


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_empty_bytes_go_out_and_come_in(tmp_path: Path, to: str) -> None:
    state = {"b": b"", "list": [b"", {"x": b"", "y": b"x"}], "set": {b""}, "deep": {"t": (b"", 1)}}
    if to == "torch":
        state["keys"] = {b"": 1, (2, b""): 3}
    step = saved(tmp_path / "run", 1, state)
    assert statehold.export_step(step, tmp_path / "out", to) == ()
    if to == "torch":
        found = torch.load(tmp_path / "out", weights_only=True)
        check_equal(found, state)
    statehold.import_step(tmp_path / "out", f"{tmp_path / 'new'}@1")
    check_equal(statehold.load(tmp_path / "new"), state)


def test_empty_bytes_that_torch_has_written_come_in(tmp_path: Path) -> None:
    state = {"b": b"", "list": [b"", b"x"]}
    torch.save(state, tmp_path / "stock.pt")
    statehold.import_step(tmp_path / "stock.pt", f"{tmp_path / 'new'}@1")
    check_equal(statehold.load(tmp_path / "new"), state)
    torch.save({"b": OneByte()}, tmp_path / "more.pt")
    with pytest.raises(CorruptionError):
        statehold.import_step(tmp_path / "more.pt", f"{tmp_path / 'new'}@2")


class OneByte:
    def __reduce__(self) -> Any:
        return bytes, (1,)


def test_keys_and_members_of_sets_that_weights_only_refuses_are_named(tmp_path: Path) -> None:
    state = {
        "keys": {np.int64(3): 1, (1, np.float32(0.5)): {"w": torch.ones(2)}},
        "set": {np.int64(7)},
        "tuple": ({np.int64(4): 1},),
    }
    step = saved(tmp_path / "run", 1, state)
    with pytest.warns(RuntimeWarning, match=r"keys\.3, keys\.\(1, .*, set, tuple\.0\.4$"):
        statehold.export_step(step, tmp_path / "x.pt", "torch")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    check_equal(
        found,
        {"keys": {3: 1, (1, 0.5): {"w": torch.ones(2)}}, "set": {7}, "tuple": ({4: 1},)},
    )
    step = saved(tmp_path / "run", 2, {"a": {"sets": {frozenset({1})}}})
    with pytest.raises(UnsupportedValueError, match=r"(?s)frozenset.*a\.sets"):
        statehold.export_step(step, tmp_path / "y.pt", "torch")


def old_script() -> dict[str, Any]:
    """What half of the published training scripts save."""
    return {
        "model": {"w": torch.arange(4.0)},
        "best": np.float64(0.5),
        "losses": np.arange(6.0).reshape(2, 3),
        "waves": np.array([1 + 2j]),
        "more": {"seen": np.array([True, False]), "count": np.int64(7)},
    }


@pytest.mark.parametrize("is_zip", [True, False])
def test_numbers_and_arrays_of_numpy_come_in(tmp_path: Path, is_zip: bool) -> None:
    expected = old_script()
    torch.save(expected, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    found = statehold.load(statehold.import_step(tmp_path / "x.pt", f"{tmp_path / 'run'}@1"))
    assert type(found["best"]) is np.float64
    assert type(found["more"]["count"]) is np.int64
    for one, other in (
        (found["losses"], expected["losses"]),
        (found["waves"], expected["waves"]),
        (found["more"]["seen"], expected["more"]["seen"]),
    ):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


FOREIGN: dict[str, Any] = {
    "pathlib.PosixPath": Path("x"),
    "argparse.Namespace": argparse.Namespace(lr=1.0),
    f"{Unknown.__module__}.Unknown": [1, (Unknown(), {"deep": Unknown()})],
}


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_data_is_left_out_by_its_name(tmp_path: Path, name: str, is_zip: bool) -> None:
    tree = {**old_script(), "extra": {"args": FOREIGN[name], "epoch": 3}}
    torch.save(tree, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    run = f"{tmp_path / 'run'}@1"
    with pytest.raises(UnsupportedValueError) as caught:
        statehold.import_step(tmp_path / "x.pt", run)
    assert caught.value.facts["it holds"] == name
    assert 'skip=["extra.args' in caught.value.hint
    assert f"torch.serialization.add_safe_globals([{name}])" in caught.value.hint
    with pytest.raises(UsageError, match="matches nothing"):
        statehold.import_step(tmp_path / "x.pt", run, skip=["extra.arg"])
    found = statehold.load(statehold.import_step(tmp_path / "x.pt", run, skip=["*.args"]))
    assert found["extra"] == {"epoch": 3}
    assert found["best"] == 0.5


def test_ctrl_c_anywhere_in_an_export_and_an_import_leaves_torch_as_it_was(tmp_path: Path) -> None:
    step = saved(tmp_path / "run", 1, {"w": torch.ones(5)})
    statehold.export_step(step, tmp_path / "first.pt", "torch")
    functions = [vars(archives)["_skeleton"], untrusted.load]
    for kind in (FakeTensorMode, torch.serialization.skip_data, torch.serialization.safe_globals):
        functions += [kind.__enter__, kind.__exit__]
    known, places = {*torch.serialization.get_safe_globals()}, set()
    for at in itertools.count():
        interrupts = Interrupts(functions, at, only_signals=True)
        with interrupts.armed(), contextlib.suppress(KeyboardInterrupt):
            statehold.export_step(step, tmp_path / f"{at}.pt", "torch")
            statehold.import_step(tmp_path / f"{at}.pt", f"{tmp_path / 'new'}@{at}")
        torch.save(torch.ones(5), tmp_path / "mine.pt")
        check_equal(torch.load(tmp_path / "mine.pt"), torch.ones(5))
        assert {*torch.serialization.get_safe_globals()} == known, interrupts.fired
        if interrupts.fired is None:
            break
        places.add(interrupts.fired.partition(",")[0])
    assert {"_skeleton", "load"} <= places


def test_two_tensors_of_one_dotted_name_keep_their_values(tmp_path: Path) -> None:
    state = {
        "d": {np.int64(1): torch.arange(4.0), "1": torch.arange(4.0) + 100},
        "model": {"w": torch.ones(2)},
        "model.w": "a note",
    }
    step = saved(tmp_path / "run", 1, state)
    with pytest.warns(RuntimeWarning, match=r"d\.1"):  # the key becomes a plain number
        statehold.export_step(step, tmp_path / "all.pt", "torch")
    check_equal(torch.load(tmp_path / "all.pt", weights_only=True), state)
    with pytest.raises(UnsupportedValueError, match=r"two tensors.*\n *name +d\.1"):
        statehold.export_step(step, tmp_path / "hf", "hf", name="")


@pytest.mark.parametrize("is_zip", [True, False])
def test_views_that_show_other_values_come_in_as_what_they_show(
    tmp_path: Path, is_zip: bool
) -> None:
    pairs = torch.complex(torch.arange(3.0), torch.arange(3.0) + 1)
    conj, neg = {"a": pairs, "b": pairs.conj()}, {"a": pairs.imag, "b": pairs.conj().imag}
    assert neg["b"].is_neg()
    for number, state in enumerate((conj, neg)):
        path, run = tmp_path / f"{number}.pt", tmp_path / f"run{number}"
        torch.save(state, path, _use_new_zipfile_serialization=is_zip)
        statehold.import_step(path, f"{run}@1")
        found = statehold.load(run)
        for name, value in state.items():
            assert torch.equal(found[name], value), (number, name)
