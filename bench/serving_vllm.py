"""Time to the first token of vLLM: with pages of statehold, with vLLM's example connector, without.

    tools/serving.sh --prepare
    PYTHONPATH=src:. .venv-serving/bin/python -m bench.serving_vllm --out FOLDER

Three engines run at the same time, each in one process, and take turns: in each repetition all of
them answer a prompt before the next one begins. "cold" is a prompt that was never seen. "hit" is a
prompt that was seen, after vLLM has forgotten its own prefix cache. "restart" is the first hit of
an engine that was just started: its pages are in files alone.

Invariants: the answers of an engine are compared with those of the engine without a connector. The
model is SmolLM2-135M in bfloat16, the prompts are random tokens. Figures are medians, with all
repetitions beside them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import smollm
from statehold.process.host_memory import home_path

SIZES = (512, 1024, 2048, 4096)
VOCABULARY = 49152
FIRST_S = 900.0


def pages(path: Path) -> dict[str, Any]:
    extra = {"path": str(path), "capacity": "4GiB", "memory": "512MiB", "deadline_s": 60.0}
    return {"kv_connector": "StateholdConnector", "kv_connector_extra_config": extra}


def example(path: Path) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(path)},
    }


# -- an engine, in a process of its own ------------------------------------------------------------


def serve(model: str, transfer: dict[str, Any] | None) -> None:
    """Answer lines of JSON on standard input: a prompt, and whether to forget before."""
    from vllm import LLM, SamplingParams

    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints
    options = {"kv_transfer_config": {**transfer, "kv_role": "kv_both"}} if transfer else {}
    llm = LLM(
        model=model, enforce_eager=True, max_model_len=4224, max_num_batched_tokens=8192,
        skip_tokenizer_init=True, distributed_executor_backend="uni", **options,
    )  # fmt: skip
    once = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
    more = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)

    def answer(ids: list[int], sampling: Any) -> tuple[float, list[int], int]:
        begun = time.perf_counter()
        (found,) = llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
        took = time.perf_counter() - begun
        return took, list(found.outputs[0].token_ids), found.num_cached_tokens

    answer([5] * 160, more)
    print("ready", file=out)
    for line in sys.stdin:
        job = json.loads(line)
        if job["forget"]:
            llm.reset_prefix_cache()
        print(json.dumps(answer(job["ids"], more if job["more"] else once)), file=out)


class Engine:
    """A process of serve()."""

    def __init__(self, name: str, model: Path, transfer: dict[str, Any] | None, log: Path) -> None:
        self.name = name
        env = {
            **os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }  # fmt: skip
        with open(log / f"{name}.log", "ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bench.serving_vllm", "--serve", str(model),
                 json.dumps(transfer)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, env=env,
            )  # fmt: skip

    def begin(self) -> None:
        line = self._line()
        if line != "ready":
            raise SystemExit(f"the engine {self.name} did not start: {line!r}")

    def ask(self, ids: list[int], *, forget: bool = True, more: bool = False) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"ids": ids, "forget": forget, "more": more}) + "\n")
        self.process.stdin.flush()
        took, tokens, cached = json.loads(self._line())
        return {"ms": took * 1e3, "tokens": tokens, "cached": cached}

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(120)


# -- the comparison --------------------------------------------------------------------------------


def prompt(dice: random.Random, tokens: int) -> list[int]:
    return dice.choices(range(10, VOCABULARY), k=tokens)


def measure(engines: list[Engine], size: int, repetitions: int) -> list[dict[str, Any]]:
    """Cold and hit of each engine, in turns."""
    dice, found, plain = random.Random(size), list[dict[str, Any]](), engines[0]
    rows = {engine.name: {"cold": [], "hit": [], "differ": 0} for engine in engines}
    for at in range(repetitions):
        ids = prompt(dice, size)
        for engine in engines[at % len(engines) :] + engines[: at % len(engines)]:
            row = rows[engine.name]
            row["cold"].append(engine.ask(ids)["ms"])
        right = None
        for engine in engines:
            row, forget = rows[engine.name], engine is not plain
            answer = engine.ask(ids, forget=forget)  # the plain one has its own prefix cache
            row["hit"].append(answer["ms"])
            row["cached"] = answer["cached"]
            tokens = engine.ask(ids, forget=forget, more=True)["tokens"]
            right = right or tokens
            row["differ"] += tokens != right
    for name, row in rows.items():
        found.append({"tokens": size, "engine": name, **row})
        print(shown(found[-1]), flush=True)
    return found


def restarts(
    model: Path, store: Path, log: Path, sizes: list[int], repetitions: int
) -> list[dict[str, Any]]:
    """The first hit after a start: the pages are in files alone."""
    engine = Engine("statehold again", model, pages(store), log)
    engine.begin()
    found = []
    for size in sizes:
        dice = random.Random(size)  # the prompts of measure()
        answers = [engine.ask(prompt(dice, size)) for _ in range(repetitions)]
        row = {
            "tokens": size, "engine": "statehold", "restart": [each["ms"] for each in answers],
            "cached": answers[0]["cached"],
        }  # fmt: skip
        found.append(row)
        print(shown(row), flush=True)
    engine.end()
    return found


def write(out: Path | None, rows: list[dict[str, Any]]) -> None:
    """The figures so far."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    command = " ".join(sys.orig_argv)
    whole = {"command": command, "cores": os.cpu_count(), "load": os.getloadavg(), "rows": rows}
    (out / "serving-vllm.json").write_text(json.dumps(whole, indent=1) + "\n")
    text = "\n".join(map(shown, rows))
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    (out / "serving-vllm.txt").write_text(
        f"{command}\n{os.cpu_count()} cores, load {load}\n\n{text}\n"
    )


def forget_memory(store: Path) -> None:
    """As a start of the host does: an engine that ends leaves its pages in memory."""
    found = store.stat()
    name = hashlib.sha256(f"{found.st_dev} {found.st_ino}".encode()).hexdigest()[:16]
    for file in Path(home_path()).glob(f"kv-{name}-*"):
        file.unlink()


def shown(row: dict[str, Any]) -> str:
    figures = [
        f"{kind} {statistics.median(row[kind]):8.0f} ms"
        for kind in ("cold", "hit", "restart")
        if kind in row
    ]
    differ = f"  {row['differ']} differ" if "differ" in row else ""
    return (
        f"{row['tokens']:5} {row['engine']:10} {'  '.join(figures)}  cached {row['cached']}{differ}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", type=Path, default=Path("bench/out/smollm2-135m"))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--repetitions", type=int, default=5)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve[0], json.loads(asked.serve[1]))
        return
    model = smollm.made(asked.model)
    folder = Path(tempfile.mkdtemp(prefix="serving-", dir="/var/tmp"))
    try:
        engines = [
            Engine("none", model, None, folder),
            Engine("statehold", model, pages(folder / "kv"), folder),
            Engine("example", model, example(folder / "example"), folder),
        ]
        for engine in engines:
            engine.begin()
        rows = list[dict[str, Any]]()
        for size in asked.sizes:
            rows += measure(engines, size, asked.repetitions)
            write(asked.out, rows)
        for engine in engines:
            engine.end()
        forget_memory(folder / "kv")
        rows += restarts(model, folder / "kv", folder, asked.sizes, asked.repetitions)
        write(asked.out, rows)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
