"""Linear layers as pairs of factors with an activation between (docs/lowrank.md).

    y = activation(x a^T) b^T + bias        a: (rank, in)    b: (out, rank)

The narrow product in the middle is the bottleneck: all that a pair moves and keeps is that wide
(CoLA, arXiv 2502.10940).

Invariants: a pair of a layer has its dtype, device and bias, and is as frozen as it was. convert()
replaces all layers that it was asked for, or none. What it cannot replace is refused by name.
Not here: several ranks (parallel), what pairs cost (planners/lowrank).
"""

from __future__ import annotations

import fnmatch
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from statehold.errors import UsageError, refused, shown
from statehold.planners.lowrank import check_sizes

__all__ = ["LowRankLinear", "ReplacedLayer", "convert", "keep_bottlenecks"]

Start = Literal["published", "svd"]

# The linear layers of a decoder layer, by the names of Hugging Face's Llama and of torchtitan's.
LLAMA = (
    *(f"*.{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")),
    *(f"*.attention.{name}" for name in ("wq", "wk", "wv", "wo")),
    *(f"*.feed_forward.{name}" for name in ("w1", "w2", "w3")),
)


class _Kept(threading.local):
    """A backward may run forwards again on threads of its own."""

    is_on = False

    def __enter__(self) -> None:
        self.is_on = True

    def __exit__(self, *_: object) -> None:
        self.is_on = False


_KEPT = _Kept()


def kept() -> AbstractContextManager[None]:
    """Around what a backward keeps. Compilers, which choose that themselves, do not see it."""
    return nullcontext() if torch.compiler.is_compiling() else _KEPT


class LowRankLinear(nn.Module):
    """A linear layer as a pair of factors.

    Args:
        in_features: of the input.
        out_features: of the output.
        rank: of the pair, at most half of either.
        bias: whether a bias is added.
        activation: "silu", or None for a plain product of two factors.
        device: where the factors are.
        dtype: what they are.

    Raises:
        UsageError: a size makes no sense; the error says which.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        *,
        bias: bool = False,
        activation: str | None = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(in_features, out_features, rank)
        if activation not in ("silu", None):
            raise refused("the activation of a pair is not known", "'silu' or None", activation)
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.activation = activation

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.a, self.b = parameter(rank, in_features), parameter(out_features, rank)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", parameter(out_features) if bias else None)
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        rank: int,
        *,
        activation: str | Literal["of the start"] | None = "of the start",
        start: Start = "published",
    ) -> LowRankLinear:
        """A pair in place of `linear`.

        start: "published" draws the factors; "svd" is the nearest product to the weight, without an
        activation unless one is given.
        """
        if activation == "of the start":
            activation = "silu" if start == "published" else None
        weight, bias = linear.weight, linear.bias
        made = cls(
            linear.in_features, linear.out_features, rank, bias=bias is not None,
            activation=activation, device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        if start == "svd":
            if weight.is_meta:
                raise refused("an svd needs trained weights", "a weight with values", "meta")
            made._take(weight, bias)
        elif start != "published":
            raise refused("the start of a pair is not known", "'published' or 'svd'", start)
        made.train(linear.training).requires_grad_(weight.requires_grad)
        if made.bias is not None and bias is not None:
            made.bias.requires_grad_(bias.requires_grad)
        return made

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the factors as published: randn * rank**-0.25 * (in + out)**-0.25."""
        deviation = (self.rank * (self.in_features + self.out_features)) ** -0.25
        for factor in (self.a, self.b):
            nn.init.normal_(factor, std=deviation)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @torch.no_grad()
    def _take(self, weight: Tensor, bias: Tensor | None) -> None:
        """Both factors get the roots of the largest singular values."""
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        left, values, right = torch.linalg.svd(wide, full_matrices=False)
        roots = values[: self.rank].sqrt()
        self.a.copy_(roots[:, None] * right[: self.rank])
        self.b.copy_(left[:, : self.rank] * roots)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            bottleneck = functional.linear(x, self.a)
        else:
            with kept():
                bottleneck = functional.linear(x, self.a)
        return functional.linear(self.activated(bottleneck), self.b, self.bias)

    def activated(self, bottleneck: Tensor) -> Tensor:
        return bottleneck if self.activation is None else functional.silu(bottleneck)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}, "
            f"bias={self.bias is not None}, activation={self.activation}"
        )


# -- convert ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplacedLayer:
    """A layer that convert() has replaced."""

    name: str
    in_features: int
    out_features: int
    rank: int
    parameters_before: int
    parameters_after: int


def convert(
    model: nn.Module,
    *,
    rank: int,
    where: str | Sequence[str] = LLAMA,
    activation: str | Literal["of the start"] | None = "of the start",
    start: Start = "published",
) -> list[ReplacedLayer]:
    """Replace linear layers of a model by pairs, in place. Returns what was replaced.

    Args:
        model: any module, before it is wrapped or sharded.
        rank: of each pair.
        where: patterns of names, such as "*.q_proj"; default: the layers of Llama.
        activation: of each pair; default: silu, and none for start="svd".
        start: "published", or "svd" of the trained weights.

    Raises:
        UsageError: a layer cannot be replaced, or there is none. The model is unchanged.
    """
    chosen = [*_chosen(model, [where] if isinstance(where, str) else where)]
    if not chosen:
        facts = {"expected": "a pattern of names, such as '*.q_proj'", "got": shown(where)}
        raise UsageError("the model has no linear layer of these names", facts=facts)
    for name, module in model.named_modules():
        if kinds := _WRAPPERS.intersection(each.__name__ for each in type(module).__mro__):
            where, expected = name or "the model itself", "a model that nothing has wrapped yet"
            raise refused("a wrapper does not see pairs", expected, ", ".join(kinds), module=where)
    owners = _owners(model)
    for name, linear in chosen:
        _check(name, linear, rank, owners, model.get_submodule(name.rpartition(".")[0]))
    # All are made before one is put in its place: what fails leaves the model as it was.
    made = [
        LowRankLinear.from_linear(linear, rank, activation=activation, start=start)
        for _, linear in chosen
    ]
    for (name, _), pair in zip(chosen, made, strict=True):
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, pair)
    return [
        ReplacedLayer(
            name, linear.in_features, linear.out_features, rank, _count(linear), _count(pair)
        )
        for (name, linear), pair in zip(chosen, made, strict=True)
    ]


def _chosen(model: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear) and any(fnmatch.fnmatchcase(name, p) for p in patterns):
            yield name, module


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """The modules that have each parameter, by its id."""
    found = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            found[id(parameter)].append(name)
    return found


def _check(
    name: str, linear: nn.Linear, rank: int, owners: dict[int, list[str]], holder: nn.Module
) -> None:
    if not name:
        raise UsageError("the linear layer is the model itself", hint="use LowRankLinear")
    others = {each for own in linear.parameters() for each in owners[id(own)] if each != name}
    if type(linear.weight) is not nn.Parameter:
        expected, got = "a weight not sharded or quantized", type(linear.weight).__name__
    elif carried := _carried(linear):
        expected, got = "weight and bias alone", f"one that also has {', '.join(carried)}"
    elif type(linear) is not nn.Linear and not _is_one_product(linear):
        expected, got = "one product, linear(x, weight, bias)", type(linear).__name__
    elif isinstance(holder, _READERS):
        expected, got = "one that is called", f"one whose weight {type(holder).__name__} reads"
    elif others:
        expected, got = (
            "parameters of its own",
            f"one that shares them: {', '.join(sorted(others))}",
        )
    else:
        check_sizes(linear.in_features, linear.out_features, rank, layer=name)
        return
    hint = "leave it out, with where="
    raise refused("a layer cannot become a pair", expected, got, hint, layer=name)


def _carried(linear: nn.Linear) -> list[str]:
    """What a linear layer has beside weight and bias: hooks, a forward, buffers, parameters."""
    named = dict(linear.named_parameters(recurse=False))
    found = [name for name in named if name not in ("weight", "bias")]
    places = [name for name, each in vars(nn.Module()).items() if isinstance(each, dict)]
    found += [name for name in places if vars(linear)[name] and name != "_parameters"]
    found += ["forward"] * ("forward" in vars(linear))
    hooks = "_backward_hooks", "_post_accumulate_grad_hooks"
    return found + [f"{n}: {h}" for n, each in named.items() for h in hooks if getattr(each, h, 0)]


class _Calls(TorchFunctionMode):
    """The functions of torch that are called, with what they get and give."""

    seen: list[tuple[Any, ...]]

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "__get__":  # attributes compute nothing
            given = (*args, *(kwargs or {}).values())
            self.seen.append((func, [id(each) for each in given if each is not None], found))
        return found


def _is_one_product(linear: nn.Linear) -> bool:
    """Whether all that a subclass computes is linear(x, weight, bias), as torchtitan's does."""
    x, calls = torch.empty_like(linear.weight[:1]), _Calls()
    calls.seen = []
    try:
        with torch.no_grad(), calls:
            found = linear.forward(x)
        ((function, inputs, product),) = calls.seen
    except Exception:
        return False  # it needs more than an input, or calls more than one function
    own = [id(each) for each in (x, *linear.parameters())]
    return function is functional.linear and inputs == own and product is found


# What knows the parameters of a model from the moment on when it has wrapped it.
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "OptimizedModule",
             "DeepSpeedEngine"}  # fmt: skip
_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # of weights of their linear layers


def _count(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


# -- keep_bottlenecks ------------------------------------------------------------------------------


def keep_bottlenecks(model: nn.Module, where: str | Sequence[str] = "*") -> list[str]:
    """Let a backward keep the bottlenecks and the inputs of layers, and compute the rest again.

    Under tensor parallelism along the bottleneck (statehold.lowrank.parallel) it keeps what the
    all-reduces gave, so nothing that is computed again communicates. Gradients have the same bits.

    Args:
        model: a model with pairs, before FSDP wraps it.
        where: patterns of names of layers; default: all members of the lists of modules that have
            pairs.

    Returns the names of the layers. Raises UsageError if there is none, or all are kept already.
    """
    patterns = [where] if isinstance(where, str) else where
    found = [
        (name, layer)
        for name, layer in _layers(model)
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if not found:
        facts = {"expected": "a list of modules with LowRankLinear in them", "got": shown(where)}
        raise UsageError("the model has no layer with pairs to keep", facts=facts)
    for _, layer in found:
        swap(layer, _Keeping)
    return [name for name, _ in found]


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost members of lists of modules that have pairs, and are not kept yet."""
    inner: list[str] = []
    seen: set[nn.Module] = set()  # a layer may stand in two lists
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict) or name.startswith(tuple(inner)):
            continue
        for own, layer in module.named_children():
            if isinstance(layer, nn.ModuleList | nn.ModuleDict):
                continue  # its own members are meant
            if any(isinstance(each, LowRankLinear) for each in layer.modules()):
                inner.append(f"{name}.{own}.")
                if not isinstance(layer, _Keeping) and layer not in seen:
                    seen.add(layer)
                    yield f"{name}.{own}".lstrip("."), layer


class _Keeping(nn.Module):
    """The forward of a layer under selective checkpointing.

    It is not compiled: a compiler would choose itself what a backward keeps.
    """

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def forward(self, *args: Any, **options: Any) -> Any:
        # A layer that runs again would fill its cache a second time. Who trains has none; outside
        # of training a cache is meant, and the layer runs once.
        caches = {name: no for name, no in _NO_CACHE.items() if options.get(name, no) is not no}
        if not torch.is_grad_enabled() or (caches and not self.training):
            return super().forward(*args, **options)
        run = partial(super().forward, **{**options, **caches})
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts)


# As Hugging Face's layers set caches aside under checkpointing.
_NO_CACHE = {"use_cache": False, "past_key_values": None, "past_key_value": None,
             "layer_past": None}  # fmt: skip


def _policy(_: object, operation: object, *__: Any, **___: Any) -> CheckpointPolicy:
    name = str(operation)
    is_kept = name in _REDUCTIONS or (_KEPT.is_on and name in _PRODUCTS)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


_PRODUCTS = ("aten.mm.default", "aten.bmm.default")
_REDUCTIONS = ("_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default")


def swap(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Put `mixin` before the class of a module, as FSDP does: names of parameters stay, and copies
    of the module have it, too."""
    kinds: Any = mixin, type(module)
    module.__class__ = _swapped(*kinds)


@cache
def _swapped(mixin: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    members = {"__module__": own.__module__, "__reduce_ex__": _reduced}
    return type(own.__name__, (mixin, own), members)


def _reduced(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """For pickle: no module has the class of a swapped one under its name."""
    return _made, type(module).__bases__, super(nn.Module, module).__reduce_ex__(protocol)[2]


def _made(*kinds: Any) -> nn.Module:
    made = _swapped(*kinds)
    return made.__new__(made)
