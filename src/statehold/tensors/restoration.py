"""What a comparison of a state with a step found: what is left to do, or how the two differ.

Owns: the acts of the last part of a restore, in their order; the error for a state that differs.
Invariants: `finish` is called only when every byte has arrived and was verified. Random generators
are put back last. What other objects draw while they load leaves no trace, so a state may be
restored in parts, the generators first or last.
Not here: the comparison (restore).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from statehold.errors import StateMismatchError
from statehold.format.selection import Answer, RestoreReport, some, suggested
from statehold.tensors import loaders
from statehold.tensors.destinations import Destination
from statehold.tensors.rng import unchanged
from statehold.tensors.stored import Fill

PROBLEMS_SHOWN = 20
NAMES_IN_HINT = 3
# A parameter that no module in the state has.
_BY_PLACE = re.compile(r"\.state\.\d+$")
_HINT = "build the state as it was when the step was saved, or leave out what differs with {}"


@dataclass(slots=True)
class Restoration:
    """Where the bytes go, and what is left to do once they have arrived.

    `used`: the saved tensors that this rank takes. `patterns`: see Answer. `has_own`: whether a
    generator goes on, because another number of ranks has saved the step. `plain`: which of the
    missing and unexpected entries hold values only. `numbered`: missing entries
    of dicts by number, where the step has them by name. `by_hand`: modules that
    may take what differs when they are loaded. `castable`: entries whose
    dtypes are other floats. `parameters`: those of modules that
    are restored, and whether they need gradients. `trains`: an optimizer is restored, too.
    `stateful`: the objects that take their
    state themselves, by path. `streams`: what reads more of the step once the destinations are
    filled; `streamed` are these tensors. The other lists are of a RestoreReport.
    """

    step: int = 0
    destinations: list[Destination] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    live: list[torch.Tensor] = field(default_factory=list)
    containers: list[Callable[[], Any]] = field(default_factory=list)
    objects: list[Callable[[], Any]] = field(default_factory=list)
    generators: list[Callable[[], Any]] = field(default_factory=list)
    stateful: list[tuple[str, Any]] = field(default_factory=list)
    streams: list[Callable[[Fill], None]] = field(default_factory=list)
    streamed: set[str] = field(default_factory=set)
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    patterns: Mapping[str, list[str] | None] = field(default_factory=dict)
    has_own: bool = False
    plain: set[str] = field(default_factory=set)
    numbered: set[str] = field(default_factory=set)
    castable: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    parameters: dict[str, bool] = field(default_factory=dict)
    trains: bool = False
    by_hand: list[str] = field(default_factory=list)

    @property
    def answer(self) -> Answer:
        """What the selection found here."""
        return Answer(
            self.patterns,
            loads=bool(self.loaded) or self.has_own,
            has_rest=bool(self.missing or self.unexpected or self.kept),
            lacks=bool(self.missing),
        )

    @property
    def report(self) -> RestoreReport:
        return RestoreReport(
            self.step,
            loaded=tuple(self.loaded),
            missing=tuple(self.missing),
            unexpected=tuple(self.unexpected),
            kept=tuple(self.kept),
            cast=tuple(self.cast),
        )

    def doubts(self, *, other_ranks: bool, frozen: Set[str] | None = None) -> Iterator[str]:
        """After finish(): what may not go on as it was, and what the user can do.

        other_ranks: another number of ranks has saved the step. frozen: the parameters that needed
        no gradient then; None if the step does not say it.
        """
        if frozen is not None and self.trains:
            needing = [name for name, needs in self.parameters.items() if needs and name in frozen]
            others = [
                name for name, needs in self.parameters.items() if not needs and name not in frozen
            ]
            for names, then, now, value in (
                (others, "needed gradients", "need none", True),
                (needing, "needed no gradients", "need them", False),
            ):
                if names:
                    yield (
                        f"step {self.step} is restored, but these parameters {then} when it was "
                        f"saved, and {now} now: {some(names)}. restore() does not change that; "
                        f"call requires_grad_({value}) if they should be as they were"
                    )
        has_rng = bool(self.generators)
        for path, live in self.stateful:
            for doubt in loaders.doubts(live, has_rng=has_rng, other_ranks=other_ranks):
                yield f'step {self.step} is restored; "{path}" may continue differently: {doubt}'

    def finish(self, *, draws: bool = True) -> None:
        """Apply everything that is not tensor bytes.

        draws: whether an act may draw random numbers. To undo that takes longer than a few acts.
        """
        with torch.no_grad():
            with unchanged() if draws else contextlib.nullcontext():
                for act in (*self.containers, *self.objects):
                    act()
            for act in self.generators:
                act()
        # Memory was written behind autograd's back: a backward that has saved these must raise.
        torch.autograd.graph.increment_version(
            [tensor for tensor in self.live if not tensor.is_inference()]
        )


def mismatch(problems: list[tuple[str, str]], found: Restoration) -> StateMismatchError:
    """The error for a state and a step that differ; found: what was found out until then."""
    facts = dict(problems[:PROBLEMS_SHOWN])
    if len(problems) > PROBLEMS_SHOWN:
        facts["..."] = f"{len(problems) - PROBLEMS_SHOWN} more"
    for given, near in found.patterns.items():
        if near is not None:
            facts[given] = f"matches nothing on this rank: {suggested(near)}"
    return StateMismatchError(
        f"the state and the step differ in {places(len(problems))}; nothing was changed",
        facts=facts,
        hint=_advice([name for name, _ in problems], found),
    )


def places(count: int) -> str:
    """ "1 place", "2 places"."""
    return f"{count} place{'s' if count != 1 else ''}"


def _advice(names: list[str], found: Restoration) -> str:
    """What is most likely meant by a state that differs from the step."""
    tops = dict.fromkeys(name.split(".")[0] for name in found.loaded)
    whole = {name for name in names if "." not in name} - found.plain
    here, there = ([name for name in those if name in whole]
                   for those in (found.missing, found.unexpected))  # fmt: skip
    if len(here) == len(there) == 1:
        rename = f'rename={{"{there[0]}": "{here[0]}"}}'
        return f'if "{there[0]}" of the step is "{here[0]}" now: {rename}'
    by_place = [name for name in found.missing if _BY_PLACE.search(name)]
    if found.numbered.intersection(by_place):
        part = by_place[0].rpartition(".state.")[0]
        return (
            f'the step was saved with the optimizer itself: put it into the state as "{part}", '
            "not its state_dict()"
        )
    if by_place:
        return (
            "an optimizer names its parameters by the modules of the state: put the model that "
            "it updates into the state, not another copy"
        )
    if tops and not found.missing and all(name.split(".")[0] not in tops for name in names):
        part = ", ".join(f'"{name}"' for name in tops)
        return f"to restore this part of the step alone: restore(state, only=[{part}])"
    return _HINT.format(_ways_out(names, found))


def _ways_out(names: list[str], found: Restoration) -> str:
    """The arguments of restore() with which the parts that fit are restored."""
    shown = ", ".join(f'"{name}"' for name in names[:NAMES_IN_HINT])
    skip = f"skip=[{shown}{', ...' if len(names) > NAMES_IN_HINT else ''}]"
    if found.castable and found.castable == names:
        return f"{skip}; cast=True converts them to the dtypes of the state"
    if all(any("." in name for name in side) for side in (found.missing, found.unexpected)):
        skip += "; rename= maps names of the step to those of the state"
    if found.by_hand:
        part = found.by_hand[0]
        return (
            f"{skip}. A module that loads its entries in a way of its own takes them with "
            f'restore(state, skip=["{part}"]) and '
            f'load_state_dict(statehold.load("RUN@{found.step}", "{part}"))'
        )
    if {*found.missing, *found.unexpected}.issuperset(names):
        return f"{skip}; strict=False leaves out all that only one side has"
    return skip
