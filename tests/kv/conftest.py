"""What tests of stores share."""

from __future__ import annotations

from typing import Any

import pytest

from statehold.kv.opened import OpenStore
from support.pages import Held


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[Held]:
    """Jobs of stores, from now on."""
    made_so_far, begin = list[Held](), OpenStore.job

    def job(self: OpenStore, *arguments: Any, **options: Any) -> Held:
        made_so_far.append(Held(begin(self, *arguments, **options)))
        return made_so_far[-1]

    monkeypatch.setattr(OpenStore, "job", job)
    return made_so_far
