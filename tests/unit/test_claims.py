"""Which equal names are one tensor: what ranks claim, learn, verify and forget."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from statehold.errors import ReplicasDifferError
from statehold.layout.claims import Claims, Lesson, judge, lesson_document, lesson_of, message
from statehold.layout.layout import Layout, Mesh
from statehold.layout.plan import TensorSpec
from statehold.ranks.membership import Membership

WORLD = 4
Contents = Callable[[int, str], int]


def plain(name: str, shape: tuple[int, ...] = (4,)) -> TensorSpec:
    return TensorSpec(name, "F32", shape, 4 * 4)


def on_mesh(name: str, mesh: Mesh, rank: int) -> TensorSpec:
    layout = Layout(mesh, ((0, 0),))
    box = layout.box((8,), rank)
    return TensorSpec(name, "F32", box.shape, 16, False, layout, (8,), box.offsets)


def data_parallel_mesh(rank: int) -> Mesh:
    """Tensor parallelism puts neighbours side by side: 0 and 2, 1 and 3 share the data axis."""
    return Mesh((2,), (rank % 2, rank % 2 + 2))


def save(
    ranks: list[Claims], number: int, state: Callable[[int], list[TensorSpec]], contents: Contents
) -> tuple[list[list[TensorSpec]], Lesson]:
    """One save on all ranks: what each plans with, and what it teaches."""
    planned, messages = [], []
    for rank, claims in enumerate(ranks):
        resolved = claims.resolve(state(rank), number - 2)  # no more saves than that are under way
        compared = {name for each in resolved.comparisons for name in each.names}
        prints = {name: contents(rank, name) for name in compared}
        messages.append(message(rank, resolved.comparisons, prints))
        planned.append(resolved.specs)
    lesson = lesson_of(lesson_document(judge(messages)))
    for claims in ranks:
        claims.learn(number, lesson)
    return planned, lesson


def everyone() -> list[Claims]:
    return [Claims(Membership(rank, WORLD)) for rank in range(WORLD)]


def same(rank: int, name: str) -> int:
    return len(name)


def test_a_plain_tensor_that_is_equal_everywhere_becomes_a_replica_two_saves_later() -> None:
    ranks = everyone()
    state: Mapping[int, list[TensorSpec]] = {r: [plain("model.buffer")] for r in range(WORLD)}
    first, _ = save(ranks, 0, state.__getitem__, same)
    second, _ = save(ranks, 1, state.__getitem__, same)
    third, _ = save(ranks, 2, state.__getitem__, same)
    assert [specs[0].layout for specs in first + second] == [None] * 8
    for rank in range(WORLD):
        layout = third[rank][0].layout
        assert layout is not None
        assert layout.replicas(rank) == (0, 1, 2, 3)


def test_values_of_a_rank_stay_with_the_rank() -> None:
    ranks = everyone()

    def contents(rank: int, name: str) -> int:
        return rank if name == "rng" else 7

    for number in range(4):
        planned, _ = save(ranks, number, lambda rank: [plain("rng"), plain("b")], contents)
    for specs in planned:
        assert specs[0].layout is None
        assert specs[1].layout is not None


def test_a_tensor_that_one_rank_has_elsewhere_does_not_part_the_buffers_of_the_model() -> None:
    ranks = everyone()

    def state(rank: int) -> list[TensorSpec]:
        own = [plain("trainer.best")] if rank == 0 else [plain("data", (rank,))]
        return [plain("model.buffer"), *own]

    for number in range(4):
        planned, lesson = save(ranks, number, state, same)
        if number < 2:
            equal = {each.equal for each in lesson.values() if len(each.meshes) == WORLD}
            assert equal == {("model.buffer",)}
    for specs in planned:
        assert specs[0].layout is not None
        assert specs[1].layout is None


def test_shards_on_sibling_meshes_are_joined_along_a_new_axis() -> None:
    ranks = everyone()

    def state(rank: int) -> list[TensorSpec]:
        return [on_mesh("model.norm", data_parallel_mesh(rank), rank)]

    def contents(rank: int, name: str) -> int:
        return rank // 2  # the same box on ranks 0 and 1, and on 2 and 3

    for number in range(3):
        planned, _ = save(ranks, number, state, contents)
    for rank, specs in enumerate(planned):
        layout = specs[0].layout
        assert layout is not None
        assert layout.replicas(rank) == ((0, 1) if rank < 2 else (2, 3))
        assert layout.box((8,), rank).offsets == specs[0].offsets


def test_experts_under_one_name_are_never_joined() -> None:
    ranks = everyone()

    def state(rank: int) -> list[TensorSpec]:
        return [on_mesh("model.expert.w", data_parallel_mesh(rank), rank)]

    for number in range(4):
        planned, lesson = save(ranks, number, state, lambda rank, name: rank)
        assert all(len(specs[0].layout.mesh.ranks) == 2 for specs in planned if specs[0].layout)
        assert all(not siblings.equal for siblings in lesson.values())


def test_pipeline_stages_have_no_siblings() -> None:
    ranks = everyone()
    _, lesson = save(ranks, 0, lambda rank: [plain(f"model.layer.{rank}")], same)
    assert len(lesson) == WORLD
    assert all(len(siblings.meshes) == 1 for siblings in lesson.values())
    resolved = ranks[0].resolve([plain("model.layer.0")], 2)
    assert resolved.comparisons == ()


def test_tensors_on_all_ranks_claim_nothing() -> None:
    mesh = Mesh((2, 2), (0, 1, 2, 3))
    spec = TensorSpec("w", "F32", (4,), 16, False, Layout(mesh, ((0, 0),)), (8,), (0,))
    assert Claims(Membership(0, WORLD)).resolve([spec], 0).comparisons == ()


def test_replicas_that_drift_apart_fail_the_save_by_name() -> None:
    ranks = everyone()
    for number in range(2):
        save(ranks, number, lambda rank: [plain("model.buffer")], same)
    with pytest.raises(ReplicasDifferError, match=r"model\.buffer"):
        save(ranks, 2, lambda rank: [plain("model.buffer")], lambda rank, name: rank)


def test_after_a_failed_save_everything_is_learned_anew() -> None:
    ranks = everyone()
    for number in range(2):
        save(ranks, number, lambda rank: [plain("b")], same)
    for claims in ranks:
        claims.forget(2)
    third, _ = save(ranks, 3, lambda rank: [plain("b")], same)
    fourth, _ = save(ranks, 4, lambda rank: [plain("b")], same)
    assert third[0][0].layout is not None  # what save 1 taught still holds here
    assert fourth[0][0].layout is None


def test_a_rank_that_missed_an_outcome_plans_under_another_version() -> None:
    ranks = everyone()
    _, lesson = save(ranks, 0, lambda rank: [plain("b")], same)
    late = Claims(Membership(3, WORLD))
    late.forget(0)
    late.resolve([plain("b")], 2)
    ranks[0].resolve([plain("b")], 2)
    assert lesson
    assert late.version != ranks[0].version


def test_a_sibling_that_no_longer_claims_fails_the_save() -> None:
    ranks = everyone()
    for number in range(2):
        save(ranks, number, lambda rank: [plain("model.b")], same)

    def one_has_changed(rank: int) -> list[TensorSpec]:
        return [plain("model.b"), plain("model.c")] if rank == 3 else [plain("model.b")]

    with pytest.raises(ReplicasDifferError):
        save(ranks, 2, one_has_changed, same)


def test_overlapping_meshes_teach_nothing() -> None:
    meshes = {0: Mesh((2,), (0, 1)), 1: Mesh((2,), (1, 2)), 2: Mesh((2,), (1, 2))}
    told = []
    for rank, mesh in meshes.items():
        claims = Claims(Membership(rank, WORLD))
        resolved = claims.resolve([on_mesh("w", mesh, rank)], 0)
        told.append(message(rank, resolved.comparisons, {"w": 1}))
    assert all(not siblings.equal for siblings in judge(told).values())


def test_steady_messages_do_not_grow_with_the_tensors() -> None:
    ranks = everyone()
    names = [f"model.buffer.{i}" for i in range(1000)]
    for number in range(3):
        save(ranks, number, lambda rank: [plain(name) for name in names], same)
    resolved = ranks[2].resolve([plain(name) for name in names], 3)
    told = message(2, resolved.comparisons, dict.fromkeys(names, 1))
    assert len(str(told)) < 500
