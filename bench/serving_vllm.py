"""Time to the first token of vLLM: with pages of statehold, LMCache, vLLM's example, and without.

    tools/serving.sh --prepare
    .venv-serving/bin/pip install --no-deps lmcache==0.5.6 aiofile caio aiofiles nvtx \
        sortedcontainers redis awscrt opentelemetry-exporter-prometheus==0.61b0
    PYTHONPATH=src:. .venv-serving/bin/python -m bench.serving_vllm --out FOLDER

LMCache is optional: --engines names who takes part. Its own server has 2 GB of memory, and files
below it. --only names what is measured:

    first     Engines run at the same time, each in one process, and take turns: in each repetition
              all of them answer a prompt before the next one begins. "cold" is a prompt that was
              never seen. "hit" is a prompt that was seen, after vLLM has forgotten its own prefix
              cache. "restart" is a hit after all processes were killed and files have left the page
              cache. "saving" and "loading" are the part of it that is inside the worker's step, and
              "saving cpu" is the time on a processor in it.
    updates   Other weights while an engine lives: all tensors, or those of three of 30 layers, from
              a run; and vLLM's reload_weights() of all, in turns. "pause": the step was read ahead,
              and the engine gave one answer before. "alone" and "beside": how long such an answer
              takes without a read, and with one. "cpu" counts the time of a processor. "stale": in
              how many of the reloads vLLM alone answers from what the weights before have computed.
    starts    How long the loader of a new engine takes: load_format="statehold", vLLM's own with
              safetensors, and restore() of the same step into tensors by a new process, in turns,
              each once the files have left the page cache.
    hang      Times between the tokens of one answer while another prompt is asked: nobody else,
              one that is computed, and one whose pages are in a storage that hangs for 5 seconds.

Invariants: answers of engines that compute as many tokens of a prompt are compared; "unlike cold":
first tokens of hits that are not those of the cold run. One token at a time rounds otherwise. The
model is SmolLM2-135M in bfloat16, the prompts are random tokens. Figures are medians, with all
repetitions beside them.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import smollm
from bench.harness import drop_caches
from statehold.kv.looking import counts
from statehold.kv.page import HEADER_BYTES
from statehold.kv.tiers import memory_path

SIZES = (512, 1024, 2048, 4096)
VOCABULARY = 49152
LIMIT_S = 300.0
PAGE, CHUNK = 128, 256  # tokens: of a page of statehold, of a chunk of LMCache
SLOT = HEADER_BYTES + PAGE * 23_040  # bytes of a page with its header
INSIDE = ("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save")
HANGS_S = 5.0
UPDATES = ("reload", "all", "tenth", "pause all", "pause tenth")
TIMES = (*UPDATES, *(f"{kind} cpu" for kind in UPDATES), "alone", "beside")
Options = dict[str, Any]


def transfer(connector: str, **extra: Any) -> Options:
    given = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {"kv_transfer_config": given}


def pages(path: Path, **options: Any) -> Options:
    given = {"capacity": "4GiB", "memory": "512MiB", "deadline_s": 60.0, **options}
    return transfer("StateholdConnector", path=str(path), **given)


# -- an engine, in a process of its own ------------------------------------------------------------


def serve(model: str, options: Options) -> None:
    """Answer lines of JSON on standard input: a method of Serving, and what it takes."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints
    serving = Serving(model, options)
    serving.ask([5] * 160, forget=False, more=True)
    print("ready", file=out)
    for line in sys.stdin:
        name, given = json.loads(line)
        print(json.dumps(getattr(serving, name)(**given)), file=out)


class Serving:
    """vLLM, all of it in this process."""

    def __init__(self, model: str, options: Options) -> None:
        from vllm import LLM, SamplingParams
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
        from vllm.triton_utils import dispatcher

        # LMCache brings llvmlite, which has an object that vLLM cannot look into.
        dispatcher.vars = lambda of: found if hasattr(found := vars(of), "get") else {}

        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        from statehold.kv.vllm import loader

        self.loading_s = 0.0
        loader.load_into = self._loads(loader.load_into)
        DefaultModelLoader.load_weights = self._loads(DefaultModelLoader.load_weights)
        self.llm = LLM(
            model=model, enforce_eager=True, max_model_len=4224, max_num_batched_tokens=8192,
            skip_tokenizer_init=True, distributed_executor_backend="uni", **options,
        )  # fmt: skip
        self.sampling = lambda tokens: SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        self.inside_s = self.cpu_s = 0.0
        if has_kv_transfer_group():
            worker = get_kv_transfer_group()
            for name in INSIDE:
                setattr(worker, name, self._timed(getattr(worker, name)))

    def _loads(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def loads(*args: Any) -> None:
            begun = time.perf_counter()
            call(*args)
            self.loading_s += time.perf_counter() - begun

        return loads

    def loaded(self) -> float:
        """Milliseconds in which the parameters got their elements."""
        return self.loading_s * 1e3

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun, cpu = time.perf_counter(), time.thread_time()
            found = call(*args, **kwargs)
            self.inside_s += time.perf_counter() - begun
            self.cpu_s += time.thread_time() - cpu
            return found

        return timed

    def ask(self, ids: list[int], *, forget: bool = True, more: bool = False) -> dict[str, Any]:
        """The answer to a prompt. forget: vLLM's own prefix cache, before; more: 8 tokens."""
        if forget:
            until(self._has_forgotten)
        self.inside_s, self.cpu_s, begun = 0.0, 0.0, time.perf_counter()
        prompts, sampling = {"prompt_token_ids": ids}, self.sampling(8 if more else 1)
        (found,) = self.llm.generate(prompts, sampling, use_tqdm=False)
        took = time.perf_counter() - begun
        tokens, cached = list(found.outputs[0].token_ids), found.num_cached_tokens
        inside = {"inside": self.inside_s * 1e3, "cpu": self.cpu_s * 1e3}
        return {"ms": took * 1e3, **inside, "tokens": tokens, "cached": cached}

    def _has_forgotten(self) -> bool:
        """LMCache lets go of its blocks in the step behind the one that has saved them."""
        self.llm.llm_engine.step()
        return bool(self.llm.reset_prefix_cache())

    def call(self, *, calls: list[tuple[str, Options]]) -> tuple[float, float]:
        """How many milliseconds methods of the worker take, one after the other, and how many of
        the processor."""
        begun, cpu = time.perf_counter(), time.process_time()
        for method, kwargs in calls:
            self.llm.collective_rpc(method, kwargs=kwargs)
        return (time.perf_counter() - begun) * 1e3, (time.process_time() - cpu) * 1e3

    def beside(self, *, ids: list[int], other: list[int] | None, hangs: bool) -> dict[str, Any]:
        """Milliseconds between the tokens of an answer. Behind its tenth token comes another
        prompt. hangs: the storage, when pages are read."""
        from statehold.kv.opened import OpenStore

        job, hung = OpenStore.job, list[Hanging]()

        def hanging(store: Any, moves: Any, *, is_write: bool = False) -> Any:
            found = job(store, moves, is_write=is_write)
            if not is_write:
                found = Hanging(found)
                hung.append(found)
            return found

        OpenStore.job = hanging if hangs else job
        until(self._has_forgotten)
        engine, at, asked = self.llm.llm_engine, list[float](), 0.0
        row: dict[str, Any] = {}
        engine.add_request("long", {"prompt_token_ids": ids}, self.sampling(300))
        while engine.has_unfinished_requests():
            for each in engine.step():
                if each.request_id == "long":
                    at.append(time.perf_counter())
                elif each.finished:
                    row["other"] = (time.perf_counter() - asked) * 1e3
                    row["cached"] = each.num_cached_tokens
            if other is not None and len(at) == 10 and not asked:
                asked = time.perf_counter()
                engine.add_request("other", {"prompt_token_ids": other}, self.sampling(1))
        OpenStore.job = job
        assert bool(hung) == hangs, row
        return {**row, "gaps": [(b - a) * 1e3 for a, b in itertools.pairwise(at)]}


class Hanging:
    """Reads of pages that take 5 seconds longer."""

    def __init__(self, job: Any) -> None:
        self._job, self._until = job, time.monotonic() + HANGS_S

    def wait(self, timeout: float | None) -> bool:
        left = max(0.0, self._until - time.monotonic())
        if timeout is not None and timeout < left:
            time.sleep(timeout)
            return False
        time.sleep(left)
        return bool(self._job.wait(timeout))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)


class Engine:
    """A process of serve(). Calls of unknown names go to its Serving."""

    def __init__(self, name: str, model: Path, options: Options, log: Path) -> None:
        self.name, self._log = name, log / f"{name}.log"
        env = {
            **os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }  # fmt: skip
        command = [sys.executable, "-m", "bench.serving_vllm", "--serve", str(model)]
        with open(self._log, "ab") as file:
            self.process = subprocess.Popen(
                [*command, json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=file, text=True, env=env,
            )  # fmt: skip
        atexit.register(self.kill)

    def begin(self) -> None:
        line = self._line()
        if line != "ready":
            raise SystemExit(
                f"the engine {self.name} did not start: {self._log.read_text()[-4000:]}"
            )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(**given: Any) -> Any:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps([name, given]) + "\n")
            self.process.stdin.flush()
            return json.loads(self._line())

        return call

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"the engine {self.name} has ended: {self._log.read_text()[-4000:]}")
        return line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Server:
    """LMCache's own process: it keeps the pages of engines, in memory and in files below."""

    def __init__(self, path: Path, log: Path) -> None:
        path.mkdir(exist_ok=True)
        port, http = free_port(), free_port()
        self.options = transfer("LMCacheMPConnector", **{"lmcache.mp.port": port})
        files = json.dumps({"type": "fs", "base_path": str(path)})
        self._memory = Path(f"/dev/shm/statehold-bench-lmcache-{port}")
        with open(log / "server.log", "ab") as file:
            self.process = subprocess.Popen(
                [Path(sys.executable).with_name("lmcache"), "server", "--l1-size-gb", "2",
                 "--eviction-policy", "LRU", "--chunk-size", str(CHUNK), "--l2-adapter", files,
                 "--shm-name", self._memory.name, "--supported-transfer-mode", "engine_driven",
                 "--port", str(port), "--http-port", str(http), "--disable-observability"],
                stdout=file, stderr=file, env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
            )  # fmt: skip
        os.environ["LMCACHE_TRACK_USAGE"] = "false"
        atexit.register(self.kill)
        until(lambda: reached(http))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._memory.unlink(missing_ok=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def reached(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


def until(is_so: Callable[[], bool]) -> None:
    """Wait for something, at most LIMIT_S."""
    end = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(is_so)
        time.sleep(0.05)


def pages_of(path: Path) -> int:
    """How many pages the files of a store have."""
    return sum(each["pages"] for each in counts(path).values())


def from_disk(path: Path) -> None:
    """As a start of the host does: files leave the page cache."""
    for file in (each for each in path.rglob("*") if each.is_file()):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# -- the first token -------------------------------------------------------------------------------


def prompt(dice: random.Random, tokens: int) -> list[int]:
    return dice.choices(range(10, VOCABULARY), k=tokens)


def turns(engines: list[Engine], at: int) -> list[Engine]:
    return engines[at % len(engines) :] + engines[: at % len(engines)]


def measure(engines: list[Engine], size: int, repetitions: int) -> list[dict[str, Any]]:
    """Cold and hit of each engine, in turns. The first engine has its own prefix cache alone."""
    dice, plain = random.Random(size), engines[0]
    rows: dict[str, dict[str, Any]] = {
        engine.name: {
            "tokens": size, "engine": engine.name, "cold": [], "saving": [], "saving cpu": [],
            "hit": [], "loading": [], "differ": 0, "unlike cold": 0,
        }
        for engine in engines
    }  # fmt: skip
    for at in range(repetitions):
        ids = prompt(dice, size)
        for engine in turns(engines, at):
            answer, row = engine.ask(ids=ids), rows[engine.name]
            row["cold"].append(answer["ms"])
            row["saving"].append(answer["inside"])
            row["saving cpu"].append(answer["cpu"])
            row["token"] = answer["tokens"]
        for engine in turns(engines, at):
            answer, row = engine.ask(ids=ids, forget=engine is not plain), rows[engine.name]
            row["hit"].append(answer["ms"])
            row["loading"].append(answer["inside"])
            row["cached"] = answer["cached"]
        more = {e.name: e.ask(ids=ids, forget=e is not plain, more=True) for e in engines}
        right = dict[int, list[int]]()  # by tokens that were not computed: bfloat16 rounds by them
        for name, row in rows.items():
            found = more[name]
            row["differ"] += found["tokens"] != right.setdefault(found["cached"], found["tokens"])
            row["unlike cold"] += found["tokens"][:1] != row["token"]
    return list(rows.values())


def restarts(engines: list[Engine], sizes: list[int], repetitions: int) -> list[dict[str, Any]]:
    """The first hits after a start, of the prompts of measure(): the pages are in files alone."""
    rows = []
    for size in sizes:
        made: dict[str, dict[str, Any]] = {
            each.name: {"tokens": size, "engine": each.name, "restart": []} for each in engines
        }
        dice = random.Random(size)
        for at in range(repetitions):
            ids = prompt(dice, size)
            for engine in turns(engines, at):
                answer = engine.ask(ids=ids)
                made[engine.name]["restart"].append(answer["ms"])
                made[engine.name]["cached"] = answer["cached"]
        rows += made.values()
    return rows


def first(asked: argparse.Namespace, model: Path, folder: Path, told: Callable[..., None]) -> None:
    """Time to the first token of all engines."""
    kv, chunks, names = folder / "kv", folder / "lmcache", asked.engines

    def begun(names: list[str]) -> tuple[list[Engine], list[Any]]:
        servers = [Server(chunks, folder)] if "lmcache" in names else []
        options = {
            "none": {},
            "statehold": pages(kv),
            "lmcache": servers[0].options if servers else {},
            "example": transfer("ExampleConnector", shared_storage_path=str(folder / "example")),
        }
        engines = [Engine(name, model, options[name], folder) for name in names]
        for engine in engines:
            engine.begin()
        return engines, [*engines, *servers]

    engines, processes = begun(names)
    for size in asked.sizes:
        told(measure(engines, size, asked.repetitions))
    tokens = asked.repetitions * sum(asked.sizes)
    until(lambda: pages_of(kv) > tokens // PAGE)  # and one of the first question
    if "lmcache" in names:
        until(lambda: sum(1 for each in chunks.rglob("*.data")) >= tokens // CHUNK)
    for process in processes:
        process.kill()
    os.unlink(memory_path(str(kv), SLOT))
    for path in (kv, chunks):
        from_disk(path)
    engines, processes = begun([each for each in names if each in ("statehold", "lmcache")])
    told(restarts(engines, asked.sizes, asked.repetitions))
    for process in processes:
        process.kill()


# -- starts ----------------------------------------------------------------------------------------


def _weights(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(model / "model.safetensors"))


def restored(run: Path, model: Path) -> float:
    """Milliseconds of restore() in this process, which is new, as an engine is."""
    import torch

    import statehold

    into = {name: torch.zeros_like(each) for name, each in _weights(model).items()}
    with statehold.Checkpointer(run.parent / "other"):  # imports what a save and a restore need
        pass
    drop_caches(run.parent)
    begun = time.perf_counter()
    with statehold.Checkpointer(run) as ckpt:
        ckpt.restore({"model": into})
    return (time.perf_counter() - begun) * 1e3


def starts(asked: argparse.Namespace, model: Path, folder: Path, told: Callable[..., None]) -> None:
    """How long an engine loads a step."""
    import statehold

    run, state = folder / "starts", _weights(model)
    with statehold.Checkpointer(run) as ckpt:
        ckpt.save(1, {"model": state}).wait("committed")
    extra = {"run": str(run), "name": "model"}
    row: dict[str, Any] = {"bytes": sum(each.nbytes for each in state.values())}
    row.update({kind: [] for kind in ("load_format", "restore", "safetensors")})
    for _ in range(asked.repetitions):
        for kind, options in {
            "load_format": {"load_format": "statehold", "model_loader_extra_config": extra},
            "safetensors": {},
        }.items():
            drop_caches(folder)
            engine = Engine(kind, model, options, folder)
            engine.begin()
            row[kind].append(engine.loaded())
            engine.kill()
        command = [sys.executable, "-m", "bench.serving_vllm", "--restore", str(run), str(model)]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        row["restore"].append(float(found.stdout))
    told([row])


# -- other weights ---------------------------------------------------------------------------------


def other_weights(model: Path, run: Path, again: Path) -> list[int]:
    """A run: step 1 has the weights of the model, step 2 others, and step 3 those but for three
    layers. `again` is the model with the others. Returns the bytes of all, and of the layers."""
    import torch
    from safetensors.torch import save_file

    import statehold

    state = _weights(model)
    other = {name: torch.neg(each) for name, each in state.items()}
    few = tuple(f"model.layers.{at}." for at in range(3))
    third = {name: state[name] if name.startswith(few) else each for name, each in other.items()}
    with statehold.Checkpointer(run, keep=None) as ckpt:
        for step, each in enumerate((state, other, third), 1):
            ckpt.save(step, {"model": each}).wait("committed")
    shutil.copytree(model, again)
    save_file(other, again / "model.safetensors", {"format": "pt"})
    part = sum(each.nbytes for name, each in state.items() if name.startswith(few))
    return [sum(each.nbytes for each in state.values()), part]


def updates(
    asked: argparse.Namespace, model: Path, folder: Path, told: Callable[..., None]
) -> None:
    """What other weights cost, beside reload_weights()."""
    run, again = folder / "run", folder / "other"
    nbytes = other_weights(model, run, again)
    extra = {"run": f"{run}@1", "name": "model"}
    of_run = {
        "load_format": "statehold", "weight_transfer_config": {"backend": "statehold"},
        "model_loader_extra_config": extra,
    }  # fmt: skip
    live, plain = (Engine(n, model, o, folder) for n, o in (("live", of_run), ("plain", {})))
    for engine in (live, plain):
        engine.begin()
    live.call(
        calls=[("init_weight_transfer_engine", {"init_info": {"run": str(run), "name": "model"}})]
    )

    ids, long = (prompt(random.Random(0), tokens) for tokens in (100, 400))

    def update(kind: str, step: int) -> None:
        def take(**info: Any) -> tuple[str, Options]:
            return "update_weights", {"update_info": {"step": step, **info}}

        live.call(calls=[("start_weight_update", {})])
        if kind.startswith("pause"):
            row["alone"].append(live.ask(ids=ids, more=True)["ms"])
            live.call(calls=[take(ahead=True)])
            row["beside"].append(live.ask(ids=ids, more=True)["ms"])
        add(kind, live.call(calls=[take(), ("finish_weight_update", {})]))

    def add(kind: str, took: tuple[float, float]) -> None:
        for name, ms in zip((kind, f"{kind} cpu"), took, strict=True):
            row[name].append(ms)

    def reload(path: Path) -> None:
        plain.ask(ids=long, more=True)
        add("reload", plain.call(calls=[("reload_weights", {"weights_path": str(path)})]))
        kept = plain.ask(ids=long, forget=False, more=True)
        one, two = (each.ask(ids=ids, more=True)["tokens"] for each in (live, plain))
        row["differ"] += one != two
        row["stale"] += (
            kept["cached"] > 0 and kept["tokens"] != plain.ask(ids=long, more=True)["tokens"]
        )

    row: dict[str, Any] = {"bytes": nbytes, "differ": 0, "stale": 0}
    row.update({kind: [] for kind in TIMES})
    for _ in range(asked.repetitions):
        for ahead in ("", "pause "):
            update(f"{ahead}all", 2)
            reload(again)
            update(f"{ahead}tenth", 3)
            update(f"{ahead}all", 1)
            reload(model)
    told([row])
    for engine in (live, plain):
        engine.kill()


# -- a storage that hangs --------------------------------------------------------------------------


def hang(asked: argparse.Namespace, model: Path, folder: Path, told: Callable[..., None]) -> None:
    """What others lose while the pages of one prompt do not come."""
    kv, dice, count = folder / "kv-hang", random.Random(0), asked.repetitions
    there = [prompt(dice, 512) for _ in range(count)]
    engine = Engine("hang", model, pages(kv), folder)
    engine.begin()
    for ids in there:
        engine.ask(ids=ids)
    until(lambda: pages_of(kv) > count * 512 // PAGE)  # and one of the first question
    engine.kill()
    os.unlink(memory_path(str(kv), SLOT))
    engine = Engine("hang", model, pages(kv, deadline_s=1.0), folder)
    engine.begin()
    rows: dict[str, dict[str, Any]] = {
        kind: {"beside": kind, "gaps": [], "other": []} for kind in ("nobody", "cold", "hangs")
    }
    for at in range(count):
        others = {"nobody": None, "cold": prompt(dice, 512), "hangs": there[at]}
        for kind, row in rows.items():
            ids, other = prompt(dice, 100), others[kind]
            found = engine.beside(ids=ids, other=other, hangs=kind == "hangs")
            row["gaps"] += found["gaps"]
            row["other"].append(found.get("other", 0.0))
            row["cached"] = found.get("cached")
    told(list(rows.values()))
    engine.kill()


# -- what is shown ---------------------------------------------------------------------------------


def shown(row: dict[str, Any]) -> str:
    median = statistics.median
    if "reload" in row:
        times = {kind: median(row[kind]) for kind in TIMES}
        parts = ((kind, end) for end in ("", " cpu") for kind in UPDATES[1:])
        return (
            f"updates {row['bytes']} bytes, {row['differ']} differ, {row['stale']} stale"
            + "".join(f"  {kind} {ms:.0f}" for kind, ms in times.items())
            + " ms  of reload"
            + "".join(f"  {k}{e} {times[k + e] / times['reload' + e]:.2f}" for k, e in parts)
        )
    if "restore" in row:
        times = {kind: median(row[kind]) for kind in ("load_format", "restore", "safetensors")}
        figures = "  ".join(f"{kind} {ms:.0f}" for kind, ms in times.items())
        of = times["load_format"] / times["restore"]
        return f"starts  {row['bytes']} bytes  {figures} ms  load_format of restore {of:.2f}"
    if "gaps" in row:
        p50, p99 = (statistics.quantiles(row["gaps"], n=100)[at] for at in (49, 98))
        return (
            f"{row['beside']:7} between tokens p50 {p50:6.1f} ms  p99 {p99:6.1f} ms  the other "
            f"prompt {median(row['other']):6.0f} ms  cached {row['cached']}"
        )
    known = ("cold", "saving", "saving cpu", "hit", "loading", "restart")
    kinds = [kind for kind in known if kind in row]
    figures = "  ".join(f"{kind} {median(row[kind]):7.1f}" for kind in kinds)
    differ = "".join(f"  {row[kind]} {kind}" for kind in ("differ", "unlike cold") if kind in row)
    return f"{row['tokens']:5} {row['engine']:10} {figures} ms  cached {row['cached']}{differ}"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--restore", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", type=Path, default=Path("bench/out/smollm2-135m"))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--repetitions", type=int, default=5)
    known = {"first": first, "starts": starts, "updates": updates, "hang": hang}
    parser.add_argument("--only", nargs="+", choices=known, default=list(known))
    peers = ["none", "statehold", "lmcache", "example"]
    parser.add_argument("--engines", nargs="+", choices=peers, default=peers)
    asked = parser.parse_args()
    if asked.restore:
        print(restored(*asked.restore))
        return
    if asked.serve:
        serve(asked.serve[0], json.loads(asked.serve[1]))
        return
    model = smollm.made(asked.model)
    folder = Path(tempfile.mkdtemp(prefix="serving-", dir="/var/tmp"))
    rows = list[dict[str, Any]]()

    def told(found: list[dict[str, Any]]) -> None:
        rows.extend(found)
        print("\n".join(map(shown, found)), flush=True)
        write(asked.out, rows)

    try:
        for name in asked.only:
            known[name](asked, model, folder, told)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
