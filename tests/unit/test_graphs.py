"""Digests of layers, the record of a graph, and the prefix that two graphs share."""

from __future__ import annotations

import itertools
import json

import pytest

from statehold.format.graphs import (
    RECORD,
    Digests,
    Layer,
    LayerGraph,
    graph_of_tensors,
    read_record,
)

Chain = list[tuple[str, str, tuple[int, ...]]]


def chain(*widths: int) -> Chain:
    return [
        (f"{index}.{name}", "F32", shape)
        for index, (a, b) in enumerate(itertools.pairwise(widths))
        for name, shape in (("weight", (b, a)), ("bias", (b,)))
    ]


def names(one: LayerGraph, two: LayerGraph) -> list[tuple[str, str]]:
    return [(a.name, b.name) for a, b in one.shared(two)]


def test_tensors_give_a_chain_of_their_modules() -> None:
    graph = graph_of_tensors(chain(2, 3, 4))
    assert [each.name for each in graph.layers] == ["0", "1"]
    assert graph.layers[0].tensors == ("0.weight", "0.bias")
    assert list(graph.tensors) == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (chain(2, 3, 4, 5), ["0", "1"]),
        (chain(2, 3, 9, 5), ["0"]),
        (chain(3, 3, 4, 5), []),
        ([(name, "BF16", shape) for name, _, shape in chain(2, 3, 4, 5)], []),
        (chain(2, 3), ["0"]),
        ([], []),
    ],
)
def test_the_prefix_ends_at_the_first_difference(other: Chain, shared: list[str]) -> None:
    one, two = graph_of_tensors(chain(2, 3, 4, 6)), graph_of_tensors(other)
    assert names(one, two) == [(name, name) for name in shared]
    assert names(two, one) == [(name, name) for name in shared]


def test_a_layer_counts_only_behind_the_same_layers() -> None:
    """Two networks that differ in the first layer alone share nothing, whatever comes after."""
    one = graph_of_tensors([("in.weight", "F32", (4, 2)), ("out.weight", "F32", (4, 4))])
    two = graph_of_tensors([("in.weight", "F32", (4, 3)), ("out.weight", "F32", (4, 4))])
    assert one.shared(two) == []


def test_graphs_of_different_kinds_share_nothing() -> None:
    layers = graph_of_tensors(chain(2, 3)).layers
    assert LayerGraph("traced", layers).shared(LayerGraph("modules", layers)) == []
    assert len(LayerGraph("traced", layers).shared(LayerGraph("traced", layers))) == 1


def test_branches_that_are_alike_are_told_apart_by_their_order() -> None:
    first, second = Digests("traced"), Digests("traced")
    query, key = first.of("linear", "x"), first.of("linear", "x")
    assert query != key
    assert [second.of("linear", "x"), second.of("linear", "x")] == [query, key]
    assert first.of("use", query) != second.of("use", key)


def test_digests_are_the_same_for_ever() -> None:
    """Steps on disk have them: a change of what they cover needs another VERSION."""
    assert Digests("traced").of(["linear", [2, 3]], ["x"]) == "adfe0cddfdf35658cdcc4568aa0b52a1"


def test_a_record_gives_the_graph_back() -> None:
    graph = graph_of_tensors(chain(2, 3, 4))
    record = graph.record()
    assert list(record) == [RECORD]
    assert read_record(record[RECORD]) == graph


@pytest.mark.parametrize(
    "text",
    [
        None,
        7,
        "",
        "no JSON",
        "[]",
        "null",
        json.dumps([2, "traced", []]),
        json.dumps([1, "unknown", []]),
        json.dumps([1, ["traced"], []]),
        json.dumps([1, "traced", [["name", "digest"]]]),
        json.dumps([1, "traced", [["name", 7, []]]]),
        json.dumps([1, "traced", [["name", "digest", [7]]]]),
        json.dumps([1, "traced", [["name", "digest", 7]]]),
        json.dumps([1, "traced", 7]),
        json.dumps([1, "traced", [["name", "\ud800", []]]]),
        "[" * 100_000,
    ],
)
def test_a_record_that_nobody_can_read_counts_as_none(text: object) -> None:
    assert read_record(text) is None


def test_layers_of_one_digest_with_other_tensors_are_not_paired() -> None:
    one = LayerGraph("traced", (Layer("a", "1", ("a.weight",)),))
    two = LayerGraph("traced", (Layer("b", "1", ("b.weight", "b.bias")),))
    assert one.shared(two) == []
