"""`python -m bench.paged_eviction`: what the scores of PagedEvictionCache keep, in a real model.

Each text is a prompt of so many tokens, with a sentence in it that names a number. It is computed
once. Then each score keeps 75, 50 and 25 % of it, and the model reads on:

    continue   the text goes on
    repeat     the prompt begins again, so what helps lies far back
    needle     the sentence comes again, and the number is its end

The figures are the mean negative log-likelihood of a token. "found" is how often each token of the
number is the likeliest one. A difference is paired: a score beside the plain recent window
(streaming) on the same text. Then the memory of the caches, and tokens a second, in turns.

The model is --gguf FILE or --model DIRECTORY, and without them a small one that is trained here.
The texts are those of pydoc, which every Python has.

Invariants: all scores have the same pages, budgets and texts, and chance has a fixed seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from bench import harness
from bench.report import table
from statehold.kv import PagedEvictionCache
from statehold.kv.caches.paged_eviction import PAGE_TOKENS, SCORES, Score, random_scores

Record = dict[str, Any]
Ids = torch.Tensor
Pairs = list[tuple[torch.Tensor, torch.Tensor]]

BUDGETS = (75, 50, 25)
BASE = "streaming"
TESTS = ("continue", "repeat", "needle")
ROUNDS = 3


def key_value_ratio(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The published score with the other sign."""
    return -SCORES["value_key_ratio"](keys, values)


def scores() -> dict[str, Callable[[], Score]]:
    found: dict[str, Callable[[], Score]] = {
        name: lambda score=score: score for name, score in SCORES.items()
    }
    return {**found, "key_value_ratio": lambda: key_value_ratio, "random": random_scores}


# -- the model and the texts -----------------------------------------------------------------------


class Letters:
    """A tokenizer of single characters, for the model that is trained here."""

    def encode(self, text: str) -> list[int]:
        return [min(ord(each), 127) for each in text]


def trained(seconds: float) -> tuple[Any, Any]:
    """A small model of characters, trained for so long on texts that are not measured."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    model, letters = LlamaForCausalLM(config), Letters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    short = [text for text in topics.values() if len(text) < 3000]
    ids = torch.tensor(letters.encode("\n".join(short)), device="cpu")
    dice, begin = torch.Generator().manual_seed(0), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        at = torch.randint(len(ids) - 256, (8,), generator=dice, device="cpu").tolist()
        batch = torch.stack([ids[each : each + 256] for each in at])
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, letters


def opened(options: argparse.Namespace) -> tuple[Any, Any, str]:
    """The model, its tokenizer, and what they are."""
    if options.gguf:
        folder, name = str(options.gguf.parent), options.gguf.name
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        return model, tokenizer, name
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        return model, tokenizer, str(options.model)
    return *trained(options.train_seconds), "a Llama of 4 layers, trained here on characters"


def encoded(tokenizer: Any, text: str) -> Ids:
    if isinstance(tokenizer, Letters):
        return torch.tensor(tokenizer.encode(text), device="cpu")
    return torch.tensor(tokenizer.encode(text, add_special_tokens=False), device="cpu")


def texts(tokenizer: Any, tokens: int, count: int) -> list[tuple[str, Ids]]:
    """The first so many texts by name that are long enough."""
    found = ((name, encoded(tokenizer, topics[name])) for name in sorted(topics)
             if len(topics[name]) > 2 * tokens)  # fmt: skip
    return [(name, ids[:tokens]) for name, ids in found if len(ids) >= tokens][:count]


# -- what is measured ------------------------------------------------------------------------------


def prefilled(model: Any, prompt: Ids) -> Pairs:
    cache = DynamicCache()
    model(prompt[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return [(layer.keys, layer.values) for layer in cache.layers]


class Abreast(DynamicLayer):
    """A layer of several caches, which keep as many tokens: a sequence of the batch has each."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__()
        self.rows = rows

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
        found = [row.update(keys[n : n + 1], values[n : n + 1]) for n, row in enumerate(self.rows)]
        return tuple(torch.cat(each) for each in zip(*found, strict=True))

    def get_seq_length(self) -> int:
        return int(self.rows[0].get_seq_length())

    def get_mask_sizes(self, query_length: int) -> Any:
        return self.rows[0].get_mask_sizes(query_length)


def cache_of(config: Any, pairs: Pairs, score: Score | None, budget: int) -> Any:
    """What a score keeps of a prompt; None: everything."""
    cache = PagedEvictionCache(config, budget, score=score) if score else DynamicCache()
    for number, pair in enumerate(pairs):
        cache.update(*pair, number)
    return cache


def read_on(model: Any, caches: list[Any], ids: Ids) -> tuple[torch.Tensor, torch.Tensor]:
    """For each cache, of each token but the first: its negative log-likelihood, and whether it is
    the likeliest one."""
    layers = zip(*(cache.layers for cache in caches), strict=True)
    abreast = Cache(layers=[Abreast(list(rows)) for rows in layers])
    logits = torch.cat([
        model(piece.expand(len(caches), -1), past_key_values=abreast, use_cache=True).logits
        for piece in ids.split(PAGE_TOKENS)
    ], dim=1)[:, :-1]  # fmt: skip
    expected = ids[1:].expand(len(caches), -1)
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2).float(), expected, reduction="none"
    )
    return losses, logits.argmax(-1) == expected


def needle(tokenizer: Any, text: Ids, number: int, prompt: int) -> tuple[Ids, Ids, int, int]:
    """A prompt with a needle in it, what asks for it with the answer, how many tokens of that are
    the answer, and how many tokens of the text are in the prompt."""
    value = 10_000 + 7_919 * number % 89_999
    hidden = encoded(tokenizer, f"\nThe secret number of Lisbon is {value}.\n")
    asks, answer = encoded(tokenizer, "\nThe secret number of Lisbon is"), f" {value}"
    room = prompt - len(hidden)
    at = room * (1 + number % 9) // 10
    answer_ids = encoded(tokenizer, answer)
    return (
        torch.cat([text[:at], hidden, text[at:room]]),
        torch.cat([asks, answer_ids]),
        len(answer_ids),
        room,
    )


def measure(
    model: Any, tokenizer: Any, number: int, text: Ids, sizes: argparse.Namespace
) -> Record:
    """The figures of a text, by "score budget", for each test."""
    more = sizes.more
    prompt, asks, answer, begin = needle(tokenizer, text, number, sizes.prompt)
    tests = {
        "continue": (text[begin : begin + more], more),
        "repeat": (prompt[:more], more),
        "needle": (asks, answer),
    }
    found: Record = {test: {} for test in TESTS}
    pairs = prefilled(model, prompt)
    for percent in (100, *BUDGETS):
        made = {name: score for name, each, score in cases() if each == percent}
        for test, (ids, last) in tests.items():
            budget = sizes.prompt * percent // 100
            caches = [cache_of(model.config, pairs, score, budget) for score in made.values()]
            losses, is_first = read_on(model, caches, ids)
            for row, name in enumerate(made):
                found[test][f"{name} {percent}"] = {
                    "nll": float(losses[row, -last:].mean()),
                    "found": bool(is_first[row, -last:].all()),
                }
    return found


def cases() -> list[tuple[str, int, Score | None]]:
    """The whole cache, then each score with each budget."""
    made = [(name, percent, make()) for name, make in scores().items() for percent in BUDGETS]
    return [("full", 100, None), *made]


def speeds(model: Any, vocabulary: int, options: argparse.Namespace) -> list[Record]:
    """Memory and tokens a second behind a long prompt, in turns."""
    dice = torch.Generator().manual_seed(0)
    count = options.long + options.decoded
    ids = torch.randint(1, vocabulary, (count,), generator=dice, device="cpu")
    pairs = prefilled(model, ids[: options.long])
    rows = []
    for _ in range(ROUNDS):
        for percent in (100, *BUDGETS):
            score = SCORES["value_key_ratio"] if percent < 100 else None
            cache = cache_of(model.config, pairs, score, options.long * percent // 100)
            begin = time.perf_counter()
            for each in ids[options.long :]:
                model(each[None, None], past_key_values=cache, use_cache=True)
            seconds = time.perf_counter() - begin
            held = cache.nbytes if score else sum(
                layer.keys.nbytes + layer.values.nbytes for layer in cache.layers
            )  # fmt: skip
            rows.append({"percent": percent, "tokens_s": options.decoded / seconds, "bytes": held})
    return rows


# -- the tables ------------------------------------------------------------------------------------


def paired(records: list[Record], test: str, name: str, other: str) -> Record:
    """The differences of two cases over the texts. spread: their standard deviation."""
    found = [each[test][name]["nll"] - each[test][other]["nll"] for each in records]
    spread = statistics.stdev(found) if len(found) > 1 else 0.0
    return {
        "mean": statistics.fmean(found), "spread": spread, "lower": sum(d < 0 for d in found),
        "error": spread / len(found) ** 0.5,
    }  # fmt: skip


def summary(records: list[Record]) -> list[Record]:
    rows = []
    for test in TESTS:
        for name, percent, _ in cases():
            case = f"{name} {percent}"
            each = [record[test][case] for record in records]
            base = f"{BASE} {percent}" if percent < 100 else case
            rows.append({
                "test": test, "score": name, "percent": percent,
                "nll": statistics.fmean(one["nll"] for one in each),
                "found": sum(one["found"] for one in each),
                "to_full": paired(records, test, case, "full 100"),
                "to_base": paired(records, test, case, base),
            })  # fmt: skip
    return rows


def shown_difference(found: Record) -> str:
    return f"{found['mean']:+.3f} ± {found['error']:.3f} ({found['spread']:.3f})"


def lines_of(rows: list[Record], speed: list[Record], texts_count: int) -> list[str]:
    columns: list[Any] = [
        ("test", lambda r: r["test"]),
        ("score", lambda r: r["score"]),
        ("%", lambda r: str(r["percent"])),
        ("NLL", lambda r: f"{r['nll']:.3f}"),
        ("to full ± error (spread)", lambda r: shown_difference(r["to_full"])),
        (f"to {BASE} ± error (spread)", lambda r: shown_difference(r["to_base"])),
        (f"texts below {BASE}", lambda r: f"{r['to_base']['lower']} of {texts_count}"),
        ("found", lambda r: f"{r['found']} of {texts_count}" if r["test"] == "needle" else ""),
    ]
    of_speed = []
    for percent in (100, *BUDGETS):
        each = [row for row in speed if row["percent"] == percent]
        of_speed.append({
            "percent": percent, "mb": each[0]["bytes"] / 1e6,
            "tokens_s": sorted(row["tokens_s"] for row in each),
        })  # fmt: skip
    speed_columns: list[Any] = [
        ("%", lambda r: str(r["percent"])),
        ("cache MB", lambda r: f"{r['mb']:.1f}"),
        ("tokens/s, least median most",
         lambda r: " ".join(f"{each:.1f}" for each in r["tokens_s"])),
    ]  # fmt: skip
    return [*table(rows, columns), "", *table(of_speed, speed_columns)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.paged_eviction", description=__doc__)
    parser.add_argument("--gguf", type=Path, help="the file of a model; needs the package gguf")
    parser.add_argument("--model", type=Path, help="the directory of a model")
    parser.add_argument("--train-seconds", type=float, default=120.0, help="without a model")
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--more", type=int, default=24, help="tokens that are read on")
    parser.add_argument("--long", type=int, default=1024, help="tokens of the prompt for speeds")
    parser.add_argument("--decoded", type=int, default=8, help="tokens for speeds")
    parser.add_argument("--seconds", type=float, default=1500.0, help="then no text is begun")
    parser.add_argument("--go-on", action="store_true", help="with the next texts, in --out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench/out/paged-eviction")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    begin = time.perf_counter()
    model, tokenizer, name = opened(options)
    model.eval()
    facts = harness.facts(harness.ROOT) | {
        "command": " ".join(["python -m bench.paged_eviction", *sys.argv[1:]]), "model": name,
    }  # fmt: skip
    before: Record = {"records": [], "speed": [], "facts": {"texts": "", "seconds": 0}}
    if options.go_on:
        before = json.loads((options.out / "paged-eviction.json").read_text())
    records, speed = before["records"], before["speed"]
    names = [*filter(None, before["facts"]["texts"].split(", "))]
    with torch.inference_mode():
        found = texts(tokenizer, options.prompt + options.more, options.texts)
        for number, (text, ids) in [*enumerate(found)][len(records) :]:
            if time.perf_counter() - begin > options.seconds:
                break
            records.append(measure(model, tokenizer, number, ids, options))
            names.append(text)
            print(f"{time.perf_counter() - begin:.0f} s: {text}", flush=True)
        speed = speed or speeds(model, model.config.vocab_size, options)

    rows = summary(records)
    facts |= {"texts": ", ".join(names), "seconds": before["facts"]["seconds"]}
    facts["seconds"] += round(time.perf_counter() - begin)
    lines = [*(f"{key}: {value}" for key, value in facts.items()), ""]
    lines += lines_of(rows, speed, len(records))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "paged-eviction.txt").write_text("\n".join(lines) + "\n")
    whole = {"schema": 1, "facts": facts, "rows": rows, "speed": speed, "records": records}
    (options.out / "paged-eviction.json").write_text(json.dumps(whole, indent=1) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
