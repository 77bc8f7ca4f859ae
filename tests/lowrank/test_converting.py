"""lowrank.convert: which layers of a model become pairs, and which are refused, by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

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

    class Other(nn.Linear):
        pass

    assert "Other" in refusal(nn.Sequential(Other(16, 16)), where="0")
    assert "the model itself" in refusal(nn.Linear(16, 16), where="*")


def test_pairs_are_not_converted_again() -> None:
    model = Titan()
    lowrank.convert(model, rank=4)
    assert "no linear layer" in refusal(copy.deepcopy(model))
    assert isinstance(model.layers["0"]["attention"].wq, LowRankLinear)  # type: ignore[index]
