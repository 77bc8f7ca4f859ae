"""`make demo SERVING=1` in small, and what its checks have to find."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from support.llama import imported

pytest.importorskip("transformers")
pytest.importorskip("statehold._core", reason="the native module is not built")

MODULES = ("served", "story", "story_serving")
STEPS = 6


@pytest.fixture(scope="module")
def llama() -> Iterator[SimpleNamespace]:
    with imported(*MODULES) as modules:
        yield modules


@pytest.mark.thorough
def test_an_engine_takes_steps_and_its_pages_survive_it(llama, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(llama.story_serving, "has_vllm", lambda: False)
    monkeypatch.setattr(llama.story_serving, "STEPS_SEEN_MIN", 2)
    demo = llama.story.Demo(out=tmp_path / "demo", steps=STEPS, kill_at=2, options=(), serving=True)
    llama.story_serving.carry_out(demo)
    said = capfd.readouterr().out
    assert f"killed behind step {STEPS}" in said
    assert "84 tokens of the prompt came from the pages of the killed engine" in said
    assert "the pages of an engine that was killed served the next one" in said
    # The check of phase 3 finds an answer of other weights.
    answered = {"step": STEPS, "tokens": [1] * llama.served.ANSWER_TOKENS, "found": 0, "pid": 1}
    with pytest.raises(llama.story.DemoError, match=rf"answers of the steps \[{STEPS}\]"):
        llama.story_serving.compare(demo, [answered])


def answers(*found: int, steps: int = 3) -> list[dict[str, Any]]:
    """Two for each step."""
    return [
        {"step": at // 2 + 1, "found": each, "pid": 1}
        for at, each in enumerate(found * (2 * steps // len(found)))
    ]


@pytest.mark.parametrize(
    ("live", "said"),
    [
        (answers(0, 64, steps=2), "taken only the steps"),
        (answers(0, 64, steps=4), "taken only the steps"),
        (answers(0, 64, 0, 64, 32, 64), r"other weights were found at the steps \[3\]"),
        (answers(0, 64, 0, 0, 0, 64), r"the steps \[2\] found no page"),
    ],
)
def test_what_was_not_seen_fails_the_demo(llama, live, said):
    with pytest.raises(llama.story.DemoError, match=said):
        llama.story_serving.check_live(live, last=3)


@pytest.mark.parametrize("after", [{"pid": 1, "found": 64}, {"pid": 2, "found": 32}])
def test_pages_that_were_lost_fail_the_demo(llama, after):
    with pytest.raises(llama.story.DemoError, match="after the kill"):
        llama.story_serving.check_found({"pid": 1, "found": 64}, after)
