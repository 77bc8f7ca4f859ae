"""`statehold.kv.planning`: counts, published figures, the simulation and a plain loop; refusals."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from bench.serving import (
    ANSWER,
    BEST,
    CAPACITIES,
    CONFIGS,
    PROMPT,
    break_even,
    fitted_load,
    fitted_prefill,
    ranked,
    throughputs,
)

from statehold.cli.plan import read_config
from statehold.errors import UsageError
from statehold.kv import planning
from statehold.kv.planning import ServingRequest, drawn, parse, simulate
from statehold.kv.planning.costs import (
    GPUS,
    DeviceLayout,
    Gpu,
    LoadTimes,
    PrefillTimes,
    ServingCosts,
    is_load_faster,
    layouts,
)
from statehold.planners.shapes import shape_in

H200 = GPUS["h200"]
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 256,
}  # fmt: skip


def costs(name: str, layout: tuple[int, int, int], utilization: float = 0.9) -> ServingCosts:
    return ServingCosts(shape_in(CONFIGS[name]), H200, DeviceLayout(*layout), utilization)


# -- counts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions", "active", "kib"),
    [
        ("SmolLM2-135M", 0.1345, 0.1345, 22.5),
        ("Llama-3.1-8B", 8.03, 7.5, 128),
        ("Qwen2.5-32B", 32.76, 32.0, 256),
        ("Llama-3.1-70B", 70.55, 69.5, 320),
        ("Llama-3.1-405B", 405.85, 403.7, 504),
        ("Qwen3-30B-A3B", 30.53, 3.0, 96),
        ("DeepSeek-V3", 671.03, 37.0, 68.625),
    ],
)
def test_parameters_and_bytes_of_a_token(
    name: str, billions: float, active: float, kib: float
) -> None:
    shape = shape_in(CONFIGS[name])
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert shape.active / 1e9 == pytest.approx(active, rel=0.02)
    assert shape.kv_token == kib * 1024


def test_ranks_share_heads_and_repeat_what_they_cannot_share() -> None:
    llama, deepseek = shape_in(CONFIGS["Llama-3.1-8B"]), shape_in(CONFIGS["DeepSeek-V3"])
    assert llama.kv_of_rank(8) * 8 == llama.kv_token
    assert llama.kv_of_rank(16) == llama.kv_of_rank(8)
    assert deepseek.kv_of_rank(8) == deepseek.kv_token


# -- published -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", CAPACITIES)
def test_published_capacities(layout: DeviceLayout) -> None:
    computed = layout.dp * costs("Qwen2.5-32B", layout, 1.0).tokens
    assert computed == pytest.approx(CAPACITIES[layout], rel=0.02)


@pytest.mark.parametrize("name", BEST)
def test_published_best_layouts(name: str) -> None:
    found = [layout for _, layout in ranked(shape_in(CONFIGS[name]))]
    assert found[0] == BEST[name]
    if name == "Llama-3.1-405B":
        assert found[-1] == DeviceLayout(1, 1, 8)


def test_published_throughputs() -> None:
    errors = [math.log(computed / published) for _, _, published, computed in throughputs()]
    assert math.sqrt(sum(each * each for each in errors) / len(errors)) < 0.06
    assert max(map(abs, errors)) < 0.2


def test_time_falls_with_the_concurrency_until_memory_is_full_and_rises_then() -> None:
    found = costs("Qwen2.5-32B", (8, 1, 1))
    requests = drawn(1024, PROMPT, ANSWER)
    outs = [simulate(found, requests, n) for n in (64, 128, 256, 512, 640, 768, 1024)]
    ends = [out.end_s for out in outs]
    least = ends.index(min(ends))
    assert 0 < least < len(ends) - 1
    assert ends[: least + 1] == sorted(ends[: least + 1], reverse=True)
    assert ends[least] < ends[least + 1] < ends[-1]
    assert [out.preemptions > 0 for out in outs] == [False] * 4 + [True] * 3
    # Pages that survive save what was computed again, if the store is faster than that.
    fast, slow = (simulate(found, requests, 1024, LoadTimes(rate)) for rate in (200e9, 1e9))
    assert fast.loaded > 0
    assert fast.recomputed == 0
    assert fast.end_s < ends[-1]
    assert (slow.loaded, slow.end_s) == (0, ends[-1])


# -- the simulation --------------------------------------------------------------------------------


def by_steps(found: ServingCosts, requests: list[ServingRequest], most: int) -> tuple[float, int]:
    """The rules of the simulation, a step at a time: the end, and the preemptions."""
    now_s, preemptions = 0.0, 0
    coming, waiting, running = list(requests), list[list[Any]](), list[list[Any]]()
    while coming or waiting or running:
        while coming and coming[0].arrival_s <= now_s:
            waiting.append([coming.pop(0), 0])
        held = sum(each.prompt + done for each, done in running)
        while waiting and len(running) < most:
            each, done = waiting[0]
            if held + each.prompt + done + 1 > found.tokens:
                break
            running.append(waiting.pop(0))
            held += each.prompt + done
            now_s += found.prefill.seconds(each.prompt + done)
        if not running:
            now_s = coming[0].arrival_s
            continue
        while held + len(running) > found.tokens:
            each, done = running[-1]
            waiting.insert(0, running.pop())
            held -= each.prompt + done
            preemptions += 1
        now_s += found.step_s(len(running), held)
        for entry in running:
            entry[1] += 1
        running = [entry for entry in running if entry[1] < entry[0].answer]
    return now_s, preemptions


@pytest.mark.parametrize("seed", range(20))
def test_events_end_as_steps_do(seed: int) -> None:
    random_ = random.Random(seed)
    shape = shape_in(SMALL)
    weights, token = shape.weights, shape.kv_token
    room = random_.choice([60, 120, 400])
    gpu = Gpu(weights + token * room + 1, 1e9, 1e9, 1e9)
    found = ServingCosts(shape, gpu, DeviceLayout(1, 1, 1), 1.0)
    assert found.tokens == room
    requests = [
        ServingRequest(n * random_.random(), random_.randint(1, 20), random_.randint(1, 39))
        for n in range(30)
    ]
    requests.sort(key=lambda each: each.arrival_s)
    most = random_.choice([1, 4, 30])
    out = simulate(found, requests, most)
    end_s, preemptions = by_steps(found, requests, most)
    assert out.end_s == pytest.approx(end_s, rel=1e-9)
    assert out.preemptions == preemptions
    assert out.answered == sum(each.answer for each in requests)


def test_loads_pass_one_after_another_beside_the_others() -> None:
    found = costs("Qwen2.5-32B", (8, 1, 1))
    requests = drawn(256, PROMPT, 8 * ANSWER, seed=1)
    for rate in (20e9, 100e9, 500e9):
        out = simulate(found, requests, 256, LoadTimes(rate))
        assert out.answered == sum(each.answer for each in requests)
        assert out.preemptions > 0
        assert out.loaded / 8 * found.shape.kv_token / (rate / 8) < out.end_s


# -- load or compute -------------------------------------------------------------------------------


def test_times_are_found_again_in_samples() -> None:
    prefill = PrefillTimes(3e-5, 2e-9)
    load = LoadTimes(2e9, 1e-3)
    sizes = (256.0, 1024.0, 8192.0)
    assert fitted_prefill([(n, prefill.seconds(n)) for n in sizes]) == PrefillTimes(
        pytest.approx(3e-5), pytest.approx(2e-9)
    )
    fitted = fitted_load([(n * 1e6, load.seconds(n * 1e6)) for n in sizes])
    assert (fitted.bandwidth, fitted.lookup_s) == (pytest.approx(2e9), pytest.approx(1e-3))
    # One term alone, where two would need a negative one.
    assert fitted_load([(1e6, 1e-3), (2e6, 1.5e-3), (4e6, 5e-3)]).lookup_s == 0
    with pytest.raises(UsageError, match="nothing to fit"):
        fitted_load([])


@pytest.mark.parametrize("tokens", [16, 1024, 32768])
def test_the_choice_changes_at_the_break_even(tokens: int) -> None:
    found = costs("Qwen2.5-32B", (4, 2, 1))
    even = break_even(found.prefill, tokens, found.shape.kv_token)
    choices = [
        is_load_faster(tokens, found.shape.kv_token, LoadTimes(even * share), found.prefill)
        for share in (0.99, 1.01)
    ]
    assert choices == [False, True]
    # From 2 active FLOP a token and 2 width layers for each pair, by hand.
    flops, shape = 0.61 * 2 * H200.flops, found.shape
    token = 2 * shape.active + 2 * shape.layers * shape.width * tokens
    sent = 2 * 64 * shape.width * 2 / (450e9 * 0.71)
    assert even == pytest.approx(shape.kv_token / (token / flops + sent))
    assert break_even(found.prefill, tokens, shape.kv_token, 1e9) == math.inf


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_hidden_layers": None}, "lacks a number.*num_hidden_layers: a whole number.*nothing"),
        ({"hidden_size": "64"}, "lacks a number.*hidden_size.*'64'"),
        ({"hidden_size": True}, "lacks a number.*hidden_size.*True"),
        ({"layer_types": ["linear_attention"]}, "other than all tokens.*linear_att"),
        ({"sliding_window": 4096}, "other than all tokens.*sliding_window 4096"),
        ({"layer_types": 5}, "other than all tokens.*got +5"),
        ({"layer_types": [["x"]]}, "other than all tokens.*'x'"),
        ({"attn_layer_period": 8, "mamba_d_state": 16}, "other than all tokens.*attn_layer"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized.*fp8, or none.*'awq'"),
        ({"torch_dtype": "int3"}, "type of the values.*bfloat16.*'int3'"),
        ({"kv_lora_rank": 8}, "lacks a number.*qk_rope_head_dim"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as caught:
        shape_in({**SMALL, **change})
    assert_says(caught.value, why)


def assert_says(error: UsageError, why: str) -> None:
    text = " ".join(str(error).split())
    assert re.search(why, text), text


@pytest.mark.parametrize("content", [None, "[1]", "{", '"x"'])
def test_files_that_are_no_configuration(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match="the configuration of the model"):
        read_config(tmp_path)


def test_a_window_that_is_off_and_null_fields_do_not_matter() -> None:
    off = {"sliding_window": 4096, "use_sliding_window": False, "layer_types": None}
    assert shape_in({**SMALL, **off}) == shape_in({**SMALL, "sliding_window": None})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no header.*arrival_s,prompt,answer"),
        ("arrival_s,prompt\n1,2", "no header.*missing answer"),
        ("arrival_s,prompt,answer\n", "no requests"),
        ("arrival_s,prompt,answer\n0,5,5\n1,0,5", "makes no sense.*request 2"),
        ("arrival_s,prompt,answer\n-1,5,5", "makes no sense"),
        ("arrival_s,prompt,answer\nnan,5,5", "makes no sense"),
        ("arrival_s,prompt,answer\n0,5", "makes no sense"),
    ],
)
def test_traces_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert_says(caught.value, why)


def test_a_trace_that_is_no_csv_is_refused() -> None:
    with pytest.raises(UsageError, match="no CSV"):
        parse(f"arrival_s,prompt,answer\n0,{'1' * 200_000},5\n")


def test_a_trace_that_a_spreadsheet_saved() -> None:
    text = "arrival_s,prompt,answer\n0,10,5\n"
    assert parse(f"\ufeff{text}") == parse(text)


def test_a_trace_is_in_the_order_of_time() -> None:
    found = parse("prompt,answer,arrival_s\n5,6,2.5\n7,8,0\n")
    assert found == [ServingRequest(0, 7, 8), ServingRequest(2.5, 5, 6)]


def test_what_does_not_fit_is_refused_and_the_rest_planned() -> None:
    shape = shape_in(CONFIGS["Llama-3.1-405B"])
    with pytest.raises(UsageError, match="the weights leave no memory"):
        ServingCosts(shape, H200, DeviceLayout(4, 2, 1))
    with pytest.raises(UsageError, match="too long for the memory of a replica"):
        simulate(costs("Qwen2.5-32B", (8, 1, 1)), [ServingRequest(0, 1, 10**6)], 1)
    requests = drawn(8, PROMPT, ANSWER)
    found = planning.plan(shape, H200, layouts(shape, 8), requests)
    assert {each.costs.layout for each in found} == {
        DeviceLayout(1, tp, 8 // tp) for tp in (1, 2, 4, 8)
    }
    with pytest.raises(UsageError, match="the weights leave no memory"):
        planning.plan(shape, H200, [DeviceLayout(8, 1, 1)], requests)


def test_bounds() -> None:
    shape = shape_in(CONFIGS["Qwen2.5-14B"])
    full = planning.plan(
        shape, H200, [DeviceLayout(8, 1, 1)], drawn(512, 512, 16384), concurrency=[8]
    )
    few = planning.plan(shape, H200, [DeviceLayout(8, 1, 1)], drawn(8, 512, 1024))
    many = planning.plan(shape, H200, [DeviceLayout(1, 8, 1)], drawn(1024, 64, 64), concurrency=[8])
    assert [each[0].bound for each in (full, few, many)] == ["capacity", "reads", "link"]
