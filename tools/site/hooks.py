"""Hooks of the site: documents that lie outside of docs/ become pages, and links find them.

Invariants: a link from a page to a file of the repository leads to the page of that file, or to the
file in the repository where it has no page. A link to a file that is not there stays as it is, so
that the strict build fails.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "bench/README.md": "project/bench.md",
    "native/README.md": "project/native.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "HACKING.md": "project/hacking.md",
    "SECURITY.md": "project/security.md",
    "STYLE.md": "project/style.md",
}
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the documents outside of docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Links of a page, which is written for readers of the repository, as the site has them."""
    sources = {page: source for source, page in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def moved(found: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(source), found[1]))
        fragment = found[2] or ""
        if not (ROOT / target).exists():
            return found[0]
        uri = PAGES.get(target) or (target.removeprefix("docs/") if _has_page(target) else None)
        if uri is None:
            return f"]({config['repo_url']}/blob/main/{target}{fragment})"
        return f"]({os.path.relpath(uri, os.path.dirname(page.file.src_uri) or '.')}{fragment})"

    return LINK.sub(moved, markdown)


def _has_page(target: str) -> bool:
    return target.startswith("docs/") and (ROOT / target).is_file()
