"""Trees of several ranks become one: union, equality with types, own values, and no guesses."""

from __future__ import annotations

from typing import Any

import pytest

from statehold.encoding import values
from statehold.format.trees import Differs, members_of, merge, tensors_of
from statehold.layout.layout import Ranks

FIRST, SECOND, THIRD = Ranks(((0, 1),)), Ranks(((2, 2),)), Ranks(((3, 5),))


def merged(*nodes: Any, rank: int = 0, same_world: bool = False) -> Any:
    return merge(list(zip((FIRST, SECOND, THIRD), nodes, strict=False)), rank, same_world)


def tensor(name: str) -> dict[str, str]:
    return {"$tensor": name}


def test_stages_of_a_pipeline_are_united() -> None:
    first = {"layers.0": tensor("m.layers.0"), "norm": tensor("m.norm")}
    second = {"norm": tensor("m.norm"), "layers.1": tensor("m.layers.1")}
    result = merged(first, second)
    assert list(result) == ["layers.0", "norm", "layers.1"]
    assert result == {**first, **second}


def test_what_differs_is_named_and_never_chosen() -> None:
    result = merged({"lr": 0.1, "epoch": 3}, {"lr": 0.2, "epoch": 3}, {"lr": 0.1, "epoch": 3})
    assert result["epoch"] == 3
    assert result["lr"] == Differs((0.1, 0.2), (Ranks(((0, 1), (3, 5))), SECOND))
    assert str(result["lr"]) == "0.1 on 0-1, 3-5; 0.2 on 2"


@pytest.mark.parametrize(("rank", "expected"), [(0, 1), (1, 1), (2, 2), (4, 3)])
def test_a_rank_at_its_place_keeps_its_own(rank: int, expected: int) -> None:
    assert merged(1, 2, 3, rank=rank, same_world=True) == expected


def test_a_rank_that_has_no_value_takes_none_of_two() -> None:
    result = merged({"a": 1}, {"b": 1}, {"b": 2}, rank=0, same_world=True)
    assert result["a"] == 1
    assert isinstance(result["b"], Differs)


@pytest.mark.parametrize(
    ("one", "other"), [(1, 1.0), (1, True), (0.0, -0.0), (None, False), ("1", 1), ([1], [1.0])]
)
def test_equality_knows_types(one: Any, other: Any) -> None:
    assert isinstance(merged(one, other), Differs)
    assert merged(one, one) == one


def test_parameters_of_optimizer_groups_are_united() -> None:
    one = {"param_groups": [{"params": ["a", "b"], "lr": 0.1}, {"params": ["c"], "lr": 0.2}]}
    two = {"param_groups": [{"params": ["b", "d"], "lr": 0.1}, {"params": [], "lr": 0.2}]}
    for same_world in (True, False):
        assert merged({"o": one}, {"o": two}, same_world=same_world)["o"]["param_groups"] == [
            {"params": ["a", "b", "d"], "lr": 0.1},
            {"params": ["c"], "lr": 0.2},
        ]


def test_names_elsewhere_are_plain_lists() -> None:
    for shape in (lambda x: {"params": x}, lambda x: {"a": [{"params": x}]}):
        result = merged(shape(["a"]), shape(["b"]))
        assert result != shape(["a", "b"])


def test_groups_of_other_numbers_differ() -> None:
    result = merged({"param_groups": [{"params": []}]}, {"param_groups": []})
    assert isinstance(result["param_groups"], Differs)


def test_lists_of_containers_go_item_by_item() -> None:
    one = [{"w": tensor("a")}, {"$tuple": [{"x": 1}]}]
    two = [{"v": tensor("b")}, {"$tuple": [{"y": 1}]}]
    assert merged(one, two) == [
        {"w": tensor("a"), "v": tensor("b")},
        {"$tuple": [{"x": 1, "y": 1}]},
    ]
    assert merged([1, 2], [1, 3]) == Differs(([1, 2], [1, 3]), (FIRST, SECOND))
    assert isinstance(merged([{}], {"$tuple": [{}]}), Differs)
    assert isinstance(merged({"$tuple": [{}]}, [{}]), Differs)
    assert isinstance(merged([{}], [{}, {}]), Differs)


def test_tensors_of_different_names_differ() -> None:
    assert isinstance(merged(tensor("a"), tensor("b")), Differs)
    assert isinstance(merged(tensor("a"), {"$ndarray": "a"}), Differs)
    assert isinstance(merged(tensor("a"), {"x": 1}), Differs)


def test_dicts_with_keys_of_any_kind() -> None:
    one, two = values.encode({1: "a", "x": 2}, ""), values.encode({"x": 2, "y": 3}, "")
    assert values.decode(merged(one, two), None) == {1: "a", "x": 2, "y": 3}
    assert values.decode(merged(two, one), None) == {"x": 2, "y": 3, 1: "a"}
    ordered = {"$ordered": [["a", 1]]}
    assert merged(ordered, {"$ordered": [["b", 1]]}) == {"$ordered": [["a", 1], ["b", 1]]}
    assert isinstance(merged({"$counter": [["a", 1]]}, {"$counter": [["b", 1]]}), Differs)


def test_nothing_to_merge_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="nothing"):
        merge([], 0, True)


def test_the_deepest_state_merges() -> None:
    one, two = values.encode(_nest("a"), ""), values.encode(_nest("b"), "")
    result = merged(one, two)
    for _ in range(values.DEPTH_MAX - 1):
        ((_, result),) = result["$dict"]
    assert result == {"a": 1, "b": 1}


def _nest(name: str) -> Any:
    value: Any = {name: 1}
    for _ in range(values.DEPTH_MAX - 1):
        value = {1: value}
    return value


def test_members_of_nodes() -> None:
    assert members_of({"a": 1}) == {"a": ("a", 1)}
    node = values.encode({"1": "a", 1: "b", "$x": "c"}, "")
    assert members_of(node) == {"1": ("1", "a"), "$1": (1, "b"), '$"$x"': ("$x", "c")}
    for other in (None, [], "a", {"$tuple": []}, {"$tensor": "a"}, {"$dict": 3}, {"$dict": [1]}):
        assert members_of(other) is None


def test_tensors_of_a_node_in_order() -> None:
    node = {"b": [tensor("2"), {"$tuple": [tensor("1")]}], "a": {"$ndarray": "2"}, "c": 5}
    assert list(tensors_of(node)) == ["2", "1", "2"]
