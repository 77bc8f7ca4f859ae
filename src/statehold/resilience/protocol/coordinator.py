"""Coordinator: who belongs to the membership. Pure: events come in, messages go out.

    hello, receive, lost    what a connection brings
    tick                    time passes: leases end, a forming membership is complete enough

Each returns the messages to send, as (connection, message). The connection of a replica that was
sent Fenced or Refused is not looked at any more; its rank closes it.

Invariants:
- An epoch is installed when all ranks of all its replicas have promised it, once (R6, R7).
- A replica that was lost never comes back under the same name (R10). Neither do its other ranks.
- Newcomers enter when a vote has ended the epoch, or when the members that are left are too few.
  So between two entries the members commit a step, whatever fails with the newcomers (R11).
- A replica that gives up is in the next epoch with all of its ranks, or with none.
- A number of an epoch is prepared once. Members define the job, also after a restart.
- A coordinator that has been restarted waits for all members of the newest epoch that a rank knows
  (R12). RETURN_S and a lease after the last one came it goes on with more than half of them, and
  after PATIENCE leases with any.
  A member that comes later is fenced.
Not here: sockets (control), what members do with an epoch (member).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from statehold.resilience.protocol.messages import (
    FETCHED,
    TORN,
    Beat,
    Complaint,
    Fenced,
    GivesUp,
    Hello,
    Install,
    Leave,
    Message,
    Prepare,
    Promise,
    Refused,
    View,
    Waiting,
)

Sent = list[tuple[int, Message]]

# After so many failed epochs in a row without progress, the member that complained most goes.
FRUITLESS_MAX = 3
# After a restart, every rank that lives and is reachable has connected again after so long.
RETURN_S = 2.0
# After that, so many leases pass before less than half of the members go on.
PATIENCE = 10


@dataclass
class _Replica:
    """A replica, from its first Hello until it is lost or leaves.

    ranks: the connection of each place. promises: the views given for the epoch in preparation.
    """

    hellos: dict[int, Hello] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    promises: dict[int, View] = field(default_factory=dict)
    left: dict[int, View] = field(default_factory=dict)
    drawn: dict[str, int] = field(default_factory=dict)

    @property
    def hello(self) -> Hello:
        """Of the rank that knows the newest epoch."""
        return max(self.hellos.values(), key=lambda hello: hello.epoch)

    @property
    def promised(self) -> int:
        return max(hello.promised for hello in self.hellos.values())

    @property
    def is_whole(self) -> bool:
        return len(self.ranks) == self.hello.width

    def works_in(self, epoch: int) -> bool:
        """Whether all its ranks are in the epoch, and it has not failed for any."""
        return all(
            each.epoch == each.promised == epoch > each.failed for each in self.hellos.values()
        )

    @property
    def has_promised(self) -> bool:
        return self.is_whole and len(self.promises) == self.hello.width

    @property
    def view(self) -> View:
        """Of its furthest rank. Its other ranks have voted in the step before, and follow.

        Of two in one step, the one with the larger share has entered an epoch that the other has
        not: the other has still to compute what that has added.
        """
        views = [self.promises[place] for place in sorted(self.promises)]
        furthest = max(views, key=lambda view: (view.step, len(view.share)))
        is_member = all(view.member for view in views)
        return replace(furthest, member=is_member, digest=" ".join(view.digest for view in views))

    @property
    def is_torn(self) -> bool:
        """Whether its ranks hold different states: the transfer to it has ended in the middle."""
        views = self.promises.values()
        states = {(view.step, view.member, view.digest == FETCHED) for view in views}
        return len(states) > 1 or any(view.step == TORN for view in views)


class Coordinator:
    """The coordinator of one job.

    expected: a run begins as soon as so many replicas are here; None: not before settle_s.
    settle_s: a run begins with fewer replicas when none has come for so long.
    replicas: those that have said who they are, by name.
    departed: how far those were that have left.
    """

    def __init__(self, expected: int | None = None, settle_s: float = 1.0) -> None:
        self.epoch = 0
        self.members: dict[str, None] = {}  # in the order in which they have entered
        self.expected = expected or sys.maxsize
        self._settle_s = settle_s
        self._target: int | None = None
        self._admits = False  # newcomers, to the epoch in preparation
        self._asked = 0  # the newest epoch that was ever prepared
        self.replicas: dict[str, _Replica] = {}
        self._names: dict[int, tuple[str, int]] = {}
        self._beats: dict[int, float] = {}
        self._gone: dict[str, Fenced | Refused] = {}
        self.departed: list[View] = []
        self._drawn: dict[str, int] = {}
        self._told_waiting = False
        self._failed = False
        self._complaints: Counter[str] = Counter()
        self._furthest: int | None = None
        self._now = self._changed_at = 0.0
        self._outlived: set[str] = set()  # newcomers that were here when the last member was lost
        self._returned_at: float | None = None  # None: nobody knew an epoch before this process
        self._ticked_at: float | None = None
        self._lease_s = self._due = sys.float_info.max  # the shortest; none ends before that time
        self._awaited: dict[str, None] = {}  # asked for a promise, and have not all given it
        self._out: Sent = []

    # Events

    def hello(self, conn: int, message: Hello, now: float) -> Sent:
        """A rank has connected."""
        self._now = now
        known = self.replicas.get(message.replica)
        if known is not None and message.place in known.ranks:
            self._lose(message.replica, Fenced(f"its rank {message.place} has connected again"))
        out = self._problem(message)
        if out is not None:
            self._out.append((conn, out))
            self._lose(message.replica, out)
            return self._sent()
        known = self.replicas.setdefault(message.replica, _Replica())
        known.hellos[message.place] = message
        known.ranks[message.place] = conn
        self._names[conn] = (message.replica, message.place)
        self._beats[conn] = self._changed_at = now
        self._lease_s = min(self._lease_s, message.lease_s)
        self._due = min(self._due, now + message.lease_s)
        if message.epoch and not self.epoch:
            self._returns(message)
        if self._target is not None and known.is_whole:
            if known.promised < self._target:
                self._ask(message.replica)
            else:  # to a coordinator before this one
                self._prepare(self._target, admits=self._admits)
        return self._sent()

    def receive(self, conn: int, message: Message, now: float) -> Sent:
        """A message of a rank that has said hello."""
        self._now = now
        if conn not in self._names:
            return []
        name, place = self._names[conn]
        replica = self.replicas[name]
        self._beats[conn] = now
        if not self.epoch:
            _note(replica.hellos, place, message)
        if isinstance(message, Beat):  # thousands beat: each decides nothing, and the tick does
            replica.drawn = dict(message.drawn)
            return []
        if isinstance(message, Promise):
            self._promise(name, place, message)
        elif isinstance(message, Complaint):
            if message.epoch == self.epoch and self._target is None:
                self._failed = True
                self._complaints[name] += 1
        elif isinstance(message, GivesUp):
            if message.after >= self.epoch:  # or the next epoch is on its way to the rank
                self._lose(name, Fenced("it has waited too long for others", gave_up=True))
        elif isinstance(message, Leave):
            replica.left[place] = message.view
            if len(replica.left) == replica.hello.width:
                if name in self.members or not self.epoch:
                    self.departed.append(max(replica.left.values(), key=lambda view: view.step))
                self._forget(name, Fenced("it has left"))
        return self._sent()

    def lost(self, conn: int, now: float) -> Sent:
        """A connection has ended: the process is gone."""
        self._now = now
        if conn in self._names:
            name, place = self._names[conn]
            if place not in self.replicas[name].left:
                self._lose(name, Fenced(f"its rank {place} has been lost"), but=conn)
        return self._sent()

    def tick(self, now: float) -> Sent:
        """Time has passed. To be called several times in a lease."""
        self._now = now
        gap = 0.0 if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        if now > self._due or gap > self._lease_s / 2:
            self._end_leases(now, gap)
        return self._sent()

    def _end_leases(self, now: float, gap: float) -> None:
        self._due = sys.float_info.max
        for conn, (name, place) in list(self._names.items()):
            if conn not in self._names:  # lost with another rank of its replica
                continue
            lease_s = self.replicas[name].hello.lease_s
            if gap > lease_s / 2:  # this process stood still: messages may wait in its sockets
                self._beats[conn] = now
            elif now - self._beats[conn] > lease_s:
                self._lose(name, Fenced(f"the lease of its rank {place} has ended ({lease_s} s)"))
                continue
            self._due = min(self._due, self._beats[conn] + lease_s)

    # Decisions

    def _sent(self) -> Sent:
        if self._target is not None:
            self._install_if_ready()
        elif self.epoch == 0:
            self._begin()
        elif not self.members:
            self._form()
        elif self._failed:
            self._end_fruitless()
            if self.members:
                self._prepare(self.epoch + 1)
        is_settled = bool(self.members) and self._target is None
        has_others = len(self.replicas) > len(self.members)
        if is_settled and has_others and not self._told_waiting and self._entering():
            self._told_waiting = True
            self._tell(self.members, Waiting(self.epoch))
        sent, self._out = self._out, []
        return sent

    def _begin(self) -> None:
        """The first epoch, or the epoch that others know (R12)."""
        returned_at, newest = self._returned_at, None
        if returned_at is not None:
            hellos = (each.hello for each in self.replicas.values())
            newest = max(hellos, key=lambda it: it.epoch, default=None)
        if returned_at is not None and newest is not None and newest.epoch:
            self._return(newest, (self._now - returned_at - RETURN_S) / newest.lease_s)
        else:
            self._form()

    def _form(self) -> None:
        """A membership of replicas that have just come: nobody holds the state of the run."""
        waited = self._now - self._changed_at > self._settle_s
        if not waited and len(self.replicas) < self.expected:
            return
        ready = self._newcomers()
        if not ready:
            return
        fewest = self._fewest(ready)
        complete = len(ready) >= self.expected and not self._outlived.issuperset(ready)
        if len(ready) >= fewest and (waited or complete):
            self._prepare(self.epoch + 1)

    def _return(self, newest: Hello, leases: float) -> None:
        """The members of the newest epoch go on.

        `leases` have passed since RETURN_S after the last one came. How long a new run waits for
        more replicas (settle_s) has nothing to do with it: the members stand still meanwhile.
        """
        members = set(newest.members)
        for name in [each for each in self.replicas if self.replicas[each].hello.epoch]:
            if name not in members:
                self._lose(name, Fenced(f"epoch {newest.epoch} is without it"))
        present = [
            name
            for name in newest.members
            if name in self.replicas and self.replicas[name].is_whole
        ]
        if not present:
            if leases > PATIENCE:  # no rank can go on without the others of its replica
                for name in [each for each in self.replicas if self.replicas[each].hello.epoch]:
                    self._lose(name, Fenced("a rank of it has not come back"))
            return
        all_here = len(present) == len(newest.members)
        if all_here and all(self.replicas[name].works_in(newest.epoch) for name in present):
            self.epoch, self.members = newest.epoch, dict.fromkeys(present)
        elif all_here or leases > (1 if 2 * len(present) > len(newest.members) else PATIENCE):
            for name in members & self.replicas.keys() - set(present):
                self._lose(name, Fenced("a rank of it has not come back"))
            self.epoch, self.members = newest.epoch, dict.fromkeys(present)
            self._prepare(self.epoch + 1)

    def _prepare(self, epoch: int, *, admits: bool = False) -> None:
        promised = max((each.promised for each in self.replicas.values()), default=0)
        self._target = self._asked = max(epoch, 1 + self._asked, 1 + promised)
        self._admits = admits
        self._told_waiting = False
        for replica in self.replicas.values():
            replica.promises.clear()
        self._awaited.clear()
        for name in [*self.members, *self._newcomers()]:  # these may be needed if members die
            self._ask(name)

    def _ask(self, name: str) -> None:
        assert self._target is not None
        self._awaited[name] = None
        self._tell([name], Prepare(self._target))

    def _promise(self, name: str, place: int, message: Promise) -> None:
        if self._target is None and name in self.members and message.epoch == self.epoch + 1:
            self._prepare(message.epoch, admits=True)  # its vote has ended the epoch (R11)
        if message.epoch == self._target:
            self.replicas[name].promises[place] = message.view
            if self.replicas[name].has_promised:
                self._awaited.pop(name, None)

    def _install_if_ready(self) -> None:
        if any(self._is_needed(name) for name in self._awaited):
            return  # found at once, where the list of all candidates takes long
        names = self._candidates()
        promised = all(self.replicas[name].has_promised for name in names)
        if self._target is None or not names or not promised:
            return
        if len(names) < self._fewest(names) and not self.departed:
            return
        views = {name: self.replicas[name].view for name in names}
        if not any(view.member for view in views.values()):
            torn = [name for name in names if self.replicas[name].is_torn]
            for name in torn:
                self._lose(name, Fenced("its ranks hold states of different steps"))
            if torn:
                self._install_if_ready()
                return
            self.departed = []
        self._install(views)

    def _install(self, views: Mapping[str, View]) -> None:
        assert self._target is not None
        self.epoch, self._target, self._failed = self._target, None, False
        furthest = max(view.step for view in views.values())
        if furthest != self._furthest:
            self._furthest = furthest
            self._complaints.clear()
        self.members = dict.fromkeys(views)
        departed, drawn = tuple(self.departed), dict(self._drawn)
        self.departed, self._drawn = [], {}
        desk = self.replicas[next(iter(self.members))].hellos[0].desk
        self._tell(self.members, Install(self.epoch, views, departed, desk, drawn))

    def _end_fruitless(self) -> None:
        """Members that cannot reach each other would fail for ever, so one goes.

        Those two notice first. The others only see that their operations do not end.
        """
        if self._complaints.total() >= FRUITLESS_MAX:
            name = max(self.members, key=lambda each: self._complaints[each])
            self._complaints.clear()
            self._lose(name, Fenced(f"{FRUITLESS_MAX} epochs with it have failed"))

    # Replicas

    def _candidates(self) -> list[str]:
        """Who would be in the next epoch: the members that live, and then newcomers."""
        admits = self._admits or len(self.members) < self._fewest(self.members)
        return [*self.members, *(self._entering() if admits else ())]

    def _is_needed(self, name: str) -> bool:
        """Whether the next epoch surely waits for a promise of this replica."""
        counts = name in self.members if self.members else not self.replicas[name].hello.epoch
        return counts and self.replicas[name].is_whole

    def _entering(self) -> list[str]:
        """The newcomers that members go on with: those that ask for more replicas stay outside."""
        entering = self._newcomers()
        while self.members and entering:
            count = len(self.members) + len(entering)
            content = [name for name in entering if self._fewest([name]) <= count]
            if content == entering:
                break
            entering = content
        return entering

    def _fewest(self, names: Iterable[str]) -> int:
        """How many replicas these need at least."""
        return max((self.replicas[name].hello.min_replicas for name in names), default=1)

    def _newcomers(self) -> list[str]:
        return [
            name
            for name, each in self.replicas.items()
            if each.is_whole and name not in self.members and not each.hello.epoch
        ]

    def _returns(self, message: Hello) -> None:
        """Others hold the state of the run: no new membership without them, nor another job."""
        is_first, self._target, self._returned_at = self._returned_at is None, None, self._now
        for name, each in list(self.replicas.items()) if is_first else ():
            out = _difference(message, each.hello)
            if out is not None and not each.hello.epoch:
                self._lose(name, out)

    def _problem(self, message: Hello) -> Fenced | Refused | None:
        if message.replica in self._gone:
            return self._gone[message.replica]
        if message.epoch and self.epoch and message.replica not in self.members:
            return Fenced("the job has gone on without it")
        others = (each.hello for each in self.replicas.values())
        knows = None if self._returned_at is None else next((it for it in others if it.epoch), None)
        if knows is None and not message.epoch and self.replicas:
            knows = next(iter(self.replicas.values())).hello
        return None if knows is None else _difference(knows, message)

    def _lose(self, name: str, out: Fenced | Refused, but: int | None = None) -> None:
        """The replica is out: tell its other ranks, and any that comes under its name later."""
        if name in self.replicas:
            replica = self.replicas[name]
            self._out += [(conn, out) for conn in replica.ranks.values() if conn != but]
            if name in self.members:
                self._failed = True
                self._drawn.update(replica.drawn)
            self._forget(name, out)
        self._gone.setdefault(name, out)

    def _forget(self, name: str, out: Fenced | Refused) -> None:
        self._awaited.pop(name, None)
        for conn in self.replicas.pop(name).ranks.values():
            self._names.pop(conn, None)
            self._beats.pop(conn, None)
        self._complaints.pop(name, None)
        self._gone[name] = out
        if name in self.members:
            del self.members[name]
            if not self.members:
                # A new run begins. Who has been lost comes back with the newest state.
                self._target, self._changed_at = None, self._now
                self._outlived = set(self._newcomers())
        elif not self._candidates():
            self._target = None  # who comes next waits for others, as after a loss of all members

    def _tell(self, names: Iterable[str], message: Message) -> None:
        for name in names:
            self._out += [(conn, message) for _, conn in sorted(self.replicas[name].ranks.items())]


def _note(hellos: dict[int, Hello], place: int, message: Message) -> None:
    """What a rank says before the others have come back, as if its Hello had said it (R12)."""
    if isinstance(message, Promise):
        hellos[place] = replace(hellos[place], promised=message.epoch)
    elif isinstance(message, Complaint):
        hellos[place] = replace(hellos[place], failed=message.epoch)


def _difference(expected: Hello, got: Hello) -> Refused | None:
    """All replicas have the same job, and as many ranks."""
    ours, theirs = ({"ranks of a replica": str(each.width), **each.job} for each in (expected, got))
    for key in ours | theirs:
        if ours.get(key) != theirs.get(key):
            facts = {"what": key, "expected": str(ours.get(key)), "got": str(theirs.get(key))}
            return Refused("the replica differs from the job", facts)
    return None
