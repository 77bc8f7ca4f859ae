"""What both sums have in common, and what they need from the groups of a membership.

Nothing in this folder knows replicas, groups or epochs. A step goes like this:

    sums.begin()
    for each microbatch of the share, and of copies of the shares of others:
        sums.watch(start or None, copy)    # before the backward pass; start: this one is the last
        loss.backward(); sums.count(index, loss)    # or sums.abandon() if one of them raised
    sums.adopt(copy)                       # if the member whose share it is has been lost
    sums.reduce(start)                     # again with another `start` if it raised, or if the
                                           # share has grown; then all members have the same result
    sums.finish()                          # after the vote: p.grad of every parameter is the mean

Invariants: `reduce` leaves what was counted as it was, whether it returns or raises. Nothing that
later steps depend on changes before `finish`. All members call `start` for tensors of the same
sizes and types in the same order. After `finish` all members have the same bits in `p.grad`, in
`losses` and in `state_dict()`. A member that has counted nothing takes part with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor


class Pending(Protocol):
    """An operation on a tensor that runs."""

    def wait(self) -> object:
        """Return when the tensor has the result. An exception means that it never will have it.

        After an exception the operation may still write into the tensor. So the caller drops the
        tensor, and the operation keeps it alive.
        """


# Starts an all_reduce(SUM) of a contiguous tensor, in place, over the ranks that sum together. Two
# of them are equal (==) if they are of the same membership, and only then: the fast sum drops what
# it has started under another membership.
Start = Callable[[Tensor], Pending]


class Reported(Protocol):
    """What all members have reported of a step."""

    @property
    def losses(self) -> Sequence[float]:
        """By microbatch; NaN for one that was given none."""

    @property
    def mean_loss(self) -> float:
        """The mean of `losses`, from their exact sum."""


class Sum(Protocol):
    """The sum of one step's gradients and losses.

    finished: the reports on the step that was finished last.
    """

    @property
    def finished(self) -> Reported: ...

    def begin(self) -> None:
        """Begin a step: nothing is counted, and p.grad of every parameter is None."""

    def watch(self, start: Start | None, copy: int = 0) -> None:
        """Announce a backward pass. With `start` it is the last one before `reduce(start)`.

        The fast sum then reduces gradients while they arrive. A pass need not be announced, unless
        it belongs to a copy (copy > 0): copies have sums of their own, which are not reduced.
        """

    def adopt(self, copy: int) -> None:
        """Add the sums of a copy to those that are reduced."""

    def count(self, index: int, loss: Tensor | None) -> None:
        """Add what a backward pass has left in p.grad: microbatch `index`, with its loss."""

    def stray(self) -> str | None:
        """A parameter with a gradient that came after the pass of its microbatch was counted, and
        that would count for another one; None: there is none. The fast sum counts each alike."""

    def abandon(self) -> bool:
        """The pass that was announced last has failed: nothing of it counts.

        False: all that was counted in this step is lost with it. p.grad of every parameter is as
        before the pass, or None. What was started stays started, so that all members start alike.
        """

    def reduce(self, start: Start) -> None:
        """Sum over the members. Raises what `start` and `Pending.wait` raise."""

    def finish(self) -> None:
        """Give the mean over all microbatches to p.grad: None where no microbatch had a gradient.

        Commits the newest `reduce`. What was counted is dropped.
        """

    @property
    def announced_bytes(self) -> int:
        """Memory that the sum holds at most, beside p.grad, in a step like the finished one."""

    def state_dict(self) -> dict[str, Any]:
        """What the next steps of all members have to have in common, beside the parameters."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over another member's state, or that of a checkpoint."""
