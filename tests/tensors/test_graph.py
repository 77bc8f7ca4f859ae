"""Graphs of live models: what is traced, what counts, and what does not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from statehold.errors import UsageError
from statehold.tensors.graph import Graph
from support.faults import DEADLINE_S, must
from support.networks import mlp

Make = Callable[[], nn.Module]


class Branches(nn.Module):
    """Two branches that are alike; `later` takes the result of one of them."""

    def __init__(self, taken: int = 0, sizes: tuple[int, int] = (4, 4)) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, sizes[0]), nn.Linear(4, sizes[1])
        self.later = nn.Linear(4, 2)
        self.last = nn.Linear(2 + sum(sizes), 2)
        self._taken = taken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.left(x), self.right(x)
        later = self.later(both[self._taken])
        return self.last(torch.cat([later, *both], dim=1))


class Tied(nn.Module):
    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.place = nn.Parameter(torch.zeros(4))
        self.head = nn.Linear(4, 10, bias=False)
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.words(x) * self.angles + self.place)


class Undecided(nn.Module):
    """What it does depends on its input."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.widths = widths
        self.body = mlp(*widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) if x.sum() > 0 else x


def shared(one: nn.Module, two: nn.Module) -> list[tuple[str, str]]:
    return [(a.name, b.name) for a, b in Graph(one).layers.shared(Graph(two).layers)]


def test_a_model_shares_all_with_one_that_is_built_alike() -> None:
    graph = Graph(mlp(2, 3, 4))
    assert (graph.kind, graph.reason) == ("traced", None)
    assert shared(mlp(2, 3, 4), mlp(2, 3, 4)) == [("0", "0"), ("2", "2")]


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (lambda: mlp(2, 3, 4, 5), ["0", "2"]),
        (lambda: mlp(2, 3, 9, 5), ["0"]),
        (lambda: mlp(2, 3, 4, act=nn.GELU), ["0"]),
        (lambda: mlp(2, 3, 4, act=lambda: nn.LeakyReLU(0.5)), ["0"]),
        (lambda: mlp(5, 3, 4), []),
        (lambda: mlp(2, 3, 4).to(torch.bfloat16), []),
        (lambda: mlp(2, 3, 4).eval().requires_grad_(False), ["0", "2"]),
    ],
)
def test_a_difference_ends_the_prefix(other: Make, names: list[str]) -> None:
    assert shared(mlp(2, 3, 4), other()) == [(name, name) for name in names]


def test_settings_of_a_layer_count_even_if_its_tensors_are_alike() -> None:
    one, two = (nn.Sequential(nn.Conv2d(3, 8, 3, stride=stride)) for stride in (1, 2))
    assert shared(one, two) == []
    one, two = (nn.Sequential(nn.MultiheadAttention(8, heads)) for heads in (2, 4))
    assert shared(one, two) == []


def test_names_do_not_count() -> None:
    named = nn.Sequential()
    for index, layer in enumerate(mlp(2, 3, 4)):
        named.add_module(f"layer{index}", layer)
    assert shared(mlp(2, 3, 4), named) == [("0", "layer0"), ("2", "layer2")]


def test_what_hangs_on_another_branch_is_another_layer() -> None:
    found = [a for a, _ in shared(Branches(0), Branches(0))]
    assert found == ["left", "right", "later", "last"]
    assert [a for a, _ in shared(Branches(0), Branches(1))] == ["left", "right"]


def test_a_change_of_one_branch_leaves_the_other() -> None:
    assert [a for a, _ in shared(Branches(0), Branches(0, (4, 5)))] == ["left", "later"]


def test_tied_tensors_belong_to_their_first_layer() -> None:
    graph = Graph(Tied())
    assert [each.tensors for each in graph.layers.layers] == [
        ("seen",), ("words.weight",), ("place",)
    ]  # fmt: skip
    untied = Graph(Tied(is_tied=False))
    assert [each.name for each in untied.layers.layers] == ["seen", "words", "place", "head"]
    assert len(graph.layers.shared(untied.layers)) == 3


def test_constants_that_no_step_holds_count_by_their_content() -> None:
    one, two = Tied(), Tied()
    assert len(shared(one, two)) == 3
    two.angles += 1
    assert [a for a, _ in shared(one, two)] == ["seen", "words", "place"]
    one, two = Tied(is_tied=False), Tied(is_tied=False)
    two.angles += 1
    assert [a for a, _ in shared(one, two)] == ["seen", "words", "place"]


def test_a_constant_of_one_element_may_have_any_stride() -> None:
    wide, narrow = Tied(), Tied()
    wide.angles, narrow.angles = torch.arange(4.0)[1::2][:1], torch.ones(1)
    assert wide.angles.stride() == (2,)
    assert len(shared(wide, narrow)) == 3


def test_tracing_changes_nothing() -> None:
    model = Tied().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    Graph(model)
    assert not model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Stopping(nn.Module):
    """A trace of it waits in the middle of forward()."""

    def __init__(self, entered: threading.Event, go: threading.Event) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.__dict__["_stop"] = Stop(entered, go)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.__dict__["_stop"]()
        out: torch.Tensor = self.last(h)
        return out


class Stop:
    """What a copy of a model shares with the model: events cannot be copied."""

    def __init__(self, entered: threading.Event, go: threading.Event) -> None:
        self._entered, self._go = entered, go

    def __deepcopy__(self, _: object) -> Stop:
        return self

    def __call__(self) -> None:
        self._entered.set()
        must(self._go.wait(DEADLINE_S))


def test_a_trace_leaves_the_calls_of_other_threads_alone() -> None:
    """torch.fx replaces nn.Module.__call__ of the whole process while it traces."""
    entered, go = threading.Event(), threading.Event()
    call, get = nn.Module.__call__, nn.Module.__getattr__
    other, x = mlp(4, 8, 2), torch.ones(1, 4)
    expected = other(x)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Graph, Stopping(entered, go))
        assert entered.wait(DEADLINE_S)
        assert nn.Module.__call__ is not call  # or nothing is tested here
        assert torch.equal(other(x), expected)
        second = pool.submit(Graph, mlp(4, 8, 2))
        go.set()
        assert (first.result(DEADLINE_S).kind, first.result().reason) == ("traced", None)
        digests = second.result(DEADLINE_S).layers
    assert (nn.Module.__call__, nn.Module.__getattr__) == (call, get)
    assert digests == Graph(mlp(4, 8, 2)).layers


def test_traces_at_once_put_everything_back() -> None:
    call = nn.Module.__call__
    alone = Graph(mlp(4, 8, 8, 2)).layers
    with ThreadPoolExecutor(8) as pool:
        graphs = list(pool.map(lambda _: Graph(mlp(4, 8, 8, 2)).layers, range(32)))
    assert nn.Module.__call__ is call
    assert all(each == alone for each in graphs)


def test_a_model_that_cannot_be_traced_is_a_list_of_modules() -> None:
    graph = Graph(Undecided(2, 3, 4))
    assert graph.kind == "modules"
    assert graph.reason is not None
    assert graph.reason.startswith("TraceError")
    # The attribute `widths` of the whole model does not end the prefix before it begins.
    assert [a for a, _ in shared(Undecided(2, 3, 4), Undecided(2, 3, 9, 4))] == ["body.0"]
    assert shared(Undecided(2, 3, 4), mlp(2, 3, 4)) == []


def test_wrappers_do_not_count() -> None:
    model = mlp(2, 3, 4)
    assert shared(nn.DataParallel(model), mlp(2, 3, 4)) == [("0", "0"), ("2", "2")]
    compiled = nn.Module()
    compiled.add_module("_orig_mod", model)  # as torch.compile has it
    assert Graph(compiled).layers == Graph(model).layers


def test_models_without_memory() -> None:
    with torch.device("meta"):
        model = Tied()
    assert Graph(model).kind == "traced"
    assert [a for a, _ in shared(model, Tied())] == ["seen", "words", "place"]


def test_a_lazy_model_has_no_shapes_yet() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    assert shared(lazy, mlp(2, 3)) == []


def test_only_a_model_has_a_graph() -> None:
    with pytest.raises(UsageError, match="graph is that of a model"):
        Graph({"w": torch.zeros(2)})  # type: ignore[arg-type]


def test_digests_are_the_same_in_every_process_and_release() -> None:
    """Steps on disk have them. If this fails with another torch, a class has other settings."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten())
    assert [each.digest for each in Graph(model).layers.layers] == [
        "cc196636c49482220b8e328632de10e6"
    ]
