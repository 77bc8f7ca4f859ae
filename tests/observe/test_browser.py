"""The page of a report in a real browser; skipped, and counted, where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from observe.browser import Browser, browser, installed
from observe.conftest import Seen
from observe.hostile import HOSTILE, hostile_run, hostile_trace
from statehold.cli import main
from support.runs import arrays_of, write_step

BROWSER = installed()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt install chromium")


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert BROWSER is not None
    with browser(BROWSER, tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture(scope="module")
def page(seen: Seen, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    code = main(["report", str(seen.run), "-o", str(path), "--trace", str(seen.trace), "--verify"])
    assert code == 0
    return path


def test_it_loads_itself_and_nothing_else(view: Browser, page: Path) -> None:
    view.open(page)
    assert view.complaints == []
    assert view.requests == [page.as_uri()]
    assert view.ask("document.querySelector('h1').textContent") == "run"
    assert view.ask("document.title") == "run - statehold report"


def test_the_timeline_can_be_looked_at_closely(view: Browser, page: Path) -> None:
    view.open(page)
    width = "document.querySelector('#lanes rect.k-commit').getBoundingClientRect().width"
    before = view.ask(width)
    assert view.ask("document.getElementById('whole').hidden") is True
    view.ask("[...document.querySelectorAll('button.look')].at(-2).click()")  # the first save
    assert view.ask(width) > before
    assert view.ask("document.getElementById('whole').hidden") is False
    view.ask("document.getElementById('whole').click()")
    assert view.ask(width) == pytest.approx(before, abs=0.01)
    assert view.complaints == []


def test_pointing_reads_and_dragging_zooms(view: Browser, page: Path) -> None:
    view.open(page)
    view.ask("document.querySelector('#lanes').scrollIntoView()")
    place = "document.querySelector('#lanes svg').getBoundingClientRect()"
    left, right, top = (view.ask(f"{place}.{side}") for side in ("left", "right", "top"))
    third = (right - left) / 3
    mouse = {"button": "left", "clickCount": 1, "y": top + 3}
    move = "Input.dispatchMouseEvent"
    view.call(move, type="mouseMoved", x=left + 1, y=top + 5)
    assert "save()" in view.ask("document.getElementById('about').textContent")
    view.call(move, type="mousePressed", x=left + third, **mouse)
    view.call(move, type="mouseMoved", x=right - third, **mouse, buttons=1)
    view.call(move, type="mouseReleased", x=right - third, **mouse)
    assert view.ask("document.getElementById('whole').hidden") is False
    assert view.ask("document.querySelectorAll('.chosen').length") == 0
    assert view.complaints == []


@pytest.mark.parametrize("width", [360, 800, 1400])
def test_nothing_runs_over_the_edge(view: Browser, page: Path, width: int) -> None:
    view.open(page)
    view.call("Emulation.setDeviceMetricsOverride", width=width, height=800,
              deviceScaleFactor=1, mobile=False)  # fmt: skip
    inside = view.ask("document.documentElement.scrollWidth")
    view.call("Emulation.clearDeviceMetricsOverride")
    assert inside <= width


def test_folded_rows_open_without_the_script(view: Browser, tmp_path: Path) -> None:
    for step in range(1, 31):
        write_step(tmp_path / "run", step, arrays_of())
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "run"), "-o", str(page)]) == 0
    view.open(page)
    height = "document.documentElement.scrollHeight"
    before = view.ask(height)
    view.ask("document.querySelector('summary').click()")
    assert view.ask(height) > before + 300
    assert view.complaints == []


@pytest.mark.parametrize("width", [360, 1400])
def test_all_levels_are_on_the_page(
    view: Browser, copied: Path, tmp_path: Path, width: int
) -> None:
    page = tmp_path / "report.html"
    words = ["--trace", str(copied / "trace.json"), "--verify", "--limit", "1 GB"]
    code = main(["report", str(copied / "run"), "-o", str(page), *words])
    assert code == 0
    view.open(page)
    view.call("Emulation.setDeviceMetricsOverride", width=width, height=800,
              deviceScaleFactor=1, mobile=False)  # fmt: skip
    inside = view.ask("document.documentElement.scrollWidth")
    view.call("Emulation.clearDeviceMetricsOverride")
    assert inside <= width
    assert view.complaints == []
    assert view.requests == [page.as_uri()]
    titles = view.ask("[...document.querySelectorAll('h2')].map(e => e.textContent)")
    assert {"Where steps are", "Copies to other levels", "Levels"} <= set(titles)
    badges = view.ask("document.querySelectorAll('.badge.good').length")
    assert badges == 1 + 1 + 2  # over all, the step, and each of its copies
    lanes = view.ask("[...document.querySelectorAll('.lane')].map(e => e.textContent)")
    assert "far" in lanes


def test_text_can_be_read_in_light_and_dark(view: Browser, page: Path) -> None:
    """Contrast as WCAG counts it, of all text against what lies behind it."""
    script = (Path(__file__).parent / "contrast.js").read_text()
    grounds = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        view.call("Emulation.setEmulatedMedia", features=features)
        view.open(page)
        found = view.ask(script)
        grounds.append(found["ground"])
        assert found["texts"] > 50
        assert found["worst"] >= 4.5, (scheme, found)
    view.call("Emulation.setEmulatedMedia", features=[])
    assert grounds[0] != grounds[1]


def test_hostile_names_do_nothing(view: Browser, tmp_path: Path) -> None:
    page, run = tmp_path / "report.html", hostile_run(tmp_path)
    trace = hostile_trace(tmp_path)
    main(["report", str(run), "-o", str(page), "--trace", str(trace), "--verify"])
    view.open(page)
    assert view.complaints == []  # a script that was refused would have left one
    assert view.requests == [page.as_uri()]
    assert view.ask("window.pwned") is None
    assert view.ask("document.querySelectorAll('img, iframe, a, object, main script').length") == 0
    names = view.ask("[...document.querySelectorAll('code')].map(e => e.textContent)")
    assert HOSTILE[0] in names
