"""Train a run, saving while it trains; started again, it goes on where it was.

    python examples/llama/train.py --run runs/mine --data ~/books --steps 2000
    torchrun --nproc-per-node 4 -- examples/llama/train.py --run runs/mine --tp 2

Owns the loop: restore, step, save, log, show. Invariants: nothing is called saved before it is
committed, and a save that failed ends the run with its error. The settings are in config.py, the
arithmetic in trainer.py.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

import config as settings
import statehold
from display import Display
from journal import Journal
from memory import data_bytes, limit_memory
from ranks import Ranks, joined
from trainer import Trainer, make_deterministic

NEWEST_EVENT_FIRST: tuple[Literal["committed", "written", "staged"], ...] = (
    "committed",
    "written",
    "staged",
)

# Called after each save() with its handle and the display. The demo dies in it.
AfterSave = Callable[[statehold.Save, Display], None]


class SaveWatch:
    """Follows the saves that are not committed yet, and logs each once it is."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._open: deque[statehold.Save] = deque()
        self._committed: int | None = None

    def add(self, save: statehold.Save) -> None:
        """Follow one more save."""
        self._open.append(save)

    def poll(self) -> str:
        """Log what has been committed since the last call; say where the saves are."""
        while self._open and self._open[0].done("committed"):
            self._log(self._open.popleft())
        parts = [] if self._committed is None else [f"step {self._committed} committed"]
        for save in self._open:
            reached = next((event for event in NEWEST_EVENT_FIRST if save.done(event)), "staging")
            parts.append(f"step {save.step} {reached}")
        return ", ".join(parts)

    def finish(self) -> str:
        """Wait for every save; raises the error of one that failed."""
        for save in self._open:
            save.wait("committed")
        return self.poll()

    def _log(self, save: statehold.Save) -> None:
        stats = save.stats
        self._committed = save.step
        self._journal.write(
            "save",
            step=save.step,
            bytes=stats.state_bytes,
            blocked_s=stats.blocked_s,
            gate_s=stats.gate_s,
            staged_s=stats.staged_s,
            written_s=stats.written_s,
            committed_s=stats.committed_s,
        )


class Run:
    """One start of a run, from restore to the last step."""

    def __init__(
        self,
        start: settings.Start,
        checkpointer: statehold.Checkpointer | None,
        journal: Journal,
        after_save: AfterSave | None,
        ranks: Ranks,
    ) -> None:
        self._config = start.config
        self._checksums = start.checksums
        self._ranks = ranks
        self._checkpointer = checkpointer
        self._journal = journal
        self._after_save = after_save
        self._watch = SaveWatch(journal)
        self._trainer = Trainer(start.config, ranks)
        self._display = Display(start.label, start.config.steps, quiet=ranks.rank > 0)

    def train(self) -> None:
        """Train from the newest committed step, or from the beginning, to the last step."""
        begin = self._resume()
        if begin >= self._config.steps:
            self._display.note(f"all {self._config.steps} steps are done; --steps trains on")
        for step in range(begin + 1, self._config.steps + 1):
            self._step(step)
            if step % self._config.validate_every == 0 or step == self._config.steps:
                self._validate(step)
        if status := self._watch.finish():
            self._display.note(status)
        self._display.finish()

    def _resume(self) -> int:
        begin = 0
        self._limit_memory()
        if self._checkpointer is not None:
            began = time.perf_counter()
            begin = self._checkpointer.restore(self._trainer.state) or 0
            if begin:
                seconds = time.perf_counter() - began
                self._display.note(f"restored step {begin}, verified, in {seconds:.3f} s")
        parameters = self._trainer.model.num_parameters()
        config = self._config
        self._journal.write(
            "start",
            step=begin,
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            device=config.device,
            parameters=parameters,
            ranks=self._ranks.size,
        )
        self._log_checksum(begin)
        self._display.note(
            f"{parameters / 1e6:.1f}M parameters, {self._trainer.loader.corpus_bytes / 1e6:.1f} MB "
            f"of text, {config.steps} steps, {config.device}, {self._ranks}, "
            f"{config.threads} thread{'s' if config.threads > 1 else ''}"
        )
        return begin

    def _limit_memory(self) -> None:
        """From here on, at most --memory beyond what weights and gradients take."""
        more = self._config.memory << 20
        gradients = sum(each.nbytes for each in self._trainer.model.parameters())
        limit = self._trainer.bytes_before_optimizer + gradients + more if more else 0
        self._journal.write("limit", nbytes=limit, taken_bytes=data_bytes())
        if limit:
            limit_memory(limit)

    def _step(self, step: int) -> None:
        began = time.perf_counter()
        loss = self._trainer.step()
        step_s = time.perf_counter() - began
        self._log_checksum(step)
        self._log_update(step)
        saving = time.perf_counter()
        save = self._save(step)
        blocked_s = time.perf_counter() - saving
        step_s += blocked_s
        self._journal.write(
            "step",
            step=step,
            loss=loss.hex(),
            step_s=step_s,
            blocked_s=blocked_s if save else 0.0,
        )
        status = self._watch.poll()
        self._display.step(step, loss, self._trainer.tokens_per_step, step_s, status)
        if save and self._after_save:
            self._after_save(save, self._display)

    def _save(self, step: int) -> statehold.Save | None:
        """Save if it is due. The last step is always saved: nothing trained is thrown away."""
        is_due = step % self._config.save_every == 0 or step == self._config.steps
        if self._checkpointer is None or not is_due:
            return None
        save = self._checkpointer.save(step, self._trainer.state)
        self._watch.add(save)
        return save

    def _log_checksum(self, step: int) -> None:
        if self._checksums:
            self._journal.write("state", step=step, sha256=self._trainer.checksum())

    def _log_update(self, step: int) -> None:
        """What the update has moved, and when; of an offloaded optimizer."""
        if update := self._trainer.last_update:
            self._journal.write("update", step=step, **update)

    def _validate(self, step: int) -> None:
        loss = self._trainer.validate()
        self._journal.write("validation", step=step, loss=loss.hex())
        self._display.note(f"step {step}: validation loss {loss:.4f} nats per byte")


def train(start: settings.Start, after_save: AfterSave | None = None) -> None:
    """Carry out one start of a run."""
    make_deterministic(start.config)
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(joined(start.config.tp, start.config.device))
        if ranks.rank == 0:
            settings.record(start.run, start.config)
        # Without saves nothing can be resumed, so a run begins its log again.
        log = start.run / "log.jsonl" if ranks.rank == 0 else Path(os.devnull)
        journal = Journal(log, fresh=not start.saves)
        stack.callback(journal.close)
        checkpointer = stack.enter_context(open_checkpointer(start)) if start.saves else None
        Run(start, checkpointer, journal, after_save, ranks).train()


def open_checkpointer(start: settings.Start) -> statehold.Checkpointer:
    """One on every rank, for the same directory; they find each other through torch.distributed."""
    return statehold.Checkpointer(
        start.run,
        keep=start.config.keep,
        staging_bytes=start.config.staging,
        peer_timeout_s=start.config.peer_timeout_s,
    )


if __name__ == "__main__":
    train(settings.parse())
