"""The commands for stores of KV pages: what goes, what was counted, the page, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from statehold.cli import main, prune, report
from statehold.errors import StateholdError
from statehold.kv import PageStore, PageVerdict, looking
from statehold.kv.looking import look
from support.pages import NEW, OLD, SLOT, get, made, put


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageStore]:
    """Six pages of OLD and three of NEW, which its process uses."""
    monkeypatch.setattr(looking, "TURN_S", 0.0)
    with made(tmp_path / "pages", identity=OLD) as made_now:
        put(made_now, *range(6))
        made_now.identity = NEW
        put(made_now, *range(3))
        yield made_now


def test_prune_says_what_goes_and_does_it_with_yes(
    store: PageStore, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["kv", "prune", store.path, "--identity", OLD.hex()]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "6 pages in all, 144 KiB of the files" in said
    assert "nothing was changed; pass --yes" in said
    assert main([*command, "--yes", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "store": store.path, "pages": {OLD.hex(): 6}, "bytes": 6 * SLOT, "done": True,
    }  # fmt: skip
    assert main([*command, "--yes"]) == 0
    assert capsys.readouterr().out == "0 pages in all, 0 B of the files\n"
    assert get(store, *range(3)) == [PageVerdict.HIT] * 3


def test_prune_takes_ages_and_sizes(
    store: PageStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*options: str) -> dict[str, int]:
        assert main(["kv", "prune", store.path, "--json", *options]) == 0
        return dict(json.loads(capsys.readouterr().out)["pages"])

    now_s = prune.time.time()
    assert gone("--older-than", "7d") == {}
    monkeypatch.setattr(prune, "time", SimpleNamespace(time=lambda: now_s + 8 * 86_400))
    assert gone("--older-than", "7d") == {OLD.hex(): 6, NEW.hex(): 3}
    assert gone("--to", str(4 * SLOT)) == {OLD.hex(): 5}  # what nobody uses goes first
    assert gone("--to", str(4 * SLOT), "--identity", NEW.hex()) == {NEW.hex(): 3}
    assert gone("--to", "1GiB", "--older-than", "7d", "--yes") == {}
    assert look(store.path).pages.total() == 9


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "pass --identity, --older-than or --to"),
        (["--identity", "abc"], "32 hexadecimal digits"),
        (["--older-than", "7"], 'a time such as "90s"'),
        (["--to", "much"], "not a size in bytes"),
    ],
)
def test_prune_refuses_what_names_no_pages(
    store: PageStore, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["kv", "prune", store.path, *options, "--yes"]) == 2
    assert said in capsys.readouterr().err
    assert look(store.path).pages.total() == 9


def test_serve_stats_counts_for_all_processes(
    store: PageStore, capsys: pytest.CaptureFixture[str]
) -> None:
    with made(Path(store.path), identity=OLD) as other:
        get(other, *range(7))
    assert main(["kv", "serve-stats", store.path, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["stored"], document["hit"], document["miss"]) == (9, 6, 1)
    assert document["identities"][OLD.hex()]["hit"] == 6
    assert document["identities"][NEW.hex()] == {
        **dict.fromkeys(looking.COUNTED, 0), "pages": 3, "stored": 3, "stored_bytes": 60_000,
    }  # fmt: skip
    assert main(["kv", "serve-stats", store.path]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["IDENTITY", "PAGES", "HIT", "MISS"]
    assert [row.split()[:4] for row in rows] == [
        [OLD.hex(), "6", "6", "1"], [NEW.hex(), "3", "0", "0"],
    ]  # fmt: skip


def test_serve_stats_follows_until_it_is_interrupted(
    store: PageStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter([1, 2])

    def sleep(_: float) -> None:
        if next(turns) == 2:
            raise KeyboardInterrupt
        get(store, 0)

    monkeypatch.setattr(report, "time", SimpleNamespace(sleep=sleep))
    assert main(["kv", "serve-stats", store.path, "--json", "--follow"]) == 130
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["hit"] for line in lines] == [0, 1]


def test_report_writes_the_page_of_a_store(
    store: PageStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    get(store, 0, 1, 9, 10)
    page = tmp_path / "page.html"
    assert main(["report", store.path, "-o", str(page), "--verify"]) == 0
    text = page.read_text()
    assert "<h1>pages</h1>" in text
    assert "intact" in text
    assert "50.0%" in text
    assert OLD.hex() in text
    assert "<h2>Damage</h2>" not in text
    store.close()
    segment = next(Path(store.path).glob("segment-*"))
    raw = bytearray(segment.read_bytes())
    raw[5000] ^= 1
    segment.write_bytes(raw)
    capsys.readouterr()
    command = ["report", store.path, "-o", str(page), "--verify", "--json"]
    assert main(command) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["bad"] == [f"{segment.name} at 0"]
    assert (document["pages"], document["verified"]) == ({OLD.hex(): 5, NEW.hex(): 3}, True)
    assert document["counts"]["miss"] == 2
    assert f"{segment.name} at 0" in page.read_text()
    assert main(["report", store.path, "-o", str(page)]) == 0
    assert "not verified" in page.read_text()
    assert main(["report", store.path, "-o", str(page), "--limit", "1GB"]) == 2
    assert "are for reports of runs" in capsys.readouterr().err


COMMANDS = [["ls"], ["verify"], ["prune", "--to", "0"], ["serve-stats"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_directory_without_a_store_is_named_and_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    empty, other = tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    other.mkdir()
    (other / "thesis.tex").touch()
    for path, got in (
        (empty, "an empty directory, where no process has opened a store"),
        (other, "thesis.tex"),
        (tmp_path / "nothing", "no directory"),
        (other / "thesis.tex", "no directory"),
    ):
        assert main(["kv", command[0], str(path), *command[1:]]) == 2
        said = capsys.readouterr().err
        assert "no store of pages" in said
        for part in (str(path), got, "store.json", "still safe", "hint"):
            assert part in said
    assert not [*empty.iterdir()]
    assert [each.name for each in other.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{", b"[]", b"\xff\xfe", b"[" * 4096, b'{"format": 2}', b"null",
        b'{"format": 2, "geometry": {"slot_bytes": 0, "segment_slots": 1, "slots": 1}}',
        b'{"format": 2, "geometry": {"slot_bytes": "8", "segment_slots": 1, "slots": 1}}',
        b'{"format": 2, "geometry": {"slot_bytes": 4096, "segment_slots": 1, "slots": 1e99}}',
    ],
)  # fmt: skip
def test_a_damaged_store_json_is_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: bytes
) -> None:
    path = tmp_path / "pages"
    with made(path) as store:
        put(store, 1)
    shutil.copy(path / "store.json", tmp_path / "copy")
    (path / "store.json").write_bytes(damage)
    for command in COMMANDS:
        assert main(["kv", command[0], str(path), *command[1:]]) == 2
    said = capsys.readouterr().err
    assert said.count("has a damaged store.json") == len(COMMANDS)
    for part in (str(path), "still safe", "put a copy of it back"):
        assert part in said
    with pytest.raises(StateholdError, match=r"damaged store\.json"):
        made(path)
    shutil.copy(tmp_path / "copy", path / "store.json")
    with made(path) as store:
        assert get(store, 1) == [PageVerdict.HIT]


def test_a_store_json_that_cannot_be_read_is_not_called_damaged(
    store: PageStore, capsys: pytest.CaptureFixture[str]
) -> None:
    about = Path(store.path, "store.json")
    about.unlink()
    about.mkdir()
    assert main(["kv", "ls", store.path]) == 4
    assert "damaged" not in capsys.readouterr().err
