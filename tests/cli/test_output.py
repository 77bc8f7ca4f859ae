"""What a terminal gets, and what a pipe gets: colours, ages, widths, progress."""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import statehold.cli
from statehold.cli import main, output, tables, terminal
from statehold.format.entries import About
from statehold.units import format_age
from support.faults import must
from support.runs import write_step

HAS_RICH = importlib.util.find_spec("rich") is not None
needs_rich = pytest.mark.skipif(not HAS_RICH, reason="needs rich: pip install rich")
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
NAME = "model.layers.{}.self_attn.query_projection_of_the_encoder.weight"


class Window(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wishes about colour from the environment of the tests."""
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command in a window: what it shows there."""

    def shown(*words: object, columns: int = 80) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", Window())
            main([*map(str, words)])
            return str(sys.stdout.getvalue())  # type: ignore[attr-defined]

    return shown


# -- colour ----------------------------------------------------------------------------------------

Wish = dict[str, str]
IN_A_WINDOW: list[tuple[Wish, bool]] = [
    ({}, True),
    ({"NO_COLOR": "1"}, False),
    ({"NO_COLOR": ""}, True),
    ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    ({"CLICOLOR": "0"}, False),
    ({"TERM": "dumb"}, False),
    ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
]
IN_A_PIPE: list[tuple[Wish, bool]] = [
    ({}, False),
    ({"FORCE_COLOR": "1"}, True),
    ({"FORCE_COLOR": "0"}, False),
    ({"CLICOLOR_FORCE": "1"}, True),
    ({"CLICOLOR": "1"}, False),
]


@needs_rich
@pytest.mark.parametrize(
    ("stream", "wish", "wanted"),
    [
        *((Window, wish, wanted) for wish, wanted in IN_A_WINDOW),
        *((io.StringIO, wish, wanted) for wish, wanted in IN_A_PIPE),
    ],
)
def test_who_gets_colour(
    stream: type[io.StringIO], wish: Wish, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in wish.items():
        monkeypatch.setenv(name, value)
    terminal.choose_color("auto")
    assert terminal.wants_color(stream()) is wanted


@needs_rich
def test_the_option_is_above_the_environment(
    run: Path, window: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CODES.search(window("ls", run))
    assert not CODES.search(window("ls", run, "--color", "never"))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not CODES.search(window("ls", run))
    assert CODES.search(window("ls", run, "--color", "always"))
    assert not CODES.search(window("ls", run))  # a choice ends with its command


def test_colours_change_no_text(run: Path, window: Callable[..., str]) -> None:
    for words in (["ls"], ["show"], ["verify"], ["show", "model.weight"], ["du"]):
        command, *more = words
        colored, bare = (
            re.sub(
                r"in [\d.]+ \w+ \(.*\)",
                "",
                CODES.sub("", window(command, run, *more, "--color", c)),
            )
            for c in ("auto", "never")
        )
        assert colored == bare


def test_without_rich_nothing_has_colour(
    run: Path, window: Callable[..., str], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(terminal, "has_rich", lambda: False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in window("ls", run)
    code = main(["ls", str(run), "--color", "always"])
    assert code == 2
    assert "statehold[cli]" in capsys.readouterr().err


def test_commands_print_through_one_module() -> None:
    folder = Path(statehold.cli.__file__).parent
    for path in folder.rglob("*.py"):
        if path.name in ("output.py",):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            called = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            is_stream = isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr")
            assert called != "print", f"{path}:{node.lineno}"
            assert not is_stream, f"{path}:{node.lineno}"
            if isinstance(node, ast.Import | ast.ImportFrom) and path.name != "styled.py":
                roots = [name.name for name in node.names] + [getattr(node, "module", "") or ""]
                assert not any(name.split(".")[0] == "rich" for name in roots), path


# -- ages ------------------------------------------------------------------------------------------


def test_ages_are_for_windows(
    golden: Path, window: Callable[..., str], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    saved_s = 1795246200  # 2026-11-21T07:30:00Z
    monkeypatch.setattr(time, "time", lambda: saved_s + 3 * 3600.0)
    text = window("ls", golden, "--color", "never", columns=120)
    assert text.splitlines()[0].split() == [
        "STEP", "STATE", "CREATED", "(UTC)", "AGE", "RANKS", "FILES", "BYTES", "WRITER"
    ]  # fmt: skip
    assert text.count("2026-11-21 07:30:00  3 h") == 2
    assert "2026-11-21 07:30:00 UTC (3 h ago)" in window("show", golden, "--color", "never")
    main(["ls", str(golden)])
    main(["show", str(golden)])
    assert "ago" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s ago"), (119, "119 s ago"), (120, "2 min ago"), (7199, "119 min ago"),
        (7200, "2 h ago"), (172_799, "47 h ago"), (172_800, "2 days ago"), (1e8, "1157 days ago"),
        (-5, "just now"), (-3600, "in the future"),
    ],
)  # fmt: skip
def test_an_age_in_words(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


# -- widths ----------------------------------------------------------------------------------------


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    arrays = {NAME.format(i): ("F32", np.zeros((2, 3), "<f4")) for i in range(3)}
    write_step(tmp_path / "wide", 1, arrays)
    return tmp_path / "wide"


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_table_fits_the_window(wide: Path, window: Callable[..., str], columns: int) -> None:
    text = window("show", wide, "--color", "never", columns=columns)
    rows = text.split("\n\n")[1].splitlines()
    assert max(map(len, rows)) <= columns
    names = [row.split()[0] for row in rows[1:]]
    assert all(row.split()[1] == "F32" for row in rows[1:])
    for index, name in enumerate(names):
        assert name.startswith("model.")
        assert name.endswith("weight")
        assert ("…" in name) is (columns < 100)
        assert columns < 100 or name == NAME.format(index)


@pytest.mark.parametrize("columns", [20, 50, 80])
def test_times_and_numbers_stay_whole_as_long_as_they_fit(
    golden: Path, window: Callable[..., str], columns: int
) -> None:
    lines = window("ls", golden, "--color", "never", columns=columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0].endswith("…") is (columns < 80)
    assert ("2026-11-21 07:30:00" in lines[1]) is (columns > 20)


def test_a_pipe_gets_whole_names(
    wide: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    main(["show", str(wide)])
    assert NAME.format(2) in capsys.readouterr().out


def test_prose_wraps_inside_its_column(tmp_path: Path, window: Callable[..., str]) -> None:
    text = window("doctor", tmp_path, "--color", "never", columns=90)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 90
    begin = lines[0].index("WHAT STATEHOLD DOES")
    wrapped = [line for line in lines if not line[:begin].strip()]
    assert wrapped
    assert all(line[begin] != " " for line in wrapped)


@pytest.mark.parametrize(
    ("text", "size", "expected"),
    [
        ("abcdefghij", 10, "abcdefghij"), ("abcdefghij", 9, "abcd…ghij"),
        ("abcdefghij", 4, "ab…j"), ("abcdefghij", 1, "…"), ("模型模型模型", 7, "模…型"),
        ("模型", 4, "模型"),
    ],
)  # fmt: skip
def test_text_gives_up_its_middle(text: str, size: int, expected: str) -> None:
    found = tables.shortened(text, size)
    assert found == expected
    assert tables.width(found) <= size


def test_numbers_are_never_shortened() -> None:
    made = output.table(("NAME", "BYTES"), [("x" * 50, "123456789012")], right="BYTES")
    lines = ["".join(line) for line in made.lines(24)]
    assert lines == ["NAME               BYTES", "xxxxx…xxxx  123456789012"]


# -- progress --------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_rich", [pytest.param(True, marks=needs_rich), False])
def test_progress_is_for_terminals(has_rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "has_rich", lambda: has_rich)
    monkeypatch.setattr(output, "FIRST_S", 0)
    monkeypatch.setattr(output, "REDRAW_S", 0)
    for stream, expected in ((io.StringIO(), ""), (Window(), "1 KiB of 2 KiB (50%)")):
        monkeypatch.setattr(sys, "stderr", stream)
        shown = output.ProgressBar("step 1", 2048)
        shown.advance(1024)
        shown.close()
        assert expected in stream.getvalue()
        assert ("step 1" in stream.getvalue()) is bool(expected)


def test_short_work_shows_no_progress(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Window()
    monkeypatch.setattr(output, "FIRST_S", 3600)
    monkeypatch.setattr(output, "REDRAW_S", 0)
    monkeypatch.setattr(sys, "stderr", stream)
    main(["verify", str(run)])
    assert stream.getvalue() == ""


def test_an_answer_removes_the_line_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both streams are one window: text must not be printed behind the progress."""
    stream = Window()
    monkeypatch.setattr(terminal, "has_rich", lambda: False)
    monkeypatch.setattr(output, "FIRST_S", 0)
    monkeypatch.setattr(output, "REDRAW_S", 0)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    shown = output.ProgressBar("step 1", 2048)
    shown.advance(1024)
    output.say("answer")
    shown.advance(1024)
    shown.close()
    lines = re.split(r"\r\x1b\[K|\n", stream.getvalue())
    assert "answer" in lines
    assert sum("step 1" in line for line in lines) >= 2


def test_an_answer_ends_what_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """`coordinate` prints lines for hours, and nothing may turn beside them."""
    stream = Window()
    monkeypatch.setattr(output, "FIRST_S", 3600)
    monkeypatch.setattr(terminal, "has_rich", lambda: False)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    shown = output.ProgressBar("work")
    shown.draw()  # as its timer does
    assert "work" in stream.getvalue()
    output.say("answer")
    before = stream.getvalue()
    shown.draw()
    assert stream.getvalue() == before
    shown.close()


# -- a real terminal -------------------------------------------------------------------------------


def in_a_terminal(words: list[str], columns: int) -> str:
    """What a command shows in a terminal of its own."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-m", "statehold", *words], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    raw = b""
    try:
        while piece := os.read(ours, 1 << 16):
            raw += piece
    except OSError:
        pass  # how Linux says that the other end is closed
    finally:
        os.close(ours)
    must(child.wait() == 0, raw)
    return raw.decode().replace("\r\n", "\n")


def test_a_real_terminal(wide: Path) -> None:
    shown = in_a_terminal(["show", str(wide)], 66)
    bare = CODES.sub("", shown)
    assert bool(CODES.search(shown)) is HAS_RICH
    table = bare.split("\n\n")[1]
    assert max(map(len, table.splitlines())) <= 66
    assert "…" in table


def test_json_is_utf8_whatever_names_are(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a file that is no UTF-8 is escaped, so a reader gets the name back."""
    Path(os.fsdecode(bytes(run / "step-000000000002") + b"/odd\xff")).touch()
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="utf-8", errors="surrogateescape") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["verify", str(run), "--json"]) == 0
        out.flush()
        document = json.loads(raw.getvalue().decode("utf-8"))
    (step,) = document["steps"]
    assert step["foreign"] == ["odd\udcff"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("command", ["ls", "tree", "json"])
def test_a_stdout_that_holds_less_than_utf8_gets_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, command: str
) -> None:
    """As in a locale such as de_DE.ISO-8859-1. What it has no character for is escaped."""
    base, about = tmp_path / "runs/base", About(tags=("größe", "😀"))
    write_step(base, 1, {"w": ("F32", np.zeros(4, "<f4"))}, about)
    main(["fork", f"{base}@1", str(tmp_path / "runs/child")])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    words = {"tree": ["tree", str(base.parent)], "json": ["ls", str(base), "--json"]}
    assert main(words.get(command, ["ls", str(base)])) == 0
    sys.stdout.flush()
    shown = sys.stdout.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    if command == "json":
        assert json.loads(shown)["steps"][0]["tags"] == ["größe", "😀"]
    else:
        assert r"\U0001f600" in shown
        assert "child" in shown or command == "ls"
