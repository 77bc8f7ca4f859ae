"""The random number generators of a process as one object of the state.

Owns: reading and setting Python's `random`, numpy's legacy global generator, torch's CPU generator,
every CUDA device's generator, and generators that the user names. `unchanged` undoes whatever a
block of code draws from any of them.
Invariants: a state consists of plain values (ints, floats, bytes), so it lives in the manifest.
Reading or setting a generator draws nothing from it.
Generators are read last of all, and put back last of all: other objects may draw while they give or
take their state, as a loader does that was not iterated yet.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import importlib
import random
import struct
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from statehold.errors import StateMismatchError, UsageError, refused
from statehold.tensors.captured import Capturing
from statehold.tensors.matching import ABSENT, Matching, Walk


class Rng:
    """State of the process' generators. CUDA devices take part once CUDA is initialised.

    Args:
        generators: more generators, by name: each a `torch.Generator`, `random.Random`,
            `numpy.random.Generator` or `numpy.random.RandomState`.

    Raises:
        UsageError: something else was given.
    """

    def __init__(self, generators: Mapping[str, Any] | None = None) -> None:
        if not isinstance(generators, Mapping | None):
            hint = (
                "Rng() holds all generators of the process; "
                'Rng({"data": generator}) also holds this one'
            )
            raise refused("Rng takes generators by name", "a dict", type(generators).__name__, hint)
        self.generators = dict(generators or {})
        for name, generator in self.generators.items():
            _kind(generator, name)
        _alive[id(self)] = self

    def state_dict(self) -> dict[str, Any]:
        state = _process_state()
        state["generators"] = {
            name: get_state(each, name) for name, each in self.generators.items()
        }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check(state)
        _set_process_state(state)
        for name, generator in self.generators.items():
            set_state(generator, name, state["generators"][name])

    def check(self, state: object) -> None:
        """Raise StateMismatchError for what load_state_dict() could not take."""
        expected: object = "a value that is no Rng"
        if isinstance(state, Mapping) and "generators" in state:
            expected = {name: value["kind"] for name, value in state["generators"].items()}
        kinds = {name: _kind(generator, name) for name, generator in self.generators.items()}
        if kinds != expected:
            raise StateMismatchError(
                "the named generators of Rng differ from those of the step; nothing was changed",
                facts={"expected": expected, "got": kinds},
                hint="construct statehold.Rng with the generators that the step was saved with",
            )


def of(value: Any) -> Rng | None:
    return value if isinstance(value, Rng) else None


def capture(to: Capturing, live: Rng, path: str) -> dict[str, Any]:
    """A node that is empty until everything else has given its state."""
    node: dict[str, Any] = {}
    depth = to.values.depth

    def read() -> None:
        to.values.depth = depth
        node.update(to.values.encode(live.state_dict(), path))

    if to.own:
        to.later.append(read)
    return node


def match(to: Matching, live: Rng, node: Any, path: str) -> None:
    if to.other_ranks and to.selection.takes(path):
        to.restoration.kept.append(path)  # all ranks would draw the numbers of one
        to.restoration.has_own = True
    elif to.takes(path) and not to.differs(node, path):
        state = to.rebuild(ABSENT, node)
        live.check(state)
        to.restoration.generators.append(lambda: live.load_state_dict(state))


def names(_: Walk, __: Rng, ___: Any, path: str) -> Iterator[str]:
    yield path


# Every Rng of the process, by its id. A part of a state may be restored without the Rng, whose
# generators must not be disturbed all the same.
_alive: weakref.WeakValueDictionary[int, Rng] = weakref.WeakValueDictionary()


class _Keeper:
    """Keeps the generators while blocks of code draw from them; threads may overlap.

    The first block to begin takes the states, the last one to end puts them back. A lock held for
    the whole block would do so, too, but a block may wait for a thread that begins one itself.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._blocks = 0
        self._process: dict[str, Any] = {}
        self._named: list[tuple[str, Any, dict[str, Any]]] = []

    def begin(self) -> None:
        with self._guard:
            if self._blocks == 0:
                self._process = _process_state()
                self._named = [
                    (name, each, get_state(each, name))
                    for rng in list(_alive.values())
                    for name, each in rng.generators.items()
                ]
            self._blocks += 1

    def end(self) -> None:
        with self._guard:
            self._blocks -= 1
            if self._blocks == 0:
                _set_process_state(self._process)
                for name, generator, state in self._named:
                    set_state(generator, name, state)
                self._named = []  # or the generators would live on


_keeper = _Keeper()


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """The block leaves no trace in the generators of the process, nor in those that a Rng names."""
    _keeper.begin()
    try:
        yield
    finally:
        _keeper.end()


def _process_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "python": _python_state(random),
        "torch": _tensor_bytes(torch.get_rng_state()),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = _numpy_legacy_state(numpy.random)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [_tensor_bytes(each) for each in torch.cuda.get_rng_state_all()]
    return state


def _set_process_state(state: Mapping[str, Any]) -> None:
    random.setstate(_python_tuple(state["python"]))
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    if "numpy" in state:
        _set_numpy_legacy(importlib.import_module("numpy").random, state["numpy"])
    _set_cuda_states(state.get("cuda", []))


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


def get_state(generator: Any, name: str) -> dict[str, Any]:
    kind = _kind(generator, name)
    if kind == "torch":
        return {"kind": kind, "state": _tensor_bytes(generator.get_state())}
    if kind == "python":
        return {"kind": kind, "state": _python_state(generator)}
    if kind == "numpy":
        return {"kind": kind, "state": generator.bit_generator.state}
    return {"kind": kind, "state": _numpy_legacy_state(generator)}


def set_state(generator: Any, name: str, saved: Mapping[str, Any]) -> None:
    kind, state = _kind(generator, name), saved["state"]
    if kind == "torch":
        generator.set_state(_bytes_tensor(state))
    elif kind == "python":
        generator.setstate(_python_tuple(state))
    elif kind == "numpy":
        generator.bit_generator.state = state
    else:
        _set_numpy_legacy(generator, state)


def _python_state(generator: Any) -> dict[str, Any]:
    # 625 words as bytes: one value of the manifest instead of 625.
    version, words, gauss = generator.getstate()
    packed = struct.pack(f"<{len(words)}I", *words)
    return {"version": version, "words": packed, "gauss": gauss}


def _python_tuple(state: Mapping[str, Any]) -> tuple[Any, ...]:
    words = array.array("I", state["words"])
    if sys.byteorder == "big":
        words.byteswap()
    return (state["version"], tuple(words), state["gauss"])


def _numpy_legacy_state(generator: Any) -> dict[str, Any]:
    # Only MT19937 can sit behind the legacy interface's global generator by default; another bit
    # generator put there by the user keeps its own layout under "state".
    state: dict[str, Any] = generator.get_state(legacy=False)
    if state["bit_generator"] == "MT19937":
        inner = state["state"]
        key = inner["key"].astype("<u4").tobytes()
        state = {**state, "state": {"key": key, "pos": int(inner["pos"])}}
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


def _tensor_bytes(state: torch.Tensor) -> bytes:
    # Tensor.numpy() would need numpy, and tolist() boxes every byte.
    state = state.contiguous()
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _bytes_tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
