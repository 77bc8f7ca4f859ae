"""One save on its way: what the stage thread and the commit thread know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from statehold.checkpoint.levels.promoting import NO_COPIES

if TYPE_CHECKING:
    from statehold._core import WriteJob
    from statehold.checkpoint.levels.places import DirectoryPlace
    from statehold.checkpoint.levels.promoting import Copies
    from statehold.checkpoint.save.handle import Save
    from statehold.errors import StateholdError
    from statehold.layout.claims import Comparison
    from statehold.layout.share import RankPlan
    from statehold.tensors.captured import Capture
    from statehold.tensors.devices.copying import DeviceCopies


@dataclass(slots=True)
class Work:
    """One save on its way. `capture` is dropped as soon as its bytes are copied. copies: those from
    devices, if there are any.

    job: copies and writes, from start() on. number: counts the calls of save(), the same on all
    ranks. attempt: names the partial directory,
    once the other ranks have been met. comparisons, version: what this rank assumes of the others
    (claims); fingerprinting gives the fingerprints for it, on the stage thread. place: the level
    that it is saved into; is_attached: the job has had its file from the start. promote: the levels
    that are to have the step, known at its commit. is_last: the process ends with it.
    """

    save: Save
    number: int
    plan: RankPlan
    tree: Any
    capture: Capture | None
    place: DirectoryPlace
    is_attached: bool = False
    copies: DeviceCopies | None = None
    comparisons: tuple[Comparison, ...] = ()
    version: str = ""
    fingerprinting: Mapping[str, Callable[[], int]] = field(default_factory=dict)
    fingerprints: dict[str, int] = field(default_factory=dict)
    attempt: str | None = None
    promote: Copies = NO_COPIES
    is_last: bool = False
    error: StateholdError | None = None
    job: WriteJob = field(init=False)

    def let_go(self) -> None:
        """Keep none of the state alive: it is copied, or nobody needs the copy."""
        self.capture = None
        self.fingerprinting = {}
        if self.copies is not None:
            self.copies.let_go()
