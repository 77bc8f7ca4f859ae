"""Steps that share files, with states of a few KiB."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from statehold.layout import groups
from statehold.testing import SimFs


@contextmanager
def small_files() -> Iterator[None]:
    """Parts from 8 KiB on are shared, in files of 16 KiB and more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "PART_BYTES_MIN", 8 << 10)
        patch.setattr(groups, "FILE_BYTES_MIN", 16 << 10)
        patch.setattr(groups, "FILE_BYTES", 32 << 10)
        yield


class Tuned(torch.nn.Module):
    """A base that needs no gradient, in layers of `width` x `width`, and a head that trains."""

    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.base = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(width, width), requires_grad=False)
            for _ in range(layers)
        )
        self.head = torch.nn.Parameter(torch.randn(64, 64))

    @torch.no_grad()
    def train_once(self) -> None:
        self.head.add_(1.0)

    def bits(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.state_dict().items()}

    @property
    def base_bytes(self) -> int:
        return sum(each.nbytes for each in self.base)


def names(fs: SimFs, folder: str) -> list[str]:
    return sorted(name for name, _ in fs.listdir(folder)) if fs.is_dir(folder) else []


def same(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )
