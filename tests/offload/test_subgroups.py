"""Cuts: each element once, at places that torch's kernel does not notice, of bounded size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statehold.errors import UsageError
from statehold.offload.state import are_boxes
from statehold.offload.subgroups import CUT, Extent, Span, Subgroup, cut, strips

FIELDS = [("master", "exp_avg", "exp_avg_sq"), ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)]
PAGE = 4096

shapes = st.one_of(
    st.tuples(st.integers(0, 3000), st.integers(1, 300)),
    st.tuples(st.integers(1, 5), st.sampled_from([64, 65, 640]), st.sampled_from([1, 64, 100])),
)
extents = st.builds(Extent, shapes, st.sampled_from(FIELDS))
sizes = st.integers(12, 500).map(lambda pages: pages * PAGE)


@given(st.lists(extents, max_size=8), sizes)
def test_a_cut_covers_each_element_once(parameters: list[Extent], size: int) -> None:
    subgroups = cut(parameters, size)
    ends = [0] * len(parameters)
    for subgroup in subgroups:
        assert subgroup.spans
        assert subgroup.nbytes <= size
        assert len({span.parameter for span in subgroup.spans}) == len(subgroup.spans)
        for span, fields in zip(subgroup.spans, subgroup.fields, strict=True):
            assert fields == parameters[span.parameter].fields
            assert span.begin == ends[span.parameter]
            assert span.begin % CUT == 0
            assert span.begin < span.end
            ends[span.parameter] = span.end
    assert ends == [each.numel for each in parameters]


@given(st.lists(extents, max_size=8), sizes)
def test_parts_do_not_overlap(parameters: list[Extent], size: int) -> None:
    for subgroup in cut(parameters, size):
        end = 0
        for part in subgroup.parts:
            assert part.begin >= end
            assert part.begin_bytes % PAGE == 0
            end = part.begin + part.span.numel
        assert end * 4 <= subgroup.nbytes
        assert subgroup.nbytes % PAGE == 0
        wanted = [(name, span) for span, names in zip(subgroup.spans, subgroup.fields, strict=True)
                  for name in names]  # fmt: skip
        assert sorted(map(str, wanted)) == sorted(
            str((part.field, part.span)) for part in subgroup.parts
        )


@given(st.lists(extents, max_size=8), sizes, st.integers(1, 20), st.integers(1, 9))
def test_strips_cover_the_same_elements(
    parameters: list[Extent], size: int, units: int, threads: int
) -> None:
    for subgroup in cut(parameters, size):
        found = list(strips(subgroup.spans, units * CUT, threads))
        assert all(found)
        assert all(sum(span.numel for span in strip) <= units * CUT for strip in found)
        joined = [span for strip in found for span in strip]
        assert all(span.begin % CUT == 0 for span in joined)
        merged = [list(elements(joined, span.parameter)) for span in subgroup.spans]
        assert merged == [[(span.begin, span.end)] for span in subgroup.spans]


@given(st.integers(1, 10_000_000), st.integers(1, 64))
def test_strips_give_each_thread_as_much_to_do(numel: int, threads: int) -> None:
    found = list(strips([Span(0, 0, numel)], 1 << 20, threads))
    sizes = [sum(span.numel for span in strip) for strip in found]
    assert max(sizes[:-1], default=0) == min(sizes[:-1], default=0)
    if numel >= threads * threads * CUT * 2:  # else the cuts are coarser than the shares
        assert len(found) % threads == 0


def elements(spans: list, parameter: int) -> list[tuple[int, int]]:
    """The spans of one parameter, joined where they touch."""
    found: list[tuple[int, int]] = []
    for span in spans:
        if span.parameter == parameter:
            if found and found[-1][1] == span.begin:
                found[-1] = (found[-1][0], span.end)
            else:
                found.append((span.begin, span.end))
    return found


def test_parameters_are_cut_in_the_order_that_is_asked_for() -> None:
    extents = [Extent((1024 * pages,), ("a",)) for pages in (3, 5, 3)]
    found = cut(extents, 6 * 4096, [0, 2, 1])
    assert [[span.parameter for span in each.spans] for each in found] == [[0, 2], [1]]


def test_cuts_are_at_whole_rows() -> None:
    parameters = [Extent((1000, 768), FIELDS[0])]
    cuts = [span.begin for each in cut(parameters, 2 << 20) for span in each.spans]
    assert len(cuts) > 4
    assert all(begin % 768 == 0 for begin in cuts)


def test_rows_of_rows_are_cut_where_a_row_is_too_long() -> None:
    """Each span is one box, as the files of a step want it."""
    shape = (3, 64, 2048)
    spans = [s for each in cut([Extent(shape, FIELDS[0])], 1 << 20) for s in each.spans]
    assert len(spans) > 3
    assert are_boxes(shape, spans)
    assert not are_boxes((3, 10_001), [Span(0, 4096, 12_288)])


def test_parts_are_found_by_their_bytes() -> None:
    (subgroup,) = cut([Extent((100,), FIELDS[1]), Extent((10,), FIELDS[1])], 1 << 20)
    assert isinstance(subgroup, Subgroup)
    found = [(part.field, part.span.parameter) for part in subgroup.parts_in(PAGE + 30, PAGE + 60)]
    assert found == [("exp_avg", 1)]
    assert subgroup.parts_in(PAGE + 40, PAGE + 60) == []  # padding
    assert len(subgroup.parts_in(0, 4 * PAGE)) == 4


def test_less_than_a_cut_is_refused() -> None:
    with pytest.raises(UsageError, match="subgroup_bytes is too small"):
        cut([Extent((10,), FIELDS[0])], 3 * CUT * 4 - 1)
