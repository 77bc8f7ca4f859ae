"""One replica of a run: a step survives the loss of other replicas, and has the same bits.

    statehold coordinate --port 29400 --replicas 4
    STATEHOLD_COORDINATOR=localhost:29400 \\
        python examples/llama/replica.py --run runs/mine --accumulate 12 --label replica-0    # each

Owns the loop of train.py for replicas, and what each of them writes down, RUN/LABEL.jsonl. A step
has `--accumulate` microbatches on all replicas together, and `--batch` sequences in each.
Invariants: what is trained depends on the step, and not on the replicas. Leaves to Replicas who
computes what, and settings and arithmetic to config.py and trainer.py.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import config as settings
from display import Display
from journal import Journal
from ranks import Ranks
from statehold.resilience import Microbatch, Replicas, Step
from train import open_checkpointer
from trainer import Trainer, make_deterministic

# Called in each microbatch, with how many this replica has computed before it in the loop over the
# step. The demo kills and stops replicas in it.
InMicrobatch = Callable[[Microbatch, int], None]
AfterStep = Callable[[int], None]


class Replica:
    """The loop over steps. A step is called by its number from 1, as in the logs of train.py."""

    def __init__(
        self,
        start: settings.Start,
        journal: Journal,
        in_microbatch: InMicrobatch,
        after_step: AfterStep,
        *,
        quiet: bool,
    ) -> None:
        self._config = start.config
        self._checksums = start.checksums
        self._journal = journal
        self._in_microbatch = in_microbatch
        self._after_step = after_step
        self._trainer = Trainer(start.config, Ranks())
        self._display = Display(start.label, start.config.steps, quiet=quiet)

    def train(self, start: settings.Start, coordinator: str | None) -> None:
        """Train to the last step, from the step that the others are in."""
        config, trainer = self._config, self._trainer
        with contextlib.ExitStack() as stack:
            replicas = Replicas(
                trainer.model,
                trainer.optimizer,
                microbatches=config.accumulate,
                samples=trainer.loader.windows,
                batch=config.batch,
                seed=config.seed,
                coordinator=coordinator,
                checkpointer=stack.enter_context(open_checkpointer(start)) if start.saves else None,
                lease_s=config.lease_s,
                state={"scheduler": trainer.scheduler},
            )
            stack.enter_context(replicas)
            self._journal.write("start", pid=os.getpid(), threads=config.threads, at=time.time())
            for step in replicas.steps(until=config.steps):
                self._step(step)
        self._display.finish()

    def _step(self, step: Step) -> None:
        began = time.perf_counter()
        for before, microbatch in enumerate(step):
            self._compute(microbatch, before)
        if step.is_over:  # the others have gone on to the end of the run without this replica
            return
        step.clip_grad_norm(self._config.clip)
        self._trainer.optimizer.step()
        self._trainer.optimizer.zero_grad()
        self._trainer.scheduler.step()
        self._log(step, time.perf_counter() - began)
        self._after_step(step.number + 1)

    def _compute(self, microbatch: Microbatch, before: int) -> None:
        began = time.time()
        batch = self._trainer.loader.numbered(microbatch.samples)
        microbatch.drew(batch)
        loss = self._trainer.loss(*batch)
        self._in_microbatch(microbatch, before)
        microbatch.backward(loss)
        self._journal.write(
            "microbatch",
            step=microbatch.step + 1,
            index=microbatch.index,
            samples=microbatch.samples,
            began=began,
            ended=time.time(),
        )

    def _log(self, step: Step, seconds: float) -> None:
        number = step.number + 1
        if self._checksums:
            self._journal.write("state", step=number, sha256=self._trainer.checksum())
        self._journal.write(
            "step",
            step=number,
            loss=step.loss.hex(),
            step_s=seconds,
            blocked_s=0.0,
            share=step.share,
            at=time.time(),
        )
        tokens = self._trainer.tokens_per_step
        self._display.step(number, step.loss, tokens, seconds, f"{len(step.share)} microbatches")


def train(
    start: settings.Start,
    coordinator: str | None = None,
    in_microbatch: InMicrobatch = lambda *_: None,
    after_step: AfterStep = lambda _: None,
    *,
    quiet: bool = False,
) -> None:
    """Be a replica of the run. coordinator: None takes STATEHOLD_COORDINATOR."""
    make_deterministic(start.config)
    start.run.mkdir(parents=True, exist_ok=True)
    journal = Journal(log_of(start.run, start.label))
    with contextlib.closing(journal):
        Replica(start, journal, in_microbatch, after_step, quiet=quiet).train(start, coordinator)


def log_of(run: Path, label: str) -> Path:
    """What a replica writes down."""
    return run / f"{label}.jsonl"


if __name__ == "__main__":
    train(settings.parse())
