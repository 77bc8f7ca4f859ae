"""What a check is given, and what it gives back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from bench.gpu import figures
from bench.gpu.figures import Figure

__all__ = ["Check", "Skipped", "Task"]


class Skipped(Exception):
    """The check cannot run here; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What a check is given.

    state_bytes: of the state that is saved. found: the figures of earlier checks, by name, among
    them the ceilings. is_smoke: everything is as small and short as it can be.
    """

    check: str
    device: str
    directory: str
    state_bytes: int
    found: Mapping[str, float] = dataclasses.field(default_factory=dict)
    is_smoke: bool = False

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def path(self) -> Path:
        """An empty directory on the storage under test; the caller removes it."""
        return Path(self.directory)

    def at_most_bytes(self, nbytes: int) -> int:
        """So many bytes, or those of the state if these are fewer."""
        return min(nbytes, self.state_bytes)

    def need_cuda(self, what: str) -> None:
        if self.torch_device.type != "cuda":
            raise Skipped(f"{what}: only on CUDA")

    def of_ceiling(self, name: str, value: float, ceiling: str, target: float) -> Figure:
        """`value` over an earlier figure of the same unit."""
        limit = self.found.get(ceiling)
        if not limit:
            return figures.skipped(name, f"no figure for: {ceiling}")
        return figures.at_least(name, value / limit, target)


Check = Callable[[Task], Iterator[Figure]]
