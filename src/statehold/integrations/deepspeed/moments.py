"""The state of the optimizer under ZeRO: moments by parameter, and the options of its groups.

In a step it has the form of an optimizer of torch: `state` by "model.NAME", `param_groups` with
names. A moment is a run of the flattened parameter; what is one number, such as `step`, is the same
on all ranks.
Invariants: what the optimizer already has in memory is filled there. What it has not made yet is
made for the restore, and put in once all bytes have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from statehold.errors import StateMismatchError, UnsupportedValueError
from statehold.integrations.comparing import check_names
from statehold.integrations.deepspeed.partitions import Partition, mesh_of, rank_here
from statehold.layout.layout import Layout
from statehold.tensors.marks import Volatile
from statehold.tensors.pieces import Piece

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


class Moments:
    """The base optimizer of a ZeRO optimizer `zero`."""

    def __init__(self, zero: Any, partitions: list[Partition]) -> None:
        self._zero = zero
        self._partitions = partitions
        self._replicated = Layout(mesh_of(zero.dp_process_group))
        self._filling: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        """What a save takes. Muon updates its momentum outside step(): it is copied at once."""
        base, found = self._zero.optimizer, {}
        is_early = any(group.get("use_muon") for group in base.param_groups)
        for part in self._partitions:
            held = base.state.get(part.master, {})
            for run in part.runs:
                entries = {key: self._entry(part, run, held, key) for key in held}
                found[_key(run.name)] = Volatile(entries) if is_early else entries
        return {STATE: found, GROUPS: self._groups()}

    def state_to_fill(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """See Pieced. Raises StateMismatchError for a step of other parameters or groups."""
        states, groups = saved[STATE], saved[GROUPS]
        own = [_key(run.name) for part in self._partitions for run in part.runs]
        check_names("optimizer.state", own, states)
        if len(groups) != len(self._groups()):
            raise StateMismatchError(
                "the optimizer of the step has another number of parameter groups",
                facts={"expected": len(self._groups()), "got": len(groups)},
            )
        self._filling, content = [], {}
        for part in self._partitions:
            held = self._held_for(part, states)
            self._filling.append(held)
            for run in part.runs:
                entries = {key: self._entry(part, run, held, key) for key in held}
                content[_key(run.name)] = entries
        return {STATE: content, GROUPS: groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        base = self._zero.optimizer
        for part, held in zip(self._partitions, self._filling, strict=True):
            entries = state[STATE][_key(part.runs[0].name)]
            plain = {key: each for key, each in entries.items() if not isinstance(each, Piece)}
            base.state[part.master] = {**held, **plain}
        for group, options in zip(base.param_groups, state[GROUPS], strict=True):
            group.update({key: value for key, value in options.items() if key != PARAMS})
        self._filling = []
        if hasattr(self._zero, "_lazy_init_hp_params_optimizer_state"):
            self._zero._lazy_init_hp_params_optimizer_state()  # for safe_get_full_optimizer_state()

    # -- entries -------------------------------------------------------------------------------

    def _entry(self, part: Partition, run: Any, held: Mapping[str, Any], key: str) -> Any:
        """A piece of what the optimizer holds as `key` for a partition, or the plain value."""
        value = held[key]
        if not isinstance(value, torch.Tensor):
            return value
        if value.ndim == 0:
            return Piece(value, (), self._replicated, rank_here())
        if value.shape != part.master.shape:
            raise UnsupportedValueError(
                "the optimizer has a state that is neither a number nor as long as its partition",
                facts={
                    "path": f"optimizer.state.{_key(run.name)}.{key}",
                    "shape": list(value.shape),
                    "elements of the partition": part.master.numel(),
                },
            )
        return part.piece(run, _getter(held, key))

    def _held_for(self, part: Partition, states: Mapping[str, Any]) -> dict[str, Any]:
        """What the optimizer has for a partition, and what it needs in addition."""
        first, *others = [states[_key(run.name)] for run in part.runs]
        for run, other in zip(part.runs[1:], others, strict=True):
            check_names(f"optimizer.state.{_key(run.name)}", first, other)
        now = self._zero.optimizer.state.get(part.master, {})
        return {key: self._value_for(part, now.get(key), each) for key, each in first.items()}

    def _value_for(self, part: Partition, now: Any, saved: Any) -> Any:
        if not isinstance(saved, torch.Tensor):
            return saved
        shape = () if saved.ndim == 0 else tuple(part.master.shape)
        if isinstance(now, torch.Tensor) and (tuple(now.shape), now.dtype) == (shape, saved.dtype):
            return now
        # Counts of steps lie on the host, unless the update reads them on the device.
        group = self._zero.optimizer.param_groups[part.group]
        is_far = bool(shape or group.get("capturable") or group.get("fused"))
        device = part.master.device if is_far else torch.device("cpu")
        return torch.zeros(shape, dtype=saved.dtype, device=device)

    def _groups(self) -> list[dict[str, Any]]:
        names: dict[int, list[str]] = {}
        for part in self._partitions:
            names.setdefault(part.group, []).extend(_key(run.name) for run in part.runs)
        return [
            {**{key: value for key, value in group.items() if key != PARAMS}, PARAMS: names[index]}
            for index, group in enumerate(self._zero.optimizer.param_groups)
        ]


def _key(name: str) -> str:
    return f"model.{name}"


def _getter(held: Mapping[str, Any], key: str) -> Callable[[], torch.Tensor]:
    return lambda: held[key]
