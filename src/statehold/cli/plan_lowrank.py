"""`statehold plan lowrank`: what pairs cost beside linear layers, and how long steps take.

Invariants: it measures nothing. The same arguments print the same plan.
Not here: the model (planners/lowrank).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any

from statehold.cli import codes
from statehold.cli.output import emit, sections, table
from statehold.cli.plan import check_limits, out_of_range, read_config
from statehold.cli.tables import Table
from statehold.errors import refused
from statehold.planners.lowrank import WAYS, DeviceRates, LlamaShape, LowRankCosts, TrainingJob
from statehold.planners.shapes import EXPERTS, ConfigFields
from statehold.units import format_bytes, format_seconds, parse_bytes

_ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
_LIMITS = {"tokens": (1, 10**9), "length": (1, 10**9), "tp": (1, 4096), "pp": (1, 4096),
           "microbatches": (1, 10**6)}  # fmt: skip
_KINDS = ("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3")  # with a Llama's layers
_FORM = "flops=2.8e14,memory=900GB,link=280GB,host=1e-3"


def run(args: argparse.Namespace) -> int:
    check_limits(args, _LIMITS)
    shape = _shape(args.config)
    least = min(map(min, shape.linears.values()))
    costs = LowRankCosts(
        shape, min(shape.width // 4, least // 2) if args.rank is None else args.rank
    )
    job = TrainingJob(args.tokens, args.length, args.tp, args.pp, args.microbatches)
    for way in WAYS:
        costs.check(way, job)
    device = None if args.device is None else _device(args.device)
    steps = {way: costs.step(way, job, device) for way in WAYS} if device else {}
    document = _document(costs, _ITEMSIZE[args.dtype], steps)
    emit(document) if args.json else sections(*_parts(document))
    return codes.YES


def _shape(config: str) -> LlamaShape:
    document = read_config(config)
    get = ConfigFields(document)
    for name in ("kv_lora_rank", *EXPERTS):
        if get(name, 0, least=0):
            summary = "the model has layers that pairs are not planned for"
            raise refused(summary, "the layers of a Llama", f"{name} {get(name)}")
    kind = document.get("model_type", "llama")
    if kind not in _KINDS:
        summary = "pairs are not planned for models of this type"
        raise refused(summary, ", ".join(_KINDS), kind)
    heads, width = get("num_attention_heads"), get("hidden_size")
    head, ff = get("head_dim", width // heads), get("intermediate_size")
    query, kv = heads * head, get("num_key_value_heads", heads) * head
    beside = 2 * head * (kind == "qwen3") + (2 * ff + width) * bool(document.get("mlp_bias"))
    if kind == "qwen2" or document.get("attention_bias"):  # qwen2 always has these, but for o_proj
        beside += query + 2 * kv + width * (kind != "qwen2")
    return LlamaShape(
        get("num_hidden_layers"), width, ff, query, kv, get("vocab_size"), head=head,
        is_tied=bool(document.get("tie_word_embeddings", False)), beside=beside,
    )  # fmt: skip


def _device(text: str) -> DeviceRates:
    values = dict.fromkeys(("flops", "memory", "link", "host"), 0.0)
    for field in text.split(","):
        key, _, value = field.partition("=")
        is_number = re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?(e-?[0-9]{1,2})?", value, re.ASCII)
        if key not in values or (key in ("flops", "host") and not is_number):
            raise out_of_range("device", _FORM, text)
        values[key] = float(value) if key in ("flops", "host") else float(parse_bytes(value))
    flops, memory, link, host = values.values()
    if not flops or not memory or not link:
        raise out_of_range("device", f"{_FORM}; only host may be left out", text)
    return DeviceRates(flops, memory, link, host)


def _document(
    costs: LowRankCosts, itemsize: int, steps: dict[str, dict[str, float]]
) -> dict[str, Any]:
    layers, models = costs.shape.layers, {"full": "full", "lowrank": "rank"}
    return {
        "rank": costs.rank,
        "pairs": layers * len(costs.shape.linears),
        "parameters": {name: costs.parameters(way) for name, way in models.items()},
        "state_bytes": {name: costs.state_bytes(way, itemsize) for name, way in models.items()},
        "reduced_bytes_per_token": {way: layers * itemsize * costs.reduced(way) for way in WAYS},
        "kept_bytes_per_token": {
            again: layers * itemsize * elements for again, elements in costs.kept().items()
        },
        "step_s": steps or None,
        "use": min(steps, key=lambda way: sum(steps[way].values()), default=None),
    }


def _parts(document: dict[str, Any]) -> Iterator[str | Table]:
    parameters, state = document["parameters"], document["state_bytes"]
    yield (
        f"{document['pairs']} pairs of rank {document['rank']}: "
        f"{parameters['lowrank'] / 1e6:,.0f} million parameters instead of "
        f"{parameters['full'] / 1e6:,.0f}, {format_bytes(state['lowrank'])} of weights and moments "
        f"instead of {format_bytes(state['full'])}"
    )
    rows = [(again, format_bytes(size)) for again, size in document["kept_bytes_per_token"].items()]
    yield table(("COMPUTED AGAIN", "KEPT"), rows, right="KEPT", foot="(of a token, in all layers)")
    steps = document["step_s"] or {way: {} for way in WAYS}
    parts = tuple(map(str.upper, steps["full"]))
    header = ("SPLIT", "REDUCED", *(("STEP", *parts) if parts else ()))
    rows = []
    for way, seconds in steps.items():
        times = (sum(seconds.values()), *seconds.values()) if seconds else ()
        reduced = format_bytes(document["reduced_bytes_per_token"][way])
        rows.append((way, reduced, *map(format_seconds, times)))
    foot = "REDUCED: all-reduced for a token forward, if more than one rank shares a layer."
    yield table(header, rows, right=" ".join(header[1:]), foot=foot)
    if best := document["use"]:
        step_s = {way: sum(seconds.values()) for way, seconds in steps.items()}
        ratios = [
            f"{each / step_s[best]:.2f} ({way})" for way, each in step_s.items() if way != best
        ]
        yield f"Use: {best}. The others take {' and '.join(ratios)} times as long."
