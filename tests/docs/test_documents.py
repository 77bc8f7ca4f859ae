"""The documents tell the truth: README's loop runs, links lead somewhere, commands exist."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]


def test_the_loop_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())

    class Loader:
        def state_dict(self) -> dict[str, int]:
            return {"position": 3}

        def load_state_dict(self, state: dict[str, int]) -> None:
            assert state == {"position": 3}

    def train_step(*_: object) -> None:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    names = {
        "model": model, "optimizer": optimizer, "loader": Loader(), "train_step": train_step,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer), "steps": 5,
    }  # fmt: skip
    exec(textwrap.dedent(block[1]), names)
    assert names["ckpt"].__class__.__name__ == "Checkpointer"
    assert sorted(p.name for p in Path("runs/llama").glob("step-*")) == [
        "step-000000000003", "step-000000000004", "step-000000000005"
    ]  # fmt: skip


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", path.read_text())
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_exist(path: Path) -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = set(re.findall(r"`make ([a-z-]+)|^    make ([a-z-]+)", path.read_text(), re.MULTILINE))
    assert {first or second for first, second in used} <= known


def test_every_row_about_failures_names_tests_that_are_there() -> None:
    rows = [
        line for line in (ROOT / "docs/failures.md").read_text().splitlines() if "`tests/" in line
    ]
    assert len(rows) > 30
    for row in rows:
        file = ""
        for name in re.findall(r"`((?:tests/[\w/]+(?:\.py)?)?(?:::\w+)?)`", row):
            path, _, test = name.partition("::")
            file = path or file
            assert (ROOT / file).exists(), row
            if test:
                assert f"def {test}(" in (ROOT / file).read_text(), name
