"""statehold plan lowrank: what it prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ask = Callable[..., tuple[int, Any]]
Say = Callable[..., tuple[int, str]]

LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
         "num_attention_heads": 32, "vocab_size": 32000}  # fmt: skip
DEVICE = "flops=2.8e14,memory=900GB,link=280GB,host=1e-3"


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return ["plan", "lowrank", "--config", str(tmp_path)]


def test_a_plan_in_words(say: Say, words: list[str]) -> None:
    code, text = say(*words, "--tp", "4", "--device", DEVICE)
    assert code == 0
    lines = text.splitlines()
    assert lines[0] == (
        "224 pairs of rank 1024: 2,821 million parameters instead of 6,738, "
        "15.8 GiB of weights and moments instead of 37.7 GiB"
    )
    assert any(line.split() == ["all", "but", "bottlenecks", "704", "KiB"] for line in lines)
    assert any(line.startswith("bottleneck   448 KiB  ") for line in lines)
    assert lines[-1].startswith("Use: bottleneck. The others take 1.58 (full) and 2.2")


def test_the_document(ask: Ask, words: list[str]) -> None:
    code, found = ask(*words, "--rank", "512", "--dtype", "fp32")
    assert code == 0
    assert (found["rank"], found["pairs"], found["step_s"], found["use"]) == (512, 224, None, None)
    assert found["state_bytes"]["full"] == 12 * found["parameters"]["full"]
    assert found["reduced_bytes_per_token"]["bottleneck"] == 32 * 4 * (7 * 512 + 2)
    assert found["kept_bytes_per_token"]["all but bottlenecks"] == 32 * 4 * (7 * 512 + 4096)
    timed = ask(*words, "--device", DEVICE.removesuffix(",host=1e-3"))[1]
    assert timed["step_s"]["full"].keys() == {"arithmetic", "memory", "link", "host"}
    assert timed["step_s"]["full"]["host"] == 0
    assert timed["use"] == "rank"  # on one device it is what the bottleneck is, and comes first


def test_the_default_rank_fits_keys_and_values(ask: Ask, words: list[str]) -> None:
    (Path(words[-1]) / "config.json").write_text(json.dumps({**LLAMA, "num_key_value_heads": 8}))
    assert ask(*words)[1]["rank"] == 512


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 16}),
        ("Mistral", {"head_dim": 16}),
        ("Granite", {"attention_bias": True}),
        ("SmolLM3", {"attention_bias": True, "mlp_bias": True, "pad_token_id": 0}),
    ],
)
@pytest.mark.thorough
def test_parameters_are_those_of_transformers(
    ask: Ask, words: list[str], kind: str, change: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    from statehold import lowrank

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **change})
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    config.save_pretrained(words[-1])
    code, found = ask(*words, "--rank", "8")
    assert code == 0
    assert found["parameters"]["full"] == sum(each.numel() for each in model.parameters())
    lowrank.convert(model, rank=8)
    assert found["parameters"]["lowrank"] == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize(
    ("more", "change", "why"),
    [
        (["--rank", "3000"], {}, "q_proj"),
        (["--rank", "0"], {}, "the rank of a pair makes no sense"),
        (["--tokens", "0"], {}, "--tokens is out of range"),
        (["--rank", "3000"], {}, "--rank) up to 2048"),
        (["--tp", "3", "--device", DEVICE], {}, "3 ranks divide"),
        (["--tp", "3"], {}, "3 ranks divide"),
        (["--tp", "16"], {"num_key_value_heads": 8}, "KV heads"),
        (["--pp", "33"], {}, "1 to 32 stages"),
        ([], {"model_type": "gpt_neox"}, "gpt_neox"),
        ([], {"model_type": "bert"}, "llama, mistral, qwen2"),
        (["--pp", "33", "--device", DEVICE], {}, "1 to 32 stages"),
        (["--device", "fast"], {}, "--device is out of range"),
        (["--device", "flops=1e14,memory=1TB"], {}, "--device is out of range"),
        (["--device", "flops=nan,memory=1TB,link=1GB"], {}, "--device is out of range"),
        ([], {"kv_lora_rank": 512}, "layers that pairs are not planned for"),
        ([], {"num_experts": 8}, "num_experts 8"),
        ([], {"hidden_size": None}, "hidden_size"),
        (["--config", "/nowhere"], {}, "the configuration of the model cannot be read"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    say: Say, words: list[str], more: list[str], change: dict[str, Any], why: str
) -> None:
    (Path(words[-1]) / "config.json").write_text(json.dumps({**LLAMA, **change}))
    code, text = say(*words, *more)
    assert code == 2
    assert why in text
