"""lowrank.convert: which layers of a model become pairs, and which are refused, by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from statehold import lowrank
from statehold.errors import UsageError
from statehold.lowrank import LowRankLinear


def hugging_face() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(16, 16, bias=False) for _ in range(4))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.w2 = nn.Linear(32, 16, bias=False)


class Titan(nn.Module):
    """The names of torchtitan's Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(8, 16)
        block = nn.ModuleDict({"attention": Attention(), "feed_forward": FeedForward()})
        self.layers = nn.ModuleDict({"0": block})
        self.output = nn.Linear(16, 8, bias=False)


def test_a_llama_of_hugging_face_trains_on_pairs() -> None:
    model = hugging_face()
    replaced = lowrank.convert(model, rank=8)
    assert [each.name for each in replaced][:7] == [
        f"model.layers.0.{name}_proj"
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o",
                     "mlp.gate", "mlp.up", "mlp.down")
    ]  # fmt: skip
    assert len(replaced) == 14
    assert {(each.parameters_before, each.parameters_after) for each in replaced} == {
        (32 * 32, 8 * 64), (32 * 64, 8 * 96)
    }  # fmt: skip
    assert type(model.lm_head) is nn.Linear
    tokens = torch.arange(12)[None]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert all(each.grad is not None and each.grad.any() for each in model.parameters())


def test_a_llama_of_torchtitan() -> None:
    model = Titan()
    replaced = lowrank.convert(model, rank=4)
    assert {each.name.rpartition(".")[2] for each in replaced} == {
        "wq", "wk", "wv", "wo", "w1", "w2", "w3"
    }  # fmt: skip
    assert type(model.output) is nn.Linear


def test_an_svd_of_full_rank_halves_computes_nearly_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).double()
    with torch.no_grad():  # weights of rank 8
        for layer in (model[0], model[2]):
            layer.weight.copy_(torch.randn(16, 8).double() @ torch.randn(8, 16).double())
    x = torch.randn(5, 16, dtype=torch.float64)
    expected = model(x)
    lowrank.convert(model, rank=8, where="*", start="svd")
    torch.testing.assert_close(model(x), expected)


def test_where_is_a_pattern_or_several() -> None:
    model = Titan()
    assert [each.name for each in lowrank.convert(model, rank=4, where="*.w[12]")] == [
        "layers.0.feed_forward.w1", "layers.0.feed_forward.w2"
    ]  # fmt: skip
    again = lowrank.convert(model, rank=4, where=["*.wq", "output"])
    assert [each.name for each in again] == ["layers.0.attention.wq", "output"]


def refusal(model: nn.Module, **options: Any) -> str:
    """Why a model is not converted; it is left as it was."""
    before = {name: type(each) for name, each in model.named_modules()}
    with pytest.raises(UsageError) as caught:
        lowrank.convert(model, **{"rank": 4, **options})
    assert {name: type(each) for name, each in model.named_modules()} == before
    return " ".join(str(caught.value).split())


def test_what_cannot_be_a_pair_is_refused_by_name() -> None:
    assert "layers.0.attention.wq" in refusal(Titan(), rank=9)
    assert "twice the rank" in refusal(Titan(), rank=9)
    assert "no linear layer" in refusal(Titan(), where="*.nothing")
    tied = hugging_face()
    tied.tie_weights()
    tied.lm_head.weight = tied.model.embed_tokens.weight
    text = refusal(tied, where="lm_head")
    assert "lm_head" in text
    assert "model.embed_tokens" in text
    twice = nn.ModuleList([nn.Linear(16, 16)] * 2)
    assert "shares" in refusal(twice, where="*")
    biases = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
    biases[1].bias = biases[0].bias
    assert "shares" in refusal(biases, where="1")

    assert "values" in refusal(
        nn.Sequential(nn.Linear(8, 8, device="meta")), where="0", start="svd"
    )
    assert "layers.0.linear1" in refusal(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16), 1, enable_nested_tensor=False),
        where="*1",
    )
    assert "out_proj" in refusal(nn.Sequential(nn.MultiheadAttention(16, 2)), where="*")
    assert "the model itself" in refusal(nn.Linear(16, 16), where="*")


class Same(nn.Linear):
    """As torchtitan's: a class of its own, and the product of nn.Linear."""

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x, self.weight, self.bias)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mul_(2)


class Needing(nn.Linear):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_subclass_that_computes_the_same_product_becomes_a_pair(device: str) -> None:
    for bias in (False, True):
        model = nn.Sequential(Same(16, 16, bias=bias, device=device))
        lowrank.convert(model, rank=4, where="0")
        assert isinstance(model[0], LowRankLinear)
    for kind in (Scaled, Needing):
        assert kind.__name__ in refusal(nn.Sequential(kind(16, 16, device=device)), where="0")


def hooked(change: Callable[[Any], object]) -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16))
    change(model[0])
    return model


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda x: x.register_forward_hook(print), "_forward_hooks"),
        (lambda x: x.register_forward_pre_hook(print), "_forward_pre_hooks"),
        (lambda x: x.register_full_backward_hook(print), "_backward_hooks"),
        (lambda x: x.register_state_dict_post_hook(lambda *_: None), "_state_dict_hooks"),
        (lambda x: vars(x).update(forward=print), "forward"),
        (lambda x: x.register_buffer("scale", torch.ones(3)), "_buffers"),
        (lambda x: x.register_parameter("scale", nn.Parameter(torch.ones(3))), "scale"),
        (lambda x: x.register_module("inner", nn.ReLU()), "_modules"),
        (lambda x: x.weight.register_hook(print), "weight: _backward_hooks"),
        (lambda x: x.bias.register_post_accumulate_grad_hook(print), "bias: _post_accumulate"),
    ],
)
def test_what_a_pair_would_lose_is_refused(change: Callable[[Any], object], name: str) -> None:
    assert name in refusal(hooked(change), where="0")


def test_a_layer_in_eval_becomes_a_pair_in_eval() -> None:
    model = Titan().eval()
    lowrank.convert(model, rank=4)
    assert not any(each.training for each in model.modules())


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_wrapped_model_is_refused(tmp_path: Path) -> None:
    """DistributedDataParallel would average no gradient of a pair."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 16)))
        assert "DistributedDataParallel" in refusal(wrapped, where="*")
        holder = nn.ModuleDict({"inner": wrapped})
        assert "inner" in refusal(holder, where="*")
    finally:
        dist.destroy_process_group()
    assert "OptimizedModule" in refusal(torch.compile(nn.Sequential(nn.Linear(16, 16))), where="*")


def test_pairs_are_not_converted_again() -> None:
    model = Titan()
    lowrank.convert(model, rank=4)
    assert "no linear layer" in refusal(copy.deepcopy(model))
    assert isinstance(model.layers["0"]["attention"].wq, LowRankLinear)  # type: ignore[index]
