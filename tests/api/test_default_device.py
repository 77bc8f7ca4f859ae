"""The library's own memory is on the device that it needs, whatever the program's default is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import statehold

FACTORIES = {each.__name__ for each in _device_constructors()}
HERE = Path(__file__).parents[2]
# What measures or tests devices runs under the default of whoever has one.
FOLDERS = [Path(statehold.__file__).parent, HERE / "bench", HERE / "tests" / "gpu"]
SOURCES = sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))


def depends_on_the_default(source: str) -> list[int]:
    """The lines that call a factory of torch without a device."""
    calls = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Call)]
    return [
        each.lineno
        for each in calls
        if isinstance(each.func, ast.Attribute)
        and each.func.attr in FACTORIES
        and ast.unparse(each.func.value) == "torch"
        and not any(keyword.arg == "device" for keyword in each.keywords)
    ]


def test_every_factory_is_given_a_device() -> None:
    assert depends_on_the_default("x = torch.empty(3)\ny = torch.ones(2, device='cpu')") == [1]
    assert all(any(each.is_relative_to(folder) for each in SOURCES) for folder in FOLDERS)
    found = {str(each): depends_on_the_default(each.read_text()) for each in SOURCES}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_a_step_goes_everywhere_under_another_default(tmp_path: Path, to: str) -> None:
    saved = {"c": torch.view_as_complex(torch.arange(8.0).view(4, 2)), "y": torch.arange(5.0)}
    fresh = {"c": torch.zeros(4, dtype=torch.complex64).conj(), "y": torch.zeros(5)}
    followed = {name: torch.zeros_like(value) for name, value in saved.items()}
    run = str(tmp_path / "run")
    with torch.device("meta"):
        with statehold.Checkpointer(run, staging_bytes="32MiB") as ckpt:
            ckpt.save(1, saved).wait("committed", 60)
            assert ckpt.restore(fresh) == 1
        with statehold.subscribe(run, followed) as updates:
            updates.wait(60).apply()
        statehold.export_step(f"{run}@1", str(tmp_path / "out"), to)
        statehold.import_step(str(tmp_path / "out"), f"{tmp_path / 'imported'}@1")
        loaded = statehold.load(str(tmp_path / "imported"))
    for got in (fresh, followed, loaded):
        assert all(torch.equal(got[name].resolve_conj(), value) for name, value in saved.items())
