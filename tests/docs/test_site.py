"""The site: its menu has every document, and nothing else. `make docs` checks its links."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MENU = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
LISTED = re.findall(r": ([\w/]+\.md)$", MENU, re.MULTILINE)


@pytest.fixture(scope="module")
def hooks() -> types.ModuleType:
    """tools/site/hooks.py, without mkdocs, which only the site needs."""
    for name in ("mkdocs", "mkdocs.structure", "mkdocs.structure.files"):
        sys.modules.setdefault(name, types.ModuleType(name))
    files = sys.modules["mkdocs.structure.files"]
    files.__dict__.setdefault("File", None)
    files.__dict__.setdefault("Files", None)
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "tools/site/hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_menu_has_every_document(hooks: types.ModuleType) -> None:
    documents = {path.name for path in ROOT.glob("docs/*.md")}
    assert len(LISTED) == len(set(LISTED))
    assert set(LISTED) == documents | set(hooks.PAGES.values())
    assert all((ROOT / source).is_file() for source in hooks.PAGES)


@pytest.mark.parametrize(
    ("page", "link", "becomes"),
    [
        ("guide.md", "](glossary.md#ranks)", "](glossary.md#ranks)"),
        ("guide.md", "](../bench/README.md)", "](project/bench.md)"),
        ("project/bench.md", "](../docs/offload.md#results)", "](../offload.md#results)"),
        ("project/hacking.md", "](docs/decisions/0009-an-emulated-device.md)",
         "](../decisions/0009-an-emulated-device.md)"),
        ("guide.md", "](../examples/minimal.py)", "](URL/blob/main/examples/minimal.py)"),
        ("guide.md", "](https://example.org/a.md)", "](https://example.org/a.md)"),
        ("guide.md", "](missing.md)", "](missing.md)"),
    ],
)  # fmt: skip
def test_a_link_leads_to_a_page_or_to_the_repository(
    hooks: types.ModuleType, page: str, link: str, becomes: str
) -> None:
    at = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=page))
    moved = hooks.on_page_markdown(link, page=at, config={"repo_url": "URL"}, files=None)
    assert moved == becomes


def test_all_that_is_public_is_in_the_reference() -> None:
    import statehold

    text = (ROOT / "docs/reference.md").read_text()
    modules = {"errors", "lineage", "metrics", "offload", "resilience", "__version__"}
    missing = [
        name
        for name in statehold.__all__
        if name not in modules and not re.search(rf"^::: statehold\.[\w.]*\b{name}$", text, re.M)
    ]
    assert missing == ["StateholdError"]  # it comes with the other errors
