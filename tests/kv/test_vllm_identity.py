"""What vLLM's pages depend on: each thing that changes them is a miss, and no path or name is one.

The identity is the one that a worker of the connector tells, and the pages lie in a store.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from statehold.kv import PageVerdict
from statehold.kv.identity import content_of
from statehold.kv.vllm import opening
from statehold.kv.vllm.connector import Connector
from statehold.kv.vllm.opening import serve
from support.faults import must
from support.pages import get, made, put
from support.serving_engine import (
    BLOCKS,
    HEADS,
    TOKENS,
    WIDTH,
    Engine,
    Layer,
    group,
    kv_config,
    vllm_config,
)

CONFIG = {"rope_scaling": {"type": "linear", "factor": 2.0}, "_name_or_path": "here"}


@dataclass
class Start:
    """What an engine starts with."""

    folder: Path
    config: Any
    group: Any
    cache: torch.Tensor
    is_served: bool  # by statehold's loader; otherwise vLLM has loaded the folder
    version: str = "0.32.0"
    told: str = json.dumps(CONFIG)
    can: dict[str, Any] = field(default_factory=torch.cpu.get_capabilities().copy)

    def identity(self) -> bytes:
        """What a worker tells the scheduler."""
        model = self.config.model_config
        model.model, model.hf_config.to_json_string = str(self.folder), lambda use_diff: self.told
        if self.is_served:
            serve(content_of(self.folder))
        worker = type("Worker", (Connector,), {"version": self.version})()
        worker.begin(self.config, kv_config(self.group, blocks=len(self.cache)))
        with mock.patch.object(torch.cpu, "get_capabilities", return_value=self.can):
            worker.register_kv_caches(dict.fromkeys(self.group.layer_names, self.cache))
        found = worker.get_handshake_metadata().identity
        worker.shutdown()
        return bytes(found)


def blocks(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(BLOCKS, *shape, dtype=dtype)


@pytest.fixture(params=[False, True], ids=["loaded by vLLM", "served"])
def start(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Start]:
    """Engines, all alike."""
    monkeypatch.setattr(opening, "_serves", [])
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 100)

    def begun() -> Start:
        config = vllm_config(tmp_path / "workers", identity=None)
        return Start(folder, config, group(), blocks(HEADS, TOKENS, WIDTH), request.param)

    return begun


def elsewhere(start: Start) -> None:
    start.folder = shutil.copytree(start.folder, start.folder.parent / "elsewhere" / "model")


def other_weights(start: Start) -> None:
    start.folder = shutil.copytree(start.folder, start.folder.with_name("other weights"))
    file = start.folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def other_rope(start: Start) -> None:
    start.told = json.dumps(CONFIG).replace("2.0", "4.0")


def of_model(**changes: object) -> Callable[[Start], None]:
    return lambda start: vars(start.config.model_config).update(changes)


def loaded_as(name: str, **options: object) -> Callable[[Start], None]:
    def change(start: Start) -> None:
        config = start.config.load_config
        config.load_format, config.model_loader_extra_config = name, options

    return change


def other_kernel(start: Start) -> None:
    layers = start.config.compilation_config.static_forward_context
    layers[start.group.layer_names[-1]] = Layer("FLASHINFER")


def other_processor(**can: object) -> Callable[[Start], None]:
    return lambda start: start.can.update(can)


def with_cache(cache: torch.Tensor) -> Callable[[Start], None]:
    return lambda start: vars(start).update(cache=cache)


# vLLM changes some of them together. Here each one is alone: it counts also where no other does.
OTHERS: dict[str, Callable[[Start], None]] = {
    "weights": other_weights,
    "RoPE factor": other_rope,
    "dtype of the model": of_model(dtype=torch.bfloat16),
    "dtype of the cache": with_cache(blocks(HEADS, TOKENS, WIDTH, dtype=torch.bfloat16)),
    "name of the cache's dtype": lambda s: vars(s.config.cache_config).update(cache_dtype="fp8"),
    "quantization": of_model(quantization="fp8"),
    "quantization of some layers": of_model(quantization_config={"ignore": ["re:.*k_proj"]}),
    "layout, by strides": with_cache(blocks(TOKENS, HEADS, WIDTH).transpose(1, 2)),
    "layout, by shape": with_cache(blocks(2 * HEADS, TOKENS, WIDTH)),
    "names of layers": lambda s: s.group.layer_names.reverse(),
    "tokens of a page": lambda s: setattr(s.group.kv_cache_spec, "block_size", 2 * TOKENS),
    "TP": lambda s: vars(s.config.parallel_config).update(tensor_parallel_size=2),
    "longest sequence": of_model(max_model_len=128),
    "kernel of a layer": other_kernel,
    "processor": other_processor(architecture="aarch64"),
    "instructions of the processor": other_processor(amx_tile=True),
    "version of vLLM": lambda s: setattr(s, "version", "0.33.0"),
}


# Of an engine whose weights vLLM has loaded.
OTHER_LOADS: dict[str, Callable[[Start], None]] = {
    "random weights": loaded_as("dummy"),
    "other files": loaded_as("pt"),
    "a loader of somebody": loaded_as("theirs", scale=2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_change_of_one_thing_finds_no_page(
    start: Callable[[], Start], tmp_path: Path, name: str
) -> None:
    first, second = start(), start()
    OTHERS[name](second)
    with made(tmp_path / "kv", identity=first.identity()) as store:
        put(store, *range(20))
        must(get(store, *range(20)) == [PageVerdict.HIT] * 20)
    with made(tmp_path / "kv", identity=second.identity()) as store:
        assert get(store, *range(20)) == [PageVerdict.MISS] * 20


@pytest.mark.parametrize("name", OTHER_LOADS)
def test_what_did_not_load_the_files_as_they_are_finds_no_page(
    start: Callable[[], Start], name: str
) -> None:
    """Until the engine takes a step: then the pages are the step's, whatever was there before."""
    first, second = start(), start()
    OTHER_LOADS[name](second)
    assert (first.identity() == second.identity()) == first.is_served


def test_the_options_of_a_loader_count(start: Callable[[], Start]) -> None:
    first, second = start(), start()
    loaded_as("theirs", scale=1)(first)
    loaded_as("theirs", scale=2)(second)
    assert (first.identity() == second.identity()) == first.is_served


def renamed(start: Start) -> None:
    start.folder = start.folder.rename(start.folder.with_name("other"))


def other_file(start: Start) -> None:
    (start.folder / "model.safetensors").rename(start.folder / "weights-1-of-1.safetensors")


def other_notes(start: Start) -> None:
    start.told = json.dumps({**CONFIG, "_name_or_path": "there", "transformers_version": "6"})


def other_store(start: Start) -> None:
    start.config = vllm_config(start.folder.with_name("other"), identity=None)


def nothing(start: Start) -> None: ...


SAME: dict[str, Callable[[Start], None]] = {
    "a second engine": nothing,
    "a copy of the directory": elsewhere,
    "another name of the directory": renamed,
    "another name of the file": other_file,
    "another name in the configuration": other_notes,
    "another store": other_store,
    "another reader of the same files": loaded_as("fastsafetensors"),
    "threads of the reader": loaded_as("auto", enable_multithread_load=True),
    "another number of blocks": with_cache(blocks(HEADS, TOKENS, WIDTH)[1:]),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_content_finds_all_pages(
    start: Callable[[], Start], tmp_path: Path, name: str
) -> None:
    with made(tmp_path / "kv", identity=start().identity()) as store:
        put(store, *range(20))
    second = start()
    SAME[name](second)
    with made(tmp_path / "kv", identity=second.identity()) as store:
        assert get(store, *range(20)) == [PageVerdict.HIT] * 20


def test_engines_find_what_the_same_weights_have_left(
    start: Callable[[], Start], tmp_path: Path
) -> None:
    """The engines compute, and their blocks go through the store."""
    prompt, first, copied, other = list(range(26)), start(), start(), start()
    elsewhere(copied)
    found = []
    other_weights(other)
    for each in (first, copied, other):
        if each.is_served:
            serve(content_of(each.folder))
        with Engine(tmp_path / "kv", identity=None, weights=str(each.folder)) as engine:
            found.append(engine.run(prompt))
    assert found == [0, 24, 0]
