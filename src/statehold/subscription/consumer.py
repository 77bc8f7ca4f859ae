"""What the consumer of a subscription changes itself: the parameters that its optimizers update.

A fused optimizer changes parameters and moves no version counter, so only its step() tells.

Invariants: what an optimizer may have changed since forget() is known to have nothing of a step.
After an update that nobody sees (updates.why_unseen), that is every tensor.
Not here: tensors that were replaced, or whose version counter has moved (preparing).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from statehold.errors import UsageError
from statehold.subscription.preparing import Filled
from statehold.tensors import updates
from statehold.tensors.stepping import Storages, storages
from statehold.tensors.storable import version_of

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage
    from torch.optim import Optimizer


class Changes:
    """The storages of what was updated. It watches all updates of torch until close()."""

    def __init__(self) -> None:
        self._updated = set[int]()
        self._has_unknown = False
        updates.watch(self)

    def without(self, filled: Mapping[str, Filled]) -> Mapping[str, Filled]:
        """What is still known of tensors."""
        if self._has_unknown or updates.why_unseen():
            return {}
        if not self._updated:
            return filled
        return {name: each for name, each in filled.items() if not self._has(each.tensor)}

    def check(self, relied: Mapping[str, Filled]) -> None:
        """Raise UsageError if one of these tensors has changed."""
        kept = self.without(relied)
        for name, each in relied.items():
            if name not in kept or version_of(each.tensor) != each.version:
                raise UsageError(
                    "a tensor was changed after the update was read",
                    facts={"tensor": name.partition(" ")[2]},
                    hint="no tensor was updated, and the next update has everything. Change "
                    "tensors before wait(), or after apply()",
                )

    def forget(self) -> None:
        """All tensors have a step now."""
        self._updated.clear()
        self._has_unknown = False

    def close(self) -> None:
        """Watch no more. On any thread."""
        updates.unwatch_later(self)

    def _has(self, tensor: Tensor) -> bool:
        return not self._updated.isdisjoint(storages([tensor]))

    # -- for updates ---------------------------------------------------------------------------

    def before_update(self, optimizers: Iterable[Optimizer]) -> None:
        """These are about to step; none: nobody knows which."""
        stepping = list(optimizers)
        self._has_unknown |= not stepping
        self._updated |= Storages.of(stepping).parameters

    def before_capture(self) -> None:
        """The captured update changes nothing yet."""

    def before_memory_goes(self, storage: UntypedStorage) -> None:
        """The storage is another memory then, which nothing is known of."""
