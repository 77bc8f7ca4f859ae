"""torch.save and safetensors: one file, written by the trainer's own thread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.peers.base import FilePeer, copy_into


class TorchSave(FilePeer):
    """torch.save of the state dicts; loads with mmap when the file is cached, which is faster."""

    def write(self, path: Path) -> None:
        whole = {
            "model": self.state.model.state_dict(),
            "optimizer": self.state.optimizer.state_dict(),
            "progress": self.state.progress,
        }
        torch.save(whole, path / "state.pt")

    def read(self, path: Path, warm: bool) -> None:
        whole: dict[str, Any] = torch.load(
            path / "state.pt", map_location="cpu", mmap=warm, weights_only=True
        )
        self.state.model.load_state_dict(whole["model"])
        self.state.optimizer.load_state_dict(whole["optimizer"])
        self.state.progress.update(whole["progress"])


class Safetensors(FilePeer):
    """save_file of the flat tensors; the plain values travel in the metadata as JSON."""

    def write(self, path: Path) -> None:
        plain = {
            "param_groups": self.state.optimizer.state_dict()["param_groups"],
            "progress": self.state.progress,
        }
        save_file(
            self.state.tensors(), path / "state.safetensors", metadata={"plain": json.dumps(plain)}
        )

    def read(self, path: Path, warm: bool) -> None:
        live = self.state.tensors()
        with safe_open(path / "state.safetensors", framework="pt") as file:
            for name in file.offset_keys():
                copy_into(live, name, file.get_tensor(name))
            plain = json.loads(file.metadata()["plain"])
        live_groups = self.state.optimizer.param_groups
        for group, saved in zip(live_groups, plain["param_groups"], strict=True):
            group["step"] = saved["step"]
        self.state.progress.update(plain["progress"])
