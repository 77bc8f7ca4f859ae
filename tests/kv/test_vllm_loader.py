"""The loader of vLLM over a step: right values, verified, and only the part that a rank needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from statehold.errors import CorruptionError, StateMismatchError, UsageError
from statehold.kv.identity import content_of, folded
from statehold.kv.vllm import loader, opening
from statehold.kv.vllm.loader import Later, StepPart, StepReader, load_into
from statehold.kv.vllm.opening import FORMAT, PagesOptions
from statehold.reading.places import StepPlace
from support.faults import must

Weights = Iterator[tuple[str, torch.Tensor]]


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(64, 1024), nn.LayerNorm(1024), nn.Linear(1024, 64))
    made[2].weight.data = made[2].weight.data.to(torch.bfloat16)
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "llama"
    with statehold.Checkpointer(path, keep=None) as ckpt:
        for step in (1, 2, 3):
            state = {"model": model(step), "rate": 0.1 * step}
            ckpt.save(step, state, metrics={"loss": abs(step - 2)}).wait("committed")
    return path


@pytest.fixture(autouse=True)
def _others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test loads is served until it ends."""
    monkeypatch.setattr(opening, "_serves", [])
    monkeypatch.setattr(opening, "_sums", {})


def taken(options: dict[str, Any], ranks: int = 1) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    load_into(lambda weights: found.update(weights), options, ranks)
    return found


def same(found: dict[str, torch.Tensor], seed: int) -> bool:
    right = model(seed).state_dict()
    return found.keys() == right.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value)
        for name, value in right.items()
    )


def test_names_of_a_step_mean_what_they_mean_elsewhere(run: Path) -> None:
    for text, seed in ((f"{run}", 3), (f"{run}@1", 1), (f"{run}@best:loss", 2)):
        assert same(taken({"run": text, "name": "model"}), seed)


def test_what_was_loaded_is_what_pages_depend_on(run: Path) -> None:
    options = PagesOptions.of({"path": "p"})
    found = []
    for text in (f"{run}@best:loss", f"{run}@2", f"{run}@3"):
        load_into(lambda weights: must(list(weights)), {"run": text, "name": "model"}, 1)
        found.append(options.identity_of("a name", {}, dtype="float32"))
    assert found[0] == found[1] != found[2]
    facts = {"dtype": "float32", "engine": "vllm", "format": FORMAT}
    assert found[2] == folded(content_of(f"{run}@3"), {}, facts)


def test_a_rank_reads_only_its_part(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's parallel layers: rows of the first matrix, columns of the last one."""
    right = model(3).state_dict()
    reader = StepReader(StepPlace(f"{run}/step-{3:012d}", 3, "step 3"), "model")
    read = list[int]()
    begin = reader.begin
    monkeypatch.setattr(
        reader, "begin",
        lambda parts: (read.extend(each.nbytes for each in parts.values()), begin(parts))[1],
    )  # fmt: skip
    weights = dict(reader.later())
    assert weights["0.weight"].shape == (1024, 64)
    assert weights["2.weight"].dtype == torch.bfloat16
    assert not read
    rows, columns = torch.empty(256, 64), torch.empty(64, 256, dtype=torch.bfloat16)
    rows.copy_(weights["0.weight"].narrow(0, 512, 256))
    columns.copy_(weights["2.weight"].narrow(1, 256, 512).narrow(-1, 256, 256))
    assert torch.equal(rows, right["0.weight"][512:768])
    assert torch.equal(columns, right["2.weight"][:, 512:768])
    assert read == [rows.nbytes, columns.nbytes]
    assert torch.equal(weights["1.weight"] + 0, right["1.weight"])
    with pytest.raises(IndexError):
        weights["0.weight"].narrow(0, 1000, 25)
    reader.close()


def test_the_next_tensors_are_read_while_vllm_takes_some(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_GROUP_BYTES", 1)
    begun, begin = list[str](), StepReader.begin

    def counted(reader: StepReader, parts: dict[str, StepPart]) -> Any:
        begun.extend(parts)
        return begin(reader, parts)

    monkeypatch.setattr(StepReader, "begin", counted)
    ahead = list[int]()
    found: dict[str, torch.Tensor] = {}

    def take(weights: Weights) -> None:
        for name, tensor in weights:
            found[name] = tensor
            ahead.append(len(begun) - len(found))

    load_into(take, {"run": str(run), "name": "model"}, 1)
    assert same(found, 3)
    assert ahead == [*[1] * (len(found) - 1), 0]


def test_ranks_get_tensors_that_were_not_read(run: Path) -> None:
    given = {"run": str(run), "name": "model"}
    found: dict[str, torch.Tensor] = {}

    def take(weights: Weights) -> None:
        for name, tensor in weights:
            must(isinstance(tensor, Later))
            found[name] = tensor.clone()

    load_into(take, given, 2)
    assert same(found, 3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_default_device_changes_nothing(run: Path, ranks: int) -> None:
    """vLLM loads under the device of the model."""
    with torch.device("meta"):
        found: dict[str, torch.Tensor] = {}
        given = {"run": str(run), "name": "model"}
        load_into(lambda w: found.update((n, t.view(t.shape)) for n, t in w), given, ranks)
    assert same(found, 3)


@pytest.mark.parametrize(("ranks", "group_bytes"), [(1, 1), (1, 1 << 20), (2, 1)])
def test_damage_is_found(
    tmp_path: Path, ranks: int, group_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the only group that is read, and in one that is read ahead."""
    monkeypatch.setattr(loader, "_GROUP_BYTES", group_bytes)
    with statehold.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": model(1)}).wait("committed")
    (data,) = tmp_path.glob("step-*/*.safetensors")
    raw = bytearray(data.read_bytes())
    raw[-1000] ^= 1
    data.write_bytes(raw)
    with pytest.raises(CorruptionError):
        load_into(lambda weights: [t + 0 for _, t in weights], {"run": str(tmp_path)}, ranks)


def test_bad_options_are_refused_with_what_to_do(run: Path) -> None:
    with pytest.raises(UsageError, match="needs a run"):
        taken({"name": "model"})
    with pytest.raises(UsageError, match="no such option"):
        taken({"run": str(run), "nmae": "model"})
    with pytest.raises(StateMismatchError, match="nothing of this name"):
        taken({"run": str(run), "name": "modle"})
    with pytest.raises(UsageError, match="has no tensors"):
        taken({"run": str(run), "name": "rate"})
