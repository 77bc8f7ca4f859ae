"""What a study found, as a document and as sentences.

Owns: the JSON document of a study; why the chosen settings were chosen.
Holds: pure; every figure says how often it was measured and between which ends it lies.
Not here: tables and files (cli.bench), the plot (plot).
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import Any

from statehold.study.choose import Figures, finding, moving_of, score
from statehold.study.profile import described
from statehold.study.strategies import Strategy
from statehold.study.study import Proof, Study
from statehold.study.sweep import comparisons
from statehold.units import format_bytes

__all__ = ["document", "findings", "reasons"]

_SETTINGS = {
    "mover": "{}",
    "block_bytes": "buffers of {}",
    "depth": "{} transfers in flight",
    "copy_threads": "{} copying",
}


def findings(study: Study) -> list[str]:
    """What the comparisons say, as far as they were measured."""
    made = groupby(comparisons(study.middle), key=lambda each: (each.what, each.than))
    told = [finding(study.figures, same) for _, same in made]
    return [text for text in told if text is not None]


def reasons(study: Study) -> list[str]:
    """What to use, and why."""
    figures, chosen = study.figures, study.chosen
    pool = figures.engines()
    lines = [f"use {described(moving_of(chosen))}"]
    worst = score(figures, chosen, pool)
    lines.append(f"in what it does worst it reaches {worst:.2f} of the best setting of the sweep")
    changed = [name for name in _SETTINGS if getattr(chosen, name) != getattr(study.middle, name)]
    for name in changed:
        now, before = (_SETTINGS[name].format(_value(s, name)) for s in (chosen, study.middle))
        lines.append(f"{now} instead of {before}")
    if changed:
        lines.append(f"without a profile: {score(figures, study.middle, pool):.2f}")
    else:
        lines.append("that is what statehold does without a profile: nothing is better by 3 %")
    return lines + [proved(proof) for proof in study.proofs]


def _value(strategy: Strategy, name: str) -> object:
    value = getattr(strategy, name)
    if name == "block_bytes":
        return format_bytes(value)
    return value.value if name == "mover" else value


def proved(proof: Proof) -> str:
    """One proof as a sentence."""
    against = {
        "statehold": "the best setting of statehold",
        "bytes": "the best of all strategies, moving bytes only",
    }[proof.kind]
    if not proof.turns:
        return f"{proof.operation.value}: the settings are {against}"
    return (
        f"{proof.operation.value}: measured again in {proof.turns} turns, the settings reach "
        f"{proof.ratio:.3f} ({proof.low:.2f} to {proof.high:.2f}) of {against}: {proof.best.name}"
    )


def document(study: Study) -> dict[str, Any]:
    """All of it for programs."""
    return {
        "rounds": study.rounds,
        "seconds": round(study.took_s, 1),
        "chosen": asdict(moving_of(study.chosen)),
        "why": reasons(study),
        "findings": findings(study),
        "strategies": [_strategy(study.figures, each) for each in study.figures.strategies()],
        "refused": [{"name": s.name, "why": why} for s, why in study.refused.items()],
        "unmeasured": [each.name for each in study.unmeasured],
        "proofs": [
            {**asdict(p), "chosen": p.chosen.name, "best": p.best.name} for p in study.proofs
        ],
    }


def _strategy(figures: Figures, strategy: Strategy) -> dict[str, Any]:
    measured = {
        operation.value: {
            "gb_per_s": figures.of(each, operation),
            "all": [round(rate, 4) for rate in rates],
            "moved": figures.moved(each, operation),
        }
        for (each, operation), rates in figures.rates.items()
        if each == strategy
    }
    return {"name": strategy.name, **asdict(strategy), "measured": measured}
