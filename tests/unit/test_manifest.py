"""The manifest: its bytes, its round trip, its seal, and the two golden steps."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from statehold.checkpoint.save import writes
from statehold.checkpoint.save.writes import Sealing
from statehold.encoding import header, strictjson, values
from statehold.errors import FormatVersionError, InvariantError, ManifestError, UsageError
from statehold.format import entries
from statehold.format.entries import About, record_file
from statehold.format.manifest import VERSION, Manifest
from statehold.layout.plan import TensorSpec, plan_save, sum_places
from statehold.layout.share import PlanCache
from statehold.layout.stored import StoredFile, StoredPart
from support.calls import calls_of
from support.seeds import SEED
from support.steps import SPECS, again_of, document_of, manifest_of, seal, spec, sums_for

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


def sealing_of(specs: list[TensorSpec]) -> Callable[..., bytes]:
    """Seals one manifest after another of a single rank."""
    plans, sealing = PlanCache(), Sealing()

    zeros = bytes(len(sums_for(plans.get(specs, 0).save)))

    def encode(
        step: int, state: Any, stored: Sequence[StoredFile] = (), sums: bytes = zeros
    ) -> bytes:
        plan = plans.get(specs, step)
        return sealing.manifest(plan, state, sums, StoredPart(stored), About(tags=(f"{step}",)))

    return encode


def test_reading_again_costs_a_later_save_what_is_new_in_its_state() -> None:
    specs = [spec(f"layers.{i}.weight.exp_avg", "U8", 5 << 20) for i in range(1000)]
    encode = sealing_of(specs)
    linked = StoredFile("opt/7", 4096, 4096, (), (), bytes(8))
    model = {each.name: {"$tensor": each.name} for each in specs}

    def calls(step: int, lr: float = 0.5, linked: StoredFile = linked) -> int:
        state = {"model": model, "optimizer": {"state": model, "lr": lr}}
        return calls_of(lambda: encode(step, state, [linked]))

    assert calls(1) > 50 * len(specs)
    assert calls(2) < len(specs)
    assert calls(3, linked=replace(linked, path="opt/8", sums=bytes(range(8)))) < len(specs)
    calls(4, lr=0.25)
    assert calls(5, lr=0.125) < 8 * len(specs)  # looked at one by one, and not decoded
    assert calls(6, linked=replace(linked, data_begin=8192, file_bytes=8192)) > 50 * len(specs)


@pytest.mark.parametrize("seed", range(SEED, SEED + 20))
def test_a_later_save_has_the_bytes_of_a_first_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other checksums, in files of its own and stored ones, and tensors without elements."""
    monkeypatch.setattr(writes, "now", lambda: "2026-11-29T12:00:00+00:00")
    rng = random.Random(seed)
    names = ["sums", '"sums":"0"', 'a","sums":"b', "\\", "e", "é", "x.y"]
    rng.shuffle(names)
    sizes = [rng.choice([0, 1, 4096, 3 << 20]) for _ in names]
    specs = [spec(name, "U8", size) for name, size in zip(names, sizes, strict=True)]
    stored, own = specs[:2], specs[2:]
    begins = tuple(accumulate([each.nbytes for each in stored], initial=8192))
    places = sum_places(8192, begins[:-1], stored)
    encode = sealing_of(own)

    def files() -> list[StoredFile]:
        sums = rng.randbytes(8 * places[-1])
        return [StoredFile("a", begins[-1], 8192, tuple(stored), begins[:-1], sums)]

    for step in range(4):
        state = {"$tuple": [step]} if rng.random() < 0.3 else {"a": {"$tensor": "e"}, "n": step}
        count = len(sums_for(PlanCache().get(own, step).save))
        said = step, state, files(), rng.randbytes(count)
        raw = encode(*said)
        assert raw == sealing_of(own)(*said)
        manifest = Manifest.decode(raw, "m")
        assert {*manifest.tensors} == {*names}


def test_what_was_refused_is_refused_again() -> None:
    """Also beside parts of a state that were accepted before, and inside of them."""
    encode = sealing_of(SPECS)
    good = {"a": {"b": {"c": 1, "d": [1]}}, "n": 1}
    encode(1, good)
    for wrong in (2**53, True, {"$unknown": 1}, {"$tensor": "elsewhere"}, {"$int": True}):
        state = {"a": {"b": {"c": wrong, "d": [1]}}, "n": 1}
        for step in (2, 3):
            if wrong is True:  # it equals 1, and has another JSON
                assert b'"c":true' in encode(step, state)
                continue
            with pytest.raises(InvariantError, match="no reader would accept"):
                encode(step, state)
        encode(4, good)


def test_many_small_parts_are_too_many_together(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = sealing_of(SPECS)
    state = {f"{i}": [[]] * 5 for i in range(200)}
    encode(1, {key: state[key] for key in list(state)[:100]})
    for module in (strictjson, entries):
        monkeypatch.setattr(module, "CONTAINERS_MAX", 300)
    with pytest.raises(InvariantError, match="no reader would accept"):
        encode(2, state)


@pytest.mark.parametrize("is_known", [False, True])
def test_too_many_containers_of_state_and_tensors(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of both has few enough."""
    encode = sealing_of(SPECS)
    for module in (strictjson, entries):
        monkeypatch.setattr(module, "CONTAINERS_MAX", 400)
    if is_known:
        encode(1, {"a": [[]] * 300})
    with pytest.raises(InvariantError, match="no reader would accept"):
        encode(2, {"a": [[]] * 390})


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
    assert manifest.encode(again_of(manifest, is_known)) == manifest.sealed()
    other = replace(manifest, **wrong)
    with pytest.raises(InvariantError, match="no reader would accept"):
        other.encode(again_of(other, is_known))


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
