"""Pairs on ranks: equal to one process, all-reduces counted, nothing communicated twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from statehold import lowrank
from statehold.errors import UsageError
from statehold.lowrank.parallel import OnlineRMSNorm, parallelize
from support.gloo import run_ranks
from support.small_llama import FF, RANK, VOCABULARY, WIDTH, loss_of, low_rank, tokens_of

LAYERS = 2
WAYS: list[dict[str, Any]] = [
    {"way": "bottleneck", "grouped": True},
    {"way": "bottleneck", "grouped": False},
    {"way": "rank"},
]


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Elements(TorchDispatchMode):
    """What all-reduces move, while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) == "_c10d_functional.all_reduce.default":
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


class Communicated(CommDebugMode):
    """CommDebugMode without its hooks on modules, which checkpointing does not bear."""

    def __init__(self) -> None:
        super().__init__()
        tracker = self.advanced_module_tracker
        unhooked = {"__enter__": lambda own: own, "__exit__": lambda *_: None}
        tracker.__class__ = type("Unhooked", (type(tracker),), unhooked)
        tracker.name, tracker.module_parents_dict = "Global", {"Global": set()}


def differences_of(
    mesh: DeviceMesh, make: Callable[[], nn.Module], **options: Any
) -> dict[str, float]:
    """The largest differences of the loss and of the gradients between ranks and one process."""
    alone, model = make(), make()
    expected, found = loss_of(alone, tokens_of()), None
    expected.backward()
    parallelize(model, mesh, **options)
    assert all(isinstance(each, DTensor) for each in model.parameters())
    found = loss_of(model, tokens_of())
    found.backward()
    differences = {"loss": (found - expected).abs().item()}
    for (name, one), each in zip(alone.named_parameters(), model.parameters(), strict=True):
        differences[name] = (whole(each.grad) - whole(one.grad)).abs().max().item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), foreach=True).step()
    return differences


def normed_heads() -> nn.Module:
    """Norms of queries and keys, and a head that is a pair."""
    model = low_rank(1, has_head_norms=True)
    lowrank.convert(model, rank=RANK, where="lm_head")
    return model


def classifier() -> nn.Module:
    """A head that Hugging Face's classifiers have, of a size that the ranks do not divide."""
    model: Any = low_rank(1)
    del model.lm_head
    model.score = nn.Linear(WIDTH, VOCABULARY + 1, dtype=torch.float64)
    model.forward = lambda tokens: model.score(model.model(tokens))
    return model


def beside_pairs(rank: int, world: int) -> list[dict[str, float]]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    makes = normed_heads, classifier
    return [differences_of(mesh, make, **options) for options in WAYS for make in makes]


@pytest.mark.thorough
def test_every_parameter_has_the_gradient_of_one_process(tmp_path: Path) -> None:
    """Also those that the ranks share: norms of heads add up over the ranks, and heads do not."""
    for found in run_ranks(beside_pairs, 2, tmp_path):
        assert len(found) == 2 * len(WAYS)
        assert "model.layers.0.self_attn.q_norm.weight" in found[0]
        assert max(max(each.values()) for each in found) < 1e-12


def as_in_one_process(rank: int, world: int) -> list[dict[str, float]]:
    """For each way: the largest differences of the loss and of the gradients."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    tokens = tokens_of()
    found = []
    for is_tied in (False, True):
        alone = low_rank(LAYERS, is_tied=is_tied)
        expected = loss_of(alone, tokens)
        expected.backward()
        gradients = {name: each.grad for name, each in alone.named_parameters()}
        for options in WAYS:
            model = low_rank(LAYERS, is_tied=is_tied)
            if not is_tied:
                lowrank.keep_bottlenecks(model)
            parallelize(model, mesh, **options)
            assert list(model.state_dict()) == list(alone.state_dict())
            assert dict(model.named_parameters()).keys() == gradients.keys()
            loss = loss_of(model, tokens)
            loss.backward()
            differences = {"loss": (loss - expected).abs().item()}
            for name, each in model.named_parameters():
                assert isinstance(each, DTensor), name
                differences[name] = (whole(each.grad) - gradients[name]).abs().max().item()
            found.append(differences)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_compute_what_one_process_computes(tmp_path: Path, world: int) -> None:
    for of_rank in run_ranks(as_in_one_process, world, tmp_path):
        assert len(of_rank) == 2 * len(WAYS)
        for differences in of_rank:
            worst = max(differences, key=lambda name: differences[name])
            assert differences[worst] < 1e-12, (worst, differences[worst])


def counted(rank: int, world: int) -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    tokens = tokens_of()
    found = []
    for options in WAYS:
        sizes, totals = [], []
        for layers in (1, 2):
            model = low_rank(layers)
            parallelize(model, mesh, **options)
            with Elements() as elements:
                model(tokens)
            sizes.append(elements.sizes)
            kept = low_rank(layers)
            lowrank.keep_bottlenecks(kept)
            parallelize(kept, mesh, **options)
            again = low_rank(layers)
            parallelize(again, mesh, **options)
            for layer in again.model.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
            of_models = []
            for each in (model, kept, again):
                loss = loss_of(each, tokens)
                with Communicated() as comm:
                    loss.backward()
                of_models.append(comm.get_total_counts())
            totals.append(of_models)
        found.append(
            {
                "elements": (sum(sizes[1]) - sum(sizes[0])) / tokens.numel(),
                "calls": len(sizes[1]) - len(sizes[0]),
                "all": totals,
            }
        )
    return found


@pytest.mark.thorough
def test_what_a_layer_all_reduces_and_how_often(tmp_path: Path) -> None:
    for grouped, single, rank in run_ranks(counted, 2, tmp_path):
        # The two numbers a token beside the bottlenecks are the norms' sums of squares.
        assert (grouped["elements"], grouped["calls"]) == (7 * RANK + 2, 4)
        assert (single["elements"], single["calls"]) == (7 * RANK + 2, 9)
        assert (rank["elements"], rank["calls"]) == (5 * WIDTH + 2 * FF, 7)
        for each in (grouped, single, rank):
            for plain, kept, again in each["all"]:
                assert again > plain == kept > 0  # what is computed again communicates nothing


def norms(rank: int, world: int) -> list[float]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    worst = []
    for scale in (1e-20, 1.0, 1e20):
        torch.manual_seed(0)
        norm = nn.RMSNorm(WIDTH, eps=0.0, dtype=torch.float64)
        with torch.no_grad():
            norm.weight.uniform_(0.5, 2)
        x = torch.randn(3, 5, WIDTH, dtype=torch.float64) * scale
        x[..., : WIDTH // 4] *= 1e3  # ranks differ
        expected = norm(x)
        split = parallelize_module(norm, mesh, OnlineRMSNorm(gather=True))
        own = x.chunk(world, -1)[rank]
        worst.append((split(own) - expected).abs().max().item() / expected.abs().max().item())

        layer = low_rank(1).model.layers[0]
        layer.input_layernorm.eps = 0.0
        expected = layer.self_attn.q_proj(layer.input_layernorm(x))
        holder = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([layer])})})
        parallelize(holder, mesh)
        found = layer.self_attn.q_proj(layer.input_layernorm(own))
        expected = expected.chunk(world, -1)[rank]
        worst.append((found - expected).abs().max().item() / expected.abs().max().item())
    return worst


def of_float16(rank: int, world: int) -> float:
    """A token of large activations behind a norm of large weights, beside one process."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    alone: Any = low_rank(1, dtype=torch.float16)
    model: Any = parallelize(low_rank(1, dtype=torch.float16), mesh)
    x = (2000 * torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0)).sign()).half()
    layers = [alone.model.layers[0], model.model.layers[0]]
    found = []
    with torch.no_grad():
        for layer, part in zip(layers, (x, x.chunk(world, -1)[rank].contiguous()), strict=True):
            layer.input_layernorm.weight.fill_(64.0)
            found.append(layer.self_attn.q_proj(layer.input_layernorm(part)))
    return (found[0].chunk(world, -1)[rank] / found[1] - 1).abs().median().item()


def test_a_group_of_float16_has_the_range_of_one_process(tmp_path: Path) -> None:
    assert max(run_ranks(of_float16, 2, tmp_path)) < 0.01


def test_the_online_norm_is_the_norm_at_any_magnitude(tmp_path: Path) -> None:
    for worst in run_ranks(norms, 2, tmp_path):
        assert len(worst) == 6
        assert max(worst) < 1e-12


def refusals(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    found = []

    def refused(model: nn.Module, **options: Any) -> None:
        before = {name: type(each) for name, each in model.named_modules()}
        with pytest.raises(UsageError) as caught:
            parallelize(model, mesh, **options)
        assert {name: type(each) for name, each in model.named_modules()} == before
        found.append(" ".join(str(caught.value).split()))

    refused(low_rank(1), dim="model")
    refused(low_rank(1), way="columns")
    refused(nn.Linear(4, 4))
    uneven = low_rank(1)
    uneven.model.layers[0].mlp.up_proj = lowrank.LowRankLinear(WIDTH, FF + 1, RANK)
    refused(uneven)
    odd = low_rank(1)
    odd.model.layers[0].mlp.down_proj = lowrank.LowRankLinear(FF, WIDTH, 7)
    refused(odd, way="rank")
    full = low_rank(1)
    full.model.layers[0].self_attn.o_proj = nn.Linear(WIDTH, WIDTH)
    refused(full)
    heads = low_rank(1)
    heads.model.layers[0].self_attn.head_dim = WIDTH
    refused(heads)
    second = low_rank(2)
    second.model.layers[1].input_layernorm = nn.LayerNorm(WIDTH)
    refused(second)
    missing = low_rank(2)
    del missing.model.layers[1].self_attn.k_proj
    refused(missing)
    unknown = low_rank(2)
    unknown.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(4))
    refused(unknown)
    shared = low_rank(2)
    shared.model.layers[1].mlp.up_proj.a = shared.model.layers[0].mlp.up_proj.a
    refused(shared)
    wide = low_rank(1)
    wide.model.layers[0].self_attn.k_norm = nn.RMSNorm(WIDTH)
    refused(wide)
    refused(fully_shard(low_rank(1), mesh=mesh))
    twice = parallelize(low_rank(1), mesh)
    with pytest.raises(UsageError, match="no pair that can be split"):
        parallelize(twice, mesh)
    layer: Any = cast(Any, twice).model.layers[0]
    with pytest.raises(UsageError, match="not split by features"):
        layer(torch.zeros(1, 2, WIDTH, dtype=torch.float64))
    return found


def test_what_cannot_be_split_is_refused_by_name(tmp_path: Path) -> None:
    for found in run_ranks(refusals, 2, tmp_path):
        words = ["'model'", "'columns'", "no decoder layers", "layers.0.mlp.up_proj",
                 "layers.0.mlp.down_proj", "layers.0.self_attn.o_proj", "heads",
                 "model.layers.1.input_layernorm", "model.layers.1.self_attn.k_proj",
                 "model.layers.1.self_attn.sinks", "that of model.layers.0.mlp.up_proj.a",
                 "model.layers.0.self_attn.k_norm", "before fully_shard"]  # fmt: skip
        assert [word for word, text in zip(words, found, strict=True) if word not in text] == []


def hugging_face(rank: int, world: int) -> float:
    transformers = pytest.importorskip("transformers")
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, use_cache=False,
    )  # fmt: skip
    losses = []
    for is_split in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        lowrank.convert(model, rank=8)
        if is_split:
            lowrank.keep_bottlenecks(model)
            parallelize(model, mesh)
        tokens = torch.arange(12)[None]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        grads = [whole(each.grad) for each in model.parameters()]
        losses.append((loss.item(), sum(each.square().sum().item() for each in grads)))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    return abs(losses[0][1] / losses[1][1] - 1)


@pytest.mark.thorough
def test_a_llama_of_hugging_face_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert max(run_ranks(hugging_face, 2, tmp_path)) < 1e-4


def mean_of_data(rank: int, world: int) -> dict[str, float]:
    """FSDP2 over two, along the bottleneck over two: the gradient of the mean of both batches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = low_rank(LAYERS)
    batches = [tokens_of(seed) for seed in range(2)]
    (sum(loss_of(alone, each) for each in batches) / 2).backward()
    model = low_rank(LAYERS)
    lowrank.keep_bottlenecks(model)
    parallelize(model, mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    loss_of(model, batches[mesh["dp"].get_local_rank()]).backward()
    expected = {name: each.grad for name, each in alone.named_parameters()}
    return {
        name: (whole(each.grad) - expected[name]).abs().max().item()
        for name, each in model.named_parameters()
    }


@pytest.mark.thorough
def test_fsdp_takes_another_dimension_of_the_mesh(tmp_path: Path) -> None:
    for found in run_ranks(mean_of_data, 4, tmp_path):
        assert Counter(difference < 1e-12 for difference in found.values()) == {True: len(found)}
