"""What a step says of itself, for people and for --json: its metrics and tags.

Not here: what save() accepts (checkpoint/save/labels), where it is written (format/about).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from statehold.cli.output import plain
from statehold.format.about import About


def said(about: About) -> dict[str, Any]:
    """The members `metrics` and `tags` of a step in the output of --json."""
    return {"metrics": dict(about.metrics), "tags": list(about.tags)}


def in_words(metrics: Mapping[str, float], tags: Sequence[str]) -> str:
    """ "val_loss=2.1 #before-lr-drop"; nothing for a step that says nothing."""
    numbers = [f"{plain(name)}={value:g}" for name, value in metrics.items()]
    return " ".join([*numbers, *(f"#{plain(tag)}" for tag in tags)])
