"""Real text as bytes, and a shuffled batch loader that resumes exactly where it was.

Owns the corpus (which files, in which order, the split into windows) and the position in it.
Invariants: the batches after load_state_dict(state_dict()) are those that would have come next, and
a position is never applied to other text than it was taken from. Leaves devices to the caller.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Between two files. The byte 0 is in no source text, so it marks where a file ends.
SEPARATOR = b"\0"
SUFFIXES = frozenset({".c", ".cpp", ".h", ".html", ".json", ".md", ".py", ".rst", ".txt"})
# Installed packages are not the standard library, and differ between machines.
SKIPPED_DIRS = frozenset({"__pycache__", "dist-packages", "site-packages"})
VALIDATION_EVERY = 20  # one window in twenty is held out


def text_files(root: Path, suffixes: frozenset[str]) -> list[Path]:
    """Files below `root` with one of the suffixes, in an order that is the same everywhere."""
    found: list[Path] = []
    for directory, subdirs, names in os.walk(root):
        subdirs[:] = [name for name in subdirs if name not in SKIPPED_DIRS]
        paths = [Path(directory, name) for name in names if Path(name).suffix in suffixes]
        found += filter(Path.is_file, paths)  # a link may lead nowhere
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def read_corpus(data: str | None) -> bytes:
    """The text to train on: a file, a directory, or (None) Python's own standard library."""
    if data is None:
        root, suffixes = Path(sysconfig.get_path("stdlib")), frozenset({".py"})
    else:
        root, suffixes = Path(data), SUFFIXES
    if root.is_file():
        return root.read_bytes()
    files = text_files(root, suffixes) if root.is_dir() else []
    if not files:
        raise FileNotFoundError(
            f"no text in {root} (looked for {' '.join(sorted(suffixes))}); "
            "name a file or a directory with --data"
        )
    return SEPARATOR.join(path.read_bytes() for path in files)


class TextLoader:
    """Batches of byte windows, reshuffled every epoch by a generator of its own.

    Training and validation windows are disjoint, and the split depends on the text and `seq` only.
    An epoch drops what does not fill a batch.
    """

    def __init__(self, corpus: bytes, *, seq: int, batch: int, seed: int) -> None:
        self._seq = seq
        self._batch = batch
        self._digest = hashlib.sha256(corpus).hexdigest()
        self._bytes = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
        windows = torch.arange((len(corpus) - 1) // seq)
        held_out = windows % VALIDATION_EVERY == VALIDATION_EVERY - 1
        self._training, self._validation = windows[~held_out], windows[held_out]
        if len(self._training) < batch:
            raise ValueError(
                f"{len(corpus)} bytes of text are too few: one batch needs about "
                f"{batch * seq * 2} (batch {batch} x seq {seq})"
            )
        self._generator = torch.Generator().manual_seed(seed)
        self._start_epoch(0)

    @property
    def epoch(self) -> int:
        """How many times all of the training text has been seen."""
        return self._epoch

    @property
    def corpus_bytes(self) -> int:
        """Size of the text."""
        return len(self._bytes)

    @property
    def windows(self) -> int:
        """How many windows there are to train on."""
        return len(self._training)

    def numbered(self, windows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Training windows by their numbers, 0 to `windows` - 1; moves no position."""
        return self._windows(self._training[torch.tensor(windows)])

    def __next__(self) -> tuple[Tensor, Tensor]:
        """The next batch: tokens and targets, both of shape BL."""
        if self._position + self._batch > len(self._order):
            self._start_epoch(self._epoch + 1)
        chosen = self._order[self._position : self._position + self._batch]
        self._position += self._batch
        return self._windows(chosen)

    def __iter__(self) -> TextLoader:
        return self

    def validation(self, batches: int) -> list[tuple[Tensor, Tensor]]:
        """The same held-out batches at every call; moves no position."""
        chosen = self._validation[: batches * self._batch]
        return [self._windows(part) for part in chosen.split(self._batch)]

    def state_dict(self) -> dict[str, Any]:
        """The position: epoch, windows taken in it, and the generator as it began the epoch."""
        return {
            "corpus": self._digest,
            "seq": self._seq,
            "epoch": self._epoch,
            "position": self._position,
            "generator": self._epoch_generator_state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position. Refuses one that was taken in other text or with another seq."""
        for name, expected in (("corpus", self._digest), ("seq", self._seq)):
            if state[name] != expected:
                raise ValueError(
                    f"this position belongs to other data: {name} was {state[name]}, is {expected}"
                )
        # The order of an epoch is drawn again instead of being stored: it is as long as the text.
        self._generator.set_state(state["generator"])
        self._start_epoch(state["epoch"])
        self._position = state["position"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._position = 0
        self._epoch_generator_state = self._generator.get_state()
        shuffle = torch.randperm(len(self._training), generator=self._generator)
        self._order = self._training[shuffle]

    def _windows(self, chosen_B: Tensor) -> tuple[Tensor, Tensor]:
        index_BL = chosen_B.unsqueeze(1) * self._seq + torch.arange(self._seq)
        return self._bytes[index_BL].long(), self._bytes[index_BL + 1].long()
