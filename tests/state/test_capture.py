"""What a capture holds: names, eagerness, ties, what is refused and where."""

from __future__ import annotations

import collections
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import statehold
from statehold.errors import UnsupportedValueError, UsageError
from statehold.state.capture import Capture, capture
from support.memory_store import MemoryStep, raw, round_trip


def eager_by_name(state: dict[str, Any]) -> dict[str, bool]:
    return {item.spec.name: item.spec.eager for item in capture(state).tensors}


def refusal(state: dict[str, Any]) -> UnsupportedValueError:
    with pytest.raises(UnsupportedValueError) as caught:
        capture(state)
    return caught.value


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")  # the default backend warns when imported


class Odd(nn.Module):
    """Every kind of entry that a module can have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.several = nn.ParameterList([torch.randn(2), torch.randn(3)])
        self.named = nn.ParameterDict({"x": torch.randn(1)})
        self.register_buffer("kept", torch.zeros(4))
        self.register_buffer("derived", torch.zeros(5), persistent=False)
        self.extra: Any = {"calls": 3, "when": (1, "x")}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_a_module_gives_its_parameters_lazily_and_its_buffers_at_once() -> None:
    assert eager_by_name({"model": Odd()}) == {
        "model.weight": False, "model.frozen": False, "model.several.0": False,
        "model.several.1": False, "model.named.x": False, "model.kept": True,
    }  # fmt: skip


def test_extra_state_is_plain_values() -> None:
    tree = capture({"model": Odd()}).tree
    assert tree["model"]["_extra_state"] == {"calls": 3, "when": {"$tuple": [1, "x"]}}


def test_everything_else_is_eager_unless_it_is_gated_or_an_optimizers() -> None:
    weight = torch.randn(4, requires_grad=True)
    state = {
        "weight": weight, "view": weight.detach()[1:3], "raw": torch.randn(2),
        "array": np.ones(3), "gated": statehold.Gated({"a": torch.randn(3), "m": Odd()}),
        "volatile": statehold.Volatile(nn.Linear(2, 2, bias=False)),
        "both": statehold.Gated(statehold.Volatile(torch.randn(2))),
        "opt": torch.optim.SGD([weight], lr=0.1),
    }  # fmt: skip
    eager = eager_by_name(state)
    del eager["array"]  # a private copy
    expected = {name for name in eager if name in {"raw", "both", "volatile.weight"}}
    assert {name for name, value in eager.items() if value} == expected | {"gated.m.kept"}


def test_volatile_wins_over_a_module_that_holds_the_same_memory() -> None:
    model = nn.Linear(2, 2, bias=False)
    for state in (
        {"model": model, "ema": statehold.Volatile(model.weight)},
        {"ema": statehold.Volatile(model.weight), "model": model},
    ):
        assert list(eager_by_name(state).values()) == [True]


def test_wrapped_modules_have_the_names_of_the_module() -> None:
    plain = set(eager_by_name({"model": Odd()}))
    assert set(eager_by_name({"model": compiled(Odd())})) == plain
    assert set(eager_by_name({"model": nn.DataParallel(Odd())})) == plain
    assert set(eager_by_name({"model": compiled(nn.DataParallel(Odd()))})) == plain


def test_only_the_wrapper_loses_its_name() -> None:
    inner = nn.Module()
    inner.my_orig_mod = nn.Linear(1, 1, bias=False)
    inner.module = compiled(nn.Linear(1, 1, bias=False))
    assert set(eager_by_name({"m": inner})) == {"m.my_orig_mod.weight", "m.module.weight"}


def test_distributed_data_parallel_has_the_names_of_the_module() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(Odd())
        assert "model.weight" in eager_by_name({"model": wrapped})
    finally:
        torch.distributed.destroy_process_group()


def test_tied_tensors_are_written_once() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    found = capture({"a": first, "b": second, "c": [first.weight]})
    assert [item.spec.name for item in found.tensors] == ["a.weight"]
    assert found.tree["b"]["weight"] == found.tree["c"][0] == {"$tensor": "a.weight"}


def test_views_that_share_memory_in_part_are_each_written() -> None:
    base = torch.arange(10.0)
    step = MemoryStep({"base": base, "head": base[:4], "tail": base[4:], "odd": base[1::2]})
    assert len(step.capture.tensors) == 4
    live = torch.zeros(10)
    step.restore({"base": torch.zeros(10), "head": live[:4], "tail": live[4:],
                  "odd": torch.zeros(5)})  # fmt: skip
    assert torch.equal(live, base)


def test_temporaries_of_state_dict_are_not_taken_for_each_other() -> None:
    class Maker:
        def state_dict(self) -> dict[str, Any]:
            # Conjugate views are resolved into copies, so that their own memory is free again.
            def make(value: int) -> torch.Tensor:
                return torch.full((64,), value, dtype=torch.complex64).conj()

            return {"deferred": Deferred(make)}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    class Deferred:
        def __init__(self, make: Any) -> None:
            self.make = make

        def state_dict(self) -> Any:
            return [Single(self.make, value) for value in range(8)]

        def load_state_dict(self, state: Any) -> None: ...

    class Single(Deferred):
        def __init__(self, make: Any, value: int) -> None:
            super().__init__(make)
            self.value = value

        def state_dict(self) -> Any:
            return self.make(self.value)

    found = capture({"x": Maker()})
    assert [item.tensor[0].real.item() for item in found.tensors] == list(range(8))


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: {"w": torch.empty(2, device="meta")}, "w"),
        (lambda: {"m": nn.Linear(2, 2, device="meta")}, "m.weight"),
        (lambda: {"a": [{"b": torch.eye(2).to_sparse()}]}, "a.0.b"),
        (lambda: {"q": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, "q"),
        (lambda: {"n": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}, "n"),
        (lambda: {"c": torch.ones(2, dtype=torch.complex128)}, "c"),
        (lambda: {"h": torch.ones(2, dtype=torch.complex32)}, "h"),
        (lambda: {"l": nn.LazyLinear(2)}, "l.weight"),
        (lambda: {"f": {"g": len}}, "f.g"),
        (lambda: {"o": object()}, "o"),
        (lambda: {"k": nn.Linear}, "k"),
        (lambda: {"a": np.array(["x"])}, "a"),
        (lambda: {"a": np.array([1.0], dtype=">f4")}, "a"),
        (lambda: {"a": np.ma.masked_array([1.0])}, "a"),
        (lambda: {"a": np.array([object()])}, "a"),
        (lambda: {"s": {torch.ones(1)}}, "s.{}"),
        (lambda: {"d": collections.defaultdict(list)}, "d"),
        (lambda: {"t": np.datetime64("2026-01-01")}, "t"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")  # torch warns about sparse, quantized and nested tensors
def test_what_no_step_can_hold_is_refused_with_its_path(make: Any, path: str) -> None:
    error = refusal(make())
    assert error.facts["path"] == path
    assert error.hint


def test_cycles_are_refused() -> None:
    direct: dict[str, Any] = {}
    direct["again"] = direct
    by_list: list[Any] = []
    by_list.append({"x": by_list})
    by_mark: dict[str, Any] = {}
    by_mark["mark"] = statehold.Gated([by_mark])

    class Node:
        def state_dict(self) -> Any:
            return {"next": [self]}

        def load_state_dict(self, state: Any) -> None: ...

    for value in (direct, by_list, by_mark, Node()):
        assert "holds itself" in refusal({"v": value}).summary


def test_names_that_collide_are_refused() -> None:
    error = refusal({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})
    assert error.facts["path"] == "a.b"


def test_a_state_is_a_mapping() -> None:
    with pytest.raises(UsageError):
        capture([torch.ones(1)])  # type: ignore[arg-type]


def test_keys_that_look_like_tags_survive() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    expected = raw(model.weight)
    step = MemoryStep({"$m": model, "$o": optimizer, "$v": {"$tensor": 1}})
    nn.init.zeros_(model.weight)
    step.restore({"$m": model, "$o": optimizer, "$v": {"$tensor": 0}})
    assert raw(model.weight) == expected


def base_tensors() -> dict[str, torch.Tensor]:
    grid = torch.arange(24.0).reshape(2, 3, 4)
    return {
        "transposed": grid.transpose(0, 2), "sliced": grid[:, ::2, 1:], "narrow": grid[1],
        "expanded": torch.ones(3, 1).expand(3, 4), "zero dim": torch.tensor(7), "strided":
        torch.as_strided(torch.arange(20.0), (3, 2), (5, 2), 1), "empty": torch.empty(0, 3),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conj": torch.randn(3, dtype=torch.complex64).conj(), "offset": grid.flatten()[5:9],
        "neg": torch.randn(3, dtype=torch.complex64).conj().imag, "0-dim view": grid[0, 0, 1],
    }  # fmt: skip


@pytest.mark.parametrize("name", base_tensors())
def test_every_layout_is_captured(name: str) -> None:
    torch.manual_seed(0)
    tensor = base_tensors()[name]
    live = torch.zeros(tensor.shape, dtype=tensor.dtype)
    round_trip({"t": tensor}, {"t": live})
    assert torch.equal(live, tensor)


def test_the_capture_keeps_the_bytes_of_its_time() -> None:
    model = nn.Linear(4, 4)
    found = capture({"model": model})
    weight = found.tensors[0]
    expected = raw(model.weight)
    model.weight.data = torch.zeros(4, 4)
    assert raw(weight.tensor) == expected
    assert weight.address == weight.tensor.data_ptr()
    assert found.moved(eager=False) is None


CHANGES = {
    "in place": lambda t: t.add_(1),
    "through a view": lambda t: t[:1].zero_(),
    "out=": lambda t: torch.add(t, 1, out=t),
    "foreach": lambda t: torch._foreach_mul_([t], 2.0),
    "copy_": lambda t: t.copy_(torch.ones_like(t)),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_in_place_are_noticed(change: str, mode: Any) -> None:
    model = nn.Linear(4, 4)
    found = capture({"model": model})
    assert found.moved(eager=False) is None
    with mode():
        CHANGES[change](model.weight)
    assert found.moved(eager=False) == "model.weight"
    assert found.moved(eager=True) is None


SILENT = {
    ".data": lambda t: t.data.add_(1),
    "numpy": lambda t: t.detach().numpy().fill(0),
    "storage": lambda t: t.untyped_storage().fill_(0),
}


@pytest.mark.parametrize("change", SILENT)
def test_limitation_some_writes_leave_no_trace(change: str) -> None:
    model = nn.Linear(4, 4)
    found = capture({"model": model})
    SILENT[change](model.weight)
    assert found.moved(eager=False) is None


def test_limitation_fused_sgd_leaves_no_trace_so_only_the_gate_protects() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model(torch.ones(4)).sum().backward()
    found = capture({"model": model, "optimizer": optimizer})
    before = raw(model.weight)
    optimizer.step()
    assert raw(model.weight) != before
    assert found.moved(eager=False) is None


def test_fused_adamw_is_noticed_by_its_step() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        model(torch.ones(4)).sum().backward()
        found = capture({"model": model, "optimizer": optimizer})
        optimizer.step()
    assert found.moved(eager=False) == "optimizer.state.model.weight.step"


def test_inference_tensors_have_no_counter_and_are_eager() -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
    found = capture({"t": statehold.Gated(tensor)})
    assert found.tensors[0].spec.eager
    with torch.inference_mode():
        tensor.add_(1)
    assert found.moved(eager=True) is None
    assert MemoryStep({"t": tensor}).bytes["t"] == raw(tensor)


def test_a_state_may_be_captured_in_inference_mode() -> None:
    model = nn.Linear(4, 4)
    with torch.inference_mode():
        found = capture({"model": model})
    with torch.no_grad():
        model.weight.zero_()
    assert found.tensors[0].spec.eager or found.moved(eager=False) == "model.weight"


def test_the_tree_shares_nothing_with_the_state() -> None:
    state = {"progress": {"tokens": [1, 2]}}
    found = capture(state)
    state["progress"]["tokens"].append(3)
    assert found.tree == {"progress": {"tokens": [1, 2]}}


def llama_like(blocks: int = 28) -> tuple[nn.Module, torch.optim.Optimizer]:
    """201 parameters in nested modules: 804 tensors with AdamW's."""
    model = nn.ModuleDict({
        "layers": nn.ModuleList(
            nn.ModuleDict({f"w{i}": nn.Linear(4, 4, bias=False) for i in range(7)})
            for _ in range(blocks)
        ),
        "tail": nn.ParameterList([torch.zeros(4) for _ in range(5)]),
    })  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def test_capture_is_quick() -> None:
    model, optimizer = llama_like()
    state = {"model": model, "optimizer": optimizer}

    def timed() -> tuple[float, Capture]:
        started = time.perf_counter()
        found = capture(state)
        return time.perf_counter() - started, found

    runs = [timed() for _ in range(10)]
    assert len(runs[0][1].tensors) == 804
    # 6 ms on the machine of docs; ten times that only fails when the algorithm got worse.
    assert min(seconds for seconds, _ in runs) < 0.06
