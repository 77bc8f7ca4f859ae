"""What a model costs on a layout of devices: tokens that fit, the time of a step and of a prefill.

A roofline: each part of a step takes as long as its arithmetic or its reads, the longer of both.

    linear     2 active FLOP a token, or all weights that the tokens of the step use
    attention  each earlier token, or its keys and values
    link       two all-reduces a layer over TP ranks, and a hand-over between PP stages
    host       once a step and stage

The PP stages work on as many parts of the batch at the same time, so each token passes all stages.

Invariants: what a device reaches of its data sheet is the same for every model and layout. A load
and a prefill are two straight lines in two terms, whether they come from a data sheet or from
measurements, so one comparison decides between them. The benchmark bench.serving fits these.
Not here: counts of a model (shapes), requests over time (the package).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from statehold.errors import refused
from statehold.planners.shapes import ModelShape
from statehold.units import format_bytes

# What devices reach of their data sheets, the latency of a hop, and what a step costs beside its
# parts: fitted to 36 throughputs of one model that NVIDIA has published (docs/planning.md).
FLOPS_SHARE, BANDWIDTH_SHARE, LINK_SHARE = 0.61, 0.63, 0.71
HOP_S, HOST_S = 21e-6, 3.4e-3
_ACTIVATION_BYTES = 2


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device by its data sheet. flops: dense, of 16 bits. link: to the others, one way."""

    memory: float
    flops: float
    bandwidth: float
    link: float


GPUS = {
    "a100": Gpu(80e9, 312e12, 2.04e12, 300e9),
    "h100": Gpu(80e9, 989e12, 3.35e12, 450e9),
    "h200": Gpu(141e9, 989e12, 4.8e12, 450e9),
    "b200": Gpu(180e9, 2250e12, 8e12, 900e9),
    "l40s": Gpu(48e9, 362e12, 0.864e12, 32e9),
}


class DeviceLayout(NamedTuple):
    """dp replicas of tp * pp devices."""

    dp: int
    tp: int
    pp: int

    def __str__(self) -> str:
        names = [f"{n.upper()} {size}" for n, size in self._asdict().items() if size > 1]
        return " x ".join(names) or "DP 1"


def layouts(shape: ModelShape, devices: int) -> Iterator[DeviceLayout]:
    """All layouts of so many devices whose ranks have equal parts of the heads."""
    for tp in range(1, devices + 1):
        for pp in range(1, devices // tp + 1):
            if devices % (tp * pp) == 0 and shape.heads % tp == 0 and pp <= shape.layers:
                yield DeviceLayout(devices // (tp * pp), tp, pp)


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """How long pages take from a store."""

    bandwidth: float
    lookup_s: float = 0.0

    def seconds(self, nbytes: float) -> float:
        return self.lookup_s + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """How long it takes to compute tokens: each, and each pair of a token and an earlier one."""

    token_s: float
    pair_s: float

    def seconds(self, tokens: float) -> float:
        return tokens * self.token_s + tokens * tokens / 2 * self.pair_s


def is_load_faster(tokens: int, token_bytes: float, load: LoadTimes, prefill: PrefillTimes) -> bool:
    """Whether pages of so many tokens come from the store before they would be computed."""
    return load.seconds(tokens * token_bytes) < prefill.seconds(tokens)


@dataclass(frozen=True)
class ServingCosts:
    """One model on one layout.

    Raises UsageError if the weights leave no memory for a token.
    """

    shape: ModelShape
    gpu: Gpu
    layout: DeviceLayout
    utilization: float = 0.9

    def __post_init__(self) -> None:
        if self.tokens < 1:
            expected = f"more than {format_bytes(int(self._weights))} of weights a device"
            got = format_bytes(int(self.gpu.memory * self.utilization))
            summary = "the weights leave no memory for a token"
            raise refused(summary, expected, got, layout=str(self.layout))

    @cached_property
    def tokens(self) -> int:
        """Tokens that the memory of one replica keeps."""
        kept = self.shape.kv_of_rank(self.layout.tp) * self._stage
        return math.floor((self.gpu.memory * self.utilization - self._weights) / kept)

    @property
    def _stage(self) -> float:
        """The part of the layers that the largest stage has."""
        return -(-self.shape.layers // self.layout.pp) / self.shape.layers

    @property
    def _weights(self) -> float:
        return self.shape.weights * self._stage / self.layout.tp

    @property
    def _flops(self) -> float:
        """FLOP/s of the ranks of a stage. Weights of 8 bits are multiplied at twice the rate."""
        wider = 2 / self.shape.weight_bytes
        return self.gpu.flops * FLOPS_SHARE * self.layout.tp * max(1.0, wider)

    @cached_property
    def prefill(self) -> PrefillTimes:
        """Of one replica, whose stages all compute."""
        shape, (_, tp, pp) = self.shape, self.layout
        moved = 2 * shape.layers * self._all_reduce_s(1) / pp if tp > 1 else 0.0
        pairs = 2 * shape.attended_first * shape.heads * shape.layers
        flops = self._flops / self._stage
        return PrefillTimes(2 * shape.active / flops + moved, pairs / flops)

    def parts(self, batch: float, context: float) -> dict[str, float]:
        """Seconds of a step in which each of `batch` requests, with `context` tokens together, gets
        a token."""
        shape, (_, tp, pp) = self.shape, self.layout
        each = max(1.0, batch / pp)
        read = shape.read + (shape.experts.parameters * shape.experts.share(each)
                             if shape.experts else 0)  # fmt: skip
        linear = (2 * shape.active * each / self._flops, self._read_s(read * shape.weight_bytes))
        attended = 2 * shape.attended * shape.heads * shape.layers
        kept = shape.kv_of_rank(tp) * tp  # every rank reads its own
        attention = (attended / self._flops, self._read_s(kept))
        counts, both = (pp * self._stage, self._stage * context), (linear, attention)
        hop_s = HOP_S * (1 + math.log2(tp)) + self._all_reduce_s(each)
        link = 2 * math.ceil(shape.layers / pp) * hop_s if tp > 1 else 0.0
        link += HOP_S + self._sent_s(each) if pp > 1 else 0.0
        return {
            "arithmetic": sum(n * c for n, (c, r) in zip(counts, both, strict=True) if c > r),
            "reads": sum(n * r for n, (c, r) in zip(counts, both, strict=True) if c <= r),
            "link": pp * link,
            "host": pp * HOST_S,
        }

    def step_s(self, batch: float, context: float) -> float:
        return sum(self.parts(batch, context).values())

    def _read_s(self, nbytes: float) -> float:
        return nbytes / (self.layout.tp * self.gpu.bandwidth * BANDWIDTH_SHARE)

    def _all_reduce_s(self, tokens: float) -> float:
        return 2 * (self.layout.tp - 1) / self.layout.tp * self._sent_s(tokens)

    def _sent_s(self, tokens: float) -> float:
        return tokens * self.shape.width * _ACTIVATION_BYTES / (self.gpu.link * LINK_SHARE)
