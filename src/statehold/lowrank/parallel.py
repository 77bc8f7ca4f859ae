"""Tensor parallelism of pairs, as styles for torch.distributed.tensor.parallel.parallelize_module.

    along the bottleneck   a: columns    b: rows       x and y are split by features, and the
    (BOOST, 2512.12131)    Shard(1)      Shard(0)      narrow product is all-reduced
    along the rank         a: rows       b: columns    x and y are whole, and the wide product is
    (Megatron's rule)      Shard(0)      Shard(1)      all-reduced

Along the bottleneck, hidden states and the residual stay split by features through all layers, and
one gather follows the last norm. Pairs with one input are grouped with the norm before them: one
product, and one all-reduce that also has the norm's sum of squares.

    S_i = sum(x_i^2)    c_i = sqrt(S_i / d_i + eps)    H_i = (x_i / c_i * gamma_i) A_i * c_i
    H, S = all-reduce of both        result = H / sqrt(S / d + eps)

That is the norm of the whole x, and then the product: a number for each token commutes with both.
c_i only keeps numbers in range, and no gradient passes it.

Invariants: parameters are DTensors of the names that they had, so a step of any layout restores
into any other. parallelize() takes every parameter of a model, or refuses the model. Between
modules there are local tensors. The result of an all-reduce is what keep_bottlenecks() keeps, so
nothing is communicated twice.
Not here: pairs themselves (the package).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from statehold.errors import UsageError, refused, shown
from statehold.lowrank import LowRankLinear, kept, swap

Way = Literal["bottleneck", "rank"]

# Norms and the pairs behind each, and the other pairs, of a decoder layer: as Hugging Face's Llama
# and torchtitan's name them.
_LAYERS = (
    (
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ("self_attn.o_proj", "mlp.down_proj"),
    ),
    (
        ("attention_norm", ("attention.wq", "attention.wk", "attention.wv")),
        ("ffn_norm", ("feed_forward.w1", "feed_forward.w3")),
        ("attention.wo", "feed_forward.w2"),
    ),
)
_HEAD_NORMS = ("q_norm", "k_norm")  # beside the pairs of queries and keys
_EMBEDDINGS, _HEADS = ("embed_tokens", "tok_embeddings"), ("lm_head", "output")
_TAKEN = ("a", "b", "bias", "weight")  # parameters that the styles split


# -- exchange --------------------------------------------------------------------------------------


class _Summed(torch.autograd.Function):
    """The sum of the ranks, in the directions that it is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, on: str) -> Tensor:
        ctx.mesh, ctx.on = mesh, on
        return _sum(x, mesh) if on != "backward" else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (_sum(gradient, ctx.mesh) if ctx.on != "forward" else gradient), None, None


def _sum(x: Tensor, mesh: DeviceMesh) -> Tensor:
    found: Tensor = _wait(funcol.all_reduce(x.contiguous(), "sum", mesh))
    return found


_wait: Any = funcol.wait_tensor


def _summed(x: Tensor, mesh: DeviceMesh, on: str = "both") -> Tensor:
    found: Tensor = _Summed.apply(x, mesh, on)  # type: ignore[no-untyped-call]
    return found


def _local(parameter: object) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _shard(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    for name, placement in placements.items():
        parameter = getattr(module, name, None)
        if parameter is not None:
            split = distribute_tensor(parameter, mesh, [placement])
            frozen = nn.Parameter(split, requires_grad=parameter.requires_grad)
            module.register_parameter(name, frozen)


# -- pairs -----------------------------------------------------------------------------------------


class _Parallel(LowRankLinear):
    mesh: DeviceMesh


class _BottleneckPair(_Parallel):
    def forward(self, x: Tensor) -> Tensor:
        bottleneck = _summed(functional.linear(x, _local(self.a)), self.mesh)
        return functional.linear(self.activated(bottleneck), _local(self.b), _local(self.bias))


class _RankPair(_Parallel):
    def forward(self, x: Tensor) -> Tensor:
        x = _summed(x, self.mesh, "backward")
        with kept():
            bottleneck = functional.linear(x, _local(self.a))
        y = functional.linear(self.activated(bottleneck), _local(self.b))
        y = _summed(y, self.mesh, "forward")
        return y if self.bias is None else y + _local(self.bias)


class _GroupedPair(_Parallel):
    """Its input is the bottlenecks of the group; `begin` is where its own one begins."""

    begin: int

    def forward(self, x: Tensor) -> Tensor:
        bottleneck = x[..., self.begin : self.begin + self.rank]
        return functional.linear(self.activated(bottleneck), _local(self.b), _local(self.bias))


class AlongBottleneck(ParallelStyle):
    """A pair whose input and output are split by features; its narrow product is all-reduced."""

    _mixin: type[_Parallel] = _BottleneckPair
    _placements: Mapping[str, Placement] = {"a": Shard(1), "b": Shard(0), "bias": Shard(0)}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        pair = check_pair(module, device_mesh, self)
        _shard(pair, device_mesh, self._placements)
        swap(pair, self._mixin)
        pair.mesh = device_mesh  # type: ignore[assignment]
        return module

    def sizes(self, pair: LowRankLinear) -> dict[str, int]:
        """What the ranks have equal parts of."""
        return {"in_features": pair.in_features, "out_features": pair.out_features}


class AlongRank(AlongBottleneck):
    """A pair that is split along its rank, by Megatron's rule; its whole output is all-reduced."""

    _mixin = _RankPair
    _placements: Mapping[str, Placement] = {"a": Shard(0), "b": Shard(1), "bias": Replicate()}

    def sizes(self, pair: LowRankLinear) -> dict[str, int]:
        return {"rank": pair.rank}


class _OfGroup(AlongBottleneck):
    _mixin = _GroupedPair


# -- norms -----------------------------------------------------------------------------------------


class _SplitNorm(nn.Module):
    """An RMSNorm of features that are split over ranks."""

    mesh: DeviceMesh
    is_gathered: bool
    pairs: tuple[LowRankLinear, ...]

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != (features := _local(self.weight).shape[0]):
            summary = "a norm got hidden states that are not split by features"
            raise refused(summary, features, x.shape[-1], "give tokens, or this rank's features")
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum(-1, keepdim=True)
        if self.pairs:
            return self._products(wide, squares, x.dtype)
        scale = self._scale(_summed(squares, self.mesh), self.mesh.size() * x.shape[-1])
        y: Tensor = (wide / scale).to(x.dtype) * _local(self.weight)
        if not self.is_gathered:
            return y
        split = DTensor.from_local(y, self.mesh, [Shard(y.dim() - 1)], run_check=False)
        return split.redistribute(placements=[Replicate()]).to_local()

    def _products(self, wide: Tensor, squares: Tensor, dtype: torch.dtype) -> Tensor:
        own = self._scale(squares.detach(), wide.shape[-1])
        y = (wide / own).to(dtype) * _local(self.weight)
        first = torch.cat([_local(pair.a) for pair in self.pairs])
        # What the norm will divide, and its sum of squares, would pass the range of float16.
        sent = torch.float32 if dtype is torch.float16 else dtype
        products = functional.linear(y, first).to(sent) * own.to(sent)
        both = torch.cat([products, squares.to(sent)], -1)
        both = _summed(both, self.mesh)
        products, squares = both[..., :-1], both[..., -1:].to(wide.dtype)
        scale = self._scale(squares, self.mesh.size() * wide.shape[-1])
        return (products / scale).to(dtype)

    def _scale(self, squares: Tensor, features: int) -> Tensor:
        epsilon = getattr(self, "variance_epsilon", getattr(self, "eps", None))
        epsilon = torch.finfo(squares.dtype).eps if epsilon is None else epsilon
        return (squares / features + epsilon).sqrt()


class _HeadNorm(_SplitNorm):
    """An RMSNorm of heads: a rank has some of the heads, and the whole weight."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = self._scale(wide.square().sum(-1, keepdim=True), x.shape[-1])
        # The gradient of the weight is the sum over the heads of all ranks.
        return (wide / scale).to(x.dtype) * _summed(_local(self.weight), self.mesh, "backward")


class OnlineRMSNorm(ParallelStyle):
    """An RMSNorm of hidden states that are split by features; one number a token is all-reduced.

    gather: the result is whole on every rank, as behind the last layer.
    """

    def __init__(self, *, gather: bool = False) -> None:
        super().__init__()
        self._is_gathered = gather

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _split_norm(module, device_mesh, is_gathered=self._is_gathered)


def _split_norm(
    module: nn.Module, mesh: DeviceMesh, *pairs: LowRankLinear, is_gathered: bool = False
) -> nn.Module:
    _check_norm(module, mesh, type(module).__name__)
    _shard(module, mesh, {"weight": Shard(0)})
    swap(module, _SplitNorm)
    # Not by setattr: the pairs stay modules of where they are.
    vars(module).update({"mesh": mesh, "is_gathered": is_gathered, "pairs": pairs})
    return module


class _NormOfHeads(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _shard(module, device_mesh, {"weight": Replicate()})
        swap(module, _HeadNorm)
        vars(module)["mesh"] = device_mesh
        return module


class GroupedPairs(ParallelStyle):
    """For a decoder layer: pairs with one input, grouped with the norm that it comes from.

    Args:
        norm: its name below the layer.
        pairs: their names. Nothing else may take what the norm gives.
    """

    def __init__(self, norm: str, pairs: Sequence[str]) -> None:
        super().__init__()
        self.names = (norm, *pairs)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        norm = module.get_submodule(self.names[0])
        _check_norm(norm, device_mesh, self.names[0])
        pairs: list[Any] = [
            check_pair(module.get_submodule(name), device_mesh, _OfGroup(), name)
            for name in self.names[1:]
        ]
        begin = 0
        for pair in pairs:
            parallelize_module(pair, device_mesh, _OfGroup())
            pair.begin = begin
            begin += pair.rank
        _split_norm(norm, device_mesh, *pairs)
        return module


class _Whole(ParallelStyle):
    """A module that every rank has as a whole. Its parameters are DTensors like the others."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def into(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            whole = partial(DTensor.from_local, device_mesh=mesh, placements=[Replicate()])
            return tuple(whole(each, run_check=False) for each in inputs)

        def out_of(_: nn.Module, outputs: Any, __: DeviceMesh) -> Any:
            return outputs.to_local()

        return distribute_module(module, device_mesh, None, into, out_of)  # type: ignore[arg-type]


# -- checks ----------------------------------------------------------------------------------------


def check_pair(
    module: nn.Module, mesh: DeviceMesh, style: AlongBottleneck, name: str = ""
) -> LowRankLinear:
    """The pair that a style is for. Raises UsageError for anything else, or an uneven split."""
    where = name or repr(module)[:80]
    if not isinstance(module, LowRankLinear) or isinstance(module, _Parallel):
        facts = {"layer": where, "expected": "LowRankLinear", "got": type(module).__name__}
        raise UsageError("a layer is no pair that can be split", facts=facts)
    if mesh.ndim != 1:
        facts = {"layer": where, "expected": "a mesh of one dimension", "got": str(mesh.ndim)}
        raise UsageError("a mesh of a pair has one dimension", facts=facts, hint='mesh["tp"]')
    _check_divides(style.sizes(module), mesh, where)
    return module


def _check_divides(sizes: dict[str, int], mesh: DeviceMesh, where: str) -> None:
    for what, size in sizes.items():
        if size % mesh.size():
            expected = f"{what} that {mesh.size()} ranks divide"
            raise refused("a layer cannot be split evenly", expected, size, layer=where)


def _check_norm(module: nn.Module, mesh: DeviceMesh, where: str) -> None:
    _check_divides({"features": _features(module, where)}, mesh, where)


def _features(norm: nn.Module, where: str) -> int:
    """Of an RMSNorm. Raises UsageError if it is another module, or has more than a weight."""
    is_norm = isinstance(norm, nn.RMSNorm) or hasattr(norm, "variance_epsilon")
    shapes = {name: tuple(each.shape) for name, each in norm.named_parameters()}
    if not is_norm or [*shapes] != ["weight"] or len(shapes["weight"]) != 1:
        got = type(norm).__name__
        raise refused("a norm cannot be split", "an RMSNorm with a weight alone", got, layer=where)
    return shapes["weight"][0]


def _check_part(model: nn.Module, name: str, style: ParallelStyle, mesh: DeviceMesh) -> None:
    """Raises UsageError if the style cannot split the module of this name."""
    module = _module(model, name)
    if isinstance(style, AlongBottleneck):
        check_pair(module, mesh, style, name)
    elif isinstance(style, OnlineRMSNorm):
        _check_norm(module, mesh, name)
    elif isinstance(style, _NormOfHeads):
        head = getattr(_module(model, name.rpartition(".")[0]), "head_dim", None)
        if (found := _features(module, name)) != head:
            raise refused("a norm has another size", f"head_dim: {head}", found, layer=name)


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        summary = "a decoder layer lacks a module that can be split"
        raise refused(summary, "the modules of a Llama", str(error), layer=name) from error


def _check_parameters(model: nn.Module, parts: Mapping[str, ParallelStyle]) -> None:
    """Raises UsageError for parameters that no style takes: each rank would train its own ones."""
    tied = {id(head.weight) for head, _ in _tied(model)}
    left, seen = [], dict[int, str]()
    for name, module in model.named_modules():
        for own, each in module.named_parameters(recurse=False):
            where = f"{name}.{own}".lstrip(".")
            first = seen.setdefault(id(each), where)
            if isinstance(each, DTensor) or (first != where and id(each) not in tied):
                got = "a DTensor" if first == where else f"that of {first}"
                expected, hint = "one of its own", "parallelize() comes before fully_shard()"
                raise refused("a parameter cannot be split", expected, got, hint, parameter=where)
            style = parts.get(name)
            if not (isinstance(style, _Whole) or (style is not None and own in _TAKEN)):
                left.append(where)
    if left:
        got = f"{', '.join(left[:8])} ({len(left)} in all)"
        hint = "for a model with these, give styles to parallelize_module"
        summary = "the model has parameters that no style splits"
        raise refused(summary, "the parameters of a Llama", got, hint)


# -- a whole model ---------------------------------------------------------------------------------


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dim: str = "tp",
    way: Way = "bottleneck",
    grouped: bool = True,
) -> nn.Module:
    """Split a Llama of pairs over one dimension of a mesh, in place; all of its layers, or none.

    Args:
        model: with pairs from convert(); of Hugging Face or torchtitan, or with their names.
        mesh: of any number of dimensions. FSDP2 may have another one afterwards.
        dim: the dimension to split over.
        way: "bottleneck", or "rank" for Megatron's rule.
        grouped: one all-reduce for pairs with one input.

    Raises:
        UsageError: the mesh has no such dimension, or a layer cannot be split; it names both.
    """
    if dim not in (mesh.mesh_dim_names or ()):
        facts = {"expected": f"a mesh with a dimension {dim!r}", "got": shown(mesh.mesh_dim_names)}
        raise UsageError("the mesh lacks the dimension to split over", facts=facts)
    own = mesh[dim]
    tied = _tied(model)
    for name, style in plan(model, own, way=way, grouped=grouped):
        parallelize_module(model, own, {name: style})
    for head, embeddings in tied:
        head.weight = embeddings.weight  # both were split alike, each for itself
    return model


def plan(
    model: nn.Module, mesh: DeviceMesh, *, way: Way = "bottleneck", grouped: bool = True
) -> list[tuple[str, ParallelStyle]]:
    """The styles of parallelize(), with the names of modules. Raises UsageError as it does."""
    if way not in ("bottleneck", "rank"):
        raise refused("pairs cannot be split so", "'bottleneck' or 'rank'", shown(way))
    parts: dict[str, ParallelStyle] = {}
    groups: list[tuple[str, GroupedPairs]] = []
    is_split = way == "bottleneck"
    style = AlongBottleneck() if is_split else AlongRank()
    for layer, (*normed, others) in _layers_of(model):
        for norm, pairs in normed:
            parts[f"{layer}.{norm}"] = OnlineRMSNorm() if is_split else _Whole()
            parts.update({f"{layer}.{name}": style for name in pairs})
            if is_split and grouped:
                groups.append((layer, GroupedPairs(norm, pairs)))
            for name in pairs:
                _check_heads(model, f"{layer}.{name}", mesh, way)
        parts.update({f"{layer}.{name}": style for name in others})
        attention = f"{layer}.{others[0].rpartition('.')[0]}"
        for own, child in _module(model, attention).named_children():
            if own in _HEAD_NORMS and list(child.parameters()):
                parts[f"{attention}.{own}"] = _NormOfHeads() if is_split else _Whole()
    if not parts:
        hint = "convert() it first; for other names, give styles to parallelize_module"
        raise UsageError("the model has no decoder layers that are known", hint=hint)
    parts.update(_ends(model, way))
    for name, each in parts.items():
        _check_part(model, name, each, mesh)
    _check_parameters(model, parts)
    members = [f"{layer}.{name}" for layer, group in groups for name in group.names]
    return [*groups, *(each for each in parts.items() if each[0] not in members)]


def _layers_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Decoder layers, and their names of norms and pairs."""
    for name, module in model.named_modules():
        for names in _LAYERS:
            if hasattr(module, names[0][0]) and hasattr(module, names[1][0]):
                yield name, names


def _ends(model: nn.Module, way: Way) -> dict[str, ParallelStyle]:
    """What stands before the first layer and behind the last one."""
    found: dict[str, ParallelStyle] = {}
    inside = tuple(f"{name}." for name, _ in _layers_of(model))
    is_split, is_tied = way == "bottleneck", bool(_tied(model))
    # One weight for both is split one way: by features, which the last norm then leaves split.
    head: ParallelStyle = ColwiseParallel(output_layouts=Replicate())
    if is_split and is_tied:
        head = RowwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate())
    whole: ParallelStyle = RowwiseParallel(input_layouts=Replicate()) if is_tied else _Whole()
    for name, module in model.named_modules():
        own = name.rpartition(".")[2]
        if name.startswith(inside):
            continue
        if own in _EMBEDDINGS and isinstance(module, nn.Embedding):
            found[name] = ColwiseParallel(output_layouts=Shard(-1)) if is_split else whole
        elif own == "norm":
            found[name] = OnlineRMSNorm(gather=not is_tied) if is_split else _Whole()
        elif own in _HEADS and isinstance(module, nn.Linear):
            found[name] = head
        elif own in (*_HEADS, "score", "qa_outputs") and not is_tied:
            found[name] = _Whole()  # a pair, or a classifier of Hugging Face
    return found


def _tied(model: nn.Module) -> list[tuple[Any, Any]]:
    """The head and the embeddings that have one weight."""
    named = [(name.rpartition(".")[2], each) for name, each in model.named_modules()]
    return [
        (head, embeddings)
        for own, head in named
        if own in _HEADS
        for other, embeddings in named
        if other in _EMBEDDINGS and getattr(head, "weight", None) is embeddings.weight
    ]


def _check_heads(model: nn.Module, name: str, mesh: DeviceMesh, way: Way) -> None:
    """Every rank needs whole heads."""
    pair: Any = _module(model, name)
    head = getattr(_module(model, name.rpartition(".")[0]), "head_dim", None)
    if way == "bottleneck" and isinstance(head, int) and isinstance(pair, LowRankLinear):
        _check_divides({"heads": pair.out_features // head}, mesh, name)
