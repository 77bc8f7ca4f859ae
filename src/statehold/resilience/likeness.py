"""Likeness: what all members of a job must have alike, as one number and by name (R19).

    likeness.digest(step)      for the ballot of a step: small parts, and a share of the other bytes
    likeness.digest()          of all bytes
    likeness.parts()           the same by name, to say what differs
    likeness.note(), check()   before and after a microbatch, which must leave buffers as they are,
                               and gives gradients to what the replicas sum

Alike are parameters, buffers, optimizer states, all plain values (learning rates, schedulers, the
position of the run), and which parameters are trained. Random generators and data loaders are each
replica's own. Hashing a large state takes longer than a step may lose, so its bytes take turns. But
plain values and small tensors are in every digest: a learning rate that differs shows there, before
anybody trains with it.

Invariants: equal states have equal digests of the same step. Different ones practically never do,
if what differs is in the share. Each byte is in one share of any TURNS_MAX steps in a row.
Not here: who differs from whom (protocol/actions), and what the members tell each other (driver).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from statehold import _core
from statehold.errors import ReplicaRefusedError, UsageError, some
from statehold.resilience.state_bytes import Among, bytes_of, captured
from statehold.tensors.captured import Capture, fingerprint_on_host
from statehold.tensors.devices.fingerprinting import totals_of
from statehold.tensors.found import Seen
from statehold.tensors.kinds import parts
from statehold.tensors.storable import device_of, is_external, is_storable, local_of, version_of

TURNS_MAX = 32
# A share is not smaller: a state of this size is compared in every step.
SHARE_BYTES_MIN = 8 << 20
# A smaller tensor takes no turns.
SMALL_BYTES = 32 << 10
# So many differences are shown.
_SHOWN = 4

Parts = Mapping[str, str]


class _Noted(NamedTuple):
    """A buffer as it was before a microbatch."""

    buffer: Tensor
    version: int
    shape: torch.Size
    digest: int


class Likeness:
    """state: as save() and restore() take it. among: as for an Offer.

    summed: the parameters whose gradients the replicas sum.
    """

    def __init__(
        self, state: Mapping[str, Any], among: Among | None = None, summed: Sequence[Tensor] = ()
    ) -> None:
        self._state = state
        self._among = among
        self._summed = {id(each): each for each in summed}
        self._seen = Seen()
        self._noted: dict[str, _Noted] = {}
        self._grads: dict[int, tuple[Tensor, int]] = {}  # of what nobody sums

    def digest(self, step: int | None = None) -> int:
        """Of what the members compare in this step; None: of everything. Below 2**63.

        Raises UsageError for a state that cannot be given to others.
        """
        found = self._captured()
        chosen = _share([spec.nbytes for spec in found.tensors.specs], step)
        shown = found.tensors.aliases([index for index, _ in chosen])
        blocks = [bytes_of(each)[part] for each, (_, part) in zip(shown, chosen, strict=True)]
        said = [found.tree, _kinds(found), [*self._trained().values()], _digests(blocks)]
        return _core.xxh3_64(json.dumps(said).encode()) >> 1

    def parts(self) -> dict[str, str]:
        """Everything by name: values as text, tensors with their digests."""
        found = self._captured()
        shown = found.tensors.aliases(range(len(found.tensors)))
        names = [spec.name for spec in found.tensors.specs]
        kinds = zip(names, _kinds(found), map(_digest, shown), strict=True)
        tensors = {name: f"{kind}, digest {digest:016x}" for name, kind, digest in kinds}
        return {**dict(_values(found.tree)), **self._trained(), **tensors}

    def turns(self) -> int:
        """In so many steps all bytes are compared."""
        return _turns(self._captured().tensors.structure.state_bytes)

    def note(self) -> None:
        """A microbatch begins."""
        self._noted = {name: self._note(name, each) for name, each in self._buffers()}
        self._grads = {
            id(param): (param.grad, version_of(local_of(param.grad)))
            for _, _, param in self._unsummed()
            if param.grad is not None
        }

    def check(self) -> None:
        """A microbatch has ended. Raises UsageError if it has changed the values of a buffer, or
        if a parameter of an optimizer has got a gradient that nobody sums.

        What grows is a cache.
        """
        for optimizer, place, param in self._unsummed():
            if _moved(param.grad, self._grads.get(id(param))):
                modules = (each.named_parameters(path) for path, each in self._modules())
                names = {id(each): name for name, each in chain.from_iterable(modules)}
                raise UsageError(
                    "a microbatch gives a gradient to a parameter that this job does not sum",
                    facts={
                        "parameter": names.get(id(param), f"number {place} of {optimizer}"),
                        "expected": "only parameters that model= had when Replicas was made",
                        "safe": "the state is that of the beginning of this step",
                    },
                    hint="put all that is trained into one module, such as nn.ModuleDict, before "
                    "you give it to Replicas as model=",
                )
        self._grads = {}
        for name, buffer in self._buffers():
            before = self._noted.get(name)
            if before is None or before.shape != buffer.shape:
                continue
            if self._note(name, buffer).digest != before.digest:
                raise UsageError(
                    "a microbatch changes a buffer, so it depends on the replica that computes it",
                    facts={"buffer": name},
                    hint="use LayerNorm or GroupNorm for BatchNorm, or track_running_stats=False; "
                    "eval() keeps buffers as they are",
                )

    def _note(self, name: str, buffer: Tensor) -> _Noted:
        """The version tells nothing of a change through `.data`, so only large buffers trust it."""
        known, version = self._noted.get(name), version_of(buffer)
        is_known = known is not None and known.buffer is buffer and known.version == version >= 0
        if known is not None and is_known and buffer.nbytes > SMALL_BYTES:
            return known
        return _Noted(buffer, version, buffer.shape, _digest(local_of(buffer)))

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for path, module in self._modules():
            for name, buffer in module.named_buffers(path):
                if is_storable(buffer):
                    yield name, buffer

    def _unsummed(self) -> Iterator[tuple[str, int, Tensor]]:
        """(optimizer, place in it, parameter) of what optimizers have, and nobody sums.

        A program may set such gradients by itself, alike on all replicas: those of masters in
        another type.
        """
        for path, each in parts(self._state):
            if isinstance(each, Optimizer):
                params = chain.from_iterable(group["params"] for group in each.param_groups)
                for place, param in enumerate(params):
                    if id(param) not in self._summed:
                        yield path, place, param

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        return ((path, each) for path, each in parts(self._state) if isinstance(each, nn.Module))

    def _trained(self) -> dict[str, str]:
        return {
            f"{name}.requires_grad": str(param.requires_grad)
            for path, module in self._modules()
            for name, param in module.named_parameters(path)
        }

    def _captured(self) -> Capture:
        return captured(self._state, self._among, self._seen, own=False)


def refusal(name: str, others: Mapping[str, Parts], step: int, turns: int) -> ReplicaRefusedError:
    """The error of a replica that is not like the others. others: with this one."""
    mine = others[name]
    other, theirs = next((each for each in others.items() if each[1] != mine), (name, mine))
    names = [key for key in {**theirs, **mine} if theirs.get(key) != mine.get(key)]
    shown = {
        key: f"here {mine.get(key, 'missing')}, there {theirs.get(key, 'missing')}"
        for key in names[:_SHOWN]
    }
    return ReplicaRefusedError(
        "the state of this replica differs from that of other members",
        facts={
            "replica": name,
            "other": other,
            "members": len(others),
            "step": step,
            "what": some(names, _SHOWN),
            **shown,
            "safe": f"saved steps up to {max(0, step - turns)}: the members were alike there",
        },
        hint="give state= all that changes between steps, such as a scheduler; do the same on all "
        "replicas after the loop over `step`, with as many threads. A new start joins the others",
    )


def _moved(grad: Tensor | None, before: tuple[Tensor, int] | None) -> bool:
    """Whether autograd has made a gradient, or added to the one that was there."""
    if grad is None:
        return False
    return before is None or grad is not before[0] or version_of(local_of(grad)) != before[1]


def _turns(nbytes: int) -> int:
    return min(TURNS_MAX, max(1, -(-nbytes // SHARE_BYTES_MIN)))


def _share(sizes: Sequence[int], step: int | None) -> list[tuple[int, slice]]:
    """The parts of tensors that are compared: (index, bytes of it)."""
    nbytes = sum(sizes)
    turns = 1 if step is None else _turns(nbytes)
    turn = (step or 0) % turns
    first, last = nbytes * turn // turns, nbytes * (turn + 1) // turns
    found: list[tuple[int, slice]] = []
    at = 0
    for index, size in enumerate(sizes):
        begin, end = max(first - at, 0), min(last - at, size)
        if size <= SMALL_BYTES:
            begin, end = 0, size
        if begin < end:
            found.append((index, slice(begin, end)))
        at += size
    return found


def _digests(blocks: Sequence[Tensor]) -> list[int]:
    """Small blocks of a device become one: each costs more than its bytes."""
    devices: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    small: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for each in blocks:
        (small if each.numel() <= SMALL_BYTES else devices)[device_of(each)].append(each)
    for device, tensors in small.items():
        devices[device].append(torch.cat(tensors))
    return [digest for tensors in devices.values() for digest in _of_device(tensors)]


def _of_device(blocks: list[Tensor]) -> list[int]:
    if not is_external(blocks[0]):
        return [fingerprint_on_host(each, _core.hash_memory) for each in blocks]
    found: list[int] = totals_of(blocks).tolist()
    return found


def _digest(tensor: Tensor) -> int:
    return _of_device([bytes_of(tensor)])[0] % (1 << 64) if tensor.numel() else 0


def _kinds(found: Capture) -> list[str]:
    return [f"{each.dtype} {list(each.shape)}" for each in found.tensors.specs]


def _values(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The plain values of a tree, by their paths."""
    if not isinstance(node, dict | list) or not node:
        yield path, json.dumps(node)
        return
    for key, each in node.items() if isinstance(node, dict) else enumerate(node):
        yield from _values(each, f"{path}.{key}" if path else str(key))
