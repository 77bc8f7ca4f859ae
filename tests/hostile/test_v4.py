"""Documents of version 4 that lie about a tensor in several files: each is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from statehold.errors import ManifestError
from statehold.format.manifest import Manifest
from statehold.format.record import Record
from support.lies import refused_as
from support.steps import changed, document_of, seal

GOLDEN = Path(__file__).parents[1] / "golden/v4"
DOCUMENTS = {
    "manifest": (GOLDEN / "step-000000000011/manifest.json", "model.weight"),
    "record": (GOLDEN / "step-000000000012/rank-00000-of-00002.json", "model.rows"),
}
Lie = Callable[[list[dict[str, Any]]], object]


def refused(what: str, document: dict[str, Any]) -> ManifestError:
    decode: Any = Manifest.decode if what == "manifest" else Record.decode
    return refused_as(ManifestError, "run/f", lambda: decode(seal(document, what), "run/f"))


def given(what: str) -> tuple[dict[str, Any], str]:
    path, name = DOCUMENTS[what]
    return document_of(path.read_bytes(), what), name


@pytest.mark.parametrize("what", DOCUMENTS)
def test_what_is_true_is_read(what: str) -> None:
    document, _ = given(what)
    decode: Any = Manifest.decode if what == "manifest" else Record.decode
    read = decode(seal(document, what), "run/f")
    assert read.version == 4
    assert document_of(read.encode(), what) == json.loads(json.dumps(document))


LIES: dict[str, Lie] = {
    "nothing": list.clear,
    "the first part is missing": lambda chunks: chunks.pop(0),
    "the last part is missing": lambda chunks: chunks.pop(),
    "another order": list.reverse,
    "a part twice": lambda chunks: chunks.append(chunks[-1]),
    "more than the tensor has": lambda chunks: chunks[-1]["shape"].__setitem__(0, 9),
    "a part elsewhere": lambda chunks: chunks[0]["offsets"].__setitem__(1, 1),
    "no dimensions": lambda chunks: chunks[0].update(offsets=[], shape=[]),
    "too few offsets": lambda chunks: chunks[0]["offsets"].pop(),
    "one file": lambda chunks: chunks[1].__setitem__("file", chunks[0]["file"]),
    "not an object": lambda chunks: chunks.__setitem__(0, 5),
    "not offsets": lambda chunks: chunks[0].__setitem__("offsets", "0"),
    "a negative size": lambda chunks: chunks[0]["shape"].__setitem__(0, -1),
}


@pytest.mark.parametrize("what", DOCUMENTS)
@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused(what: str, lie: str) -> None:
    document, name = given(what)
    LIES[lie](document["tensors"][name]["chunks"])
    assert refused(what, document).facts["where"].startswith(f"tensors.{name}")


@pytest.mark.parametrize("what", DOCUMENTS)
def test_older_versions_have_no_such_thing(what: str) -> None:
    document, _ = given(what)
    refused(what, changed(document, ("version",), 3))


@pytest.mark.parametrize(
    "name",
    [
        "rank-00000-of-00001-0.safetensors",
        "rank-00000-of-00001-01.safetensors",
        "rank-00001-of-00001-1.safetensors",
        "rank-00000-of-00001-.safetensors",
        "../rank-00000-of-00001-1.safetensors",
    ],
)
def test_names_of_files(name: str) -> None:
    document, _ = given("manifest")
    assert refused("manifest", changed(document, ("files", 1, "name"), name)).facts["where"] == (
        "files[1].name"
    )
