"""The names of the objects of a run, and the content of a commit object.

    step-000000000100.5f3a09c1-7/manifest.json     one attempt at a step: a whole step directory
    step-000000000100.5f3a09c1-7/rank-00000-of-00001.safetensors
    step-000000000100.5f3a09c1-7/rank-00000-of-00001.shared.json
                                                   which data files of a rank are shared objects
    step-000000000100.commit                       names the attempt that counts
    shared/0123456789abcdef....safetensors         a data file that several steps have

Owns: these names, and the JSON of commit objects and references, sealed like a manifest.
Invariants: parsing is strict, and no name, given or read, leads out of the run's prefix.
Not here: the store (io/objects/client), the order of operations (objects).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from statehold.checkpoint.store.directory_names import ATTEMPT
from statehold.encoding.strictjson import Checker
from statehold.errors import InvariantError, ManifestError
from statehold.format.entries import seal, unseal

FORMAT = "statehold.commit"
VERSION = 1
COMMIT_BYTES_MAX = 4096

_DIRECTORY = re.compile(rf"step-([0-9]{{12}})\.({ATTEMPT})")
_COMMIT = re.compile(r"step-([0-9]{12})\.commit")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
SHARED = "shared"
_SHARED_FORMAT = "statehold.shared"
_SHARED_MEMBERS = ("format", "version", "files", "shared_sha256")
_SHARED_OBJECT = re.compile(r"[0-9a-f]{64}\.safetensors")
_MEMBERS = ("format", "version", "step", "directory", "manifest_sha256", "commit_sha256")


def commit_name(step: int) -> str:
    return f"step-{step:012d}.commit"


def step_of_commit(name: str) -> int | None:
    """The step whose commit object has this name; None for any other name."""
    match = _COMMIT.fullmatch(name)
    return int(match[1]) if match else None


def directory_name(step: int, attempt: str) -> str:
    name = f"step-{step:012d}.{attempt}"
    if _DIRECTORY.fullmatch(name) is None:
        raise InvariantError("not a valid name of an attempt to save", facts={"got": repr(name)})
    return name


def attempt_of(name: str) -> tuple[int, str] | None:
    """(step, attempt) of a directory with this name; None for any other name."""
    match = _DIRECTORY.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def is_file_name(name: str) -> bool:
    """Whether a file of a step may have this name."""
    return _FILE.fullmatch(name) is not None


def check_file(name: str) -> str:
    """`name`, checked as the name of a file of a step."""
    if not is_file_name(name):
        raise InvariantError("not a valid name of a file of a step", facts={"got": repr(name)})
    return name


def reference_name(rank: int, world_size: int) -> str:
    """The object that says which data files of a rank are shared objects."""
    return f"rank-{rank:05d}-of-{world_size:05d}.shared.json"


def is_reference_name(name: str) -> bool:
    return name.endswith(".shared.json")


def shared_name(digest: str) -> str:
    """The shared object for the file with the content of this sha256."""
    return f"{digest}.safetensors"


def encode_references(files: Mapping[str, str]) -> bytes:
    """The content of a reference object. files: data file -> shared object."""
    document = {"format": _SHARED_FORMAT, "version": VERSION, "files": dict(files)}
    return seal(document, "shared")


def decode_references(raw: bytes, path: str) -> dict[str, str]:
    """Data file -> shared object. Raises ManifestError, or FormatVersionError."""
    check = Checker(ManifestError, "a reference object is not valid", path)
    _, document = unseal(check, raw, "shared", _SHARED_FORMAT, VERSION)
    check.members(document, "shared", _SHARED_MEMBERS)
    files = check.object(document["files"], "files")
    for file, name in files.items():
        check.text(file, "files", _FILE, "names of files of a step")
        check.text(name, f"files.{file}", _SHARED_OBJECT, "64 hex digits and .safetensors")
    return files


@dataclass(frozen=True, slots=True)
class CommitObject:
    """The directory of the step, and the sha256 of its manifest."""

    step: int
    directory: str
    manifest_sha256: str

    def encode(self) -> bytes:
        document = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "directory": self.directory,
            "manifest_sha256": self.manifest_sha256,
        }
        return seal(document, "commit")

    @staticmethod
    def decode(raw: bytes, step: int, path: str) -> CommitObject:
        """The commit object of `step` in `raw`. Raises ManifestError, or FormatVersionError."""
        check = Checker(ManifestError, "a commit object is not valid", path)
        _, document = unseal(check, raw, "commit", FORMAT, VERSION)
        check.members(document, "commit", _MEMBERS)
        check.integer(document["step"], "step", low=step, high=step)
        expected = f"the directory of an attempt at step {step}"
        directory = check.text(document["directory"], "directory", _DIRECTORY, expected)
        if not directory.startswith(f"step-{step:012d}."):
            check.fail("directory", expected, repr(directory))
        digest = check.text(
            document["manifest_sha256"], "manifest_sha256", _DIGEST, "64 digits 0-9 and a-f"
        )
        return CommitObject(step, directory, digest)
