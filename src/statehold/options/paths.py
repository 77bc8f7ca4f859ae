"""Which paths can be those of a run, of a level, or of a checkpoint.

Every path that a user gives comes through here, to a class, a function or a command.

Invariants: nothing is opened or made here. What only a shell or an object store understands is
refused, with what to write instead. Otherwise statehold would make a directory called "s3:" or "~".
"""

from __future__ import annotations

import os
import re

from statehold.errors import UsageError, shown

PATH = (str, os.PathLike)
# Path() takes one slash away, and Databricks writes one.
_STORES = "s3|s3a|s3n|gs|gcs|az|adl|abfs|abfss|wasbs?|oss|hdfs|webhdfs|dbfs|hf|memory|https?|file"
_URL = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]*://|({_STORES}):/")
# RUN@STEP, with a number or "newest".
AT_STEP = re.compile(r"(?P<run>.*)@(?P<step>\d{1,12}|newest)", re.DOTALL)
_STEP = re.compile(r"step-\d{12}")


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


def absolute(path: str | os.PathLike[str], what: str) -> str:
    """`path`, absolute, if it can be the path of a directory."""
    return os.path.abspath(check_path(path, what))


def check_run(run: str | os.PathLike[str]) -> str:
    """The path of a run, absolute."""
    path = absolute(run, "the run")
    above, name = os.path.split(path)
    if _STEP.fullmatch(name):  # otherwise the run would seem to have no steps
        raise UsageError(
            "the run is the directory of a step",
            facts={"expected": above, "got": path},
            hint=f"open the run, and call restore(state, step={int(name[5:])})",
        )
    return path


def check_source(source: str | os.PathLike[str]) -> tuple[str, int | None]:
    """The run, absolute, and the step of RUN or RUN@STEP; None: the newest."""
    text = check_path(source, "the source")
    found = None if os.path.isdir(text) else AT_STEP.fullmatch(text)
    if found is None:
        return check_run(text), None
    return check_run(found["run"]), None if found["step"] == "newest" else int(found["step"])


def check_parent(parent: str | os.PathLike[str]) -> tuple[str, int | None]:
    """The run, absolute, and the step of RUN@STEP; None: the newest."""
    found = AT_STEP.fullmatch(check_path(parent, "the parent"))
    if found is None:
        raise UsageError(
            "the parent is not a step of a run",
            facts={"expected": "RUN@STEP, such as runs/base@1000 or runs/base@newest",
                   "got": os.fspath(parent)},
        )  # fmt: skip
    return check_run(found["run"]), None if found["step"] == "newest" else int(found["step"])
