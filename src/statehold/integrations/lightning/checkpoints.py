"""A path that Lightning saves to, and the step behind it.

    OUT/step-000000000100/                   the newest steps of the run
    OUT/last.ckpt                            weights and values, as load_from_checkpoint() opens it
    OUT/last.ckpt.steps/step-000000000100/   the files of the step once more
    OUT/last.ckpt.steps/step-...100.json     a note: the run whose step the path stands for
    OUT/last.ckpt.steps/step-...200.removed  a note: the path goes when this step is committed

Owns: these files. The folder `.steps` is a run of its own with one step, so the path keeps it when
the run retires it, and gives its space back when Lightning removes the path.
Invariants: a path gets its new step before it loses the old one. The note is written before the
save, so after a kill it leads to a step that was committed, and not held yet.
Not here: when this happens (strategy).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from statehold.integrations.formats.archives import torch_save
from statehold.integrations.trained import give_second_names
from statehold.options.paths import step_name
from statehold.process.whole_files import sync_files

STEPS, MANIFEST, REMOVED, HALF = ".steps", "manifest.json", ".removed", ".half"
# What stands in a file until its weights are written. No reader takes it for a checkpoint.
WEIGHTS_FOLLOW = (
    b"statehold: the weights of this checkpoint follow; its step is beside it, in .steps\n"
)


class FoundStep(NamedTuple):
    """A committed step of the run in the directory `run`. last_of: the state key of the
    ModelCheckpoint whose last checkpoint this is, if the path had no save of its own."""

    run: str
    step: int
    last_of: str | None


class Checkpoint:
    """The path `path`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self.steps = Path(f"{self.path}{STEPS}")

    def target(self) -> Checkpoint:
        """The checkpoint itself, if the path is a link to it (save_last="link")."""
        return Checkpoint(os.path.realpath(self.path))

    @property
    def is_ours(self) -> bool:
        return self.steps.is_dir()

    # -- a save ----------------------------------------------------------------------------

    def announce(self, run: str, step: int, last_of: str | None = None) -> None:
        """The path stands for this step of the run, once it is committed."""
        for removal in self.removals() if self.is_ours else ():
            removal.unlink()
        self.steps.mkdir(parents=True, exist_ok=True)
        note = {"run": os.path.relpath(run, self.steps), "last_of": last_of}
        _write(self._note(step), json.dumps(note).encode())
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path)  # a sharded checkpoint of Lightning
        if self.path.is_symlink() or not self.path.exists():
            _write(self.path, WEIGHTS_FOLLOW)
        os.utime(self.path)  # ckpt_path="last" takes the path with the newest time

    def hold(self, step: int) -> bool:
        """Give the files of the step second names here; False if the run has no such step."""
        run, _ = self._noted(step)
        source, held = self.steps / run / step_name(step), self.steps / step_name(step)
        if not (source / MANIFEST).is_file():
            return False
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=self.steps))
        give_second_names(source, new / held.name)
        if held.exists():  # saved again
            os.replace(held, new / "old")
        os.replace(new / held.name, held)
        sync_files([self.steps, self.steps.parent])
        self._drop_older(held.name)
        if self.has_weights():
            _write(self.path, WEIGHTS_FOLLOW)
        return True

    def has_weights(self) -> bool:
        """Whether the file is complete, and not what stands there until then."""
        return self.path.exists() and self.path.stat().st_size != len(WEIGHTS_FOLLOW)

    def write(self, values: dict[str, Any]) -> None:
        """Make the file one that Lightning loads. Its time stays, which is that of the save."""
        times = self.path.stat()
        new = f"{self.steps}/{os.getpid()}{HALF}"  # after a kill, hold() removes it
        try:
            torch_save(values, new)
            os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))
            sync_files([new])  # a file that is there counts as whole
            os.replace(new, self.path)
        except BaseException:  # no room, perhaps: leave it to the steps
            with contextlib.suppress(OSError):
                os.unlink(new)
            raise

    def removed_after(self, step: int) -> None:
        """Note that the path goes once this step is committed, which a kill may prevent."""
        (self.steps / f"{step_name(step)}{REMOVED}").touch()

    def removals(self) -> list[Path]:
        return [*self.steps.glob(f"step-*{REMOVED}")]

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        shutil.rmtree(self.steps, ignore_errors=True)

    # -- a restore -------------------------------------------------------------------------

    def found(self) -> FoundStep | None:
        """The newest committed step of the path; None if it has none."""
        for note in sorted(self.steps.glob("step-*.json"), reverse=True):
            step = int(note.stem[5:])
            if self.holds(step) or self.hold(step):
                return FoundStep(str(self.steps), step, self._noted(step)[1])
        return None

    def holds(self, step: int) -> bool:
        return (self.steps / step_name(step) / MANIFEST).is_file()

    def _note(self, step: int) -> Path:
        return self.steps / f"{step_name(step)}.json"

    def _noted(self, step: int) -> tuple[str, str | None]:
        try:
            note = json.loads(self._note(step).read_bytes())
        except ValueError:  # it is empty, as a power cut leaves a file that was not synced
            return os.pardir, None
        return note["run"], note["last_of"]

    def _drop_older(self, name: str) -> None:
        """Remove what is older than the step `name`, and what a kill has left."""
        for path in self.steps.iterdir():
            if path.is_dir() and path.name != name:
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix == HALF or (path.suffix == ".json" and path.stem < name):
                path.unlink()


def settle(folder: str, resumed: int) -> list[Checkpoint]:
    """Do what a kill has left undone, before a training goes on from the step `resumed`.

    Returns the paths that stay and have no weights yet.

    Paths get what was committed. A path without a step goes: its first save was not committed, so
    no state of a callback says that it is there. A path that Lightning had removed by then goes.
    A directory without a note is of somebody else, or of a save that had not begun.
    """
    owed = []
    for steps in sorted({note.parent for note in Path(folder).glob(f"*{STEPS}/step-*")}):
        checkpoint = Checkpoint(str(steps).removesuffix(STEPS))
        is_gone = any(int(each.stem[5:]) <= resumed for each in checkpoint.removals())
        if is_gone or (checkpoint.found() is None and not checkpoint.has_weights()):
            checkpoint.remove()
            continue
        for note in (*steps.glob("step-*.json"), *checkpoint.removals()):
            if note.suffix == REMOVED or not checkpoint.holds(int(note.stem[5:])):
                note.unlink()
        if not checkpoint.has_weights():
            owed.append(checkpoint)
    return owed


def _write(path: Path, content: bytes) -> None:
    """Write a file as a whole, in place of whatever has the name."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    new.write_bytes(content)
    os.replace(new, path)
