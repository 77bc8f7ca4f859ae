"""What a manifest says about a step: metrics, tags, and the step that its run began from.

Owns: the member `about` of version 5 (docs/format.md, "About").
Invariants: a decoded About contradicts nothing. An empty one is not written, so a step that says
nothing of itself keeps the version that it would have without.
Not here: who sets these (checkpoint/save), who asks for them (reading, cli).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from statehold.encoding.strictjson import INT_MAX, Checker, show
from statehold.errors import UsageError

_MEMBERS = ("metrics", "tags", "parent")
_PARENT = ("run", "step", "manifest_sha256")
# JSON has no such numbers.
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
NAMES_MAX = 1000
# Without surrogates, which UTF-8 cannot hold. Steps from before may have those of U+0080 to U+009F.
_NAME = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,200}")
_C1 = re.compile(r"[\x80-\x9f]")  # some terminals obey them
_RUN = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,4096}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
NAMED = "1 to 200 characters, none of them a control character"
_RUN_NAMED = "1 to 4096 characters, none of them a control character"


@dataclass(frozen=True, slots=True)
class Origin:
    """The step of another run that a run began from. run: its directory or URL, at that time."""

    run: str
    step: int
    manifest_sha256: str


@dataclass(frozen=True, slots=True)
class About:
    """metrics: by name. tags: words of the user, each once. parent: of the run."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    parent: Origin | None = None

    def __bool__(self) -> bool:
        return bool(self.metrics or self.tags or self.parent)

    def document(self) -> dict[str, Any]:
        """The member `about` of a manifest."""
        parent = self.parent
        return {
            "metrics": {name: _number_document(value) for name, value in self.metrics.items()},
            "tags": list(self.tags),
            "parent": {name: getattr(parent, name) for name in _PARENT} if parent else None,
        }


NOTHING = About()


def is_name(name: object) -> bool:
    """Whether this can be the name of a metric, or a tag."""
    return type(name) is str and _NAME.fullmatch(name) is not None and not _C1.search(name)


def check_origin(run: str) -> None:
    """Raise UsageError unless steps can say that their run began from one of the run here."""
    if _RUN.fullmatch(run) is None:
        raise UsageError(
            "no step can record the path of the run that this run begins from",
            facts={"expected": _RUN_NAMED, "got": ascii(run)[:300]},
            hint="rename that directory; its steps are not affected",
        )


def check_about(check: Checker, node: Any, step_max: int) -> About:
    """The value of a member `about`. Fails as `check` does."""
    found = check.members(node, "about", _MEMBERS)
    metrics = check.object(found["metrics"], "about.metrics")
    tags = check.array(found["tags"], "about.tags")
    _count(check, len(metrics), "about.metrics")
    _count(check, len(tags), "about.tags")
    for name in metrics:
        check.text(name, "about.metrics", _NAME, f"names of {NAMED}")
    for tag in tags:
        check.text(tag, "about.tags", _NAME, f"tags of {NAMED}")
    if len(set(tags)) != len(tags):
        check.fail("about.tags", "each tag once", show(tags))
    return About(
        metrics={name: _number(check, value, name) for name, value in metrics.items()},
        tags=tuple(tags),
        parent=_origin(check, found["parent"], step_max),
    )


def _count(check: Checker, count: int, where: str) -> None:
    if count > NAMES_MAX:
        check.fail(where, f"at most {NAMES_MAX} names", f"{count}")


def _number(check: Checker, value: Any, name: str) -> float:
    if type(value) is str and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if type(value) is not float and not (type(value) is int and abs(value) <= INT_MAX):
        check.fail(f"about.metrics.{name}", "a number", show(value))
    return float(value)


def _number_document(value: float) -> float | str:
    return value if math.isfinite(value) else str(float(value))


def _origin(check: Checker, node: Any, step_max: int) -> Origin | None:
    if node is None:
        return None
    found = check.members(node, "about.parent", _PARENT)
    return Origin(
        check.text(found["run"], "about.parent.run", _RUN, _RUN_NAMED),
        check.integer(found["step"], "about.parent.step", high=step_max),
        check.text(found["manifest_sha256"], "about.parent.manifest_sha256", _DIGEST,
                   "64 hex digits"),
    )  # fmt: skip
