"""Plans: order, offsets, the header and the step in it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from statehold.encoding import header
from statehold.errors import InvariantError, UsageError
from statehold.layout.plan import (
    BLOCK_BYTES,
    STEP_MAX,
    TensorSpec,
    piece_count,
    pieces,
    plan_save,
)
from statehold.layout.share import PlanCache
from statehold.ranks.membership import Membership
from support.calls import calls_of
from support.steps import spec


def many(count: int = 1000) -> list[TensorSpec]:
    return [
        spec(f"optimizer.state.model.layers.{i}.weight.exp_avg", "F32", 128, 128 + i % 7)
        for i in range(count)
    ]


def test_order_is_width_then_eager_then_capture() -> None:
    specs = [
        spec("a", "BF16", 3),
        spec("b", "F32", 2),
        spec("c", "F32", 2, eager=True),
        spec("d", "U8", 3),
        spec("e", "I64", 1),
        spec("f", "F32", 1),
    ]
    plan = plan_save(specs, step=1)
    assert [s.name for s in plan.specs] == ["e", "c", "b", "f", "a", "d"]
    assert plan.source_index == (4, 2, 1, 5, 0, 3)
    assert plan.data_begin == len(plan.header)
    assert [begin - plan.data_begin for begin in plan.begins] == [0, 8, 16, 24, 28, 34]
    assert plan.file_bytes == plan.data_begin + 37
    assert plan.file_name == "rank-00000-of-00001.safetensors"


def test_single_numbers_part_no_other_tensors() -> None:
    """Tensors of a device that follow each other are copied together."""
    shapes = {"step": (), "exp_avg": (2,), "exp_avg_sq": (2,)}
    state = [spec(f"{name}.{i}", "F32", *shapes[name]) for i in range(3) for name in shapes]
    marked = [spec("lr", "F32")._replace(eager=True), spec("none", "F32", 0)]
    names = [s.name for s in plan_save([*state, *marked], step=1).specs]
    moments = [f"{name}.{i}" for i in range(3) for name in ("exp_avg", "exp_avg_sq")]
    assert names == ["lr", *moments, "none", "step.0", "step.1", "step.2"]


def test_the_header_says_what_stock_readers_need() -> None:
    specs = [spec("w", "F32", 2, 3), spec("s", "I64"), spec("e", "F32", 0)]
    plan = plan_save(specs, step=12, world_size=4, rank=3)
    entries, metadata, data_begin = header.decode(plan.header, plan.file_bytes, "f")
    assert plan.file_name == "rank-00003-of-00004.safetensors"
    assert data_begin == plan.data_begin == header.PAGE
    assert [(e.name, data_begin + e.begin) for e in entries] == [
        (s.name, b) for s, b in zip(plan.specs, plan.begins, strict=True)
    ]
    assert metadata == {
        "statehold.step": "000000000012",
        "statehold.world_size": "4",
        "statehold.global_shapes": '{"s":[],"w":[2,3],"e":[0]}',
        "DCP_SHARDING_INFO": json.dumps(
            {
                "s": {"saved_offsets": []},
                "w": {"saved_offsets": [0, 0]},
                "e": {"saved_offsets": [0]},
            },
            separators=(",", ":"),
        ),
        "DCP_VERSION": "1.0",
        "format": "pt",
    }


def test_no_tensors_is_a_file_of_one_page() -> None:
    plan = plan_save([], step=0)
    assert plan.file_bytes == plan.data_begin == header.PAGE
    assert header.decode(plan.header, plan.file_bytes, "f")[0] == []


def test_the_step_never_moves_a_byte() -> None:
    specs = many(60)
    plan = plan_save(specs, step=0)
    for step in (1, 999, STEP_MAX):
        other = plan_save(specs, step=step)
        assert (other.begins, other.file_bytes) == (plan.begins, plan.file_bytes)
        assert plan.at_step(step) == other
        assert plan.as_written(other.header) == other


def test_the_header_of_another_file_is_of_no_step_of_the_plan() -> None:
    plan = plan_save(many(60), step=7)
    bits = bytearray(plan.header)
    for at in range(len(bits)):
        bits[at] ^= 1  # of a digit: another digit, so another step
        found = plan.as_written(bytes(bits))
        bits[at] ^= 1
        assert found is None or found == plan.at_step(found.step) != plan
    others = (b"", plan.header[:-1], plan.header + b" ", plan_save(many(61), step=7).header)
    assert not any(map(plan.as_written, others))


def test_a_name_that_looks_like_the_step_stays() -> None:
    specs = [spec('"statehold.step":"000000000005"', "U8", 1)]
    plan = plan_save(specs, step=5).at_step(6)
    entries, metadata, _ = header.decode(plan.header, plan.file_bytes, "f")
    assert entries[0].name == specs[0].name
    assert metadata["statehold.step"] == "000000000006"


@pytest.mark.parametrize("step", [-1, STEP_MAX + 1, True, 1.0, "1"])
def test_steps_out_of_range(step: int) -> None:
    with pytest.raises(UsageError) as caught:
        plan_save([], step=step)
    assert {"expected", "got"} <= set(caught.value.facts)


@pytest.mark.parametrize(
    "specs",
    [
        [spec("a", "F32"), spec("a", "F32")],
        [spec("__metadata__", "F32")],
        [spec("", "F32")],
        [spec("\ud800", "F32")],
        [TensorSpec("a", "F32", (2,), 4)],
        [TensorSpec("a", "F128", (2,), 32)],
        [TensorSpec("a", "F4", (3,), 1)],
        [TensorSpec("a", "F32", (2**62, 2**62), 1)],
    ],
)
def test_specs_that_contradict_themselves(specs: Sequence[TensorSpec]) -> None:
    with pytest.raises(InvariantError):
        plan_save(specs, step=1)


def test_a_header_that_readers_would_refuse_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(header, "HEADER_BYTES_MAX", 8000)
    with pytest.raises(UsageError, match="too large"):
        plan_save(many(100), step=1)


def test_pieces() -> None:
    assert list(pieces(5, 0, 10)) == []
    assert list(pieces(5, 5, 10)) == [(5, 10)]
    assert list(pieces(5, 6, 10)) == [(5, 10), (10, 11)]
    assert list(pieces(10, 25, 10)) == [(10, 20), (20, 30), (30, 35)]
    assert [piece_count(5, n, 10) for n in (0, 1, 5, 6, 15, 16)] == [0, 1, 1, 2, 2, 3]


def test_the_cache_plans_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PlanCache(Membership(1, 2))
    first = cache.get(many(), 1).save
    assert first == plan_save(many(), step=1, world_size=2, rank=1)
    second = cache.get(many(), 2).save
    assert second == plan_save(many(), step=2, world_size=2, rank=1)
    assert second.begins is first.begins
    assert second.specs is first.specs


@pytest.mark.parametrize(
    "change", [spec("new", "F32", 1), spec("x", "F32", 1), spec("x", "U8", 4, eager=True)]
)
def test_the_cache_notices_a_change(change: TensorSpec) -> None:
    cache = PlanCache()
    specs = [spec("x", "U8", 4)]
    cache.get(specs, 1)
    specs[0] = change  # the cache keeps its own list
    assert cache.get(specs, 2).save == plan_save(specs, step=2)


def test_planning_is_quick() -> None:
    specs, equal = many(), many()
    assert calls_of(lambda: plan_save(specs, step=1)) < 12 * len(specs)
    cache = PlanCache()
    cache.get(specs, 1)
    assert calls_of(lambda: cache.get(equal, 2)) < 2 * len(specs)


def test_the_grid_is_one_mebibyte() -> None:
    assert BLOCK_BYTES == 1 << 20
