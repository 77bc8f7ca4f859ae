"""A loop over torchdata's StatefulDataLoader, whose workers draw random numbers.

Kill it at any moment, then run it again: it goes on with the next sample, bit for bit.

python examples/loader_workers.py [RUN]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import statehold

STEPS = 20  # two epochs


class Noisy(TensorDataset):
    """Its state is the generator of a worker. The state of the loader has that of each worker."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.tensors[0][index] + 0.1 * torch.randn(16)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["generator"])


def main(run: str = "runs/loader") -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Noisy(torch.randn(40, 16, generator=torch.Generator().manual_seed(7)))
    loader = StatefulDataLoader(data, batch_size=4, shuffle=True, num_workers=2)
    state = {"model": model, "optimizer": optimizer, "data": loader, "rng": statehold.Rng()}
    state["losses"], state["samples"] = [], []
    with statehold.Checkpointer(run, keep=2) as ckpt:
        step = ckpt.restore(state) or 0
        while step < STEPS:
            for indices, batch in loader:
                loss = nn.functional.mse_loss(model(batch), batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state["losses"].append(loss.item())
                state["samples"] += indices.tolist()
                ckpt.save(step := step + 1, state)
    Path(run, "losses.txt").write_text(str(state["losses"]))


if __name__ == "__main__":
    main(*sys.argv[1:2])
