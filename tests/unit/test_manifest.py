"""The manifest: its bytes, its round trip, its seal, and the two golden steps."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from statehold.checkpoint.save.writes import Sealing
from statehold.encoding import header, values
from statehold.errors import FormatVersionError, InvariantError, ManifestError, UsageError
from statehold.format.entries import About, record_file
from statehold.format.manifest import VERSION, Manifest
from statehold.layout.plan import plan_save
from statehold.layout.share import PlanCache
from statehold.layout.stored import StoredFile, StoredPart
from support.calls import calls_of
from support.steps import SPECS, document_of, manifest_of, seal, spec, sums_for

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "v1").iterdir())
(GOLDEN_V3,) = (Path(__file__).parents[1] / "golden" / "v3").iterdir()


def test_round_trip() -> None:
    manifest = manifest_of()
    raw = manifest.encode()
    assert Manifest.decode(raw, "m") == manifest
    assert Manifest.decode(raw, "m").encode() == raw


def test_layout() -> None:
    raw = manifest_of().encode()
    document = json.loads(raw)
    assert list(document) == [
        "format",
        "version",
        "step",
        "world_size",
        "created",
        "writer",
        "checksum",
        "block_bytes",
        "files",
        "tensors",
        "state",
        "manifest_sha256",
    ]
    assert raw.startswith(b'{"format":"statehold","version":1,"step":7,"world_size":1,')
    body, rest = raw.split(b',"manifest_sha256":')
    assert rest == b'"%s"}\n' % hashlib.sha256(body).hexdigest().encode()
    assert list(document["files"][0]) == ["name", "bytes", "data_begin", "header_sums", "digest"]
    assert document["tensors"]["model.weight"] == {
        "dtype": "BF16",
        "shape": [3, 4],
        "chunks": [
            {
                "offsets": [0, 0],
                "shape": [3, 4],
                "file": 0,
                "begin": 4124,
                "end": 4148,
                "sums": "0000000000000004",
            }
        ],
    }


def test_a_record_of_a_file() -> None:
    plan = plan_save(SPECS, step=7)
    sums = sums_for(plan)
    file, tensors = record_file(plan, sums, index=2)
    digits = "".join(sums[i : i + 8][::-1].hex() for i in range(0, len(sums), 8))
    assert file.header_sums == digits[:16]
    assert file.digest == hashlib.sha256(digits.encode()).hexdigest()
    assert (file.name, file.bytes, file.data_begin) == (
        plan.file_name,
        plan.file_bytes,
        plan.data_begin,
    )
    assert "".join(t.chunks[0].sums for t in tensors.values()) == digits[16:]
    assert list(tensors) == [s.name for s in plan.specs]
    assert {t.chunks[0].file for t in tensors.values()} == {2}
    # `large` begins in the first grid block, behind the header: one piece more than its blocks.
    assert len(tensors["large"].chunks[0].sums) == 4 * 16
    assert tensors["empty"].chunks[0].sums == ""


def test_a_wrong_number_of_checksums_is_our_mistake() -> None:
    plan = plan_save(SPECS, step=7)
    with pytest.raises(InvariantError, match="number of checksums"):
        record_file(plan, sums_for(plan) + bytes(8))


@pytest.mark.parametrize("state", [None, [], {"a": 1.0}, "x", 5])
def test_states_of_any_kind(state: Any) -> None:
    manifest = manifest_of((), state=state or {})
    assert Manifest.decode(manifest.encode(), "m") == manifest


@pytest.mark.parametrize("state", [float("nan"), {"a": object()}, "\ud800"])
def test_a_tree_that_is_not_json_is_our_mistake(state: Any) -> None:
    with pytest.raises(InvariantError):
        manifest_of((), state=state).encode()


def test_a_deep_state_survives() -> None:
    value: Any = 1
    for _ in range(values.DEPTH_MAX):
        value = {1: value}
    manifest = manifest_of((), state=values.encode(value, "x"))
    back = Manifest.decode(manifest.encode(), "m")
    assert values.decode(back.state, None) == value


def test_a_manifest_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = manifest_of()
    raw = manifest.encode()
    monkeypatch.setattr("statehold.format.entries.DOCUMENT_BYTES_MAX", len(raw) - 1)
    with pytest.raises(UsageError, match="too large"):
        manifest.encode()
    with pytest.raises(ManifestError):
        Manifest.decode(raw, "m")


def test_a_newer_version() -> None:
    document = document_of(manifest_of().encode())
    document["version"] = VERSION + 1
    document["something"] = "that no version has"
    with pytest.raises(FormatVersionError) as caught:
        Manifest.decode(seal(document), "run/step/manifest.json")
    assert caught.value.facts == {
        "file": "run/step/manifest.json",
        "where": "version",
        "expected": f"{VERSION} or older",
        "got": VERSION + 1,
    }
    assert "upgrade" in str(caught.value)


def test_a_flipped_bit_is_damage_and_never_a_newer_version() -> None:
    raw = manifest_of().encode()
    at = raw.index(b'"version":1') + len('"version":')
    with pytest.raises(ManifestError):
        Manifest.decode(raw[:at] + b"3" + raw[at + 1 :], "m")


def test_every_bit_counts() -> None:
    raw = manifest_of().encode()
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(ManifestError) as caught:
            Manifest.decode(bytes(damaged), "m")
        assert {"file", "where", "expected", "got"} <= set(caught.value.facts)


def test_every_truncation_counts() -> None:
    raw = manifest_of().encode()
    for size in range(len(raw)):
        with pytest.raises(ManifestError):
            Manifest.decode(raw[:size], "m")
    with pytest.raises(ManifestError):
        Manifest.decode(raw + b"\n", "m")


def test_encoding_is_quick() -> None:
    specs = [spec(f"layers.{i}.weight.exp_avg", "U8", 5 << 20) for i in range(1000)]
    manifest = manifest_of(specs)
    assert calls_of(manifest.encode) < 100 * len(specs)  # the proof, which reads all again: 80
    assert calls_of(manifest.sealed) < 12 * len(specs)


def test_reading_again_costs_a_later_save_what_its_state_holds() -> None:
    specs = [spec(f"layers.{i}.weight.exp_avg", "U8", 5 << 20) for i in range(1000)]
    plans, sealing = PlanCache(), Sealing()
    linked = StoredFile("opt/7", 4096, 4096, (), (), bytes(8))

    def calls(step: int, state: Any = None, linked: StoredFile = linked) -> int:
        manifest, plan = manifest_of(specs, state, step), plans.get(specs, step)
        encoding = calls_of(lambda: sealing.encode(manifest, plan, StoredPart([linked])))
        return encoding - calls_of(manifest.sealed)

    assert calls(1) > 50 * len(specs)
    assert calls(2) < 20 * len(specs)
    assert calls(3, linked=replace(linked, path="opt/8", sums=bytes(range(8)))) < 20 * len(specs)
    assert calls(4, state={"epoch": 3}) < len(specs)
    assert calls(5, linked=replace(linked, file_bytes=8192)) > 50 * len(specs)


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        {"state": {"a": {"$unknown": 1}}},
        {"state": {"a": {"$tensor": "elsewhere"}}},
        {"state": {"a": 2**53}},
        {"step": -1},
        {"created": "today"},
        {"about": About(tags=("",))},
    ],
    ids=str,
)
def test_what_no_reader_accepts_is_not_encoded(wrong: dict[str, Any], is_known: bool) -> None:
    manifest = manifest_of()
    assert manifest.encode(is_known=is_known) == manifest.sealed()
    with pytest.raises(InvariantError, match="no reader would accept"):
        replace(manifest, **wrong).encode(is_known=is_known)


@pytest.mark.parametrize("step", GOLDEN, ids=lambda path: path.name)
def test_golden_steps_decode_and_encode_to_the_same_bytes(step: Path) -> None:
    raw = (step / "manifest.json").read_bytes()
    manifest = Manifest.decode(raw, str(step))
    assert manifest.encode() == raw
    assert f"step-{manifest.step:012d}" == step.name
    (file,) = manifest.files
    content = (step / file.name).read_bytes()
    assert len(content) == file.bytes
    entries, metadata, data_begin = header.decode(content, len(content), file.name)
    assert data_begin == file.data_begin
    assert header.encode(entries, metadata) == content[:data_begin]
    for entry in entries:
        tensor = manifest.tensors[entry.name]
        assert (entry.dtype, entry.shape) == (tensor.dtype, tensor.shape)
        assert data_begin + entry.begin == tensor.chunks[0].begin
    assert len(entries) == len(manifest.tensors)


def test_golden_steps_hold_everything_there_is() -> None:
    manifests = [(step / "manifest.json").read_bytes() for step in GOLDEN]
    text = b"".join(manifests).decode()
    dtypes = set(re.findall(r'"dtype":"([A-Z0-9_]+)","shape"', text))
    assert dtypes == set(header.DTYPE_BITS)
    text += (GOLDEN_V3 / "manifest.json").read_text()
    assert set(values._TAGS) <= set(re.findall(r'"(\$[a-z0-9]+)"', text))
    size = sum(path.stat().st_size for step in GOLDEN for path in step.iterdir())
    assert size < 20_000


def test_golden_values_decode() -> None:
    state = Manifest.decode((GOLDEN[0] / "manifest.json").read_bytes(), "m").state
    plain = values.decode(state["plain"], None)
    assert values.encode(plain, "plain") == state["plain"]
    assert plain["bigger"] == -(10**60) - 1
    assert plain["bytes"] == bytes(range(256))
    assert plain["int keys"][(1, 2)] == "d"
    assert state["model"]["head.weight"] == {"$tensor": "model.embed.weight"}


def test_the_example_in_the_document_is_a_golden_step() -> None:
    document = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    block = re.search(r"```json\n(.*?)```", document, re.DOTALL)
    assert block is not None
    assert json.loads(block[1]) == json.loads((GOLDEN[1] / "manifest.json").read_bytes())
    for tag in values._TAGS:
        assert f'"{tag}":' in document
    for dtype in header.DTYPE_BITS:
        assert dtype in document
