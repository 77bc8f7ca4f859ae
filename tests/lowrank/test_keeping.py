"""lowrank.keep_bottlenecks: the same bits of gradients, from what is narrow alone."""

from __future__ import annotations

import copy
import gc
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from statehold import lowrank
from statehold.errors import UsageError
from statehold.planners.lowrank import LlamaShape, LowRankCosts
from support.small_llama import (
    FF,
    HEADS,
    RANK,
    VOCABULARY,
    WIDTH,
    Llama,
    loss_of,
    low_rank,
    tokens_of,
)

KEPT = LowRankCosts(LlamaShape(2, WIDTH, FF, WIDTH, WIDTH, VOCABULARY), RANK).kept()


def gradients(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(7)
    loss_of(model, tokens).backward()
    found = {}
    for name, each in model.named_parameters():
        assert each.grad is not None, name
        found[name] = each.grad.clone()
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_have_the_same_bits(dtype: torch.dtype, dropout: float) -> None:
    plain = low_rank(3, dropout=dropout, dtype=dtype)
    kept = copy.deepcopy(plain)
    assert lowrank.keep_bottlenecks(kept) == [f"model.layers.{n}" for n in range(3)]
    assert list(plain.state_dict()) == list(kept.state_dict())
    expected, found = gradients(plain, tokens_of()), gradients(kept, tokens_of())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(each.any() for each in expected.values())


def hugging_face() -> Any:
    """With the default of Hugging Face, use_cache=True."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    lowrank.convert(model, rank=8)
    return model


def test_a_llama_of_hugging_face_keeps_its_bottlenecks() -> None:
    model = hugging_face()
    tokens = torch.arange(12)[None]
    losses = []
    for each in (model, copy.deepcopy(model)):
        if each is not model:
            lowrank.keep_bottlenecks(each)
        loss = each(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append((loss.detach(), [p.grad for p in each.parameters()]))
    assert torch.equal(losses[0][0], losses[1][0])
    assert all(torch.equal(a, b) for a, b in zip(losses[0][1], losses[1][1], strict=True))


def test_a_cache_is_used_outside_of_training() -> None:
    """With gradients on, too: who forgets no_grad still gets the tokens of the cache."""
    model = hugging_face().eval()
    tokens = torch.arange(12)[None]
    expected = model(input_ids=tokens).logits[:, -1]
    lowrank.keep_bottlenecks(model)
    first = model(input_ids=tokens[:, :-1], use_cache=True)
    last = model(input_ids=tokens[:, -1:], past_key_values=first.past_key_values).logits[:, -1]
    torch.testing.assert_close(last, expected)
    last.sum().backward()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
def test_a_compiled_model_keeps_its_bottlenecks() -> None:
    plain, kept = low_rank(2), low_rank(2)
    lowrank.keep_bottlenecks(kept)
    kept.compile(backend="aot_eager")
    expected, found = gradients(plain, tokens_of()), gradients(kept, tokens_of())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def kept_bytes(layers: int, tokens: Tensor) -> int:
    """The bytes of tensors that a forward leaves for its backward."""

    def storages() -> dict[int, int]:
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is Tensor]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}

    model = low_rank(layers)
    lowrank.keep_bottlenecks(model)
    before = storages()
    hidden = model.model(tokens)
    after = storages()
    assert hidden.requires_grad
    return sum(size for at, size in after.items() if at not in before)


def test_a_layer_keeps_seven_bottlenecks_and_its_input() -> None:
    tokens = tokens_of(batch=4, length=64)
    a_layer = kept_bytes(3, tokens) - kept_bytes(2, tokens)
    elements = a_layer / 8 / tokens.numel()
    assert elements == pytest.approx(7 * RANK + WIDTH, rel=0.05)
    assert KEPT["all but bottlenecks"] == 7 * RANK + WIDTH


def saved_elements(layers: int, tokens: Tensor, way: str) -> float:
    """Elements of float32 a token that autograd saves in a forward, but for the parameters."""
    model = Llama(layers) if way == "nothing, full" else low_rank(layers, dtype=torch.float32)
    if way == "layers":
        for layer in model.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    sizes = {each.untyped_storage().data_ptr(): 0 for each in model.parameters()}
    saved = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)  # or its memory is used again
        storage = tensor.untyped_storage()
        sizes.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(tokens)
    return sum(sizes.values()) / 4 / tokens.numel()


@pytest.mark.parametrize("way", ["nothing, full", "nothing", "layers"])
def test_what_is_kept_without_bottlenecks(way: str) -> None:
    """The planner's count. Norms also keep what they normalise, and a number of each; attention
    keeps one for each head."""
    tokens = tokens_of(batch=4, length=64)
    a_layer = saved_elements(3, tokens, way) - saved_elements(2, tokens, way)
    beside = 0 if way == "layers" else 2 * (WIDTH + 1) + HEADS
    assert a_layer == KEPT[way] + beside


def test_products_of_the_first_factor_are_not_computed_again() -> None:
    tokens = tokens_of()

    def flops(model: Llama) -> int:
        loss = loss_of(model, tokens)
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return counter.get_total_flops()

    plain, kept, whole = (low_rank(2) for _ in range(3))
    lowrank.keep_bottlenecks(kept)
    for layer in whole.model.layers:
        layer.forward = lambda x, run=layer.forward: checkpoint(run, x, use_reentrant=False)
    first = 2 * RANK * (6 * WIDTH + FF) * tokens.numel() * 2
    assert flops(whole) - flops(kept) == first
    assert flops(kept) > flops(plain)


def test_a_kept_model_is_pickled() -> None:
    model = low_rank(2)
    lowrank.keep_bottlenecks(model)
    expected = gradients(model, tokens_of())
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(copied.model.layers[0]) is type(model.model.layers[0])
        found = gradients(copied, tokens_of())
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_layer_in_two_lists_is_kept_once() -> None:
    model = low_rank(2)
    model.blocks = nn.ModuleList(model.model.layers[1:])
    assert lowrank.keep_bottlenecks(model) == ["model.layers.0", "model.layers.1"]
    with pytest.raises(UsageError, match="no layer with pairs"):
        lowrank.keep_bottlenecks(model)
    assert gradients(model, tokens_of())


def test_without_gradients_nothing_is_kept() -> None:
    model = low_rank(2)
    expected = model(tokens_of())
    lowrank.keep_bottlenecks(model)
    with torch.no_grad():
        assert torch.equal(model(tokens_of()), expected)


def test_layers_are_kept_once_and_may_be_chosen() -> None:
    model = low_rank(3)
    assert lowrank.keep_bottlenecks(model, where="model.layers.[12]") == [
        "model.layers.1", "model.layers.2"
    ]  # fmt: skip
    assert lowrank.keep_bottlenecks(model) == ["model.layers.0"]
    assert gradients(model, tokens_of())
    with pytest.raises(UsageError, match="no layer with pairs"):
        lowrank.keep_bottlenecks(model)
    with pytest.raises(UsageError, match="no layer with pairs"):
        lowrank.keep_bottlenecks(Llama())
