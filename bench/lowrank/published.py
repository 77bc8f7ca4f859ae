"""The times that BOOST has published beside those of `statehold plan lowrank`.

Owns: the table (arXiv 2512.12131), and the rates that are nearest to it: those of a device and its
link that make the sum of squared logarithms of twelve times smallest. Sizes and tokens are those of
the authors' configurations; 3B and 13B have none, and get the usual ones of a Llama.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from statehold.planners.lowrank import WAYS, DeviceRates, LlamaShape, LowRankCosts, TrainingJob

_VOCABULARY = 32000
FITTED = DeviceRates(flops=2.8e14, memory=9e11, link=2.8e11, host_s=1e-3)


def _case(layers: int, width: int, ff: int, job: TrainingJob) -> tuple[LowRankCosts, TrainingJob]:
    shape = LlamaShape(layers, width, ff, width, width, _VOCABULARY, is_tied=True)
    return LowRankCosts(shape, width // 4), job


CASES = {
    "1B, TP 1": _case(24, 2048, 5472, TrainingJob(16384, 4096)),
    "3B, TP 2": _case(26, 3200, 8640, TrainingJob(16384, 4096, tp=2, microbatches=4)),
    "7B, TP 4": _case(32, 4096, 11008, TrainingJob(16384, 4096, tp=4, microbatches=4)),
    "13B, TP 4 x PP 2": _case(40, 5120, 13824, TrainingJob(32768, 4096, 4, 2, 8)),
}
PUBLISHED = {
    "1B, TP 1": (0.85, 0.56, 0.59),
    "3B, TP 2": (1.14, 1.41, 0.78),
    "7B, TP 4": (1.06, 1.64, 0.72),
    "13B, TP 4 x PP 2": (2.07, 2.42, 1.30),
}


def computed(name: str, device: DeviceRates = FITTED) -> tuple[float, ...]:
    """Seconds of a step in each of WAYS."""
    costs, job = CASES[name]
    return tuple(sum(costs.step(way, job, device).values()) for way in WAYS)


def ratios(times: tuple[float, ...]) -> tuple[float, float]:
    """Full rank, and pairs along the rank, over pairs along the bottleneck."""
    full, rank, bottleneck = times
    return full / bottleneck, rank / bottleneck


def _distance(device: DeviceRates) -> float:
    return sum(
        math.log(ours / theirs) ** 2
        for name, times in PUBLISHED.items()
        for ours, theirs in zip(computed(name, device), times, strict=True)
    )


def fit() -> DeviceRates:
    """The nearest rates of a grid."""
    grid = itertools.product(range(14, 33), range(4, 21), range(60, 320, 20), range(0, 26, 2))
    return min(
        (DeviceRates(f * 1e13, m * 1e11, link * 1e9, h * 1e-4) for f, m, link, h in grid),
        key=_distance,
    )


def lines() -> Iterator[str]:
    """A table in Markdown."""
    yield "| | published | computed | full / bottleneck | rank / bottleneck |"
    yield "|---|---|---|---|---|"
    for name, theirs in PUBLISHED.items():
        ours = computed(name)
        cells = [", ".join(f"{each:.2f}" for each in times) for times in (theirs, ours)]
        for then, now in zip(ratios(theirs), ratios(ours), strict=True):
            cells.append(f"{then:.2f}, {now:.2f} ({now / then - 1:+.0%})")
        yield f"| {name} | {' | '.join(cells)} |"
