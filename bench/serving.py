"""`statehold plan serving` beside what others have published, and beside a store that is throttled.

`python -m bench.serving findings` prints each published figure beside the computed one. `fit` has
the throughputs that the constants of kv/planning/costs were fitted to. `choices` throttles a store,
measures for each case how long a prefix takes to load and to compute, and counts how often the
planner, which knows two other measurements of each, chooses what was faster.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from statehold.errors import UsageError
from statehold.kv import PageStore, PageVerdict, opened, planning
from statehold.kv.page import slot_bytes
from statehold.kv.planning.costs import (
    GPUS,
    DeviceLayout,
    LoadTimes,
    PrefillTimes,
    ServingCosts,
    is_load_faster,
    layouts,
)
from statehold.planners.shapes import ModelShape, shape_in

_LLAMA = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
          "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256}  # fmt: skip
_QWEN = {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8,
         "vocab_size": 152064}  # fmt: skip
_FP8 = {"quantization_config": {"quant_method": "fp8"}}
CONFIGS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
                     "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
                     "tie_word_embeddings": True},
    "Llama-3.1-8B": {**_LLAMA, "hidden_size": 4096, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "intermediate_size": 14336},
    "Qwen2.5-14B": {**_QWEN, "num_hidden_layers": 48, "intermediate_size": 13824},
    "Qwen2.5-32B": {**_QWEN, "num_hidden_layers": 64, "intermediate_size": 27648},
    "Llama-3.1-70B": _LLAMA,
    "Llama-3.1-405B": {**_LLAMA, "hidden_size": 16384, "num_hidden_layers": 126,
                       "num_attention_heads": 128, "intermediate_size": 53248},
    "Qwen3-30B-A3B": {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
                      "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
                      "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
                      "vocab_size": 151936},
    "DeepSeek-V3": {"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
                    "intermediate_size": 18432, "moe_intermediate_size": 2048,
                    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
                    "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536,
                    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
                    "vocab_size": 129280, **_FP8},
}  # fmt: skip

# -- what others have published ------------------------------------------------------------------

# Tokens that fit eight H200 with a 32B model (arXiv 2605.19775, all memory used).
CAPACITIES = {DeviceLayout(8, 1, 1): 2.35e6, DeviceLayout(4, 2, 1): 3.33e6,
              DeviceLayout(1, 8, 1): 4.06e6}  # fmt: skip
# The best layout of eight H200 (the same).
BEST = {"Qwen2.5-14B": DeviceLayout(8, 1, 1), "Qwen2.5-32B": DeviceLayout(4, 2, 1),
        "Llama-3.1-405B": DeviceLayout(1, 8, 1), "DeepSeek-V3": DeviceLayout(1, 2, 4)}  # fmt: skip
PROMPT, ANSWER = 512, 4096

# Output tokens a second of Llama 3.1 70B in FP8 on 1, 2, 4 and 8 H200 with tensor parallelism, by
# tokens of prompt and answer (TensorRT-LLM, docs/source/performance, perf-overview).
THROUGHPUTS = {
    (128, 128): (4020.75, 6823.01, 11098.63, 15355.84),
    (128, 2048): (4165.68, 8290.35, 14156, 21195.88),
    (128, 4096): (2651.75, 6526.67, 10574.06, 16941.52),
    (500, 2000): (3018.39, 6848.02, 12452.79, 17278.4),
    (1000, 1000): (2823.45, 5164.76, 8911.29, 13181.24),
    (2048, 128): (465.99, 809, 1358.06, 1983.03),
    (2048, 2048): (1913.8, 4183.88, 7130.44, 11142.47),
    (5000, 500): (560.16, 1025.38, 1811.55, 2717.83),
    (20000, 2000): (279.52, 640.62, 1199.68, 1920.45),
}


def throughputs() -> Iterator[tuple[int, tuple[int, int], float, float]]:
    """TP, the lengths, the published and the computed throughput."""
    shape = shape_in({**CONFIGS["Llama-3.1-70B"], **_FP8}, "fp8")
    for (prompt, answer), row in THROUGHPUTS.items():
        for tp, published in zip((1, 2, 4, 8), row, strict=True):
            costs = ServingCosts(shape, GPUS["h200"], DeviceLayout(1, tp, 1), 0.95)
            # A request is admitted there only if all of its answer has room; at most 2048 are.
            batch = min(2048, costs.tokens / (prompt + answer))
            step_s = costs.step_s(batch, batch * (prompt + answer / 2))
            step_s += batch / answer * costs.prefill.seconds(prompt)
            yield tp, (prompt, answer), published, batch / step_s


def ranked(shape: ModelShape, answer: int = ANSWER) -> list[tuple[float, DeviceLayout]]:
    """The layouts of eight H200, by tokens a second while requests wait."""
    found = []
    for layout in layouts(shape, 8):
        try:
            costs = ServingCosts(shape, GPUS["h200"], layout)
        except UsageError:
            continue  # the weights do not fit
        found.append((planning.steady(costs, PROMPT, answer), layout))
    return sorted(found, reverse=True)


def _findings(args: argparse.Namespace) -> int:
    shape = shape_in(CONFIGS["Qwen2.5-32B"])
    for layout, published in CAPACITIES.items():
        tokens = layout.dp * ServingCosts(shape, GPUS["h200"], layout, 1.0).tokens
        print(f"32B {layout}: published {published / 1e6:.2f} M tokens, computed "
              f"{tokens / 1e6:.3f} M ({tokens / published - 1:+.1%})")  # fmt: skip
    for answer in (1024, 2048, ANSWER, 8192, 16384):
        for name, best in BEST.items():
            first, *others = ranked(shape_in(CONFIGS[name]), answer)
            rates = {layout: rate for rate, layout in [first, *others]}
            print(f"answers of {answer}, {name}: published {best}, computed {first[1]}; the "
                  f"published one has {rates[best] / first[0]:.1%} of its rate")  # fmt: skip
    requests = planning.drawn(args.requests, PROMPT, ANSWER)
    for name in BEST:
        shape = shape_in(CONFIGS[name])
        for each in planning.plan(shape, GPUS["h200"], layouts(shape, 8), requests):
            out = each.swept[each.chosen]
            print(f"{name} {each.costs.layout}: {args.requests} requests, {out.end_s:.0f} s at "
                  f"{each.chosen}, {out.answered / out.end_s:.0f} tokens/s")  # fmt: skip
    return 0


def _fit(args: argparse.Namespace) -> int:
    errors = []
    for tp, lengths, published, computed in throughputs():
        errors.append(math.log(computed / published))
        print(
            f"TP {tp}, {lengths}: {published:.0f}, {computed:.0f} ({computed / published - 1:+.1%})"
        )
    print(f"root of the mean square: {math.sqrt(statistics.fmean(e * e for e in errors)):.1%}")
    return 0


# -- load or compute, in a store that is throttled -----------------------------------------------

_PAGE_TOKENS = 16
_TOKENS_MAX = 1024
_OTHERS = 24  # pages, more than the memory of the store has


def _median_s(body: Callable[[], object], before: Callable[[], object] = int) -> float:
    taken = []
    for _ in range(3):
        before()
        begin = time.perf_counter()
        body()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def fitted_load(samples: Sequence[tuple[float, float]]) -> LoadTimes:
    """From (bytes, seconds)."""
    lookup_s, per_byte = _fitted([(1.0, nbytes, s) for nbytes, s in samples])
    return LoadTimes(1.0 / max(per_byte, 1e-15), lookup_s)


def fitted_prefill(samples: Sequence[tuple[float, float]]) -> PrefillTimes:
    """From (tokens, seconds)."""
    return PrefillTimes(*_fitted([(tokens, tokens * tokens / 2, s) for tokens, s in samples]))


def break_even(
    prefill: PrefillTimes, tokens: int, token_bytes: float, lookup_s: float = 0.0
) -> float:
    """The bandwidth from which on it is faster to load so many tokens; infinite if the look-up
    alone takes longer."""
    left_s = prefill.seconds(tokens) - lookup_s
    return tokens * token_bytes / left_s if left_s > 0 else math.inf


def _fitted(samples: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """a and b, not negative, with a x + b y = s at the least relative error."""
    rows = [(x / s, y / s) for x, y, s in samples if s > 0]
    xx, xy, yy = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(row[i] for row in rows) for i in (0, 1))
    if not xx or not yy:
        facts = {"expected": "(size, seconds), both above 0", "got": list(samples)}
        raise UsageError("there is nothing to fit a time to", facts=facts)
    if determinant := xx * yy - xy * xy:
        a, b = (x * yy - y * xy) / determinant, (xx * y - xy * x) / determinant
        if a >= 0 and b >= 0:
            return a, b
    # One term alone: the one that leaves less.
    return (x / xx, 0.0) if x * x / xx > y * y / yy else (0.0, y / yy)


class _Prefix:
    """A prefix of a small random Llama: it is computed by the model, or loaded from a store."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        torch.set_num_threads(1)
        config = LlamaConfig(
            hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, vocab_size=1024, max_position_embeddings=2 * _TOKENS_MAX,
        )  # fmt: skip
        self._model: Any = LlamaForCausalLM(config).eval()
        self._torch = torch
        self.token_bytes = 2 * 2 * 128 * 4
        self.page_bytes = self.token_bytes * _PAGE_TOKENS
        pages = _TOKENS_MAX // _PAGE_TOKENS + _OTHERS
        self.keys = [n.to_bytes(32, "big") for n in range(pages)]
        # A limit acts between two requests of the disk, so each has one page.
        opened.BUFFER_BYTES = slot_bytes(self.page_bytes)
        # Memory for few pages: what is asked for in order is always read from files.
        self.store = PageStore(folder, page_bytes=self.page_bytes, capacity="256MiB",
                               memory=16 * self.page_bytes, deadline_s=60.0)  # fmt: skip
        self._buffers = [bytearray(self.page_bytes) for _ in self.keys]
        for key in self.keys:
            self.store.put([key], [random.Random(key).randbytes(self.page_bytes)]).wait()
        self.store.flush()

    def compute(self, tokens: int) -> None:
        with self._torch.inference_mode():
            self._model.model(self._torch.zeros(1, tokens, dtype=self._torch.long), use_cache=True)

    def load(self, tokens: int) -> None:
        self._read(slice(tokens // _PAGE_TOKENS))

    def forget(self) -> None:
        """Read other pages: memory has none of the prefix, and the limit owes no burst."""
        self._read(slice(-_OTHERS, None))

    def _read(self, pages: slice) -> None:
        verdicts = self.store.get(self.keys[pages], self._buffers[pages]).wait()
        if set(verdicts) != {PageVerdict.HIT}:
            raise RuntimeError(f"pages were not read: {verdicts}")

    def throttle(self, bytes_per_s: int) -> None:
        self.store._open._engine.set_limit(0, None, bytes_per_s)


def _choices(args: argparse.Namespace) -> int:
    random_ = random.Random(args.seed)
    right = 0
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        prefix = _Prefix(folder)
        prefix.compute(128)  # the first one also allocates
        sizes = (128, 512, _TOKENS_MAX)
        for _ in range(args.cases):
            prefill = fitted_prefill([(n, _median_s(partial(prefix.compute, n))) for n in sizes])
            tokens = round(2 ** random_.uniform(6, 10)) // _PAGE_TOKENS * _PAGE_TOKENS
            even = break_even(prefill, tokens, prefix.token_bytes)
            limit = int(even * 2 ** random_.uniform(-3, 3))
            prefix.throttle(limit)
            load = fitted_load(
                [
                    (n * prefix.token_bytes, _median_s(partial(prefix.load, n), prefix.forget))
                    for n in sizes[:2]
                ]
            )
            chosen = is_load_faster(tokens, prefix.token_bytes, load, prefill)
            load_s = _median_s(partial(prefix.load, tokens), prefix.forget)
            compute_s = _median_s(partial(prefix.compute, tokens))
            is_right = chosen is (load_s < compute_s)
            right += is_right
            what, mark = "load" if chosen else "compute", "" if is_right else "  WRONG"
            times = f"load {load_s * 1e3:.0f} ms, compute {compute_s * 1e3:.0f} ms"
            print(f"{tokens} tokens at {limit / 1e6:.0f} MB/s: {times}, chosen {what}{mark}")
        prefix.throttle(0)
        prefix.store.close()
    print(f"right in {right} of {args.cases} cases ({right / args.cases:.0%})")
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__)
    commands = parser.add_subparsers(required=True)
    findings = commands.add_parser("findings")
    findings.set_defaults(run=_findings)
    findings.add_argument("--requests", type=int, default=8192)
    commands.add_parser("fit").set_defaults(run=_fit)
    choices = commands.add_parser("choices")
    choices.set_defaults(run=_choices)
    choices.add_argument("--cases", type=int, default=40)
    choices.add_argument("--seed", type=int, default=0)
    choices.add_argument("--dir", default=".")
    args = parser.parse_args(arguments)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
