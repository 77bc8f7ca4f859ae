"""`plan resilience` at its limits: the most replicas that it takes, and one."""

from __future__ import annotations

import json

import pytest

from statehold.cli import main

GIVEN = ["plan", "resilience", "--mtbf", "3600", "--save-seconds", "5", "--steps", "10", "--json"]


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", ["1", "100000"])
def test_an_answer_at_each_limit(capsys: pytest.CaptureFixture[str], replicas: str) -> None:
    pytest.importorskip("simpy")
    assert main([*GIVEN, "--replicas", replicas]) == 0
    policies = [each["policy"] for each in json.loads(capsys.readouterr().out)["policies"]]
    assert ("stacked" in policies) is (replicas != "1")


def test_more_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GIVEN, "--replicas", "100001"]) == 2
    assert "--replicas is out of range" in capsys.readouterr().err
