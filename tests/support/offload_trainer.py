"""A trainer with an offloaded optimizer whose every update is known beforehand.

An update's gradients follow from its number. So what a step must hold is what torch's optimizer has
after as many updates on the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from statehold import Checkpointer, offload
from statehold._core import Fs
from support.twins import same_bits

SHAPES = [(9000,), (40, 70), (6100,)]
SUBGROUP = 12_288  # one page for each field. So two paths have fewer buffers than subgroups

State = dict[str, torch.Tensor]


def noise(update: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * update + index)
    return torch.randn(SHAPES[index], generator=generator).to(torch.bfloat16)


@cache
def expected(updates: int) -> State:
    """The weights and the state after so many updates, by torch's optimizer."""
    masters = [torch.nn.Parameter(noise(0, index).float()) for index in range(len(SHAPES))]
    torchs = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    for update in range(1, updates + 1):
        for index, master in enumerate(masters):
            master.grad = noise(update, index).float()
        torchs.step()
    found = {}
    for index, master in enumerate(masters):
        found[f"weight {index}"] = master.detach().to(torch.bfloat16)
        if updates:
            found[f"master {index}"] = master.detach().clone()
            fields = torchs.state[master]
            found |= {f"{name} {index}": fields[name].clone() for name in ("exp_avg", "exp_avg_sq")}
    return found


class Trainer:
    """A model, its optimizer on `tiers`, and its run. update: how many there were. serial: of the
    save that was restored, if whoever saves counts saves.

    fs: of the optimizer, where it is not the machine's.
    """

    def __init__(
        self, run: Callable[[], Checkpointer], tiers: Sequence[Any], fs: Fs | None = None
    ) -> None:
        self.params = [torch.nn.Parameter(noise(0, index)) for index in range(len(SHAPES))]
        self.optimizer = offload.AdamW(
            self.params, lr=1e-2, tiers=tiers, subgroup_bytes=SUBGROUP, fs=fs
        )
        self.ckpt = run()
        self.update = 0
        self.serial: int | None = None

    @property
    def state(self) -> dict[str, Any]:
        params = {str(index): each for index, each in enumerate(self.params)}
        return {
            "params": params,
            "optimizer": self.optimizer,
            "update": self.update,
            "serial": self.serial,
        }

    def train(self) -> None:
        for index, parameter in enumerate(self.params):
            parameter.grad = noise(self.update + 1, index)
        self.optimizer.step()
        self.update += 1

    def restore(self, step: int | None = None) -> int | None:
        """Returns the step; without one, the weights are those of the beginning."""
        state = self.state
        found = self.ckpt.restore(state, step)
        if found is not None:
            self.update, self.serial = state["update"], state["serial"]
        return found

    def wrong(self) -> str | None:
        """What differs from what torch has after as many updates."""
        found = {f"weight {index}": each.detach() for index, each in enumerate(self.params)}
        for index, fields in self.optimizer.state_dict()["state"].items():
            found |= {f"{name} {index}": value for name, value in fields.items() if name != "step"}
        wanted = expected(self.update)
        if found.keys() != wanted.keys():
            return f"{sorted(found.keys() ^ wanted.keys())} at update {self.update}"
        names = [name for name, value in wanted.items() if not same_bits(found[name], value)]
        return f"{names} at update {self.update}" if names else None

    def close(self) -> None:
        self.ckpt.close()
        self.optimizer.close()
