"""What a run directory must hold: every save that was begun, every step that was promised.

A save has a serial number, never used twice; its content is a function of rank, step and serial.
So whatever a restore brings back says itself which save it is, and is compared with that save bit
for bit.

    begun       saves that may be there: they were started
    promised    the newest save of each step that some rank reported as committed
    suspect     steps with bytes that rot or a misdirected write has changed: these may be refused
    far         steps that only the second level has: it may not have got the newest save of them

Violations are collected, not raised: a seed goes on to its end, and reports them all.
"""

from __future__ import annotations

import math
import random
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from statehold import Keep
from statehold.options.keep import kept_of
from support.in_memory import SimFs
from support.keeping import Said, expected

RUN = "/runs/x"
FAR = f"{RUN}-far"  # the second level, of jobs that have one
SAME_NUMEL, OWN_NUMEL = 1500, 700
_STEP = re.compile(rf"{RUN}(?:-far)?/step-(\d{{12}})(?:\.corrupt|\.replaced)?/")


class Rarely(torch.nn.Module):
    """Weights that change with every third save; two together are enough for a shared file."""

    def __init__(self, serial: int, rank: int = 0) -> None:
        super().__init__()
        begin = serial // 3 * 1013 + 7 * rank
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.arange(2500.0) + begin + 31 * layer, requires_grad=False)
            for layer in range(2)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rarely) and all(map(torch.equal, self.weights, other.weights))

    __hash__ = torch.nn.Module.__hash__


def content(rank: int, step: int, serial: int, *, shares: bool = False) -> dict[str, Any]:
    """What `rank` saves: "same" and "base" on all ranks alike, "own" and "tail" on none.

    shares: with "base", "tail" and "loose", which change rarely.
    """
    base = step * 1009 + serial * 100_003
    return {
        **(_rarely(serial, rank) if shares else {}),
        "same": torch.arange(SAME_NUMEL, dtype=torch.int32) * 31 + base,
        "own": torch.arange(OWN_NUMEL, dtype=torch.int32) * 17 + base + 7 * rank,
        "rank": rank,
        "step": step,
        "serial": serial,
    }


def _rarely(serial: int, rank: int = 0) -> dict[str, Any]:
    """What changes with every third save; "loose", which is copied before save() returns, with
    every sixth."""
    loose = Rarely(serial // 2, rank + 50).weights
    return {
        "base": Rarely(serial),
        "tail": Rarely(serial, rank),
        **{f"loose{index}": each.detach() for index, each in enumerate(loose)},
    }


def blank(*, shares: bool = False) -> dict[str, Any]:
    return {
        **(_rarely(-1000) if shares else {}),
        "same": torch.zeros(SAME_NUMEL, dtype=torch.int32),
        "own": torch.zeros(OWN_NUMEL, dtype=torch.int32),
        "rank": None,
        "step": None,
        "serial": None,
    }


def differs(found: dict[str, Any], rank: int, names: Iterable[str]) -> str | None:
    """What is wrong with a state after a restore of `names`."""
    expected = content(rank, found["step"], found["serial"], shares="base" in found)
    for name in names:
        value = expected[name]
        same = (
            torch.equal(found[name], value)
            if isinstance(value, torch.Tensor)
            else found[name] == value
        )
        if not same:
            return f"{name} is not that of serial {found['serial']}"
    return None


def metrics_of(step: int) -> dict[str, float]:
    """What every save of a step says. Some steps have not measured it, or in vain."""
    if step % 7 == 6:
        return {}
    return {"loss": math.nan if step % 9 == 8 else step * 7 % 5 / 4}


def best_of(chance: random.Random, keep: int | None) -> Keep:
    """Rules for the newest steps, and for others besides."""
    best = chance.choice((0, 1, 2))
    return Keep(
        last=keep or 1,
        every=chance.choice((None, 2, 3)),
        best=best,
        metric="loss" if best else None,
        mode=chance.choice(("min", "max")),
        pinned=chance.choice(((), (2,))),
    )


@dataclass
class Oracle:
    """The promises of one run directory that keeps what `keep` says. Thread-safe."""

    keep: int | Keep | None
    has_levels: bool = False
    begun: dict[int, dict[int, int]] = field(default_factory=dict)  # step -> serial -> ranks
    promised: dict[int, int] = field(default_factory=dict)
    suspect: set[int] = field(default_factory=set)
    far: set[int] = field(default_factory=set)
    committed: int = 0
    _rewound: int = 0
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, step: int, serial: int, ranks: int) -> None:
        with self._guard:
            self.begun.setdefault(step, {})[serial] = ranks

    def promise(self, step: int, serial: int) -> None:
        with self._guard:
            if serial < self._rewound:  # told late: the rewind has settled what is there
                return
            self.committed += self.promised.get(step) != serial
            self.promised[step] = max(serial, self.promised.get(step, 0))

    def doubt(self, newer_than: int, serial: int) -> None:
        """A rewind was begun: newer steps of saves before `serial` may be there or not."""
        with self._guard:
            self._rewound = max(self._rewound, serial)
            # What was there newer than a step has decided whether it was kept.
            kept = self._kept(
                each for each, saves in self.begun.items() if min(saves, default=serial) < serial
            )
            for step in [each for each in self.promised if each > newer_than or each not in kept]:
                del self.promised[step]

    def forget(self, newer_than: int, serial: int) -> None:
        """A rewind has succeeded: nothing newer may be there of saves before `serial`, and the step
        itself is there."""
        with self._guard:
            self.promised.setdefault(newer_than, 0)
            for step in [step for step in self.begun if step > newer_than]:
                left = {each: size for each, size in self.begun[step].items() if each > serial}
                self.begun[step] = left

    def look(self, fs: SimFs) -> None:
        """Note which steps hold damaged files now."""
        found = filter(None, map(_STEP.match, fs.damaged))
        self.suspect |= {int(match[1]) for match in found}

    def judge(self, visible: Sequence[int]) -> list[str]:
        """Which promises are broken if these are the steps that there are; forgets old ones."""
        kept = self._kept({*self.promised, *visible, *self.suspect})
        wrong = [
            f"step {step} was committed and is not there"
            for step in kept
            if step in self.promised and step not in visible and step not in self.suspect
        ]
        wrong += [f"step {step} was never saved" for step in visible if not self.begun.get(step)]
        self.promised = {step: self.promised[step] for step in self.promised if step in visible}
        return wrong

    def _kept(self, steps: Iterable[int]) -> list[int]:
        """Those of these steps that stay."""
        known, keep = sorted(steps), kept_of(self.keep)
        if keep is None:
            return known
        return sorted(expected(keep, {step: Said(metrics_of(step)) for step in known}))

    def judge_content(
        self, step: int, rank: int, found: dict[str, Any], names: Iterable[str]
    ) -> list[str]:
        """What is wrong with what `rank` has restored of `step`."""
        if found["step"] != step or found["serial"] not in self.begun.get(step, {}):
            return [f"step {step}: holds step {found['step']}, serial {found['serial']}"]
        may_be_older = step in self.far or (self.has_levels and step in self.suspect)
        if found["serial"] < self.promised.get(step, 0) and not may_be_older:
            return [f"step {step}: serial {found['serial']}, {self.promised[step]} was committed"]
        wrong = differs(found, rank, names)
        return [f"step {step}, rank {rank}: {wrong}"] if wrong else []

    def ranks_of(self, step: int) -> set[int]:
        return set(self.begun.get(step, {}).values())
