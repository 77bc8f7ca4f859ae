"""One save under way, as the stage thread and the commit thread know it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from statehold.checkpoint.levels.promoting import NO_COPIES
from statehold.checkpoint.save.shared import SharedFiles
from statehold.format.about import NOTHING, About
from statehold.layout.stored import StoredPart

if TYPE_CHECKING:
    from statehold._core import WriteJob
    from statehold.checkpoint.levels.places import DirectoryPlace
    from statehold.checkpoint.levels.promoting import Copies
    from statehold.checkpoint.save.handle import Passage, Save
    from statehold.errors import StateholdError
    from statehold.layout.claims import Comparison
    from statehold.layout.share import RankPlan
    from statehold.tensors.captured import Capture
    from statehold.tensors.devices.copying import DeviceCopies
    from statehold.tensors.stored import StoredState


@dataclass(slots=True)
class Work:
    """One save under way.

    handle: what the trainer has of `save`. number: of the call of save(), the same on all ranks.
    capture: dropped as soon as its bytes are copied. copies: from devices, if there are any.
    place: the level that gets the save. is_attached: the job had its file from the start.
    comparisons, version: what this rank assumes about the others (claims). fingerprinting: makes
        the fingerprints for the comparisons, on the stage thread.
    attempt: names the partial directory, if several ranks save.
    promote: the levels that get the step, known at its commit.
    is_last: the process ends with this save.
    about: what the caller says about the step.
    job: copies and writes, as soon as the save has started.
    shared: the files that it shares with other steps.
    stored: the parts of the state that lie in files. taken: when the step has them, all files other
        than the rank's own.
    """

    save: Passage
    handle: Save
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
    about: About = NOTHING
    error: StateholdError | None = None
    shared: SharedFiles = field(default_factory=SharedFiles)
    stored: list[StoredState] = field(default_factory=list)
    taken: StoredPart = field(default_factory=StoredPart)
    job: WriteJob = field(init=False)

    @property
    def has_more_files(self) -> bool:
        """Whether the step holds other files than the one that the rank writes."""
        return bool(self.stored or self.shared.links or self.shared.fresh)

    def release(self) -> None:
        """The save has ended: its objects may use their files as they like."""
        self.shared.release(failed=self.error is not None)
        stored, self.stored = self.stored, []
        for each in stored:
            each.release()

    def cancel(self) -> None:
        """Stop the native jobs, if the save has started them."""
        if hasattr(self, "job"):
            self.job.cancel()
        self.shared.cancel()

    def let_go(self) -> None:
        """Release the state: it is copied, or nobody needs the copy."""
        self.capture = None
        self.fingerprinting = {}
        if self.copies is not None:
            self.copies.let_go()
