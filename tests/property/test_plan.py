"""Whatever the tensors: every byte has one place, and pieces stay in their block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statehold.encoding import header
from statehold.encoding.header import DTYPE_BITS
from statehold.layout.plan import BLOCK_BYTES, TensorSpec, piece_count, pieces, plan_save
from statehold.layout.share import PlanCache
from statehold.units import MiB
from support.steps import spec

sizes = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.integers(0, 40 * MiB).map(lambda n: (n,)),
)


@st.composite
def tensors(draw: st.DrawFn, name: str) -> TensorSpec:
    dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
    shape = draw(sizes)
    if DTYPE_BITS[dtype] % 8:
        shape = (*shape, 4)  # four elements of 4 or 6 bits are whole bytes
    return spec(name, dtype, *shape, eager=draw(st.booleans()))


@st.composite
def states(draw: st.DrawFn) -> list[TensorSpec]:
    text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
    names = draw(st.lists(text.filter(lambda t: t != header.METADATA), unique=True, max_size=12))
    return [draw(tensors(name)) for name in names]


@given(states(), st.integers(0, 10**12 - 1))
def test_every_byte_is_covered_once(specs: list[TensorSpec], step: int) -> None:
    plan = plan_save(specs, step=step)
    assert sorted(plan.source_index) == list(range(len(specs)))
    assert plan.specs == tuple(specs[i] for i in plan.source_index)
    at = plan.data_begin
    for tensor, begin in zip(plan.specs, plan.begins, strict=True):
        assert begin == at
        at += tensor.nbytes
    assert at == plan.file_bytes
    assert plan.data_begin % header.PAGE == 0


@pytest.mark.thorough
@given(states())
def test_every_tensor_is_aligned_to_its_dtype(specs: list[TensorSpec]) -> None:
    plan = plan_save(specs, step=1)
    for tensor, begin in zip(plan.specs, plan.begins, strict=True):
        assert begin % max(1, DTYPE_BITS[tensor.dtype] // 8) == 0


@pytest.mark.thorough
@given(states(), st.integers(0, 10**12 - 1))
def test_the_header_tells_the_plan(specs: list[TensorSpec], step: int) -> None:
    plan = plan_save(specs, step=step)
    entries, metadata, data_begin = header.decode(plan.header, plan.file_bytes, "f")
    assert data_begin == plan.data_begin
    assert int(metadata["statehold.step"]) == step
    told = {e.name: (e.dtype, e.shape, data_begin + e.begin) for e in entries}
    assert told == {
        s.name: (s.dtype, s.shape, b) for s, b in zip(plan.specs, plan.begins, strict=True)
    }


@pytest.mark.thorough
@given(states(), states(), st.integers(0, 10**12 - 1))
def test_the_cache_is_never_wrong(a: list[TensorSpec], b: list[TensorSpec], step: int) -> None:
    cache = PlanCache()
    for specs in (a, b, b, a):
        assert cache.get(specs, step).save == plan_save(specs, step=step)


@given(
    st.integers(0, 1 << 40),
    st.integers(0, 64 * MiB),
    st.sampled_from([4096, BLOCK_BYTES, 4 * MiB]),
)
def test_pieces_cover_a_range_and_straddle_nothing(begin: int, nbytes: int, block: int) -> None:
    if block == 4096:
        nbytes %= 4 * MiB
    found = list(pieces(begin, nbytes, block))
    assert len(found) == piece_count(begin, nbytes, block)
    at = begin
    for low, high in found:
        assert low == at
        assert low < high
        assert low // block == (high - 1) // block
        assert low // (16 * MiB) == (high - 1) // (16 * MiB)
        at = high
    assert at == begin + nbytes
