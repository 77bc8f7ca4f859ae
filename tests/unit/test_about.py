"""What a step says of itself, in the manifests of both kinds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from statehold.encoding.strictjson import INT_MAX
from statehold.errors import ManifestError
from statehold.format.entries import NAMES_MAX, About, Origin
from statehold.format.manifest import Commit, Manifest
from support.records import example
from support.steps import document_of, manifest_of, seal

SAID = About({"loss": 0.5}, ("best",), Origin("runs/base", 7, "a" * 64))


def of_each_kind() -> list[Manifest | Commit]:
    return [manifest_of(), example().commit]


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("about", [SAID, About({"loss": math.inf}), About(tags=("a", "b"))])
def test_it_is_read_as_it_was_written(kind: int, about: About) -> None:
    manifest = replace(of_each_kind()[kind], about=about)
    assert manifest.version == 5
    found = Manifest.decode(manifest.encode(), "m")
    assert found == manifest
    assert found.about == about


@pytest.mark.parametrize("kind", [0, 1])
def test_a_step_that_says_nothing_keeps_its_version(kind: int) -> None:
    manifest = of_each_kind()[kind]
    assert manifest.version < 5
    assert b"about" not in manifest.encode()
    assert not Manifest.decode(manifest.encode(), "m").about


MANY = [str(number) for number in range(NAMES_MAX + 1)]
PARENT = SAID.document()["about"]["parent"]


@pytest.mark.parametrize(
    ("member", "value", "where"),
    [
        ("metrics", None, "about.metrics"),
        ("metrics", {"loss": "high"}, "about.metrics.loss"),
        ("metrics", {"loss": True}, "about.metrics.loss"),
        ("metrics", {"loss": INT_MAX + 1}, "about.metrics.loss"),
        ("metrics", {"": 1}, "about.metrics"),
        ("metrics", {"a\nb": 1}, "about.metrics"),
        ("metrics", dict.fromkeys(MANY, 1), "about.metrics"),
        ("tags", {}, "about.tags"),
        ("tags", ["a", 1], "about.tags"),
        ("tags", ["a", "a"], "about.tags"),
        ("tags", ["x" * 201], "about.tags"),
        ("tags", MANY, "about.tags"),
        ("tags", ["\ud800"], "about.tags"),
        ("parent", {**PARENT, "run": "\udfff"}, "about.parent.run"),
        ("parent", [], "about.parent"),
        ("parent", {**PARENT, "run": ""}, "about.parent.run"),
        ("parent", {**PARENT, "step": -1}, "about.parent.step"),
        ("parent", {**PARENT, "manifest_sha256": "A" * 64}, "about.parent.manifest_sha256"),
        ("parent", {**PARENT, "why": ""}, "about.parent"),
        ("why", 1, "about"),
    ],
)
def test_what_cannot_be_is_refused_by_name(member: str, value: Any, where: str) -> None:
    document = document_of(replace(manifest_of(), about=SAID).encode())
    document["about"][member] = value
    with pytest.raises(ManifestError) as caught:
        Manifest.decode(seal(document), "m")
    assert caught.value.facts["where"] == where


def test_version_5_has_to_say_something() -> None:
    document = document_of(manifest_of().encode())
    document["version"] = 5
    with pytest.raises(ManifestError):
        Manifest.decode(seal(document), "m")
