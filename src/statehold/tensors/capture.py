"""Flatten a state into tensors with names and a tree of plain values; no tensor's bytes move here.

Owns: the order in which the parts of a state are asked.
Not here: what becomes of each kind of part (kinds), which tensors are copied at once (captured).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from statehold.errors import UsageError
from statehold.tensors.captured import Capture, Capturing
from statehold.tensors.found import Seen
from statehold.tensors.kinds import kind_of, modules, parts


def capture(
    state: Mapping[str, Any],
    rank: int | None = None,
    stepping: Iterable[torch.optim.Optimizer] = (),
    seen: Seen | None = None,
    *,
    world: int = 1,
    own: bool = True,
) -> Capture:
    """Capture a state, or `rank`'s part of one that `world` ranks save (None: it is alone).

    stepping: optimizers whose every step() waits at the gate, whether the state has them or not.
    seen: what the capture before saw; it makes this one faster, and changes nothing else.
    own: with random generators and data loaders, which replicas do not have in common.
    Raises UnsupportedValueError, with the path, for what no step can hold.
    """
    if not isinstance(state, Mapping):
        raise UsageError(
            "the state must be a mapping of names to values",
            facts={"expected": "a dict", "got": type(state).__name__},
            hint='give the parts names: save(step, {"model": model, "optimizer": optimizer})',
        )
    found = list(parts(state))
    entries, names = modules.look_into(found)
    replicas = modules.replicas_in(found, rank)
    optimizers = [part for _, part in found if isinstance(part, torch.optim.Optimizer)]
    to = Capturing(kind_of, rank, world, own, optimizers, stepping, seen or Seen())
    to.entries, to.names, to.replicas = entries, names, replicas
    return to.result(state)
