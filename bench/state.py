"""The training state that every benchmark saves and restores, and the proof that it came back.

Owns: a Llama-shaped model in bf16, `MasterAdamW` with fp32 master weights and both moments, and
the deterministic content of all of it.
Invariants: the content of every tensor is a pure function of (seed, tensor index, number of
optimizer steps), so a restored state is compared with its source bit for bit without a second copy
in memory.
Not here: how the state is saved (peers/), how long a step takes (train.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

PATTERN_ELEMENTS = 1 << 22  # 16 MiB of fp32, larger than the caches, filled once per process
MARK_ELEMENTS = 1024  # what one optimizer step rewrites at the head of every tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a decoder. Even sizes only: TorchSnapshot loses odd-length bf16 tensors."""

    dim: int
    layers: int
    hidden: int
    vocab: int


SHAPES = {
    "smoke": Shape(dim=64, layers=2, hidden=176, vocab=512),
    "80m": Shape(dim=640, layers=11, hidden=1728, vocab=16000),
    "130m": Shape(dim=768, layers=12, hidden=2048, vocab=32000),
    "350m": Shape(dim=1024, layers=22, hidden=2816, vocab=32000),
}


def _linear(inputs: int, outputs: int) -> nn.Linear:
    with torch.device("meta"):  # no initialisation: `fill` gives the content
        layer = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
    return layer.to_empty(device="cpu")


def _norm(dim: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(dim, dtype=torch.bfloat16, device="cpu"))


class Layer(nn.Module):
    """The parameters of one decoder layer: 7 matrices and 2 norms."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        for name in ("wq", "wk", "wv", "wo"):
            self.add_module(name, _linear(shape.dim, shape.dim))
        self.w1 = _linear(shape.dim, shape.hidden)
        self.w2 = _linear(shape.hidden, shape.dim)
        self.w3 = _linear(shape.dim, shape.hidden)
        self.attention_norm = _norm(shape.dim)
        self.ffn_norm = _norm(shape.dim)


class Decoder(nn.Module):
    """The parameters of a Llama-style decoder; the benchmarks never call it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Parameter(
            torch.empty(shape.vocab, shape.dim, dtype=torch.bfloat16, device="cpu")
        )
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = _norm(shape.dim)
        self.output = _linear(shape.dim, shape.vocab)


class MasterAdamW(torch.optim.Optimizer):
    """The state of a mixed-precision AdamW (fp32 master, exp_avg, exp_avg_sq), with a cheap step.

    A step rewrites only the head of every tensor, with a value that depends on the number of the
    step. That needs a gate, moves every version counter and exposes a torn copy, and still takes
    little time, so the time of the loop is that of the saves.
    """

    def __init__(self, params: Any, lr: float = 3e-4) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.1, "step": 0})
        for parameter in self._parameters():
            for key in ("master", "exp_avg", "exp_avg_sq"):
                self.state[parameter][key] = torch.empty(
                    parameter.shape, dtype=torch.float32, device="cpu"
                )

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                _mark(parameter, group["step"])
                for tensor in self.state[parameter].values():
                    _mark(tensor, group["step"])

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load in place. torch's own would replace the tensors and cast the masters to bf16."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for index, parameter in enumerate(self._parameters()):
            for key, tensor in self.state[parameter].items():
                source = state_dict["state"][index][key]
                if source is not tensor:
                    tensor.copy_(source)


def _mark_value(step: int) -> float:
    return float(step % 251 + 1)  # exact in bf16, never zero


def _mark(tensor: torch.Tensor, step: int) -> None:
    tensor.view(-1)[:MARK_ELEMENTS].fill_(_mark_value(step))


@dataclass(slots=True)
class TrainingState:
    """A model, its optimizer and the progress of the run: what a checkpointer is given."""

    model: Decoder
    optimizer: MasterAdamW
    progress: dict[str, Any] = field(default_factory=lambda: {"step": 0, "epoch": 1.5})

    @classmethod
    def of(cls, shape: Shape) -> TrainingState:
        """A state of these dimensions; its content is arbitrary until `fill`."""
        model = Decoder(shape)
        return cls(model, MasterAdamW(model.parameters()))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor under one flat name, in a fixed order."""
        named = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for index, entries in self.optimizer.state_dict()["state"].items():
            named |= {f"optimizer.{index}.{key}": value for key, value in entries.items()}
        return named

    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def step(self) -> int:
        """One optimizer step, counted in the progress too; returns the number of the step."""
        self.optimizer.step()
        self.progress["step"] = self.optimizer.param_groups[0]["step"]
        return int(self.progress["step"])

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        """Give every tensor the content of `seed` before any optimizer step."""
        pattern = _pattern()
        for index, tensor in enumerate(self.tensors().values()):
            source = pattern.to(tensor.dtype)
            for begin, end, at in _tiles(tensor.numel(), seed, index):
                tensor.view(-1)[begin:end].copy_(source[at : at + end - begin])

    @torch.no_grad()
    def wipe(self) -> None:
        """Forget everything, so that only a restore can make `difference` return None."""
        for tensor in self.tensors().values():
            tensor.zero_()
        self.optimizer.param_groups[0]["step"] = -1
        self.progress["step"] = -1

    def difference(self, seed: int, step: int) -> str | None:
        """The first thing that is not bit for bit the state of (seed, step); None when all is."""
        if self.progress["step"] != step:
            return f"progress.step: expected {step}, got {self.progress['step']}"
        if (got := self.optimizer.param_groups[0]["step"]) != step:
            return f"optimizer param_groups[0].step: expected {step}, got {got}"
        pattern = _pattern()
        for index, (name, tensor) in enumerate(self.tensors().items()):
            if not _same(tensor, pattern.to(tensor.dtype), seed, index, step):
                return f"{name}: content differs from its source"
        return None


def build(size: str) -> TrainingState:
    """A state of the named size; its content is arbitrary until `fill`."""
    return TrainingState.of(SHAPES[size])


_pattern_cache: list[torch.Tensor] = []


def _pattern() -> torch.Tensor:
    if not _pattern_cache:
        generator = torch.Generator().manual_seed(1)
        _pattern_cache.append(
            torch.randn(PATTERN_ELEMENTS, generator=generator, device="cpu") * 0.02
        )
    return _pattern_cache[0]


def _tiles(elements: int, seed: int, index: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, where in the pattern) of the pieces that tile one tensor."""
    at = (seed * 104729 + index * 7919) % PATTERN_ELEMENTS
    begin = 0
    while begin < elements:
        end = min(elements, begin + PATTERN_ELEMENTS - at)
        yield begin, end, at
        begin, at = end, 0


def _same(tensor: torch.Tensor, source: torch.Tensor, seed: int, index: int, step: int) -> bool:
    bits = torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32
    flat = tensor.detach().view(-1)
    marked = min(MARK_ELEMENTS, tensor.numel()) if step > 0 else 0
    if marked and not bool((flat[:marked] == _mark_value(step)).all()):
        return False
    for begin, end, at in _tiles(tensor.numel(), seed, index):
        skip = max(0, min(marked, end) - begin)
        expected = source[at + skip : at + end - begin]
        if not torch.equal(flat[begin + skip : end].view(bits), expected.view(bits)):
            return False
    return True
