"""Which paths can be those of a run, of a level, or of a checkpoint, and how a step is named.

    RUN                      its newest step; so is RUN@newest
    RUN@1000                 the step with this number
    RUN@best:val_loss        the best one by a metric; the greatest is best in RUN@best:score,max
    RUN@tag:before-decay     the newest one with a tag; RUN is there if the tag has a slash
    RUN/step-000000001000    the directory of a step

Every path that a user gives comes through here, to a class, a function or a command.

Invariants: nothing is opened or made here. What only a shell or an object store understands is
refused, with what to write instead. Otherwise statehold would make a directory called "s3:" or "~".
A directory that exists is never cut at an `@`, and no new run gets a name that names a step.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from statehold.errors import UsageError, shown

PATH = (str, os.PathLike)
# Path() takes one slash away, and Databricks writes one.
_STORES = "s3|s3a|s3n|gs|gcs|az|adl|abfs|abfss|wasbs?|oss|hdfs|webhdfs|dbfs|hf|memory|https?|file"
_URL = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]*://|({_STORES}):/")
_AT_STEP = re.compile(r"(?P<run>.*)@(?P<step>[0-9]{1,12}|newest)", re.DOTALL)
_BY_WHAT_IT_SAYS = re.compile(
    r"(?P<run>.*)@(tag:(?P<tag>.+)|best:(?P<best>.+?)(,(?P<mode>min|max))?)", re.DOTALL
)
STEP_NAME = re.compile(r"step-([0-9]{12})")


def step_name(step: int) -> str:
    """The name of the directory of a step in its run."""
    return f"step-{step:012d}"


def check_path(path: str | os.PathLike[str], what: str) -> str:
    """`path`, if it can be the path of a directory: not empty, and not a URL."""
    text = os.fspath(path) if isinstance(path, PATH) else None
    if not isinstance(text, str) or not text.strip():
        raise UsageError(
            f"{what} is not the path of a directory",
            facts={"expected": "a str or os.PathLike that is not empty", "got": shown(path)},
            hint="os.fsdecode() makes a str of bytes"
            if isinstance(path, bytes)
            else '"." is the working directory',
        )
    if not can_be_a_name(text):
        raise UsageError(
            f"{what} has a name that is not UTF-8, or has NUL in it",
            facts={"got": ascii(text)},
            hint="rename the directory, or make a link to it: ln -s OLD NEW",
        )
    if _URL.match(text):
        scheme = text.partition(":")[0]
        raise UsageError(
            f"{what} is a URL, not the path of a directory",
            facts={"expected": "a path such as runs/llama", "got": f"{scheme}://..."},
            hint="an object store is a level of a run: "
            'levels=[Directory(), ObjectStore("s3://b/llama")]; statehold ls RUN --levels lists it',
        )
    if (home := os.path.expanduser(text)) != text:
        raise UsageError(
            f"{what} begins with ~, which only a shell replaces",
            facts={"expected": home, "got": text},
            hint=f'pass os.path.expanduser("{text}")',
        )
    return text


def can_be_a_name(text: str) -> bool:
    """Whether the core, a manifest and a note can hold the path."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def absolute(path: str | os.PathLike[str], what: str) -> str:
    """`path`, absolute, if it can be the path of a directory."""
    text = check_path(path, what)
    try:
        return os.path.abspath(text)
    except FileNotFoundError:
        raise _deleted(text) from None


def _deleted(text: str) -> UsageError:
    return UsageError(
        "a path is relative, and the working directory was deleted",
        facts={"expected": "an absolute path", "got": text},
    )


def absolute_outside(path: str | os.PathLike[str], what: str) -> str:
    """As absolute(), of what is to be made. Raises UsageError if it would be deleted with a step,
    because it lies in the directory of one, also behind a link."""
    text = absolute(path, what)
    for above in (*Path(text).parents, *Path(os.path.realpath(text)).parents):
        if STEP_NAME.fullmatch(above.name):
            raise UsageError(
                f"{what} would lie in the directory of a step, and be deleted with it",
                facts={"expected": f"a path outside of {above}", "got": text},
            )
    return text


def check_run(run: str | os.PathLike[str]) -> str:
    """The path of a run, absolute. Raises UsageError for a new one that is called like a step, or
    lies in one, and for a link to one."""
    path = absolute_outside(run, "the run")
    for above, name in map(os.path.split, (path, os.path.realpath(path))):
        if named := STEP_NAME.fullmatch(name):  # otherwise the run would seem to have no steps
            raise UsageError(
                "the run is the directory of a step",
                facts={"expected": above, "got": path},
                hint=f"open the run, and call restore(state, step={int(named[1])})",
            )
    if _parts(path) is not None and not os.path.isdir(path):
        raise UsageError(
            "the run is called like a step",
            facts={"expected": "a path of its own", "got": path},
            hint="readers of this name would look for a step of another run",
        )
    return path


@dataclass(frozen=True, slots=True)
class NamedStep:
    """The step that a text names. run: as it was written. At most one of the others is set, and
    `mode` with `best`; without any of them it is the newest step."""

    run: str
    step: int | None = None
    best: str | None = None
    tag: str | None = None
    mode: str | None = None

    def __str__(self) -> str:
        if self.best is not None:
            what = f"best:{self.best},{self.mode}" if self.mode else f"best:{self.best}"
        elif self.tag is not None:
            what = f"tag:{self.tag}"
        else:
            what = "newest" if self.step is None else f"{self.step}"
        return f"{self.run}@{what}"

    @property
    def is_newest(self) -> bool:
        return self.step is None and self.best is None and self.tag is None


def named_step(text: str) -> NamedStep:
    """Which step of which run a text names; neither has to exist. Raises UsageError for RUN@WORD,
    if WORD names no step."""
    try:
        above, name = os.path.split(os.path.abspath(text) if text else "")
    except FileNotFoundError:
        raise _deleted(text) from None
    if found := STEP_NAME.fullmatch(name):
        return NamedStep(above, int(found[1]))
    parts = _parts(text)
    if os.path.isdir(text) or ("@" not in name and parts is None):
        return NamedStep(text)
    if parts is None and os.path.isdir(text.rpartition("@")[0]):
        raise _not_a_step(text)
    return parts or NamedStep(text)


def step_in_run(run: str, word: str) -> NamedStep:
    """The step that `word`, which begins with an `@`, names in `run`, whatever else has such a
    path. Raises UsageError for a word that names no step."""
    found = _parts(word)
    if found is None:
        raise _not_a_step(f"{run}{word}")
    return replace(found, run=run)


def check_step(text: str | os.PathLike[str], what: str) -> NamedStep:
    """The step that a text names; its run is absolute."""
    found = named_step(check_path(text, what))
    if "@" in os.path.basename(found.run) and not os.path.exists(found.run):
        raise _not_a_step(found.run)
    return replace(found, run=absolute(found.run, f"the run of {what}"))


def _not_a_step(text: str) -> UsageError:
    run, _, word = text.rpartition("@")
    return UsageError(
        "this is not the name of a step",
        facts={"run": run,
               "expected": "a number of up to 12 digits, newest, best:METRIC, or tag:NAME",
               "got": word or "nothing"},
        hint=f"the steps of this run: statehold ls {run}",
    )  # fmt: skip


def _parts(text: str) -> NamedStep | None:
    """RUN@..., cut at the right `@`; None for another text."""
    by_number, said = _AT_STEP.fullmatch(text), _BY_WHAT_IT_SAYS.fullmatch(text)
    if said and "/" in said[2]:  # of a path, unless the run is there
        run, is_run = said["run"], os.path.isdir(said["run"] or ".")
        said = said if is_run and not os.path.isdir(f"{run}@{said[2].partition('/')[0]}") else None
    # A metric or a tag may end like a number, and so may a run that is older than this grammar.
    if by_number and not (said and not os.path.isdir(by_number["run"])):
        number = by_number["step"]
        return NamedStep(by_number["run"], None if number == "newest" else int(number))
    return said and NamedStep(said["run"], None, said["best"], said["tag"], said["mode"])
