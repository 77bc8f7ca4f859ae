"""Frozen 4-bit weights below trained adapters (QLoRA): those of bitsandbytes, and a look-alike."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import statehold
from statehold.errors import StateMismatchError, TornSnapshot, UnsupportedValueError
from statehold.tensors import kinds
from support import fourbit
from support.faults import SMALL, Holdup
from support.matching import MemoryStep, captured, eager

pytestmark = pytest.mark.filterwarnings("ignore")

PLAIN = {"compress_statistics": False, "quant_type": "nf4"}
NESTED = {"compress_statistics": True, "quant_type": "nf4"}
QUANTIZED = ["absmax", "quant_map"]
DOUBLY = [*QUANTIZED, "nested_absmax", "nested_quant_map", "nested_offset"]


@pytest.fixture(params=["look-alike", "bitsandbytes"])
def bnb(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "bitsandbytes":
        return pytest.importorskip("bitsandbytes").nn.modules
    monkeypatch.setitem(sys.modules, fourbit.NAME, library := fourbit.library())
    return library


class Adapted(nn.Module):
    """A frozen 4-bit layer and a trained adapter of rank 2."""

    def __init__(self, bnb: Any, options: Any, device: str = "cpu") -> None:
        super().__init__()
        self.base = bnb.Linear4bit(128, 64, bias=False, device=device, **options)
        self.down, self.up = nn.Linear(128, 2, bias=False), nn.Linear(2, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))

    def trained(self) -> list[nn.Parameter]:
        return [*self.down.parameters(), *self.up.parameters()]


def qlora(bnb: Any, options: Any = NESTED) -> dict[str, Any]:
    model = Adapted(bnb, options).to("cpu")
    return {"model": model, "optimizer": torch.optim.AdamW(model.trained(), 1e-2)}


def train(state: dict[str, Any], seed: int, steps: int = 2) -> list[float]:
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        loss = state["model"](torch.randn(4, 128, generator=generator)).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        losses.append(loss.item())
    return losses


def parts(weight: Any) -> dict[str, torch.Tensor]:
    """What a quantized weight is made of, asked of the library and not of statehold."""
    state = weight.quant_state
    found = {"": weight.detach(), "absmax": state.absmax, "quant_map": state.code}
    if state.state2 is not None:
        nested = state.state2
        found |= {"nested_absmax": nested.absmax, "nested_quant_map": nested.code}
        found |= {"nested_offset": state.offset}
    return found


def values(weight: Any) -> dict[str, Any]:
    return {name: each.tolist() for name, each in parts(weight).items()}


@pytest.mark.parametrize("options", [PLAIN, NESTED], ids=["plain", "nested"])
def test_training_goes_on_bit_for_bit(bnb: Any, options: Any, tmp_path: Path) -> None:
    state = qlora(bnb, options)
    train(state, 1)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.save(3, state).wait("committed")
    expected, resumed = train(state, 2), qlora(bnb, options)
    weight = resumed["model"].base.weight
    quantization, places = weight.quant_state, {n: p.data_ptr() for n, p in parts(weight).items()}
    assert values(weight)["absmax"] != values(state["model"].base.weight)["absmax"]
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        ckpt.restore(resumed)
    assert resumed["model"].base.weight is weight
    assert weight.quant_state is resumed["model"].base.quant_state is quantization
    assert {n: p.data_ptr() for n, p in parts(weight).items()} == places
    assert values(weight) == values(state["model"].base.weight)
    assert train(resumed, 2) == expected
    (file,) = (tmp_path / "run").glob("step-*/*.safetensors")
    with safe_open(file, "pt") as stock:
        names = {name for name in stock.offset_keys() if name.startswith("model.base")}
        assert torch.equal(stock.get_tensor("model.base.weight"), weight.detach())
    inner = DOUBLY if options is NESTED else QUANTIZED
    assert names == {"model.base.weight", *(f"model.base.weight.{name}" for name in inner)}


def test_the_node(bnb: Any) -> None:
    node = MemoryStep(qlora(bnb)).manifest.state["model"]["base.weight"]["$subclass"]
    assert node["class"] == "bitsandbytes.nn.modules.Params4bit"
    assert node["tensors"][""] == {"$tensor": "model.base.weight"}
    assert node["tensors"]["nested_offset"] == {"$tensor": "model.base.weight.nested_offset"}
    assert node["context"] == {
        "quantized": True,
        "quant_type": "nf4",
        "blocksize": node["context"]["blocksize"],
        "dtype": {"$torch": {"dtype": "float32"}},
        "shape": {"$torch": {"size": [64, 128]}},
        "nested_blocksize": 256,
        "nested_dtype": {"$torch": {"dtype": "float32"}},
    }


def test_frozen_weights_are_copied_lazily(bnb: Any) -> None:
    assert eager(qlora(bnb)) == set()


def test_what_changes_inside_is_noticed(bnb: Any) -> None:
    for change in (lambda weight: weight.detach(), lambda weight: weight.quant_state.absmax):
        state = qlora(bnb)
        found = kinds.capture(state)
        assert found.moved(eager=False) is None
        change(state["model"].base.weight).zero_()
        assert found.moved(eager=False) is not None


def test_a_torn_one_fails_the_save(bnb: Any, tmp_path: Path) -> None:
    state = qlora(bnb) | {"filler": statehold.Gated(torch.zeros(1 << 20))}  # more than is staged
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        holdup = Holdup(ckpt)
        save = ckpt.save(1, state)
        state["model"].base.weight.quant_state.absmax.zero_()
        holdup.release()
        with pytest.raises(TornSnapshot, match=r"base\.weight\.absmax"):
            save.wait("committed")


def test_weights_that_are_moved_meanwhile_are_saved_from_where_they_were(bnb: Any) -> None:
    state = qlora(bnb)
    weight = state["model"].base.weight
    before, found = values(weight), captured(state)
    weight.data = torch.zeros_like(weight.detach())
    weight.quant_state.absmax = torch.zeros_like(weight.quant_state.absmax)
    assert found["model.base.weight"].tensor.tolist() == before[""]
    assert found["model.base.weight.absmax"].tensor.tolist() == before["absmax"]


@pytest.mark.parametrize("options", [PLAIN, NESTED], ids=["plain", "nested"])
def test_one_is_put_together_where_nothing_is(bnb: Any, options: Any) -> None:
    model, live = qlora(bnb, options)["model"], {"weights": {}}
    MemoryStep({"weights": {"w": model.base.weight}}).restore(live)
    made = live["weights"]["w"]
    assert type(made) is bnb.Params4bit
    assert values(made) == values(model.base.weight)
    other = Adapted(bnb, options).to("cpu")
    other.base.weight = made
    inputs = torch.randn(2, 128)
    assert torch.equal(other.base(inputs), model.base(inputs))
    again = MemoryStep({"w": made}).manifest
    assert again.state == MemoryStep({"w": model.base.weight}).manifest.state


def test_a_class_is_not_imported_because_a_step_names_it(
    bnb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = MemoryStep({"w": qlora(bnb)["model"].base.weight})
    monkeypatch.delitem(sys.modules, fourbit.NAME)
    with pytest.raises(UnsupportedValueError) as caught:
        step.prepare({"w": None})
    assert caught.value.facts["class"] == "bitsandbytes.nn.modules.Params4bit"
    assert "import bitsandbytes.nn.modules" in str(caught.value)
    assert fourbit.NAME not in sys.modules


def test_before_it_is_quantized_it_is_a_plain_weight(bnb: Any) -> None:
    saved, live = (Adapted(bnb, NESTED) for _ in range(2))
    step = MemoryStep({"m": saved})
    assert step.manifest.state["m"]["base.weight"]["$subclass"]["context"]["quantized"] is False
    step.restore({"m": live})
    assert torch.equal(live.base.weight.detach(), saved.base.weight.detach())
    assert values(live.to("cpu").base.weight) == values(saved.to("cpu").base.weight)
    fresh: dict[str, Any] = {"w": None}
    MemoryStep({"w": Adapted(bnb, PLAIN).base.weight}).restore(fresh)
    assert fresh["w"].quant_type == "nf4"
    assert fresh["w"].quant_state is None


def reshaped(bnb: Any) -> nn.Module:
    """As many values, in other rows."""
    model = qlora(bnb)["model"]
    model.base = bnb.Linear4bit(64, 128, bias=False, **NESTED).to("cpu")
    return model


DIFFERENT = {
    "not quantized": (lambda bnb: Adapted(bnb, NESTED), "not quantized yet", "quantized True"),
    "not doubly": (lambda bnb: qlora(bnb, PLAIN)["model"], "Params4bit", "nested_blocksize 256"),
    "another type": (
        lambda bnb: qlora(bnb, {**NESTED, "quant_type": "fp4"})["model"],
        "Params4bit", "quant_type 'nf4'",
    ),
    "another shape": (reshaped, "Params4bit", "shape {'$torch': {'size'"),
}  # fmt: skip


@pytest.mark.parametrize(("build", "expected", "got"), DIFFERENT.values(), ids=DIFFERENT)
def test_differences_are_listed_before_anything_changes(
    bnb: Any, build: Any, expected: str, got: str
) -> None:
    live = build(bnb)
    before = live.down.weight.tolist(), live.base.weight.tolist()
    with pytest.raises(StateMismatchError) as caught:
        MemoryStep({"m": qlora(bnb)["model"]}).prepare({"m": live})
    fact = caught.value.facts["m.base.weight"]
    assert expected in fact.split(", got ")[0]
    assert got in fact.split(", got ")[1]
    assert (live.down.weight.tolist(), live.base.weight.tolist()) == before


def test_a_meta_weight_is_refused_before_anything_changes(bnb: Any) -> None:
    live = Adapted(bnb, NESTED, "meta")
    before = live.down.weight.tolist()
    with pytest.raises(UnsupportedValueError, match="meta") as caught:
        MemoryStep({"m": qlora(bnb)["model"]}).prepare({"m": live})
    assert caught.value.facts["path"] == "m.base.weight"
    assert live.down.weight.tolist() == before


def test_layers_with_state_of_their_own_beside_them(bnb: Any) -> None:
    """The module is loaded through load_state_dict(), which refuses the entries of the weight."""

    class Counting(nn.Module):
        count = 0

        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            self.count = state

    saved, live = (nn.Sequential(Adapted(bnb, NESTED).to("cpu"), Counting()) for _ in range(2))
    saved[1].count = 7
    MemoryStep({"m": saved}).restore({"m": live})
    assert live[1].count == 7
    assert values(live[0].base.weight) == values(saved[0].base.weight)


def test_a_table_that_layers_share_is_stored_once(bnb: Any) -> None:
    def layers(*, share: bool) -> nn.Module:
        made = nn.Sequential(*(Adapted(bnb, NESTED).base for _ in range(2))).to("cpu")
        nested = [each.weight.quant_state.state2 for each in made]
        nested[1].code = nested[0].code if share else nested[0].code.clone()
        return made

    saved, live = layers(share=True), layers(share=False)
    step = MemoryStep({"m": saved})
    assert "m.0.weight.nested_quant_map" in step.manifest.tensors
    assert "m.1.weight.nested_quant_map" not in step.manifest.tensors
    step.restore({"m": live})
    assert [values(each.weight) for each in live] == [values(each.weight) for each in saved]
    MemoryStep({"m": live}).restore({"m": saved})
    assert saved[0].weight.quant_state.state2.code is saved[1].weight.quant_state.state2.code


def test_weights_that_lost_their_state_are_refused(bnb: Any) -> None:
    model = qlora(bnb)["model"]
    weight = model.base.weight
    model.base.weight = nn.Parameter(weight.detach(), requires_grad=False)
    weight.quant_state = None
    for state, path in (({"m": model}, "m.base.weight"), ({"w": weight}, "w")):
        with pytest.raises(UnsupportedValueError, match="without its quantization state") as caught:
            MemoryStep(state)
        assert caught.value.facts["path"] == path


def test_weights_that_lose_it_as_state_dict_is_called_are_refused(bnb: Any) -> None:
    """A hook of fully_shard swaps the gathered weights, which have it, for the sharded ones."""
    model = qlora(bnb)["model"]
    plain = nn.Parameter(model.base.weight.detach(), requires_grad=False)
    fired = []

    def swap(layer: nn.Module, *_: Any) -> None:
        fired.append(layer)
        layer.weight = plain

    model.base.register_state_dict_pre_hook(swap)
    with pytest.raises(UnsupportedValueError, match="without its quantization state") as caught:
        MemoryStep({"m": model})
    assert fired
    assert caught.value.facts["path"] == "m.base.weight"


def test_weights_that_are_packed_for_inference_are_refused_untouched(bnb: Any) -> None:
    model = qlora(bnb)["model"]
    step, before = MemoryStep({"m": model, "w": model.base.weight}), values(model.base.weight)
    model.base.weight.quant_state.packing_format_for_cpu = True
    for state, path in (({"m": model}, "m.base.weight"), ({"w": model.base.weight}, "w")):
        for act in (MemoryStep, step.prepare):
            with pytest.raises(UnsupportedValueError, match="packed for inference") as caught:
                act(state)
            assert caught.value.facts["path"] == path
    assert values(model.base.weight) == before


def test_the_trained_parameters_alone(bnb: Any) -> None:
    """As the guide has it: without the frozen weights."""

    def adapters(state: dict[str, Any]) -> dict[str, Any]:
        named = state["model"].named_parameters()
        trained = {name: each for name, each in named if each.requires_grad}
        return {"adapters": trained, "optimizer": state["optimizer"]}

    saved, live = qlora(bnb), qlora(bnb)
    train(saved, 1)
    step = MemoryStep(adapters(saved))
    assert not any("base" in name for name in step.manifest.tensors)
    step.restore(adapters(live))
    for one, other in zip(saved["model"].trained(), live["model"].trained(), strict=True):
        assert torch.equal(one, other)
