"""Names of objects, and commit objects that are damaged or hostile."""

from __future__ import annotations

import json

import pytest

from statehold.errors import FormatVersionError, InvariantError, ManifestError
from statehold.format.entries import seal
from statehold.steps.objects import (
    CommitObject,
    attempt_of,
    check_file,
    commit_name,
    directory_name,
    step_of_commit,
)

GOOD = CommitObject(100, "step-000000000100.5f3a09c1-7", "ab" * 32)


def test_names_there_and_back() -> None:
    assert commit_name(100) == "step-000000000100.commit"
    assert step_of_commit("step-000000000100.commit") == 100
    assert directory_name(100, "5f3a09c1-7") == GOOD.directory
    assert attempt_of(GOOD.directory) == (100, "5f3a09c1-7")


@pytest.mark.parametrize(
    "name", ["step-100.commit", "step-000000000100.commit.x", "a/step-000000000100.commit", "", "x"]
)
def test_other_names_are_no_steps(name: str) -> None:
    assert step_of_commit(name) is None
    assert attempt_of(name) is None


@pytest.mark.parametrize(
    "attempt", ["", "..", "5f3a09c1-7/..", "5F3A09C1-7", "5f3a09c1-7\n", "a-1"]
)
def test_an_attempt_cannot_leave_the_prefix(attempt: str) -> None:
    with pytest.raises(InvariantError):
        directory_name(1, attempt)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a\\b", ".hidden", "a\n", "a" * 201]
)
def test_a_file_cannot_leave_its_directory(name: str) -> None:
    with pytest.raises(InvariantError):
        check_file(name)


def test_a_commit_object_there_and_back() -> None:
    assert CommitObject.decode(GOOD.encode(), 100, "there") == GOOD


def test_every_shorter_or_changed_commit_object_is_damage() -> None:
    raw = GOOD.encode()
    for end in range(len(raw)):
        with pytest.raises(ManifestError):
            CommitObject.decode(raw[:end], 100, "there")
    for at in range(len(raw)):
        with pytest.raises(ManifestError):
            CommitObject.decode(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :], 100, "there")


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("format", "statehold.manifest"),
        ("version", 0),
        ("version", True),
        ("step", 101),
        ("step", "100"),
        ("directory", "step-000000000101.5f3a09c1-7"),
        ("directory", "../step-000000000100.5f3a09c1-7"),
        ("directory", "step-000000000100.5f3a09c1-7/.."),
        ("directory", "step-000000000100.commit"),
        ("directory", None),
        ("manifest_sha256", "AB" * 32),
        ("manifest_sha256", ""),
        ("more", 1),
    ],
)
def test_what_a_commit_object_must_not_say(member: str, value: object) -> None:
    document = json.loads(GOOD.encode())
    del document["commit_sha256"]
    raw = seal({**document, member: value}, "commit")
    with pytest.raises(ManifestError) as caught:
        CommitObject.decode(raw, 100, "there")
    assert caught.value.facts["file"] == "there"


def test_a_newer_commit_object_is_told_apart() -> None:
    document = json.loads(GOOD.encode())
    del document["commit_sha256"]
    with pytest.raises(FormatVersionError):
        CommitObject.decode(seal({**document, "version": 2}, "commit"), 100, "there")
