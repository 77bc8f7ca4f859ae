"""Folders of save_pretrained whose models tie weights: only one name of a tensor is in the file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import statehold
from statehold.dcp import restore_stock
from statehold.integrations.deepspeed import EngineProgress, load_weights

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32,
         "intermediate_size": 32}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", {**SMALL, "tie_word_embeddings": True}),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 32},
    ),
    "BertForMaskedLM": ("BertConfig", SMALL),
}


def made(name: str, seed: int) -> Any:
    config, options = MODELS[name]
    transformers.set_seed(seed)
    return getattr(transformers, name)(getattr(transformers, config)(**options))


@pytest.mark.parametrize("name", MODELS)
def test_a_tied_model_takes_a_folder_of_save_pretrained(tmp_path: Path, name: str) -> None:
    saved, live, other = (made(name, seed) for seed in range(3))
    state = saved.state_dict()
    assert len({each.data_ptr() for each in state.values()}) < len(state)
    saved.save_pretrained(tmp_path / "folder")
    report = restore_stock(tmp_path / "folder", {"model": live})
    assert not report.missing
    torch.testing.assert_close(live.state_dict(), state, rtol=0, atol=0)
    statehold.import_step(tmp_path / "folder", f"{tmp_path / 'run'}@1", name="model")
    with statehold.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.restore({"model": other}) == 1
    torch.testing.assert_close(other.state_dict(), state, rtol=0, atol=0)


def test_weights_of_an_engine_have_all_names_of_a_tied_one(tmp_path: Path) -> None:
    """As stage 3 saves them: each parameter once, and flattened. DeepSpeed is not needed."""
    model = nn.ModuleDict({"words": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["words"].weight
    weight = model["words"].weight.detach()
    zero = SimpleNamespace(loss_scaler=SimpleNamespace())
    counts = {"global_steps": 1, "global_samples": 1, "skipped_steps": 0, "micro_steps": 1}
    engine = SimpleNamespace(
        module=model, optimizer=zero, gradient_accumulation_steps=lambda: 1, **counts
    )
    progress = EngineProgress(engine, {"words.weight": [5, 3]})
    state = {"model": {"words.weight": weight.flatten()}, "deepspeed": progress}
    with statehold.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).wait("committed")
    found = load_weights(tmp_path)
    assert torch.equal(found["head.weight"], weight)
    model.load_state_dict(found)
