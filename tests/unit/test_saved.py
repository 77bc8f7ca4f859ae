"""What a reader sees of a step: tensors, tree and places, whatever the version and the world."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from statehold.checkpoint.save.writes import Sealing
from statehold.errors import InvariantError, ManifestError, StateMismatchError
from statehold.format.entries import record_file
from statehold.format.manifest import groups_of
from statehold.format.record import Record
from statehold.format.saved import PlacedChunk, open_step
from statehold.format.trees import Differs
from statehold.layout.layout import Box, Layout, Mesh, Ranks
from statehold.layout.plan import TensorSpec, plan_save
from statehold.layout.share import HeldTensor, PlanCache
from statehold.layout.stored import StoredPart
from statehold.ranks.membership import Membership
from support.calls import calls_of
from support.meshes import local_spec
from support.records import DIRECTORY, World, example
from support.seeds import SEED
from support.steps import SPECS, again_of, manifest_of, spec, sums_for, true_sums

PAIR = Mesh((2,), (0, 1))


# -- version 1 --------------------------------------------------------------------------------


def read_v1(path: str, max_bytes: int) -> bytes:
    assert path == "run/manifest.json"
    assert max_bytes > 1 << 20
    return manifest_of().encode()


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_step_of_one_rank(world_size: int) -> None:
    step, manifest = open_step(read_v1, "run", 7, 0, world_size), manifest_of()
    assert (step.step, step.world_size, step.block_bytes) == (7, 1, 1 << 20)
    assert step.state == manifest.state
    assert step.files == manifest.files
    assert step.tensors["model.weight"][:2] == ("BF16", (3, 4))
    (placed,) = step.chunks("model.weight", Box((1, 1), (1, 2)))
    (chunk,) = manifest.tensors["model.weight"].chunks
    (file,) = manifest.files
    whole = Box.whole((3, 4))
    assert placed == PlacedChunk(whole, file.name, file.bytes, chunk.begin, chunk.end, chunk.sums)
    assert step.chunks("empty", Box.whole((0, 2))) == []
    left = step.unread({"model.weight"})
    assert {name for name, _ in left} == {spec.name for spec in SPECS} - {"model.weight", "empty"}
    assert step.widened() is step


def test_another_step() -> None:
    with pytest.raises(ManifestError, match="another step"):
        open_step(read_v1, "run", 8, 0, 1)


@pytest.mark.parametrize("box", [Box((0, 0), (4, 4)), Box((6, 0), (1, 1)), Box((0,), (3,))])
def test_more_than_there_is(box: Box) -> None:
    with pytest.raises(InvariantError):
        open_step(read_v1, "run", 7, 0, 1).chunks("model.weight", box)
    with pytest.raises(InvariantError):
        example().open(0, 4).chunks("sharded", Box(box.offsets, tuple(2 * n for n in box.shape)))


# -- version 2 --------------------------------------------------------------------------------


def test_a_rank_at_its_place_reads_its_record() -> None:
    world = example()
    step = world.open(2, 4)
    assert step.state == {"model": world.records[2].state["model"], "epoch": 3, "seed": 2}
    assert list(step.tensors) == ["sharded", "uneven", "replicated", "free", "own"]
    assert step.tensors["uneven"].shape == (5,)
    assert step.files == world.records[2].files
    world.assemble(step, "sharded", Box((3, 0), (3, 2)))
    assert len(step.files) == 1


def test_the_wider_view_has_all_ranks() -> None:
    held = [[HeldTensor(f"layers.{i}", "I64", (2,), None)] for i in range(2)]
    own = [{f"layers.{i}": np.array([i, i])} for i in range(2)]
    world = World(held, {}, own, [{"seed": rank} for rank in range(2)])
    step = world.open(1, 2)
    assert list(step.tensors) == ["layers.1"]
    wide = step.widened()
    assert list(wide.tensors) == ["layers.0", "layers.1"]
    assert list(wide.state["model"]) == ["layers.0", "layers.1"]
    assert wide.state["seed"] == 1
    assert list(world.assemble(wide, "layers.0", Box.whole((2,)))) == [0, 0]
    other = world.open(0, 3)
    assert other.state["seed"] == Differs((0, 1), (Ranks(((0, 0),)), Ranks(((1, 1),))))
    assert list(world.assemble(other, "layers.1", Box.whole((2,)))) == [1, 1]


def test_another_world_reads_one_record_a_group() -> None:
    held = [HeldTensor("w", "I64", (8,), Layout(PAIR, ((0, 0),)))]
    world = World([held] * 2, {"w": np.arange(8)})
    step = world.open(5, 6)
    assert step.state == {"model": {"w": {"$tensor": "w"}}}
    assert len(step.files) == 1
    assert list(world.assemble(step, "w", Box((6,), (2,)))) == [6, 7]
    assert len(step.files) == 2


def test_states_with_keys_of_any_kind() -> None:
    held = [HeldTensor("w", "I64", (8,), Layout(PAIR, ((0, 0),)))]
    world = World([held] * 2, {"w": np.arange(8)})
    node = {"$dict": [[1, {"$tensor": "w"}], ["x", 5]]}
    records = [
        Record(r.step, 2, r.rank, r.attempt, r.block_bytes, r.files, r.held, r.chunks, node)
        for r in world.records
    ]
    world.records = records
    world.store(world.commit_of(()), records)
    assert world.commit.state.keys() == {"model"}
    for rank, size in ((0, 2), (0, 3)):
        assert world.open(rank, size).state == node


def test_an_empty_state() -> None:
    world = World([[], []], {})
    step = world.open(0, 2)
    assert step.state == {"model": {}}
    assert (dict(step.tensors), step.files, step.block_bytes) == ({}, (), 1 << 20)


def test_what_is_left_to_verify() -> None:
    world = example()
    verified = set()
    for rank in range(4):
        step = world.open(rank, 4)
        record = world.records[rank]
        (box,) = [Box((3 * (rank // 2), 2 * (rank % 2)), (3, 2))]
        asked = step.chunks("sharded", box)
        left = step.unread({"sharded"})
        assert "sharded" not in {name for name, _ in left}
        assert len(left) + 1 == sum(map(len, record.chunks.values()))
        verified |= {(chunk.file, chunk.begin) for chunk in asked + [c for _, c in left]}
    files = [path for path in world.files if path.endswith(".safetensors")]
    assert {name for name, _ in verified} == {path.removeprefix(f"{DIRECTORY}/") for path in files}
    assert world.open(0, 3).unread(()) == []


# -- what the committer says ------------------------------------------------------------------


def test_groups_of_ranks() -> None:
    said = [{"m": "a", "seed": "0"}, {"m": "a", "seed": "1"}, {"m": "b"}, {"m": "a"}]
    assert groups_of(said) == {
        "m": (Ranks(((0, 1), (3, 3))), Ranks(((2, 2),))),
        "seed": (Ranks(((0, 0),)), Ranks(((1, 1),))),
    }


def test_ranks_say_the_same_whoever_writes_and_whatever_else_they_hold() -> None:
    said = [record.group_digests() for record in example().records]
    assert len({digests["model"] for digests in said}) == 1
    assert len({digests["seed"] for digests in said}) == 4
    other = HeldTensor("other", "I64", (2,), Layout(Mesh((1,), (1,))))
    more = [[other], []]
    held = HeldTensor("w", "I64", (2,), Layout(PAIR, ((0, 0),)))
    world = World(
        [[held, *each] for each in more[::-1]], {"w": np.arange(2), "other": np.arange(2)}
    )
    a, b = (
        Record(7, 2, r.rank, "a", 1 << 20, r.files, r.held[::-1], r.chunks, {"x": {"$tensor": "w"}})
        for r in world.records
    )
    assert (
        a.group_digests() == b.group_digests()
    )  # though the mesh of w is their first and their second


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"writer": 1}, False),
        ({"shape": (4,)}, False),
        ({"dtype": "F64"}, False),
        ({"layout": None}, False),
        ({}, True),
    ],
)
def test_tensors_count_in_what_ranks_say(change: dict[str, Any], same: bool) -> None:
    base: dict[str, Any] = {"name": "w", "dtype": "I64", "shape": (2,), "layout": Layout(PAIR)}
    said = [
        Record(
            7,
            2,
            0,
            "a",
            4096,
            (),
            (HeldTensor(**values),),
            {},
            {"x": {"$tensor": "w"}},
            {"w": "0" * 16},
        ).group_digests()
        for values in (base, {**base, **change})
    ]
    assert (said[0] == said[1]) is same


# -- what a record is made of -----------------------------------------------------------------


def test_a_file_of_parts() -> None:
    spec = TensorSpec("w", "I64", (2, 4), 64, global_shape=(6, 8), offsets=(4, 4))
    plan = plan_save([spec], step=7, world_size=2, rank=1)
    file, tensors = record_file(plan, sums_for(plan), index=3)
    assert file.name == "rank-00001-of-00002.safetensors"
    assert tensors["w"].shape == (6, 8)
    (chunk,) = tensors["w"].chunks
    assert (chunk.box, chunk.file) == (Box((4, 4), (2, 4)), 3)


def test_meshes_are_written_short() -> None:
    def meshes(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Any:
        held = HeldTensor("w", "I64", (0,), Layout(Mesh(shape, ranks)))
        record = Record(7, 99_999, ranks[0], "a", 4096, (), (held,), {}, {})
        raw = record.encode()
        back = Record.decode(raw, "r")
        assert back.held == (held,)
        return raw.split(b'"meshes":')[1].split(b',"tensors"')[0]

    assert b'"ranks":{"first":0,"strides":[1]}' in meshes((90_000,), tuple(range(90_000)))
    grid = tuple(3 + 100 * i + 7 * j for i in range(4) for j in range(5))
    assert b'{"first":3,"strides":[100,7]}' in meshes((4, 5), grid)
    assert b'{"first":9,"strides":[0,0]}' in meshes((1, 1), (9,))
    assert b'{"first":9,"strides":[]}' in meshes((), (9,))
    assert b'"ranks":[1,0]' in meshes((2,), (1, 0))
    assert b'"ranks":[0,1,3]' in meshes((3,), (0, 1, 3))


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        {"state": {"a": {"$tensor": "elsewhere"}}},
        {"state": 5},
        {"attempt": "x"},
        {"contents": {"sharded": "-1"}},
    ],
    ids=str,
)
def test_what_no_reader_accepts_is_not_encoded(wrong: dict[str, Any], is_known: bool) -> None:
    record = example().records[0]
    assert record.encode(again_of(record, is_known)) == record.sealed()
    other = replace(record, **wrong)
    with pytest.raises(InvariantError, match="no reader would accept"):
        other.encode(again_of(other, is_known))


@pytest.mark.parametrize("seed", range(SEED, SEED + 10))
def test_a_later_record_has_the_bytes_of_a_first_one(seed: int) -> None:
    """With other checksums, contents and values, and boxes of several ranks."""
    rng = random.Random(seed)
    layouts = [None, Layout(PAIR, ((0, 0),)), Layout(PAIR, ())]
    names = ["content", '"content":"0"', "sums", "a", "b", "é"]
    specs = list[TensorSpec]()
    for name in rng.sample(names, len(names)):
        size, layout = rng.choice([2, 4096, 3 << 20]), rng.choice(layouts)
        own_spec = spec(name, "U8", size)
        specs.append(local_spec(name, "U8", (size,), layout, 1) if layout else own_spec)
    own = [each.name for each in specs if each.layout is None]
    plans, later, before = PlanCache(Membership(1, 2)), Sealing(), dict[str, str]()
    for step in range(5):
        plan, few = plans.get(specs, step), rng.sample(own, rng.randint(0, len(own)))
        prints = {name: rng.getrandbits(64) for name in (few if step > 3 else own)}
        state = {"a": {"$tensor": "a"}, "b": {"w": {"$tensor": "b"}, "n": step // 2}}
        said = plan, state, rng.randbytes(len(sums_for(plan.save))), StoredPart(), "5eed-1", prints
        raw, digests = later.record(*said)
        assert (raw, digests) == Sealing().record(*said)
        record = Record.decode(raw, "r")
        assert record.contents == {name: f"{value:016x}" for name, value in prints.items()}
        assert digests == record.group_digests()
        assert (digests == before) is (step in (1, 3))
        before = digests
    plan = plans.get([spec(name, "U8", 1) for name in names], 5)
    of_others = plan, state, sums_for(plan.save), StoredPart(), "5eed-1", dict[str, int]()
    assert later.record(*of_others) == Sealing().record(*of_others)


def test_a_record_without_room_for_its_group_digests_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, sealing, digests_of = (
        PlanCache(Membership(1, 2)).get([], 1),
        Sealing(),
        Record.group_digests,
    )

    def said(number: int) -> Any:
        state = {"a": number}
        return plan, state, sums_for(plan.save), StoredPart(), "5eed-1", dict[str, int]()

    def fail(*_: object) -> Any:
        raise MemoryError

    sealing.record(*said(1))
    monkeypatch.setattr(Record, "group_digests", fail)
    with pytest.raises(MemoryError):
        sealing.record(*said(2))
    monkeypatch.setattr(Record, "group_digests", digests_of)
    assert sealing.record(*said(2)) == Sealing().record(*said(2))


def test_a_later_record_costs_what_is_new_in_its_state() -> None:
    layout = Layout(PAIR, ((0, 0),))
    specs = [local_spec(f"layers.{i}", "U8", (64,), layout, 1) for i in range(1000)]
    model = {each.name: {"$tensor": each.name} for each in specs}
    plans, sealing = PlanCache(Membership(1, 2)), Sealing()

    def calls(step: int) -> int:
        plan, state = plans.get(specs, step), {"model": model, "step": step}
        said = plan, state, sums_for(plan.save), StoredPart(), "5eed-1", dict[str, int]()
        return calls_of(lambda: sealing.record(*said))

    assert calls(1) > 50 * len(specs)
    assert calls(2) < 2 * len(specs)


def test_a_record_costs_what_it_holds_not_how_many_ranks_there_are() -> None:
    def size(world_size: int) -> int:
        mesh = Mesh((world_size,), tuple(range(world_size)))
        held = tuple(
            HeldTensor(f"layers.{i}", "F32", (1 << 20,), Layout(mesh, ())) for i in range(100)
        )
        return len(Record(7, world_size, 1, "a", 4096, (), held, {}, {}).encode())

    assert size(50_000) - size(2) < 100


def test_the_example_in_the_document_is_a_record() -> None:
    held = HeldTensor("model.w", "I64", (4,), Layout(PAIR, ((0, 0),)))
    world = World([[held]] * 2, {"model.w": np.arange(4)})
    document = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    _, block = re.findall(r"```json\n(.*?)```", document, re.DOTALL)
    assert json.loads(block) == json.loads(world.records[1].encode())
    raw = world.files[f"{DIRECTORY}/manifest.json"].decode()
    (state,) = re.findall(r"The manifest has `(.*?)`", document)
    assert state in raw


def test_values_that_thousands_of_ranks_have_each_are_not_read_to_be_refused() -> None:
    ranks = 70
    mesh = Mesh((ranks,), tuple(range(ranks)))
    held = [HeldTensor("w", "I64", (ranks,), Layout(mesh, ((0, 0),)), 0)]
    extra = [{"seed": rank, "lr": 0.5} for rank in range(ranks)]
    world = World([held] * ranks, {"w": np.arange(ranks)}, extra=extra)
    step = world.open(0, 1)
    assert isinstance(step.state["seed"], Differs)
    assert step.state["lr"] == 0.5
    assert list(step.tensors) == ["w"]
    assert len(step.files) <= 2
    assert world.open(69, ranks).widened().state["seed"] == 69


def test_a_rank_s_own_version_is_not_one_that_it_shares_with_others() -> None:
    held = [HeldTensor("w", "I64", (2,), None, 0)]
    own = [{"w": np.full(2, rank)} for rank in range(2)]
    world = World([held, held], {}, own, sums=true_sums)
    step, box = world.open(1, 2), Box.whole((2,))
    assert len(step.chunks("w", box)) == 1
    for view in (step, step.widened()):
        with pytest.raises(StateMismatchError):
            view.chunks("w", box, among=(0, 1))
