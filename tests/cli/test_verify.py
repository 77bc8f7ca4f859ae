"""verify finds every flipped byte, says what it belongs to, and goes on behind it.

STATEHOLD_ALL_BYTES=1 flips every byte of the steps instead of a sample.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from statehold.cli import checking, verify
from statehold.cli.checking import CheckReport, Finding, SpanReader, _Cover, check_step
from statehold.encoding.header import decode
from statehold.format.entries import record_file
from statehold.format.manifest import Manifest
from statehold.format.record import Record
from statehold.layout.plan import BLOCK_BYTES, plan_save
from statehold.reading.places import file_system, find
from support.records import rewritten
from support.runs import CREATED, GOLDEN, write_step
from support.steps import spec, true_sums

ALL_BYTES = "STATEHOLD_ALL_BYTES" in os.environ
SAMPLES = 24


@pytest.fixture(scope="module")
def reader() -> Iterator[SpanReader]:
    with SpanReader() as reader:
        yield reader


def look(reader: SpanReader, step: Path) -> CheckReport:
    fs = file_system()
    return check_step(fs, find(fs, str(step)), reader)


def places(size: int, seed: str) -> list[int]:
    """Offsets to flip: the ends, and some or all between."""
    if ALL_BYTES:
        return list(range(size))
    inner = random.Random(seed).choices(range(size), k=SAMPLES)
    return sorted({0, size - 1, *inner})


def owner(path: Path, offset: int) -> str | None:
    """The tensor that a byte of a data file belongs to, as its header says."""
    raw = path.read_bytes()
    entries, _, begin = decode(raw, len(raw), str(path))
    if offset < begin:
        return None
    return next(e.name for e in entries if begin + e.begin <= offset < begin + e.end)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 0x10]))


def check_flips(reader: SpanReader, step: Path) -> None:
    assert look(reader, step).is_intact
    for path in sorted(step.iterdir()):
        tensors = {at: owner(path, at) for at in places(path.stat().st_size, path.name)
                   } if path.suffix == ".safetensors" else {}  # fmt: skip
        for offset in places(path.stat().st_size, path.name):
            flip(path, offset)
            found = look(reader, step).findings
            flip(path, offset)
            assert len(found) == 1, (path.name, offset, found)
            assert found[0].file == path.name
            check_finding(found[0], path, offset, tensors)
    assert look(reader, step).is_intact


def check_finding(
    finding: Finding, path: Path, offset: int, tensors: dict[int, str | None]
) -> None:
    if path.suffix == ".json":
        assert finding.what == ("manifest" if path.name == "manifest.json" else "record")
    else:
        assert (finding.what, finding.tensor) == ("checksum", tensors[offset]), offset
        assert finding.begin is not None
        assert finding.end is not None
        assert finding.begin <= offset < finding.end
    if path.name != "manifest.json":
        assert finding.rank == int(path.name[5:10])


def test_every_byte_of_a_step_of_one_rank(reader: SpanReader, run: Path) -> None:
    check_flips(reader, run / "step-000000000002")


@pytest.mark.thorough
def test_every_byte_of_a_step_of_several_ranks(reader: SpanReader, shared: Path) -> None:
    check_flips(reader, shared / "step-000000000007")


def test_golden_steps_are_intact(reader: SpanReader) -> None:
    for step in sorted(GOLDEN.glob("step-*")):
        report = look(reader, step)
        assert report.is_intact, report.findings
        assert report.foreign == []


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight MiB in four tensors, read in batches of one MiB."""
    monkeypatch.setattr(checking, "BATCH_BYTES", 1 << 20)
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": ("U8", rng.integers(0, 255, 2 << 20, "u1")) for i in range(4)}
    return write_step(tmp_path / "run", 3, arrays)


def test_it_goes_on_behind_bad_pieces(reader: SpanReader, large: Path) -> None:
    (data,) = large.glob("*.safetensors")
    for offset in (5000, 1 << 20, (1 << 20) + 5, (6 << 20) + 4096, data.stat().st_size - 1):
        flip(data, offset)
    report = look(reader, large)
    found = [(f.tensor, f.begin, f.end, f.pieces) for f in report.findings]
    mib = 1 << 20
    assert found == [
        ("w0", 4096, 2 * mib, 2),  # two pieces side by side
        ("w3", 6 * mib + 4096, 7 * mib, 1),
        ("w3", 8 * mib, 8 * mib + 4096, 1),
    ]
    assert all(f.what == "checksum" and f.got and f.expected for f in report.findings)
    assert report.bytes == data.stat().st_size


def test_a_file_that_ends_early(reader: SpanReader, large: Path) -> None:
    (data,) = large.glob("*.safetensors")
    size = data.stat().st_size
    os.truncate(data, size - (3 << 20))
    found = look(reader, large).findings
    mib = 1 << 20
    assert [(f.what, f.tensor, f.begin, f.end, f.pieces) for f in found] == [
        ("size", None, None, None, 0),
        ("unreadable", "w2", 5 * mib, 6 * mib + 4096, 2),
        ("unreadable", "w3", 6 * mib + 4096, size, 3),
    ]


def test_a_file_that_goes_on(reader: SpanReader, large: Path) -> None:
    (data,) = large.glob("*.safetensors")
    with data.open("ab") as stream:
        stream.write(b"more")
    (finding,) = look(reader, large).findings
    assert (finding.what, finding.file) == ("size", data.name)
    assert int(finding.got or 0) == int(finding.expected or 0) + 4


def test_missing_and_foreign_files(reader: SpanReader, shared: Path) -> None:
    step = shared / "step-000000000007"
    (step / "rank-00001-of-00004.safetensors").unlink()
    (step / "rank-00002-of-00004.json").unlink()
    (step / "notes.txt").write_text("mine")
    report = look(reader, step)
    assert [(f.what, f.rank, f.file) for f in report.findings] == [
        ("missing", 1, "rank-00001-of-00004.safetensors"),
        ("missing", 2, "rank-00002-of-00004.json"),
    ]
    assert "sharded" in report.findings[0].detail
    assert report.foreign == ["notes.txt"]


def test_a_file_of_another_step(reader: SpanReader, run: Path) -> None:
    """Headers of other steps are valid: the checksum is what tells."""
    name = "rank-00000-of-00001.safetensors"
    shutil.copy(run / "step-000000000001" / name, run / "step-000000000002" / name)
    found = look(reader, run / "step-000000000002").findings
    assert [(f.what, f.tensor, f.detail) for f in found] == [
        ("checksum", None, "the header"),
        ("checksum", "model.weight", ""),
    ]


def test_a_record_of_another_attempt(reader: SpanReader, shared: Path) -> None:
    path = shared / "step-000000000007" / "rank-00003-of-00004.json"
    path.write_bytes(rewritten(path.read_bytes(), _other_attempt, "record"))
    (finding,) = look(reader, path.parent).findings
    assert (finding.what, finding.rank) == ("record", 3)


def _other_attempt(document: dict[str, Any]) -> None:
    document["attempt"] = "5eed-2"


def test_a_header_that_says_something_else(reader: SpanReader, tmp_path: Path) -> None:
    """All checksums are right: a writer has put another name into the file."""
    array = np.arange(6, dtype="<f4")
    says, means = (plan_save([spec(name, "F32", 6)], step=1) for name in ("wrong", "right"))
    content = says.header + array.tobytes()
    file, tensors = record_file(means, true_sums(means, content))
    manifest = Manifest(1, 1, CREATED, "test", BLOCK_BYTES, (file,), tensors, {})
    (tmp_path / file.name).write_bytes(content)
    (tmp_path / "manifest.json").write_bytes(manifest.encode())
    found = look(reader, tmp_path).findings
    assert [(f.what, f.tensor, f.got) for f in found] == [
        ("header", "right", "nothing"),
        ("header", "wrong", "('F32', 4096, 4120)"),
    ]


def test_a_manifest_that_says_other_groups(reader: SpanReader, shared: Path) -> None:
    path = shared / "step-000000000007" / "manifest.json"
    path.write_bytes(rewritten(path.read_bytes(), _other_groups, "manifest"))
    (finding,) = look(reader, path.parent).findings
    assert (finding.what, finding.file) == ("manifest", "manifest.json")
    assert "groups of ranks" in finding.detail


def _other_groups(document: dict[str, Any]) -> None:
    document["state"]["epoch"] = [[[0, 1]], [[2, 3]]]


def test_chunks_that_do_not_make_a_tensor(reader: SpanReader, shared: Path) -> None:
    """Every record is valid by itself; together they lack two elements that nobody wrote."""
    cover = _Cover()
    step = shared / "step-000000000007"
    for rank in range(4):
        path = step / f"rank-{rank:05d}-of-00004.json"
        record = Record.decode(path.read_bytes(), str(path))
        if rank == 1:
            chunks = {name: each for name, each in record.chunks.items() if name != "free"}
            record = Record(**{**record.__dict__, "chunks": chunks})
        cover.add(record)
    (finding,) = cover.findings()
    assert (finding.what, finding.tensor) == ("cover", "free")
    assert (finding.expected, finding.got) == ("8", "5")


def test_a_step_that_goes_meanwhile(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given up by its job, it is not damaged."""
    fs = file_system()
    place = find(fs, f"{run}@1")
    begin = SpanReader.bad_pieces

    def first_remove(self: SpanReader, *args: Any) -> Any:
        shutil.rmtree(place.directory)
        return begin(self, *args)

    monkeypatch.setattr(SpanReader, "bad_pieces", first_remove)
    assert list(verify.verified(fs, [place])) == []
    assert list(verify.verified(fs, [place])) == []  # gone before it began


def test_exit_codes(run: Path, shared: Path, say: Callable[..., tuple[int, str]]) -> None:
    assert say("verify", run)[0] == 0
    assert say("verify", f"{run}@1")[0] == 0
    assert say("verify", shared)[0] == 0
    assert say("verify", run / "step-000000000001")[0] == 0
    code, text = say("verify", f"{run}@5")
    assert code == 3
    assert "1, 2 (2 in all)" in text
    assert say("verify", run / "nowhere")[0] == 3
    flip(run / "step-000000000001" / "rank-00000-of-00001.safetensors", 5000)
    assert say("verify", f"{run}@1")[0] == 1
    assert say("verify", run, "--all")[0] == 1
    assert say("verify", f"{run}@newest")[0] == 0


def test_what_it_says(run: Path, say: Callable[..., tuple[int, str]]) -> None:
    flip(run / "step-000000000001" / "rank-00000-of-00001.safetensors", 5000)
    _, text = say("verify", f"{run}@1")
    lines = text.splitlines()
    assert lines[0].startswith("step 1: DAMAGED; 1 file, 5 tensors, 5 pieces, 6.39 KiB in ")
    assert lines[1].split() == ["DAMAGE", "TENSOR", "RANK", "FILE", "BYTES", "PIECES", "DETAIL"]
    assert "checksum  model.weight     0  rank-00000-of-00001.safetensors  [4136, 6536)" in lines[2]


def test_all_steps_end_with_what_was_found(run: Path, say: Callable[..., tuple[int, str]]) -> None:
    assert say("verify", run, "--all")[1].splitlines()[-1] == "in all: 2 intact; 12.8 KiB"
    flip(run / "step-000000000001" / "rank-00000-of-00001.safetensors", 5000)
    for more in ([], ["--levels"]):
        last = say("verify", run, "--all", *more)[1].splitlines()[-1]
        assert last == "in all: 1 intact, 1 damaged (step 1); 12.8 KiB"
    assert "in all" not in say("verify", run)[1]


def test_of_much_damage_it_shows_some(
    tmp_path: Path, say: Callable[..., tuple[int, str]], ask: Callable[..., tuple[int, Any]]
) -> None:
    many = {f"w{index:02}": ("F32", np.ones(9, "<f4")) for index in range(50)}
    path = write_step(tmp_path / "run", 1, many)
    with (path / "rank-00000-of-00001.safetensors").open("r+b") as file:
        file.truncate(8192 if file.seek(0, 2) > 8192 else 4096)
    code, text = say("verify", tmp_path / "run")
    assert code == 1
    damage = len(ask("verify", tmp_path / "run")[1]["steps"][0]["damage"])
    assert damage >= 50
    assert len(text.splitlines()) < 30
    assert f"and {damage - 20} more" in text


def test_json(run: Path, ask: Callable[..., tuple[int, Any]]) -> None:
    code, document = ask("verify", run, "--all")
    assert code == 0
    assert document.keys() == {"intact", "shared_damage", "steps"}
    assert document["shared_damage"] == []
    assert [step["step"] for step in document["steps"]] == [1, 2]
    assert document["steps"][0].keys() == {
        "step", "path", "intact", "world_size", "ranks_here", "files", "tensors", "pieces",
        "bytes", "seconds", "damage", "foreign",
    }  # fmt: skip
    flip(run / "step-000000000001" / "rank-00000-of-00001.safetensors", 5000)
    code, document = ask("verify", f"{run}@1")
    assert code == 1
    assert document["steps"][0]["damage"][0].keys() == {
        "what", "file", "begin", "end", "tensor", "rank", "pieces", "expected", "got", "detail"
    }  # fmt: skip
