"""What a Llama of low-rank pairs costs beside one of linear layers, and how long its steps take.

    full        linear layers, split by Megatron's rule
    rank        pairs, split along the rank by the same rule: their inputs and outputs are whole
    bottleneck  pairs, split along the bottleneck (BOOST, arXiv 2512.12131): inputs and outputs are
                split by features, and the narrow products are whole

The time of a step is a sum. A backward has twice the arithmetic of its forward.

    arithmetic  the products of linear layers, pairs, attention and the head
    memory      what they, the norms, attention and the MLP read and write
    link        all-reduces in a ring: 2 (tp - 1) / tp of what is reduced
    host        once a layer and microbatch

Invariants: counts are exact. A time has no constant of its own: a device reaches what the caller
says. The same device is as good at each of the three.
Not here: pairs themselves (the package lowrank), config.json (planners/shapes).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from statehold.errors import refused

WAYS = ("full", "rank", "bottleneck")
_FIELDS = 3  # a weight and its two moments, each of one dtype


def check_sizes(in_features: int, out_features: int, rank: int, **where: str) -> None:
    """Raises UsageError unless a pair of this rank is smaller than the layer."""
    if type(rank) is not int or rank < 1:
        raise refused(
            "the rank of a pair makes no sense", "a whole number from 1 on", rank, **where
        )
    if min(in_features, out_features) < 2 * rank:
        expected = f"in and out of at least twice the rank: {2 * rank}"
        got = f"{in_features} and {out_features}"
        hint = f"a rank (rank=, --rank) up to {min(in_features, out_features) // 2}"
        raise refused("a layer is too small for a pair of this rank", expected, got, hint, **where)


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """query, kv: features of all heads together. head: those of one.

    beside: parameters of a decoder layer that pairs have, too: biases, and norms of heads.
    """

    layers: int
    width: int
    ff: int
    query: int
    kv: int
    vocabulary: int
    is_tied: bool = False
    head: int = 1
    beside: int = 0

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The layers of a decoder layer that become pairs: in and out."""
        width, ff = self.width, self.ff
        return {
            "q_proj": (width, self.query), "k_proj": (width, self.kv), "v_proj": (width, self.kv),
            "o_proj": (self.query, width), "gate_proj": (width, ff), "up_proj": (width, ff),
            "down_proj": (ff, width),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """tokens: of a step. length: of a sequence. microbatches: of a step, in each pipeline."""

    tokens: int
    length: int
    tp: int = 1
    pp: int = 1
    microbatches: int = 1


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What a device reaches, not its data sheet: FLOP/s, bytes/s of its memory and of its link.

    host_s: what a layer costs its host, forward and backward together.
    """

    flops: float
    memory: float
    link: float
    host_s: float = 0.0


@dataclass(frozen=True)
class LowRankCosts:
    """A model and a rank. Elements are of a token and a decoder layer.

    Raises UsageError if a layer is too small for the rank.
    """

    shape: LlamaShape
    rank: int

    def __post_init__(self) -> None:
        for name, (in_features, out_features) in self.shape.linears.items():
            check_sizes(in_features, out_features, self.rank, layer=name)

    @cached_property
    def _sides(self) -> tuple[int, int]:
        """The inputs and the outputs of the linear layers, added up."""
        ins, outs = zip(*self.shape.linears.values(), strict=True)
        return sum(ins), sum(outs)

    def matrices(self, way: str) -> int:
        """Parameters of the linear layers or pairs of a decoder layer."""
        if way == "full":
            return sum(a * b for a, b in self.shape.linears.values())
        return self.rank * sum(self._sides)

    def parameters(self, way: str) -> int:
        """All of the model, with norms, embeddings and head."""
        shape = self.shape
        tables = shape.vocabulary * shape.width * (1 if shape.is_tied else 2)
        norms = (2 * shape.layers + 1) * shape.width
        return shape.layers * (self.matrices(way) + shape.beside) + tables + norms

    def state_bytes(self, way: str, itemsize: int) -> int:
        """A step: weights and both moments of AdamW."""
        return _FIELDS * itemsize * self.parameters(way)

    def reduced(self, way: str, *, is_backward: bool = False) -> int:
        """Elements that are all-reduced."""
        ins, outs = self._sides
        if way == "rank":
            return ins if is_backward else outs
        # The two numbers beside the bottlenecks are the sums of squares of both norms.
        return 2 * self.shape.width if way == "full" else len(self.shape.linears) * self.rank + 2

    def kept(self) -> dict[str, int]:
        """Elements that a backward keeps, by what is computed again."""
        shape = self.shape
        narrow = len(shape.linears) * self.rank
        states = 4 * shape.width + 2 * (shape.query + shape.kv) + 3 * shape.ff
        return {
            "nothing, full": states,
            "nothing": states + 2 * narrow,  # before and after the activation
            "all but bottlenecks": narrow + shape.width,
            "layers": shape.width,
        }

    # -- time --------------------------------------------------------------------------------

    def step(self, way: str, job: TrainingJob, device: DeviceRates) -> dict[str, float]:
        """Seconds of a step, by what takes them. Raises UsageError if the ranks do not divide."""
        self.check(way, job)
        layers = self.shape.layers / job.pp
        head = 2 * self.shape.vocabulary * self.shape.width / job.tp / job.pp
        flop = 3 * job.tokens * (layers * self._flop(way, job) + head)
        touched = 3 * job.tokens * layers * self._touched(way, job.tp) * 2
        elements = self.reduced(way) + self.reduced(way, is_backward=True)
        ring = 2 * (job.tp - 1) / job.tp
        reduced = job.tokens * layers * elements * 2 * ring
        # The first microbatch fills the pipeline, and the last one leaves it.
        filled = 1 + (job.pp - 1) / job.microbatches
        return {
            "arithmetic": flop / device.flops * filled,
            "memory": touched / device.memory * filled,
            "link": reduced / device.link * filled if reduced else 0.0,
            "host": layers * job.microbatches * device.host_s * filled,
        }

    def _flop(self, way: str, job: TrainingJob) -> float:
        """Of a token forward, on a rank. Half of the other tokens of a sequence are before it."""
        attention = 2 * self.shape.query * job.length
        return 2 * self.matrices(way) / job.tp + attention / (1 if way == "rank" else job.tp)

    def _touched(self, way: str, tp: int) -> float:
        """Elements that a rank reads and writes for a token forward."""
        shape = self.shape
        # Inputs of q, k, v, gate and up, outputs of o and down; norms and residuals.
        of_width = (5 + 2 + 2 * 2 + 2 * 3) * shape.width
        # Outputs of q, k and v, their rotation, attention, and the input of o.
        inner = 6 * shape.query + 6 * shape.kv
        inner += (2 + 3 + 1) * shape.ff  # outputs of gate and up, their product, the input of down
        narrow = 4 * len(shape.linears) * self.rank  # written, activated, read
        if way == "full":
            return of_width + inner / tp
        if way == "rank":
            return of_width + inner + narrow / tp
        return (of_width + inner) / tp + narrow

    def check(self, way: str, job: TrainingJob) -> None:
        """Raises UsageError if the ranks do not divide the model."""
        shape = self.shape
        sizes: dict[str, tuple[int, ...]] = {"of pairs": (self.rank,)}
        if way != "rank":
            heads = {"heads": (shape.query // shape.head,), "KV heads": (shape.kv // shape.head,)}
            sizes = {**shape.linears, **heads}
        for name, each in sizes.items():
            if uneven := [size for size in each if size % job.tp]:
                expected = f"a size that {job.tp} ranks divide"
                raise refused("a layer cannot be split evenly", expected, uneven[0], layer=name)
        if not 1 <= job.pp <= self.shape.layers:
            expected = f"1 to {self.shape.layers} stages, one for each layer"
            raise refused("the layers cannot be split into so many stages", expected, job.pp)
