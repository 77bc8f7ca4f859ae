"""The shape of a model, from its config.json: what a token keeps, computes and reads.

Owns: the fields of Llama, Qwen, Mixtral and DeepSeek (MLA) configurations, and their names.
Invariants: what the formulas cannot count is refused by name, and never guessed. Counts are of
matrices: norms and biases are left out, which is below a thousandth of any model.
Not here: reading the file (cli/plan); time, and memory of devices (kv/planning/costs).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from statehold.errors import refused, shown

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
_WHOLE_MAX = 10**9


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of all layers together: `of` to choose from, `chosen` for a token."""

    parameters: int
    of: int
    chosen: int

    def share(self, tokens: float) -> float:
        """The share of experts that at least one of so many tokens goes to."""
        return 1.0 - math.pow(1.0 - self.chosen / self.of, tokens)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the costs of a model follow from.

    parameters: all. active: those that a token is multiplied with. read: those that each step
    reads, whatever its tokens. kv_values: values that a token keeps in a layer, of each KV head.
    attended, attended_first: multiplications of a token with each earlier one, in a layer and
    head, of an answer and of a prompt (MLA computes them from other values).
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    kv_values: int
    attended: int
    attended_first: int
    parameters: int
    active: int
    read: int
    experts: Experts | None
    weight_bytes: int
    kv_bytes: int

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return self.parameters * self.weight_bytes

    @property
    def kv_token(self) -> int:
        """Bytes that a token keeps, over all layers, held once."""
        return self.kv_of_rank(1)

    def kv_of_rank(self, tp: int) -> int:
        """The same on one of `tp` ranks: they share heads, and hold a head at least once."""
        return self.layers * -(-self.kv_heads // tp) * self.kv_values * self.kv_bytes


def shape_in(config: Mapping[str, Any], kv_dtype: str | None = None) -> ModelShape:
    """The shape in a configuration. Raises UsageError if it has layers that the formulas do not
    count."""
    get = ConfigFields(config)
    _refuse_other_layers(config)
    layers, width, heads = (
        get(name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    head = get("head_dim", width // heads)
    kv_heads = get("num_key_value_heads", heads)
    kv_values = attended = attended_first = 2 * head
    attention = 2 * width * head * (heads + kv_heads)
    if rank := get("kv_lora_rank", 0, least=0):
        rope, nope, value = (
            get(name) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        # Attention on the compressed values themselves: each head meets the whole latent twice.
        kv_heads, kv_values, attended = 1, rank + rope, 2 * rank + rope
        attended_first = nope + rope + value
        into = get("q_lora_rank", 0, least=0)
        asking = heads * (nope + rope)
        attention = into * (width + asking) if into else width * asking
        attention += width * (rank + rope) + rank * heads * (nope + value) + heads * value * width
    experts, routed, fixed, tokens_own = _experts(get, layers, width)
    vocabulary = get("vocab_size") * width
    tables = vocabulary * (1 if config.get("tie_word_embeddings", False) else 2)
    steady = layers * attention + fixed + vocabulary  # the embedding is a look-up
    weight_bytes = _weight_bytes(config)
    kv_bytes = _dtype_bytes(kv_dtype) if kv_dtype else max(2, weight_bytes)
    return ModelShape(
        layers, width, heads, kv_heads, kv_values, attended, attended_first,
        layers * attention + fixed + routed + tables, steady + tokens_own, steady, experts,
        weight_bytes, kv_bytes,
    )  # fmt: skip


def _experts(get: ConfigFields, layers: int, width: int) -> tuple[Experts | None, int, int, int]:
    """The experts, and parameters: theirs, of all other MLPs, and of the experts of a token."""
    of = next(filter(None, (get(name, 0, least=0) for name in EXPERTS)), 0)
    dense = 3 * width * get("intermediate_size")
    if not of:
        return None, 0, layers * dense, 0
    chosen = get("num_experts_per_tok")
    one = 3 * width * get("moe_intermediate_size", get("intermediate_size"))
    first, every = get("first_k_dense_replace", 0, least=0), get("decoder_sparse_step", 1)
    sparse = len([n for n in range(first, layers) if (n + 1) % every == 0])
    beside = get("n_shared_experts", 0, least=0) * one
    beside += 3 * width * get("shared_expert_intermediate_size", 0, least=0)
    routed = sparse * of * one
    fixed = (layers - sparse) * dense + sparse * (beside + of * width)
    return Experts(routed, of, min(chosen, of)), routed, fixed, sparse * min(chosen, of) * one


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


# Fields of models some of whose layers have a state instead of keys and values (Mamba, RWKV, linear
# attention), or a pattern of layers that is written in another way.
_OF_OTHERS = (
    "mamba", "ssm_", "linear_", "rwkv", "recurrent_", "attn_layer_", "block_types", "hybrid_",
    "layers_block_type", "full_attention_interval",
)  # fmt: skip


def _refuse_other_layers(config: Mapping[str, Any]) -> None:
    told = config.get("layer_types") or []
    kinds = set(map(str, told)) - {"full_attention"} if type(told) is list else {shown(told)}
    kinds |= {name for name, value in config.items() if name.startswith(_OF_OTHERS) and value}
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window is not None or kinds:
        got = ", ".join(sorted(kinds)) or f"sliding_window {window}"
        summary = "the model has layers that keep other than all tokens"
        raise refused(summary, "layers with full attention, or MLA", got)


def _weight_bytes(config: Mapping[str, Any]) -> int:
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        if method != "fp8":
            summary = "the weights are quantized in a way that is not planned"
            raise refused(summary, "fp8, or none", shown(method))
        return DTYPE_BYTES["fp8"]
    return _dtype_bytes(config.get("dtype", config.get("torch_dtype", "bfloat16")))


def _dtype_bytes(name: object) -> int:
    if not isinstance(name, str) or name not in DTYPE_BYTES:
        expected = ", ".join(DTYPE_BYTES)
        raise refused("the type of the values is not known", expected, shown(name))
    return DTYPE_BYTES[name]


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """Whole numbers of a configuration. A null is as good as nothing."""

    config: Mapping[str, Any]

    def __call__(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if type(value) is not int or not least <= value <= _WHOLE_MAX:
            expected = f"{name}: a whole number from {least} on"
            got = "nothing" if value is None else shown(value)
            raise refused("the configuration of the model lacks a number", expected, got)
        return value
