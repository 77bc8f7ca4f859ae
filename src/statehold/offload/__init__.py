"""Optimizers whose state is larger than memory: it lies on tiers, and passes through memory.

    from statehold import offload

    optimizer = offload.AdamW(
        model.parameters(), lr=3e-4, tiers=[offload.Host("4GiB"), offload.Path("/nvme0/opt")]
    )

`AdamW`, `Adam` and `SGD` have the parameter groups, the arguments and the bits of their namesakes
in torch with `fused=True` on float32 masters. Schedulers, closures, clipping and
torch.amp.GradScaler work as with those.

Invariants: `optimizer.state` holds nothing, because the state is on tiers. state_dict() makes all
of it in host memory, in torch's shape; parameters in 16 bit have "master" in addition.

Not here: the state as a whole (state), the subgroups on their way (pipeline).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from queue import SimpleQueue
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from statehold._core import Fs
from statehold.errors import UsageError
from statehold.offload.rules import AdamRule, Rule, SgdRule
from statehold.offload.state import OFFLOADED, OffloadedState
from statehold.offload.stats import Event, PathStats, Stats
from statehold.offload.tiers import Host, Path, Tier
from statehold.options.keywords import answering
from statehold.process.ending import forget, remember
from statehold.process.reentry import enter, refuse
from statehold.process.worker import Thread
from statehold.tensors.stored import Fill, SavedParameter, States, StoredState

__all__ = ["SGD", "Adam", "AdamW", "Event", "Host", "Path", "PathStats", "Stats"]


# -- the optimizers --------------------------------------------------------------------------------


_ENTRIES = object()  # the key of all state while torch loads the groups
EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_


class _Offloaded(torch.optim.Optimizer):
    """What the optimizers have in common. like: one of torch with the options and the rule."""

    # As torch's fused optimizers: GradScaler hands over the scale, and the kernel divides by it.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: ParamsT,
        like: torch.optim.Optimizer,
        rule: Rule,
        tiers: Sequence[Tier],
        subgroup_bytes: int | str | None,
        drain_gradients: bool,
        device_every: int | str | None,
        fs: Fs | None,
    ) -> None:
        self._offloaded: OffloadedState | None = None
        super().__init__(params, like.defaults)
        self._like = like
        self._drains = drain_gradients
        self._clipped: torch.Tensor | None = None  # what drained gradients are divided by
        wait_for_dropped()
        self._offloaded = OffloadedState(
            self.param_groups, rule, tiers, subgroup_bytes, drain_gradients, device_every, fs
        )
        self.state = _OnTiers(self._offloaded)
        self._keeper = OptimizerKeeper(self, self._offloaded.close)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients. closure: computes the loss, and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        if self._drains and found_inf is not None:
            raise UsageError(
                "GradScaler looks for gradients in .grad, where drain_gradients leaves none",
                hint="leave drain_gradients off, or train in bfloat16 without a scaler",
            )
        if found_inf is None or not found_inf.item():
            scale = getattr(self, "grad_scale", None) if self._clipped is None else self._clipped
            try:
                self._checked.update(self.param_groups, scale)
            except BaseException:  # GradScaler would multiply its next scale by this one
                vars(self).pop("grad_scale", None)
                raise
        self._clipped = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those that drain_gradients has taken from `.grad`."""
        super().zero_grad(set_to_none)
        self._opened.mirror.discard()
        self._clipped = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip as torch.nn.utils.clip_grad_norm_ does, and return the norm of all gradients.

        That function does not see what drain_gradients has taken from `.grad`. This one does: the
        next step() divides those by norm / max_norm, in float32.
        """
        if not self._drains:
            every = [each.tensor for each in self._checked.parameters]
            return torch.nn.utils.clip_grad_norm_(every, max_norm)
        found = self._opened.gradients().values()
        norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in found]
        norm = (
            torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device="cpu")
        )
        self._clipped = ((norm + EPSILON) / max_norm).clamp(min=1)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """The state in torch's shape, all of it in host memory: 12 bytes for each parameter."""
        self.state.update(self.gathered_state())
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def stored_parameters(self, saved: Sequence[SavedParameter]) -> StoredState | None:
        """The state for a save that takes files as they are; None without a Path."""
        return self._checked.stored(saved)

    @property
    def has_lost_state(self) -> bool:
        """Whether an update has failed in the middle, and no state was loaded since."""
        return self._opened.failure is not None

    def gathered_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """What `state` of torch's optimizer has, by parameter. A save takes it by their names."""
        parameters = self._checked.parameters
        gathered = self._opened.gather()
        return {parameters[index].tensor: fields for index, fields in gathered.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the groups and the state of any optimizer of this kind, offloaded or torch's."""
        with self.register_load_state_dict_pre_hook(lambda _, given: self._take(given)):  # the last
            super().load_state_dict(dict(state_dict))

    def _take(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What torch loads: the groups, and the state as one entry that it does not look into."""
        groups = [dict(group) for group in state_dict["param_groups"]]
        self._like.__setstate__({"state": {}, "param_groups": groups})  # what an older torch lacks
        names = chain.from_iterable(group["params"] for group in groups)
        entries = [state_dict["state"].get(name) for name in names]
        self._checked.check(groups, entries)  # a refusal leaves the groups as they are
        return {"state": {_ENTRIES: entries}, "param_groups": groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """load_state_dict() of torch calls it before the hooks that come after a load."""
        super().__setstate__({**state, "state": self.state})
        self._opened.load(state["state"][_ENTRIES])

    def check_stored(self, groups: Sequence[Mapping[str, Any]], state: States) -> None:
        """Refuse what load_state_dict() would, before anything of a step is read."""
        self._checked.check(groups, self._entries(state))

    def load_stored(self, state: States, fill: Fill) -> None:
        """load_state_dict() without the groups, from a step that is read a subgroup at a time."""
        self._checked.load(self._entries(state), fill)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made, because its state is cut and placed then."""
        if self._offloaded is not None:
            raise UsageError(
                "an offloaded optimizer takes no more parameters",
                hint="give all parameters to its constructor, or make another optimizer",
            )
        super().add_param_group(param_group)

    @property
    def stats(self) -> Stats:
        """Bytes and seconds by tier, since the optimizer was made."""
        return self._opened.stats

    def recorded(self) -> AbstractContextManager[list[Event]]:
        """With it, a list gets every read, update and write of a subgroup, with its times."""
        return self._opened.timeline.recorded()

    def close(self) -> None:
        """Remove the state from all tiers. It cannot be used any more. Idempotent."""
        enter(f"close() {OFFLOADED}")
        self._keeper.close()

    @property
    def _opened(self) -> OffloadedState:
        refuse(f"a call {OFFLOADED}", among=OFFLOADED)
        if self._offloaded is None:
            raise UsageError("the optimizer is not constructed yet")
        return self._offloaded

    def _entries(self, state: States) -> list[Mapping[str, Any] | None]:
        return list(map(state.get, range(len(self._opened.parameters))))

    @property
    def _checked(self) -> OffloadedState:
        """The state, if it is that of the parameters that are in the groups."""
        opened = self._opened
        opened.check_parameters(self.param_groups)
        return opened

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(
            "an offloaded optimizer can be neither copied nor pickled",
            hint="state_dict() has its state",
        )


class _OnTiers(defaultdict[torch.Tensor, dict[str, Any]]):
    """`state` of torch's optimizer. Nothing is in it, and `[parameter]` copies from the tiers.

    Its length is the number of parameters that were updated. Torch makes an update with zero
    gradients where it is 0, and takes the names of the fields from `[parameter]`.
    """

    def __init__(self, offloaded: OffloadedState) -> None:
        super().__init__()
        self._offloaded = offloaded

    def __len__(self) -> int:
        return len(self._offloaded.started)

    def __missing__(self, parameter: torch.Tensor) -> dict[str, Any]:
        found = self._offloaded.started
        index = next((i for i in found if self._offloaded.parameters[i].tensor is parameter), None)
        return {} if index is None else self._offloaded.gather([index])[index]


@answering()
class AdamW(_Offloaded):
    """torch.optim.AdamW on tiers.

    The arguments before `tiers` are those of torch.optim.AdamW.

    Args:
        tiers: `Host` and `Path`, nearest first.
        subgroup_bytes: the state that is moved and updated at once; None: chosen from the size of
            the state.
        drain_gradients: gradients of parameters on a device leave it in backward, and `.grad` is
            None then; step() uses them up, and zero_grad() of the optimizer forgets them.
        device_every: k, and a device updates every k-th subgroup of its parameters with its own
            kernel; "auto": k from measured rates; None: the host updates all of them.
        fs: a file system from the caller, for tests.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        tiers: Sequence[Tier],
        subgroup_bytes: int | str | None = None,
        drain_gradients: bool = False,
        device_every: int | str | None = None,
        fs: Fs | None = None,
    ) -> None:
        like = torch.optim.AdamW(
            _ANY, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=True
        )
        super().__init__(
            params, like, AdamRule(), tiers, subgroup_bytes, drain_gradients, device_every, fs
        )


@answering()
class Adam(_Offloaded):
    """torch.optim.Adam on tiers. All arguments are those of `AdamW`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        tiers: Sequence[Tier],
        subgroup_bytes: int | str | None = None,
        drain_gradients: bool = False,
        device_every: int | str | None = None,
        fs: Fs | None = None,
    ) -> None:
        like = torch.optim.Adam(
            _ANY, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=True
        )
        super().__init__(
            params, like, AdamRule(), tiers, subgroup_bytes, drain_gradients, device_every, fs
        )


@answering()
class SGD(_Offloaded):
    """torch.optim.SGD on tiers: momentum, and masters of parameters in 16 bit.

    All arguments are those of torch.optim.SGD and, from `tiers` on, those of `AdamW`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        tiers: Sequence[Tier],
        subgroup_bytes: int | str | None = None,
        drain_gradients: bool = False,
        device_every: int | str | None = None,
        fs: Fs | None = None,
    ) -> None:
        like = torch.optim.SGD(
            _ANY, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, fused=True
        )
        super().__init__(
            params, like, SgdRule(), tiers, subgroup_bytes, drain_gradients, device_every, fs
        )


# torch's optimizers check the options, and say their defaults. They want a parameter for that.
_ANY = [torch.nn.Parameter(torch.zeros(1, device="cpu"))]


# -- the end of a state ----------------------------------------------------------------------------
# A state ends at close(), when the optimizer is dropped, or with the program. It is ended once. The
# collector may drop an optimizer inside any allocation, on any thread, while that thread holds any
# lock. To wait for other threads there can be a deadlock. So dropping only leaves a word, and a
# thread that waits for it ends the state.
#
# A later optimizer of this process waits for dropped ones, so it finds their memory and their
# folders free. A forked child ends nothing of its parent.


_dropped: list[OptimizerKeeper] = []  # one operation at a time is atomic


class OptimizerKeeper:
    """Calls `end` for an `owner`, which `end` must not keep alive. end: may be called twice."""

    def __init__(self, owner: object, end: Callable[[], None]) -> None:
        self._end_state = end
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._thread = Thread(self._serve, "statehold-keeper")
        self._thread.start()
        self._finalizer = weakref.finalize(owner, self._drop)
        self._finalizer.atexit = False
        remember(self)

    def close(self) -> None:
        """End the state. Idempotent."""
        if self._finalizer.detach() is not None:
            self._asked.put(False)
            forget(self)
            self._end_state()

    def wait(self) -> None:
        """Return once the state of a dropped owner has ended."""
        self._thread.join()

    def _drop(self) -> None:
        """Called by the collector."""
        _dropped.append(self)
        self._asked.put(True)

    def _serve(self) -> None:
        if self._asked.get():
            try:
                self._end_state()
            finally:
                forget(self)
                _dropped.remove(self)

    def _end(self) -> None:
        """The program ends."""
        self.close()
        if self in _dropped:
            self.wait()


def wait_for_dropped() -> None:
    """Wait for the state of optimizers that were dropped."""
    for each in list(_dropped):
        each.wait()
