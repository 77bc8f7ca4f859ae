"""Messages between the ranks of replicas and their coordinator, and their form on the wire.

A message is one line of JSON, an object whose member "is" names its class below.

Invariants: `decode(encode(message)) == message`. A line that is no message raises ValueError, and
so does one with a name, a number or a time that no rank has: the receiver uses a message as it is.
Only free text (job, facts, reason) may have characters that a terminal obeys.
Not here: when a message is sent (member, coordinator), and how (control).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from statehold.encoding import strictjson

SECONDS_MAX = 24 * 3600.0
# Of what a rank may know when it connects: the coordinator counts on from there.
EPOCH_MAX = 2**62
# The step of a rank whose state is neither its own nor that of others: a transfer has broken off.
TORN = -1
# The digest of a state that has come from members: those of the same step are equal.
FETCHED = "fetched"


@dataclass(frozen=True, slots=True)
class View:
    """What a rank tells when it promises (R6).

    step: the step in progress; its state is that of the step's beginning.
    voted: it has reduced this step and entered the vote, so another rank may have committed it.
    share: the microbatches that it contributes to this step.
    stack: what it computes in this step whatever happens: the share that it began with, and copies
        of those of others (redundancy). Empty without copies.
    member: it holds the state of the run. A rank that has just come does not.
    digest: of its state, if it has just come: equal states need no transfer. FETCHED of one that
        has fetched it in this step. The view of a replica has those of all its ranks.
    """

    step: int
    voted: bool = False
    share: tuple[int, ...] = ()
    member: bool = False
    digest: str = ""
    stack: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a connection.

    replica: the name of this life of the replica; a replica that comes back has another one.
    place, width: which rank of the replica this is, and of how many.
    job: what all replicas must have in common, by name.
    epoch, promised, members: the membership that this rank is in; 0 and () if in none.
    failed: the newest epoch whose groups have failed for it.
    desk: the address where this rank lets the ranks of an epoch meet (R9).
    """

    replica: str
    place: int
    width: int
    job: Mapping[str, str]
    view: View
    min_replicas: int = 1
    lease_s: float = 1.0
    epoch: int = 0
    promised: int = 0
    failed: int = 0
    members: tuple[str, ...] = ()
    desk: str = ""


@dataclass(frozen=True, slots=True)
class Beat:
    """The rank is alive, and its training thread makes progress.

    drawn: checksums of what was drawn for microbatches of the step since the last beat.
    """

    step: int
    drawn: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Promise:
    """The rank commits nothing under an epoch before `epoch` any more (R6)."""

    epoch: int
    view: View


@dataclass(frozen=True, slots=True)
class Complaint:
    """An operation of the groups of `epoch` failed for this rank."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Leave:
    """The rank has committed its last step and goes."""

    view: View


@dataclass(frozen=True, slots=True)
class GivesUp:
    """The rank has waited too long for an epoch later than `after`."""

    after: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """The coordinator asks for the promise to join `epoch` (R6)."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """Replicas wait to be admitted: the members end the epoch with their next vote (R11)."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Install:
    """The membership of `epoch` (R7).

    views: of each member by its name, in the order of the members.
    departed: views of replicas that have left after their last step.
    desk: where the ranks of this epoch meet: at its first member.
    drawn: checksums of what lost replicas have drawn in this step.
    """

    epoch: int
    views: Mapping[str, View]
    departed: tuple[View, ...] = ()
    desk: str = ""
    drawn: Mapping[str, int] = field(default_factory=dict)

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(self.views)


@dataclass(frozen=True, slots=True)
class Fenced:
    """The replica belongs to no membership any more: it was taken for dead, or it lost a rank.

    gave_up: a rank of it has given up before the next epoch was installed. So all of them give up.
    """

    reason: str
    gave_up: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica may not join: it differs from the job."""

    reason: str
    facts: Mapping[str, str] = field(default_factory=dict)


Message = (
    Hello
    | Beat
    | Promise
    | Complaint
    | Leave
    | GivesUp
    | Prepare
    | Waiting
    | Install
    | Fenced
    | Refused
)

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """One line, with its end."""
    fields = {"is": type(message).__name__, **dataclasses.asdict(message)}
    line = json.dumps(fields, allow_nan=False)
    return line.encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of a line; ValueError if it is something else."""
    try:
        fields = strictjson.message(line)
        kind = _KINDS[fields.pop("is")]
        message: Message = kind(**{name: _READERS[name](each) for name, each in fields.items()})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a message: {line[:200]!r}") from error
    if isinstance(message, Hello):
        _check_hello(message)
    return message


def _check_hello(hello: Hello) -> None:
    if hello.place >= hello.width:
        raise ValueError(f"not a place: {hello.place} of {hello.width}")
    if max(hello.epoch, hello.promised, hello.failed) > EPOCH_MAX:
        raise ValueError("an epoch that no coordinator has reached")


def _is(*kinds: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) not in kinds:
            raise TypeError(f"{type(value).__name__} instead of {kinds[0].__name__}")
        return value

    return read


_words, _flag, _list, _object = _is(str), _is(bool), _is(list), _is(dict)


def _between(least: int, most: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"a number outside of {least} to {most}")
        return value

    return read


_number = _between(TORN, strictjson.INT_MAX)
_count, _positive = _between(0, strictjson.INT_MAX), _between(1, strictjson.INT_MAX)
_checksum = _between(0, 2**64 - 1)


def _name(value: Any) -> str:
    """A text that may be shown as it is."""
    text: str = _words(value)
    if not text.isprintable():
        raise ValueError("a name with characters that nobody can read")
    return text


def _seconds(value: Any) -> float:
    seconds: float = _is(float, int)(value)
    if not 0 < seconds <= SECONDS_MAX:
        raise ValueError("no time, or more than a day")
    return seconds


def _names(value: Any) -> tuple[str, ...]:
    names = _tuple(_name)(value)
    if len(set(names)) < len(names):
        raise ValueError("a name twice")
    return names


def _tuple(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: tuple(read(each) for each in _list(value))


def _mapping(
    read: Callable[[Any], Any], key: Callable[[Any], str] = _name
) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {key(name): read(each) for name, each in _object(value).items()}


def _view(value: Any) -> View:
    return View(
        step=_number(value["step"]),
        voted=_flag(value["voted"]),
        share=_tuple(_count)(value["share"]),
        member=_flag(value["member"]),
        digest=_name(value["digest"]),
        stack=_tuple(_tuple(_count))(value["stack"]),
    )


_READERS: dict[str, Callable[[Any], Any]] = {
    "replica": _name,
    "place": _count,
    "width": _positive,
    "job": _mapping(_words, _words),
    "view": _view,
    "min_replicas": _positive,
    "lease_s": _seconds,
    "epoch": _count,
    "after": _count,
    "gave_up": _flag,
    "promised": _count,
    "failed": _count,
    "members": _names,
    "desk": _name,
    "step": _number,
    "drawn": _mapping(_checksum),
    "reason": _words,
    "views": _mapping(_view),
    "departed": _tuple(_view),
    "facts": _mapping(_words, _words),
}
