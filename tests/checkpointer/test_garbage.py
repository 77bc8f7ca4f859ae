"""What a commit leaves to Python's collector: of tens of thousands of tensors nothing."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import statehold
from statehold.checkpoint.save import writes
from support.faults import DEADLINE_S, SMALL, spy_on


def test_the_document_of_a_step_is_gone_when_its_bytes_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, seen, at_the_write = writes.Manifest, [], []

    def watched(**members: Any) -> Any:
        manifest = build(**members)
        seen.append(weakref.ref(manifest))
        return manifest

    def before(operation: str, _: tuple[Any, ...]) -> None:
        if operation == "write_file" and seen:
            at_the_write.append(seen[-1]() is None)

    monkeypatch.setattr(writes, "Manifest", watched)
    with statehold.Checkpointer(tmp_path / "run", **SMALL) as ckpt:
        spy_on(ckpt, before)
        ckpt.save(1, {"w": torch.ones(8)}).wait("committed", DEADLINE_S)
    assert len(seen) == 1
    assert at_the_write[0]
