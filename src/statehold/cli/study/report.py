"""The results of a study, as a document and as sentences.

Owns: the JSON document of a study; the reasons for the chosen settings.
Invariants: pure. Every figure comes with the number of its measurements and its range.
Not here: tables and files (cli/bench).
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import Any

from statehold.cli.study.choose import StudyFigures, finding, moving_of, rates_of
from statehold.cli.study.strategies import Strategy
from statehold.cli.study.study import Remeasured, Study
from statehold.io.profile import described
from statehold.units import format_bytes

_SETTINGS = {
    "mover": "{}",
    "block_bytes": "buffers of {}",
    "depth": "{} transfers in flight",
    "copy_threads": "{} copying",
}


def findings(study: Study) -> list[str]:
    """The findings from the comparisons, as far as they were measured."""
    made = groupby(study.compared, key=lambda each: (each.what, each.than))
    sentences = [finding(study.figures, same) for _, same in made]
    return [text for text in sentences if text is not None]


def reasons(study: Study) -> list[str]:
    """The settings to use, and the reasons."""
    chosen = study.chosen
    lines = [f"use {described(moving_of(chosen))}"]
    changed = [name for name in _SETTINGS if getattr(chosen, name) != getattr(study.middle, name)]
    for name in changed:
        now, before = (_SETTINGS[name].format(_value(s, name)) for s in (chosen, study.middle))
        lines.append(f"{now} instead of {before}")
    if not changed:
        lines.append("that is what statehold does without a profile")
    lines.append(
        f"in what it does worst it reaches {study.score:.2f} of the best of the sweep, and "
        f"{study.score_before:.2f} without a profile; less than {study.margin:.2f} between two "
        "settings is by chance"
    )
    lines += [proved(proof) for proof in study.proofs]
    if study.proofs:
        worst = min(proof.ratio for proof in study.proofs)
        lines.append(f"so the chosen settings reach {worst:.3f} of the best others, or more")
    return lines


def _value(strategy: Strategy, name: str) -> object:
    value = getattr(strategy, name)
    if name == "block_bytes":
        return format_bytes(value)
    return value.value if name == "mover" else value


def proved(proof: Remeasured) -> str:
    """One proof as a sentence."""
    against = {
        "statehold": "a rival setting",
        "bytes": "a rival of all strategies, bytes only",
    }[proof.kind]
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
        "rates": _rates(study.figures),
        "score": study.score,
        "score_before": study.score_before,
        "margin": study.margin,
        "why": reasons(study),
        "findings": findings(study),
        "strategies": [_strategy(study.figures, each) for each in study.figures.strategies()],
        "refused": [{"name": s.name, "why": why} for s, why in study.refused.items()],
        "unmeasured": [each.name for each in study.unmeasured],
        "proofs": [
            {**asdict(p), "chosen": p.chosen.name, "best": p.best.name} for p in study.proofs
        ],
    }


def _rates(figures: StudyFigures) -> dict[str, int] | None:
    rates = rates_of(figures)
    return asdict(rates) if rates else None


def _strategy(figures: StudyFigures, strategy: Strategy) -> dict[str, Any]:
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
