"""What the groups share: a state of which little changes, disks, and what a group returns."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench import harness
from bench.report import number

MIB = 1 << 20
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """base: bytes of the frozen base, in `layers`. saves: timed ones, in each round. full: a shape
    of bench.state. fork: bytes of the step that is forked. files, makers: of `many`."""

    base: int
    layers: int
    saves: int
    full: str
    fork: int
    files: int
    makers: int


SIZES = {
    "whole": Sizes(1 << 30, 64, 2, "80m", 5 << 30, 50, 20),
    "smoke": Sizes(16 << 20, 8, 1, "smoke", 32 << 20, 5, 4),
}


@dataclass
class Target:
    """What the project wants of a figure. is_met is None where a figure alone says nothing."""

    what: str
    wanted: str
    got: str
    is_met: bool | None


@dataclass
class Group:
    """What a group has found."""

    rows: list[Row] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    facts: Row = field(default_factory=dict)

    def aim(self, what: str, wanted: str, got: float | None, is_met: bool, digits: int = 2) -> None:
        self.targets.append(Target(what, wanted, number(got, digits), is_met))


class Lora(nn.Module):
    """A frozen base of bf16 matrices, and adapters of rank 8 in fp32 beside each of them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        columns = 4096
        rows = max(8, sizes.base // sizes.layers // 2 // columns)
        self.base, self.adapters = nn.ParameterList(), nn.ParameterList()
        for seed in range(sizes.layers):
            noise = torch.Generator().manual_seed(seed)
            frozen = torch.randint(0, 1 << 14, (rows, columns), generator=noise, device="cpu")
            frozen = frozen.to(torch.int16).view(torch.bfloat16)
            self.base.append(nn.Parameter(frozen, requires_grad=False))
            for shape in ((8, columns), (rows, 8)):
                self.adapters.append(
                    nn.Parameter(torch.randn(shape, generator=noise, device="cpu"))
                )


class Tuning:
    """The training state of a Lora."""

    def __init__(self, sizes: Sizes) -> None:
        self.model = Lora(sizes)
        self.optimizer = torch.optim.AdamW(self.model.adapters.parameters(), lr=1e-3)
        for each in self.model.adapters.parameters():
            each.grad = torch.full_like(each, 0.01)
        self.optimizer.step()

    def step(self) -> None:
        """One update, in which all that trains changes."""
        for each in self.model.adapters.parameters():
            assert each.grad is not None
            each.grad.add_(1e-3)
        self.optimizer.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, live: what the peers save."""
        found = {f"model.{name}": each for name, each in self.model.state_dict().items()}
        for index, state in enumerate(self.optimizer.state_dict()["state"].values()):
            found |= {f"optimizer.{index}.{name}": each for name, each in state.items()}
        return found

    @property
    def changing_bytes(self) -> int:
        frozen = sum(each.nbytes for each in self.model.base)
        return sum(each.nbytes for each in self.tensors().values()) - frozen


@contextmanager
def folder(where: Path) -> Iterator[Path]:
    """A folder on the storage under test, for a while."""
    made = Path(tempfile.mkdtemp(prefix="unchanged-", dir=where))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def own_bytes(step: Path, names: int = 1) -> int:
    """What a step takes on storage that no other step has. names: of a file that only it has."""
    files = (path.stat() for path in harness.files_below(step))
    return sum(each.st_blocks * 512 for each in files if each.st_nlink <= names)


def ratios(mine: Iterable[float], others: Iterable[float]) -> float:
    """The median of the ratios of rounds."""
    return statistics.median(a / b for a, b in zip(mine, others, strict=True))


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], each) for name, each in expected.items()
    )
