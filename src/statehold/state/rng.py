"""The random number generators of a process as one object of the state.

Owns: reading and setting Python's `random`, numpy's legacy global generator, torch's CPU generator,
every CUDA device's generator, and generators that the user names.
Always: a state is plain values (ints, floats, bytes), so it lives in the manifest; nothing is drawn
from any generator while reading or setting it.
Not here: when it is applied. Restore applies it last, because building data loaders draws numbers.
"""

from __future__ import annotations

import array
import ctypes
import importlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from statehold.errors import StateMismatchError, UsageError

__all__ = ["Rng"]


class Rng:
    """State of the process' generators, plus `generators` by name.

    A named generator is a `torch.Generator`, `random.Random`, `numpy.random.Generator` or
    `numpy.random.RandomState`. CUDA devices take part once CUDA is initialised.
    """

    def __init__(self, generators: Mapping[str, Any] | None = None) -> None:
        self.generators = dict(generators or {})
        for name, generator in self.generators.items():
            _kind(generator, name)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "python": _python_state(random._inst),
            "torch": _tensor_bytes(torch.get_rng_state()),
        }
        if (numpy := sys.modules.get("numpy")) is not None:
            state["numpy"] = _numpy_legacy_state(numpy.random)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = [_tensor_bytes(each) for each in torch.cuda.get_rng_state_all()]
        state["generators"] = {
            name: _get_state(generator, name) for name, generator in self.generators.items()
        }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._check(state)
        random.setstate(_python_tuple(state["python"]))
        torch.set_rng_state(_bytes_tensor(state["torch"]))
        if "numpy" in state:
            _set_numpy_legacy(importlib.import_module("numpy").random, state["numpy"])
        _set_cuda_states(state.get("cuda", []))
        for name, generator in self.generators.items():
            _set_state(generator, name, state["generators"][name])

    def _check(self, state: Mapping[str, Any]) -> None:
        saved = state["generators"]
        kinds = {name: _kind(generator, name) for name, generator in self.generators.items()}
        expected = {name: value["kind"] for name, value in saved.items()}
        if kinds != expected:
            raise StateMismatchError(
                "the named generators of Rng differ from those of the step",
                facts={"expected": expected, "got": kinds},
                hint="construct statehold.Rng with the generators that the step was saved with",
            )


def _kind(generator: Any, name: str) -> str:
    if isinstance(generator, torch.Generator):
        return "torch"
    if isinstance(generator, random.Random) and type(generator) is not random.SystemRandom:
        return "python"
    if (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(generator, numpy.random.Generator):
            return "numpy"
        if isinstance(generator, numpy.random.RandomState):
            return "numpy-legacy"
    raise UsageError(
        "this is not a generator whose state can be saved",
        facts={"name": name, "type": type(generator).__qualname__},
        hint="pass torch.Generator, random.Random, numpy.random.Generator or RandomState objects",
    )


def _get_state(generator: Any, name: str) -> dict[str, Any]:
    kind = _kind(generator, name)
    if kind == "torch":
        return {"kind": kind, "state": _tensor_bytes(generator.get_state())}
    if kind == "python":
        return {"kind": kind, "state": _python_state(generator)}
    if kind == "numpy":
        return {"kind": kind, "state": generator.bit_generator.state}
    return {"kind": kind, "state": _numpy_legacy_state(generator)}


def _set_state(generator: Any, name: str, saved: Mapping[str, Any]) -> None:
    kind, state = _kind(generator, name), saved["state"]
    if kind == "torch":
        generator.set_state(_bytes_tensor(state))
    elif kind == "python":
        generator.setstate(_python_tuple(state))
    elif kind == "numpy":
        generator.bit_generator.state = state
    else:
        _set_numpy_legacy(generator, state)


def _python_state(generator: random.Random) -> dict[str, Any]:
    # 625 words as bytes: one value of the manifest instead of 625.
    version, words, gauss = generator.getstate()
    return {"version": version, "words": _words_to_bytes(words), "gauss": gauss}


def _python_tuple(state: Mapping[str, Any]) -> tuple[Any, ...]:
    return (state["version"], tuple(_bytes_to_words(state["words"])), state["gauss"])


def _numpy_legacy_state(generator: Any) -> dict[str, Any]:
    # Only MT19937 can sit behind the legacy interface's global generator by default; another bit
    # generator put there by the user keeps its own layout under "state".
    state: dict[str, Any] = generator.get_state(legacy=False)
    if state["bit_generator"] == "MT19937":
        inner = state["state"]
        state = {**state, "state": {"key": _words_to_bytes(inner["key"]), "pos": int(inner["pos"])}}
    return state


def _set_numpy_legacy(generator: Any, state: Mapping[str, Any]) -> None:
    state = dict(state)
    if state["bit_generator"] == "MT19937":
        numpy = importlib.import_module("numpy")
        key = numpy.frombuffer(state["state"]["key"], dtype="<u4").astype(numpy.uint32)
        state["state"] = {"key": key, "pos": state["state"]["pos"]}
    generator.set_state(state)


def _set_cuda_states(states: list[bytes]) -> None:
    # A machine with fewer devices than the step's takes what it has: no tensor depends on the rest.
    count = torch.cuda.device_count() if states else 0
    for index, state in enumerate(states[:count]):
        torch.cuda.set_rng_state(_bytes_tensor(state), index)


def _words_to_bytes(words: Any) -> bytes:
    packed = array.array("I", words)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _bytes_to_words(raw: bytes) -> array.array[int]:
    packed = array.array("I", raw)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def _tensor_bytes(state: torch.Tensor) -> bytes:
    # Tensor.numpy() would need numpy, and tolist() boxes every byte.
    state = state.contiguous()
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _bytes_tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
