"""Data loaders in a state, themselves or inside other objects: torch's, torchdata's, Accelerate's.

Owns: finding them; what their state_dict() leaves out, which is the generator that a user gave to
the loader; putting both back; what cannot be put back, in words for the user.
Invariants: loaders are found by walking the attributes of an object, with a limit. Nothing is
called and no property is read on the way, and datasets are not looked into. The first iterator of a
restored state leaves no trace, and every later one draws as ever.

Positions of torchdata's loaders, for a loader with another number of workers.

torchdata keeps a position in one of two forms, without workers and with a fixed number of them, and
a loader of another number ends at its first batch with an assertion. The samplers are in the
process that trains, whatever the number is, so their part of a position is good for any number.
Invariants: a position is handed over only if it says all: what a dataset keeps for itself belongs
to the workers that had it, and is refused. So is what a sampler cannot take.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from statehold.errors import UnsupportedValueError
from statehold.tensors.kinds.rng import get_state, set_state, unchanged

# -- positions for another number of workers -------------------------------------------------------


_YIELDED, _FINISHED = "_num_yielded", "_iterator_finished"
_SNAPSHOT, _SINCE, _MAIN, _WORKERS = (
    "_snapshot", "_steps_since_snapshot", "_main_snapshot", "_worker_snapshots",
)  # fmt: skip
_COUNT, _STEP, _SEED = "_num_workers", "_snapshot_step", "_base_seed"
_SAMPLER = "_sampler_iter_state"
_COMMON = (
    "_index_sampler_state", _SAMPLER, "_sampler_iter_yielded", "_IterableDataset_len_called",
    "_shared_seed",
)  # fmt: skip
_OF_DATASET = dict.fromkeys(("dataset_state", "fetcher_state"))


class PositionRefused(Exception):
    """A position that the loader cannot take: what it expects, and what is there."""


def fitted_to(state: Any, loader: Any) -> Any:
    """A state in which each position is one that `loader` takes. Raises PositionRefused."""
    if isinstance(state, Mapping) and (_YIELDED in state or _SNAPSHOT in state):
        return _of_loader(state, loader)
    if type(state) is dict:
        return {key: fitted_to(each, loader) for key, each in state.items()}
    return [fitted_to(each, loader) for each in state] if type(state) is list else state


def _of_loader(state: Mapping[str, Any], loader: Any) -> Mapping[str, Any]:
    snapshot = state.get(_SNAPSHOT, {})
    main = snapshot.get(_MAIN, state)
    saved = main.get(_COUNT, 0)
    _check_sampler(main.get(_SAMPLER), loader)
    if saved == loader.num_workers:
        return state
    own = [state, *snapshot.get(_WORKERS, {}).values()]
    has_own = any(each.get(key) is not None for each in own for key in _OF_DATASET)
    if has_own or state.get(_SINCE) or any(key not in main for key in _COMMON):
        raise PositionRefused(
            f"the position of a loader with num_workers={loader.num_workers}",
            f"one with num_workers={saved}, which a dataset or a snapshot ties to its workers",
        )
    yielded = snapshot.get(_STEP, state.get(_YIELDED))
    position = {key: main[key] for key in _COMMON}
    end = {_FINISHED: state[_FINISHED]}
    if not loader.num_workers:
        return {**position, **_OF_DATASET, _YIELDED: yielded, **end}
    seed = main.get(_SEED, torch.initial_seed() % 2**63)
    workers = range(loader.num_workers)
    handed = {
        _STEP: yielded,
        "_last_yielded_worker_id": loader.num_workers - 1,
        _MAIN: {_COUNT: loader.num_workers, **position, _SEED: seed},
        _WORKERS: {f"worker_{i}": {"worker_id": i, **_OF_DATASET} for i in workers},
    }
    return {_SNAPSHOT: handed, _SINCE: 0, **end}


def _check_sampler(state: Any, loader: Any) -> None:
    """Raise for a state of a sampler, or of its iterator, that this loader's has no place for."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if not isinstance(state, Mapping) or sampler is None:
        return
    forgets = not hasattr(sampler, "load_state_dict")
    draws_anew = inspect.isgeneratorfunction(type(sampler).__iter__) or type(
        sampler
    ).__module__.startswith("torch.utils.data.")
    if ("sampler_state" in state and forgets) or ("sampler_iter_state" in state and draws_anew):
        got = "that of a sampler of another kind, as with another shuffle= or sampler="
        raise PositionRefused(f"the position of a loader with a {type(sampler).__name__}", got)


# A member that is added to a loader's state: {path of the loader: state of its generator}.
GENERATORS = "statehold.generators"
# A wrapper holds its loader near: `self.loader`, `self.loaders["train"]`, `self.data.loader`.
DEPTH_MAX = 3
OBJECTS_MAX = 256
_OPAQUE = (
    type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.Tensor, nn.Module,
    torch.optim.Optimizer, torch.Generator, Dataset, _BaseDataLoaderIter,
    str, bytes, int, float, type(None),
)  # fmt: skip
_FORGETFUL = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)

_MAKER = "_get_iterator"


def _tells_restored(loader: Any) -> bool:
    """Whether a loader tells an iterator of a restored state from a new one: torchdata's do."""
    return hasattr(loader, _MAKER) and "next_iter_state" in vars(loader)


def _first_is_due(loader: Any) -> bool:
    """Whether the next iterator of a loader is one of a restored state."""
    return _tells_restored(loader) and loader.next_iter_state is not None


def _leave_no_trace(loader: Any, *, own: bool) -> None:
    """Let the iterator that is due leave no trace.

    own: neither in the loader's own generator, which was restored, too. Otherwise nothing is known
    of that generator, and torchdata's best effort stands.
    """
    vars(loader)[_MAKER] = _FirstIterator(loader, own)


class _FirstIterator:
    """Stands for `_get_iterator` of one loader that has taken a state, for one call.

    Every iterator of torch.utils.data draws a seed when it is made, and sets or draws from the
    generators of the loader and of its samplers. The saved generators have those draws behind them.
    If making the iterator fails, this stays for the next attempt.

    Why not make the iterator in restore(): users call sampler.set_epoch() between restore() and the
    loop, and it would come too late. Why not wrap iter(loader): at the end of an epoch it makes two
    iterators, the saved one, which is used up, and the next one, which has to draw.
    """

    def __init__(self, loader: Any, own: bool) -> None:
        self._loader = loader
        self._own = own

    def __call__(self) -> Any:
        if not _first_is_due(self._loader):  # the user has given up the restored state
            return self._made()
        with unchanged(), _unchanged(self._loader.generator if self._own else None):
            return self._made()

    def _made(self) -> Any:
        iterator = getattr(type(self._loader), _MAKER)(self._loader)
        vars(self._loader).pop(_MAKER, None)
        return iterator


@contextlib.contextmanager
def _unchanged(generator: Any) -> Iterator[None]:
    state = None if generator is None else generator.get_state()
    try:
        yield
    finally:
        if generator is not None:
            generator.set_state(state)


def are_in(value: Any) -> bool:
    """Whether an object holds loaders, or is an iterator of one."""
    return bool(found_in(value)) or issubclass(type(value), _BaseDataLoaderIter)


def is_loader(value: Any) -> bool:
    # By its real type: Accelerate's wrappers claim to be of the class of the loader inside.
    return issubclass(type(value), DataLoader)


def found_in(value: Any) -> list[tuple[str, Any]]:
    """The loaders of an object by the path of attributes that leads to them, nearest first."""
    found: list[tuple[str, Any]] = []
    if issubclass(type(value), _OPAQUE):
        return found
    seen: set[int] = set()
    left = deque([("", value, 0)])
    while left and len(seen) < OBJECTS_MAX:
        path, value, depth = left.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_loader(value):
            found.append((path, value))
        elif depth < DEPTH_MAX:
            left += [(f"{path}.{key}".lstrip("."), each, depth + 1) for key, each in _held(value)]
    return found


def _held(value: Any) -> Iterator[tuple[Any, Any]]:
    """What an object or a container holds, as far as a loader may be there."""
    if type(value) in (list, tuple):
        members: Any = enumerate(value[:OBJECTS_MAX])
    else:
        held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        members = islice(list(held.items()), OBJECTS_MAX)
    # A key becomes a part of a path. Others may be costly to print: optimizers have tensors there.
    return (
        (key, each)
        for key, each in members
        if type(key) in (str, int) and not issubclass(type(each), _OPAQUE)
    )


def state_of(value: Any, tell: Callable[[str], None]) -> Any:
    """`value.state_dict()`, and the states of the generators that its loaders were given.

    tell: is given what will not come back, and what to do about it.
    torchdata saves a generator as it was when the epoch began. A seed is drawn after that, and the
    next epoch's order begins with what comes then.
    """
    state = value.state_dict()
    found = found_in(value)
    own = {
        path: get_state(loader.generator, path)
        for path, loader in found
        if _has_own_generator(loader)
    }
    for _, loader in found:
        if _tells_restored(loader) and (name := _forgetful_sampler(loader)):
            tell(_OTHER_ORDER.format(name))
    if not own or not isinstance(state, dict) or GENERATORS in state:
        return state
    return {**state, GENERATORS: own}


def _has_own_generator(loader: Any) -> bool:
    # What sits around a loader of another kind may have its own way with the generator.
    generator = loader.generator
    is_own = isinstance(generator, torch.Generator) and generator is not torch.default_generator
    return is_own and _tells_restored(loader)


def fitted(value: Any, state: Any) -> Any:
    """What state_of() gave, for the workers and samplers that the loaders have now.

    Nothing says which of several loaders a position is of, so those have to be alike. Raises
    PositionRefused.
    """
    found = [loader for _, loader in found_in(value) if _tells_restored(loader)]
    kinds = {(loader.num_workers, type(loader.sampler)) for loader in found}
    return fitted_to(state, found[0]) if len(kinds) == 1 else state


def load(value: Any, state: Any) -> None:
    """Give an object what state_of() gave. The first iterator of its loaders leaves no trace."""
    own = {}
    if isinstance(state, dict) and GENERATORS in state:
        own = state[GENERATORS]
        state = {key: each for key, each in state.items() if key != GENERATORS}
    value.load_state_dict(state)
    for path, loader in found_in(value):
        if _first_is_due(loader):
            is_known = path in own and _has_own_generator(loader)
            if is_known:
                set_state(loader.generator, path, own[path])
            _leave_no_trace(loader, own=is_known)


# -- what cannot be put back ---------------------------------------------------------------------


def doubts(value: Any, has_rng: bool, other_ranks: bool) -> Iterator[str]:
    """What may not go on as it was after load(), and what to do about it.

    has_rng: generators were restored, too, so somebody counts on them.
    other_ranks: another number of ranks has saved it.
    """
    found = found_in(value)
    if other_ranks and found:
        yield _OTHER_RANKS
    for path, loader in found:
        if _tells_restored(loader):
            if _first_is_due(loader) and (name := _forgetful_sampler(loader)):
                yield _OTHER_ORDER.format(name)
        elif has_rng:
            yield _MAY_DRAW.format(f"the {type(loader).__name__} in it" if path else "it")
    is_iterable = hasattr(type(value), "__iter__") and not isinstance(value, DistributedSampler)
    if has_rng and is_iterable and not found:
        yield _MAY_DRAW.format("it")


_MAY_DRAW = (
    "statehold cannot tell whether {} draws random numbers when its first iterator is made. If it "
    "does, training does not continue bit for bit. Then restore the Rng again after iter(loader), "
    'before the first batch: ckpt.restore({{"rng": rng}}, step=step, only=["rng"])'
)
_OTHER_RANKS = (
    "another number of ranks has saved it, all with the same position. If each rank reads its own "
    "part of the data, that position is wrong here, and samples are lost or repeated. In that case "
    "name it in skip= of restore()"
)
_OTHER_ORDER = (
    "its {} has no state, so the remaining samples of the epoch may come in another order. "
    "Pass shuffle=True to StatefulDataLoader, or a sampler with state_dict() and "
    "load_state_dict(). With Accelerate, give such a StatefulDataLoader to prepare()"
)


def _forgetful_sampler(loader: Any) -> str | None:
    """The name of a sampler that draws a new order each time that it is iterated."""
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, _FORGETFUL) and not hasattr(sampler, "load_state_dict"):
            return type(sampler).__name__
    return None


# -- what no step can hold -----------------------------------------------------------------------


def refusal(value: Any, path: str) -> UnsupportedValueError | None:
    """The error for a loader, or an iterator of one, that does not know how far it has come."""
    kind = type(value)
    held = getattr(value, "__dict__", {})
    inside = held.get("base_dataloader")
    if is_loader(inside) and not hasattr(inside, "state_dict"):
        hint = "pass DataLoaderConfiguration(use_stateful_dataloader=True) to the Accelerator"
    elif hasattr(kind, "load_state_dict"):
        return None
    elif is_loader(held.get("_dataloader")):
        hint = f"put the loader in it into the state, {path}._dataloader"
        if not hasattr(held["_dataloader"], "load_state_dict"):
            hint = f"{hint}, and make it stateful: {_STATEFUL}"
    elif is_loader(value):
        hint = _STATEFUL
    elif issubclass(kind, _BaseDataLoaderIter):
        hint = f"put the loader itself into the state, and let it be stateful: {_STATEFUL}"
    else:
        return None
    return UnsupportedValueError(
        "a DataLoader that does not know how far it has come cannot be stored",
        facts={"path": path, "type": f"{kind.__module__}.{kind.__qualname__}"},
        hint=hint,
    )


_STATEFUL = (
    "torchdata's loader takes the same arguments and can be stored (pip install torchdata): "
    "from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader"
)
