"""export_step() and import_step(): steps and checkpoints of other libraries, one into the other.

Invariants: the source is never changed. A destination appears whole or not at all, and a second
call goes on where the first one was killed. What the format of the destination cannot hold is named
in a warning, or in an error if it is a tensor.
Not here: the formats (one module each), which format a path has, and the table of all
(recognition).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from statehold.encoding.strictjson import show
from statehold.errors import CorruptionError, UsageError, storage_error
from statehold.format.entries import DOCUMENT_BYTES_MAX, sha256
from statehold.format.saved import MANIFEST_NAME
from statehold.integrations.formats import hf, untrusted
from statehold.integrations.formats.partial import Done, PartialExport, identity_of, work_on
from statehold.integrations.formats.recognition import FORMATS, Format, check_names, recognised
from statehold.integrations.formats.step_writer import StepTree, engine_for_parts, write_step
from statehold.integrations.formats.streamed import read_now
from statehold.integrations.formats.trees import nbytes_of, replaced, without
from statehold.observe.progress import Progress
from statehold.options.paths import absolute
from statehold.process.warn import warn_caller
from statehold.reading.places import StepPlace, at_rest, file_system, step_in

_SHOWN = 12
# (bytes done, bytes in all) -> nothing.
Report = Callable[[int, int], None]
Path = str | os.PathLike[str]


def export_step(
    step: Path,
    destination: Path,
    to: str,
    *,
    name: str | None = None,
    config: Path | None = None,
    report: Report | None = None,
) -> tuple[str, ...]:
    """Write a step as a checkpoint of another library; returns the names of what was left out.

    Args:
        step: "RUN@STEP", the run directory (its newest step), or the directory of a step.
        destination: a directory that does not exist; for "torch" a file.
        to: "hf" (safetensors of Hugging Face), "torch" (one file of torch.save), "dcp"
            (torch.distributed.checkpoint), or "deepspeed-universal".
        name: the part of the state to export, such as "model"; "" is all of it. None: "model" for
            "hf", if the state has it, and else all.
        config: for "hf", a directory of Hugging Face whose config.json, tokenizer and other small
            text files go with the weights, or a config.json alone. from_pretrained() needs it.
        report: called with the bytes done and in all, from time to time.

    Raises:
        UsageError: the destination exists, or an argument is not valid.
        UnsupportedValueError: the format cannot hold a tensor; the error names it.
        CorruptionError: bytes of the step are damaged.
    """
    kind = FORMATS.get(to)
    if kind is None or kind.export is None:
        known = ", ".join(name for name, each in FORMATS.items() if each.export)
        raise UsageError("no such format", facts={"expected": known, "got": show(to)})
    with contextlib.closing(file_system()) as fs:
        beside = {} if config is None else hf.texts_of(os.fspath(config), to)
        target = absolute(destination, "the destination")
        call = _Export(fs, target, to, kind, kind.export, name, beside, report)
        left_out = at_rest(fs, os.fspath(step), call.run)
    if left_out:
        more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
        names = ", ".join(left_out[:_SHOWN])
        warn_caller(f"the format {to} does not hold these as they were: {names}{more}")
    return tuple(left_out)


class _Export(NamedTuple):
    fs: Any
    destination: str
    to: str
    kind: Format
    export: Callable[[Any, PartialExport], list[str]]
    name: str | None
    beside: Mapping[str, bytes]
    report: Report | None

    def run(self, place: StepPlace) -> list[str]:
        raw = self.fs.read_file(f"{place.directory}/{MANIFEST_NAME}", DOCUMENT_BYTES_MAX)
        saved = place.open(self.fs)
        name = self.name
        if name is None:
            has_it = isinstance(saved.state, dict) and self.kind.name in saved.state
            name = self.kind.name if has_it else ""
        with engine_for_parts() as engine:
            found = StepTree(saved, place.directory, engine, name)
            if not isinstance(found.root, Mapping):
                found.root = {name.rpartition(".")[2]: found.root}
            texts = {file: sha256(text) for file, text in self.beside.items()}
            identity = identity_of(export=self.to, name=name, manifest=sha256(raw), beside=texts)
            with counted(
                f"exporting step {saved.step}", nbytes_of(found.root), self.report
            ) as done:
                is_file = self.kind.is_file
                with work_on(self.destination, identity, is_file=is_file, done=done) as work:
                    for file, text in self.beside.items():
                        with work.file(file) as out:
                            out.write(text, 0)
                    return [*self.export(found.root, work), *found.arrays]


def import_step(
    source: Path,
    step: str,
    *,
    name: str | None = None,
    skip: Iterable[str] | None = None,
    report: Report | None = None,
) -> str:
    """Make a checkpoint of another library a step of a run; returns the directory of the step.

    The files of the source show its format: one file of torch.save or safetensors, or a directory
    of safetensors, of pytorch_model.bin, of torch.distributed.checkpoint, of DeepSpeed's ZeRO or of
    its universal checkpoints. No pickle is trusted.

    Args:
        source: the checkpoint.
        step: "RUN@STEP". The run is made if it does not exist; the step must not exist.
        name: the name in the state below which all of the source is put. None: "model" for
            safetensors and pytorch_model.bin, and "" for all others.
        skip: names or patterns in the state of what is left out ("args", "*.bias").
        report: called with the bytes done and in all, from time to time.

    Raises:
        UsageError: the source is no checkpoint, or the run has the step.
        UnsupportedValueError: the source holds what a step cannot hold; the error names it.
        CorruptionError: the source is damaged.
    """
    path = absolute(source, "the source")
    run, number = step_in(step)
    before, (kind, place) = _stamps(path), recognised(path)
    below = kind.name if name is None else name
    tree = replaced(kind.read(place), read_now)
    for part in reversed(below.split(".") if below else []):
        tree = {part: tree}
    try:
        check_names(tree, path)
    except UsageError as error:
        error.hint = error.hint or 'name="model" puts it into one'
        raise
    patterns = list(skip or ())
    tree = without(tree, patterns)
    for where, foreign in untrusted.foreign_in(tree):
        raise untrusted.untrusted(path, foreign, where, f'leave it out with skip=["{where}"]')
    identity = identity_of(source=path, stamps=before, name=below, skip=sorted(patterns))
    with counted(f"importing {path}", nbytes_of(tree), report) as done:
        try:
            check = partial(_check_unchanged, path, before)
            return write_step(run, number, tree, identity, done, check)
        except OSError as error:
            raise storage_error("write a step", error.errno or errno.EIO, run) from error


def _stamps(path: str) -> list[list[Any]]:
    """The files of a source as they are now: an import goes on only with the same ones."""
    if not os.path.exists(path):
        return []
    if not os.path.isdir(path):
        return [_stamp(path, os.path.basename(path))]
    return [
        _stamp(os.path.join(parent, name), os.path.relpath(os.path.join(parent, name), path))
        for parent, _, names in sorted(os.walk(path))
        for name in sorted(names)
    ]


def _stamp(path: str, name: str) -> list[Any]:
    found = os.stat(path)
    return [name, found.st_size, found.st_mtime_ns]


def _check_unchanged(path: str, before: list[list[Any]]) -> None:
    """Raise if the files of a source are others than before: the step would be a mixture."""
    if _stamps(path) != before:
        raise CorruptionError(
            "the source has changed while it was read",
            facts={"source": path},
            hint="import it again when nothing writes to it; no step was committed",
        )


@contextlib.contextmanager
def counted(what: str, total: int, report: Report | None) -> Iterator[Done]:
    """Counts bytes, and logs how far they are if that takes long."""
    so_far = [0]

    def done(nbytes: int) -> None:
        so_far[0] += nbytes
        if report is not None:
            report(min(so_far[0], total), total)

    with Progress(what, partial(_counts, so_far, total)):
        yield done


def _counts(so_far: list[int], total: int) -> tuple[int, int]:
    return so_far[0], total
