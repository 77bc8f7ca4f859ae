"""Plans of sessions: what a seed means."""

from __future__ import annotations

from powerloss.filesystems import BY_NAME
from powerloss.plans import KINDS, draw

NAMES = sorted(BY_NAME)


def test_seeds_have_every_kind_on_every_file_system() -> None:
    plans = [draw(seed, NAMES, KINDS) for seed in range(len(NAMES) * len(KINDS))]
    pairs = {(plan.file_system, plan.kind) for plan in plans}
    assert pairs == {(name, kind) for name in NAMES for kind in KINDS}


def test_a_kind_that_came_later_leaves_the_seeds_before_it_as_they_were() -> None:
    earlier = [kind for kind in KINDS if kind not in ("offload", "shared")]
    for seed in range(len(NAMES) * len(earlier)):
        assert draw(seed, NAMES, KINDS) == draw(seed, NAMES, earlier)
