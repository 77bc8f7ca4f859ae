"""Member: what one rank has promised, and what it may commit.

Two threads use it, under one lock that their owner holds: the control thread brings the messages of
the coordinator, and the training thread plays steps.

Invariants:
- A rank commits a step only under the newest epoch that it has promised (R4, R6). A promise and a
  commit exclude each other, so a view never misses a commit.
- A view that a rank has given stays true until the next epoch: a fetch excludes a promise, too.
- The step never goes back. The share of a step only grows.
- A rank that has voted keeps what it reduced until the step is committed or reduced again.
Not here: waiting, sockets and groups (control, groups), the order of actions (actions).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from statehold.errors import InvariantError
from statehold.resilience.protocol.messages import (
    FETCHED,
    TORN,
    Complaint,
    Fenced,
    Hello,
    Install,
    Message,
    Prepare,
    Promise,
    Refused,
    View,
    Waiting,
)
from statehold.resilience.protocol.shares import Resolution, Share, Stack, fresh, resolve, stack_of


class Member:
    """A rank of a replica, at the beginning of the step of its first Hello.

    microbatches: of a step. redundancy: how many members compute each of them.
    """

    def __init__(self, hello: Hello, microbatches: int, redundancy: int = 1) -> None:
        self.name = hello.replica
        self.microbatches = microbatches
        self._redundancy = redundancy
        self.step = hello.view.step
        self.share: Share = ()
        self.stack: Stack = ()
        self.epoch = 0
        self.promised = 0
        self.members: tuple[str, ...] = ()
        self.holders: tuple[str, ...] = ()
        self.joiners: tuple[str, ...] = ()
        self.newcomers: tuple[str, ...] = ()  # joiners, and who has fetched the state in this step
        self.desk = ""
        self.joiners_wait = False
        self.drawn: Mapping[str, int] = {}
        self.fenced: Fenced | Refused | None = None
        self._hello = hello
        self._own = hello.view  # of the state in its tensors while it is no member
        self._told = hello.view  # of its replica, in the newest epoch
        self._failed = 0
        self._voted = False
        self._holds_state = False
        self._fetched_in: int | None = None
        self._next: Resolution | None = None

    @property
    def view(self) -> View:
        if not self._holds_state:
            return self._own
        digest = FETCHED if self._fetched_in == self.step else ""
        return View(self.step, self._voted, self.share, True, digest, self.stack)

    @property
    def own_view(self) -> View:
        """Of its tensors, for another seat: nobody else has this state, as far as it knows."""
        return View(self.step, digest=self.name) if self._holds_state else self._own

    @property
    def work(self) -> list[tuple[int, int]]:
        """What to compute in this step, in order: (microbatch, place of its copy in the stack).

        The place is 0 for what counts. The order is the same on all ranks of a replica, whenever
        each of them enters an epoch: they compute together. So copies come before what is gained.
        """
        begun = [(index, place) for place, part in enumerate(self.stack) for index in part]
        counts = [part for place, part in enumerate(self.stack) if place in (0, *self.adopted)]
        known = {index for part in counts for index in part}
        return begun + [(index, 0) for index in self.share if index not in known]

    @property
    def adopted(self) -> list[int]:
        """The places of the copies that have become part of the share."""
        own = set(self.share)
        return [
            place
            for place, copy in enumerate(self.stack)
            if place and copy and own.issuperset(copy)
        ]

    def following(self) -> list[int]:
        """The microbatches of the next step, if the members stay the same."""
        shares = fresh(self.microbatches, self.members)
        stack = stack_of(self.name, shares, self._redundancy) or (shares[self.name],)
        return [index for part in stack for index in part]

    @property
    def is_changing(self) -> bool:
        """It has promised an epoch that is not installed yet: it must not commit."""
        return self.promised > self.epoch or self.epoch == 0

    @property
    def is_behind(self) -> bool:
        """Another member has committed the step that this one has voted in (R8)."""
        return self._next is not None

    @property
    def is_first(self) -> bool:
        """Of the members. There is one in each epoch."""
        return self.members[:1] == (self.name,)

    @property
    def must_fetch(self) -> bool:
        return not self._holds_state

    def hello(self) -> Hello:
        """The first message of every connection to the coordinator (R12)."""
        return replace(
            self._hello,
            view=self.view,
            epoch=self.epoch,
            promised=self.promised,
            failed=self._failed,
            members=self.members,
        )

    def receive(self, message: Message) -> Message | None:
        """A message of the coordinator; the answer to it."""
        if isinstance(message, Prepare):
            return self.promise(message.epoch)
        if isinstance(message, Install):
            self.install(message)
        elif isinstance(message, Waiting):
            self.joiners_wait = message.epoch == self.epoch
        elif isinstance(message, Fenced | Refused):
            self.fenced = message
        return None

    def complain(self, reason: str) -> Complaint:
        """The groups of the epoch have failed for this rank. A lost complaint is in every Hello."""
        self._failed = self.epoch
        return Complaint(self.epoch, reason)

    def promise(self, epoch: int) -> Promise | None:
        """R6: the answer to Prepare; None if a later epoch is promised already."""
        if epoch < self.promised or epoch <= self.epoch:
            return None
        self.promised = epoch
        return Promise(epoch, self.view)

    def install(self, install: Install) -> bool:
        """R7, R8: enter the epoch. False if it is not the one promised."""
        if install.epoch != self.promised or install.epoch <= self.epoch:
            return False
        if self.name not in install.views:
            raise InvariantError("an epoch without this member", facts={"epoch": install.epoch})
        found = resolve(self.microbatches, install.views, install.departed)
        self._told = install.views[self.name]
        self.epoch, self.desk = install.epoch, install.desk
        self.members = install.members
        self.holders, self.joiners = found.holders, found.joiners
        self.newcomers = found.joiners + tuple(
            name
            for name, view in install.views.items()
            if view.member and view.step == found.step and FETCHED in view.digest.split()
        )
        self.joiners_wait, self.drawn, self._next = False, install.drawn, None
        if self.name in found.joiners:
            self._holds_state, self.step, self.share, self.stack = False, found.step, (), ()
        elif self.step < found.step and self._holds_state:
            self._next = found
        else:
            self._begin(found.step, found.shares[self.name], self._stack_in(found))
        return True

    def fetch(self, epoch: int) -> bool:
        """From now on its tensors hold parts of different states. False if that epoch has ended.

        Then it has promised another epoch with the state that it has, and must keep that.
        """
        if self.is_changing or epoch != self.epoch:
            return False
        self._own = View(TORN)
        return True

    def received(self, epoch: int) -> None:
        """The state of the step's beginning has come from its holders (R11)."""
        if epoch == self.epoch:
            self._own = View(self.step, digest=FETCHED)
            self._holds_state = True
            self._fetched_in = self.step

    def vote(self, epoch: int) -> bool:
        """R3: the step is reduced under `epoch`. False if that epoch has ended."""
        if self.is_changing or epoch != self.epoch:
            return False
        self._voted = True
        return True

    def commit(self, epoch: int, *, end_epoch: bool) -> bool:
        """R4: all members have voted. False if this rank has promised a later epoch meanwhile.

        end_epoch: some member knows of waiting replicas, so this commit ends the epoch (R11).
        """
        if self.is_changing or epoch != self.epoch:
            return False
        shares = fresh(self.microbatches, self.members)
        stack = stack_of(self.name, shares, self._redundancy)
        self._begin(self.step + 1, shares[self.name], stack)
        if end_epoch:
            self.promised = self.epoch + 1
        self.newcomers = ()
        return True

    def catch_up(self) -> None:
        """Commit the step that others have committed, and enter the one in progress."""
        if self._next is None or not self._voted:
            raise InvariantError("nothing to catch up with", facts={"step": self.step})
        found, self._next = self._next, None
        self._begin(found.step, found.shares[self.name], self._stack_in(found))

    def _stack_in(self, found: Resolution) -> Stack:
        """The stack in the step of a resolution: all ranks of the replica have the same."""
        if found.begins:
            return stack_of(self.name, found.shares, self._redundancy)
        return self._told.stack if self._told.step == found.step else ()

    def _begin(self, step: int, share: Share, stack: Stack) -> None:
        self.step, self.share, self.stack, self._voted = step, share, stack, False
        self._holds_state = True
