"""planners.lowrank: counts beside published ones, and times beside the table of BOOST."""

from __future__ import annotations

import pytest
from bench.lowrank.published import CASES, PUBLISHED, computed, ratios

from statehold.errors import UsageError
from statehold.planners.lowrank import (
    WAYS,
    DeviceRates,
    LlamaShape,
    LowRankCosts,
    TrainingJob,
)

# Width, ff, layers and rank of CoLA's sizes; millions of parameters, full and low-rank.
SIZES = {
    "60M": (512, 1376, 8, 128, 58, 42.8),
    "130M": (768, 2048, 12, 256, 134, 94.0),
    "350M": (1024, 2736, 24, 256, 368, 185),
    "1B": (2048, 5461, 24, 512, 1339, 609),
    "7B": (4096, 11008, 32, 1024, 6738, 2821),
}
ONES = DeviceRates(1, 1, 1, 1)


def llama(width: int, ff: int, layers: int, rank: int) -> LowRankCosts:
    return LowRankCosts(LlamaShape(layers, width, ff, width, width, 32000), rank)


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_those_of_the_published_sizes(name: str) -> None:
    *sizes, full, low_rank = SIZES[name]
    costs = llama(*map(int, sizes))
    assert costs.parameters("full") / 1e6 == pytest.approx(full, rel=0.006)
    assert costs.parameters("bottleneck") / 1e6 == pytest.approx(low_rank, rel=0.006)
    assert costs.parameters("rank") == costs.parameters("bottleneck")
    assert costs.state_bytes("full", 2) == 6 * costs.parameters("full")


def test_a_tied_head_counts_once() -> None:
    shape = LlamaShape(2, 64, 128, 64, 64, 1000)
    tied = LlamaShape(2, 64, 128, 64, 64, 1000, is_tied=True)
    loose = LowRankCosts(shape, 16).parameters("full")
    assert loose - LowRankCosts(tied, 16).parameters("full") == 64 * 1000


def test_what_is_reduced_is_what_the_ranks_reduce() -> None:
    """The same counts as in tests/lowrank/test_parallel.py, where they are measured."""
    costs = llama(4096, 11008, 32, 1024)
    assert costs.reduced("full") == 2 * 4096
    assert costs.reduced("rank") == 5 * 4096 + 2 * 11008
    assert costs.reduced("rank", is_backward=True) == 6 * 4096 + 11008
    assert costs.reduced("bottleneck") == 7 * 1024 + 2
    published = {"full": 0.25, "rank": 1.32, "bottleneck": 0.22}  # GiB of a layer, 4 x 4096 tokens
    for way, gib in published.items():
        assert costs.reduced(way) * 2 * 16384 / 2**30 == pytest.approx(gib, rel=0.02)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_ratios(name: str) -> None:
    """The same wins, and no ratio is further off than a sixth."""
    theirs, ours = PUBLISHED[name], computed(name)
    for then, now in zip(ratios(theirs), ratios(ours), strict=True):
        assert now / then == pytest.approx(1, abs=1 / 6)
        assert (now > 1.05) == (then > 1.05)
    for then, now in zip(theirs, ours, strict=True):
        assert now / then == pytest.approx(1, abs=0.24)


def test_more_of_a_device_takes_less_of_its_part_alone() -> None:
    costs, job = CASES["7B, TP 4"]
    before = costs.step("rank", job, ONES)
    for part, faster in (
        ("arithmetic", DeviceRates(2, 1, 1, 1)),
        ("memory", DeviceRates(1, 2, 1, 1)),
        ("link", DeviceRates(1, 1, 2, 1)),
        ("host", DeviceRates(1, 1, 1, 0.5)),
    ):
        after = costs.step("rank", job, faster)
        assert {name: before[name] / after[name] for name in before} == {
            **dict.fromkeys(before, 1), part: 2
        }  # fmt: skip


def test_a_rank_alone_has_no_link_and_stages_wait_for_the_first_microbatch() -> None:
    costs = CASES["1B, TP 1"][0]
    alone = costs.step("full", TrainingJob(4096, 4096), ONES)
    assert alone["link"] == 0
    piped = costs.step("full", TrainingJob(4096, 4096, pp=2, microbatches=4), ONES)
    assert piped["arithmetic"] == pytest.approx(alone["arithmetic"] / 2 * 5 / 4)
    equal = [costs.step(way, TrainingJob(4096, 4096), ONES)["arithmetic"] for way in WAYS[1:]]
    assert equal[0] == equal[1] < alone["arithmetic"]


@pytest.mark.parametrize(
    ("job", "way", "words"),
    [
        (TrainingJob(1, 1, tp=3), "full", ("q_proj", "3 ranks divide")),
        (TrainingJob(1, 1, tp=3), "rank", ("of pairs", "3 ranks divide")),
        (TrainingJob(1, 1, tp=3), "bottleneck", ("q_proj", "2048")),
        (TrainingJob(1, 1, pp=25), "bottleneck", ("24 stages",)),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(
    job: TrainingJob, way: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as caught:
        CASES["1B, TP 1"][0].step(way, job, ONES)
    text = " ".join(str(caught.value).split())
    assert [word for word in words if word not in text] == []


def test_a_rank_that_is_too_large_is_refused_with_the_layer() -> None:
    with pytest.raises(UsageError, match="k_proj"):
        LowRankCosts(LlamaShape(2, 64, 128, 64, 16, 1000), 16)
