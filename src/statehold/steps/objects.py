"""The steps of one run in an object store: the commit protocol on a store without rename.

    PREFIX/step-000000000100.5f3a09c1-7/...     one attempt at a step, manifest.json included
    PREFIX/step-000000000100.commit             names the attempt that counts: this object alone
                                                makes the step committed
    PREFIX/step-000000000080.corrupt    was a commit object, until a restore found the step corrupt;
                                        left for a person, with all attempts at the step
    PREFIX/shared/0123456789abcdef....safetensors    a data file that several steps have
    PREFIX/run.json                             the run that owns the steps (owners)

Owns: these names, and the JSON of commit objects and references, sealed like a manifest; which
shared objects stay.
Invariants: a listing always shows whole steps, and a commit object never names files that are being
deleted or uploaded. Every object is whole or missing. No name, given or read, leads out of PREFIX.
Thread-safe. One job writes, any number may read.

Not here: which steps are kept, what is uploaded when (levels); transfers (io/objects/client).
"""

from __future__ import annotations

import contextlib
import copy
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from statehold.encoding.strictjson import Checker
from statehold.errors import (
    CorruptionError,
    InvariantError,
    ManifestError,
    MissingFileError,
    StepNotFoundError,
    StorageError,
    UnavailableError,
    no_such_step,
)
from statehold.format.entries import seal, sha256, unseal
from statehold.format.saved import MANIFEST_NAME
from statehold.io.objects.client import DEADLINE_S, PART_BYTES, ObjectClient, no_limit
from statehold.io.objects.parallel import Extent, side_by_side
from statehold.layout.plan import file_of
from statehold.options.paths import STEP_NAME, step_name
from statehold.process.warn import logger
from statehold.steps.directories import ATTEMPT, step_of
from statehold.steps.near_files import NearFiles
from statehold.steps.shelf import FetchedFile, Ranges, Shelf

# -- the steps -------------------------------------------------------------------------------------
# A step is uploaded file by file into the directory of its attempt. `publish` puts the manifest,
# then the commit object. One request creates the commit object, or replaces that of an earlier
# attempt. Afterwards the directory that it no longer names is deleted. `retire` deletes the commit
# object first. If a step is replaced while it is read, the reader gets MissingFileError, and the
# new step when it asks again.
#
# A death leaves directories that no commit object names; `clear` deletes them. It also leaves parts
# of an upload that were never put together, which no listing shows. The store's own lifecycle rule
# removes those (docs/format.md).


AT_ONCE = 16
ANSWER_S = 10.0  # for a question that a restart waits for, with all its retries
SILENT_S = 30.0

T = TypeVar("T")


class Neighbour:
    """The shared objects of the run at `url`, for the run of `client`: the store copies them.

    The name of a shared object follows from its content, so an object of the other run with the
    same name and size is the file. The copy is an object of this run alone. Requests go to the
    store of this run only, with its options, and the other run is only read. An object is copied
    whole or not at all. What cannot be copied is left out, and no error of the store is raised.

    If they are not in one store, nothing is asked, and nothing found.
    """

    def __init__(self, client: ObjectClient, url: str) -> None:
        self._client = client
        self._url = url
        self._both = client.around(url)
        self._failed = False

    def bring(self, files: Mapping[str, int], before: Callable[[int], None]) -> set[str]:
        """Copy these shared objects (name -> size), and return the names of those that are copied.

        before(0) is called again and again. What it raises ends the copying, and is raised here.
        """
        found: set[str] = set()
        names = list(files) if self._both is not None else []
        for at in range(0, len(names), AT_ONCE):
            before(0)
            some = names[at : at + AT_ONCE]
            done = side_by_side([partial(self._bring, name, files[name]) for name in some], AT_ONCE)
            found.update(name for name, is_copied in zip(some, done, strict=True) if is_copied)
        return found

    def _bring(self, name: str, size: int) -> bool:
        if self._both is None or self._failed:
            return False
        both, theirs, ours = self._both
        source, target = f"{theirs}{SHARED}/{name}", f"{ours}{SHARED}/{name}"
        try:
            if both.size(source) != size:
                return False
            both.copy(source, target)
            return self._client.has(f"{SHARED}/{name}", size)
        except MissingFileError:  # the other run has just deleted it
            return False
        except StorageError as error:
            self._give_up(error)
            return False

    def _give_up(self, error: StorageError) -> None:
        """Ask no more: each request would wait as long for its failure."""
        if not self._failed:
            self._failed = True
            logger.info("files that the run at %s has are uploaded again: %s", self._url, error)


class ObjectSteps(Shelf):
    """The steps below `url`: s3://bucket/prefix, gs://..., az://..., file:///..., memory://.

    options: options of the store (io/objects/client lists them); credentials come from the
        environment.
    deadline_s: how long one request may take with all its retries.
    part_bytes: size of the parts of uploads and downloads.
    near: directories for fetched files.

    Only this object and its `client`, which makes all requests, see memory://.
    """

    def __init__(
        self,
        url: str,
        *,
        options: Mapping[str, Any] = {},
        deadline_s: float = DEADLINE_S,
        part_bytes: int = PART_BYTES,
        near: Sequence[str] = (),
    ) -> None:
        self.client = ObjectClient(url, options, deadline_s=deadline_s, part_bytes=part_bytes)
        self.name = self.client.url
        self._near = NearFiles(near)
        self._is_late = False
        self._silent: tuple[float, UnavailableError] | None = None
        self.shared = SharedObjects(self.client)
        self._is_sweep_due = True  # an earlier job may have left objects
        self._guard = threading.Lock()
        self._commits: dict[int, CommitObject] = {}

    def __repr__(self) -> str:
        return f"ObjectSteps({self.client.url!r})"

    @property
    def where(self) -> str:
        """The URL below which the steps are."""
        return self.client.url

    def note(self, name: str) -> bytes | None:
        """A small object next to the steps; None if there is none."""
        with contextlib.suppress(MissingFileError):
            return self._answer(lambda client: client.get(name, COMMIT_BYTES_MAX))
        return None

    def put_note(self, name: str, content: bytes) -> None:
        """Create or replace a small object next to the steps."""
        self.client.put(name, content)

    def stop(self) -> None:
        """Wait for the store no longer than a few seconds from now on."""
        self.client.stop()

    def neighbour(self, url: str) -> Neighbour:
        """The run at `url`, as a place to have shared files copied from."""
        return Neighbour(self.client, url)

    # -- reading ---------------------------------------------------------------------------

    def steps(self) -> list[int]:
        names, _ = self._answer(lambda client: client.list())
        return sorted(step for step in map(step_of_commit, names) if step is not None)

    def ask_again(self) -> None:
        """The next question is asked, even if the store has just been silent."""
        self._silent = None

    def _answer(self, ask: Callable[[ObjectClient], T]) -> T:
        """The answer to a question that somebody waits for, who could go on without the store.

        A store that did not answer is not asked again for SILENT_S: a restart has many questions.
        """
        if self._silent is not None and time.monotonic() < self._silent[0] + SILENT_S:
            raise copy.copy(self._silent[1])
        self._is_late = False
        try:
            return ask(self.client.hasty(ANSWER_S, self._say_late))
        except UnavailableError as error:
            self._silent = time.monotonic(), copy.copy(error)
            raise

    def _say_late(self) -> None:
        if not self._is_late:
            self._is_late = True
            logger.warning(
                "%s does not answer; it is given up after %g s", self.client.url, ANSWER_S
            )

    def path(self, step: int) -> str:
        return self.client.path(step_name(step))

    def read(self, step: int, name: str, max_bytes: int) -> bytes:
        """The content of a file of a committed step.

        A reader begins with the manifest. Reading it asks again which attempt is the step.
        Raises StepNotFoundError, MissingFileError, CorruptionError or StorageError.
        """
        is_manifest = name == MANIFEST_NAME
        with self._directory(step, anew=is_manifest) as commit:
            path = f"{commit.directory}/{check_file(name)}"
            data = self.client.get(path, max_bytes)
        if is_manifest and sha256(data) != commit.manifest_sha256:
            facts = {"file": self.client.path(path), "expected": commit.manifest_sha256}
            facts["got"] = sha256(data)
            raise ManifestError("a manifest is not the one that was committed", facts=facts)
        return data

    def size(self, step: int, name: str) -> int | None:
        """The size of a file of a committed step; None if there is no such file, or step."""
        with contextlib.suppress(StepNotFoundError), self._directory(step) as commit:
            return self.client.size(self.shared.path_of(commit.directory, check_file(name)))
        return None

    def find(self, step: int, name: str, nbytes: int, ranges: Ranges = None) -> str:
        size = self.size(step, name)
        if size != nbytes:
            raise MissingFileError(
                "a file of a step is not in the object store as it was committed",
                facts={"file": f"{self.path(step)}/{name}",
                       "expected": f"{nbytes} bytes", "got": size},
            )  # fmt: skip
        return self._near.bring(step, name, nbytes, ranges, partial(self.fetch, step, name))

    def open_file(self, step: int, name: str) -> FetchedFile:
        return FetchedFile(partial(self.fetch, step, name))

    def protect(self, step: int) -> contextlib.AbstractContextManager[None]:
        # A reader of a step that is replaced in the store gets an error, and asks again.
        return self._near.reading(step)

    def has_readers(self, step: int) -> bool:
        """Whether this process reads the step, or keeps it."""
        return self._near.has_readers(step)

    def close(self) -> None:
        """Remove the files that were fetched."""
        self._near.close()

    def fetch(self, step: int, name: str, targets: Sequence[Extent]) -> None:
        """Fill memory with ranges of a file of a committed step, in parallel parts, with up to
        IN_FLIGHT_BYTES of memory."""
        with self._directory(step) as commit:
            self.client.fetch(self.shared.path_of(commit.directory, check_file(name)), targets)

    @contextlib.contextmanager
    def _directory(self, step: int, anew: bool = False) -> Iterator[CommitObject]:
        """The commit object of a step; asked for again after a file was missing."""
        with self._guard:
            known = self._commits.get(step)
        commit = self._commit(step) if anew or known is None else known
        if commit is None:
            raise no_such_step(step, self.client.url)
        try:
            yield commit
        except MissingFileError:
            self._forget(step)
            self.shared.forget(commit.directory)
            raise

    def _commit(self, step: int) -> CommitObject | None:
        """The commit object of a step as it is now; None if there is none."""
        name = commit_name(step)
        try:
            raw = self.client.get(name, COMMIT_BYTES_MAX)
        except MissingFileError:
            self._forget(step)
            return None
        commit = CommitObject.decode(raw, step, self.client.path(name))
        with self._guard:
            self._commits[step] = commit
        return commit

    def _forget(self, step: int) -> None:
        with self._guard:
            self._commits.pop(step, None)

    # -- writing ---------------------------------------------------------------------------

    def refer(self, step: int, attempt: str, files: Mapping[str, str]) -> None:
        """Say which shared objects files of an attempt are: data file -> object."""
        if files:
            self.shared.refer(directory_name(step, attempt), files)

    def upload(
        self,
        step: int,
        attempt: str,
        name: str,
        size: int,
        blocks: Iterable[memoryview],
        before: Callable[[int], None] = no_limit,
    ) -> None:
        """Create a file of an attempt, `size` bytes from `blocks`; whole or not at all.

        This streams: it takes blocks as it sends parts. The memory of a block may be used again
        when the next block is taken, because the block is copied. A read-only block (bytes, a
        mapped file) is not copied, which is faster. `before(n)` is called before each n bytes. An
        exception of it or of `blocks` ends the upload, and is raised here.
        """
        path = f"{directory_name(step, attempt)}/{check_file(name)}"
        self.client.upload(path, size, blocks, before)

    def has(self, step: int, attempt: str, name: str, size: int) -> bool:
        """Whether a file of an attempt was uploaded before: objects are whole or missing."""
        return self.client.has(f"{directory_name(step, attempt)}/{check_file(name)}", size)

    def uploaded(self, step: int, attempt: str, name: str) -> FetchedFile:
        """A file of an attempt that was not published, for reading."""
        path = f"{directory_name(step, attempt)}/{check_file(name)}"
        return FetchedFile(partial(self.client.fetch, path))

    def publish(
        self, step: int, attempt: str, manifest: bytes, records: Collection[str] = ()
    ) -> None:
        """Commit a step whose other files are uploaded. May be called again after a failure.

        records: those of the ranks, by name; raises MissingFileError if one is not there.
        """
        directory = directory_name(step, attempt)
        wanted = {f"{directory}/{name}" for name in records}
        if missing := wanted and wanted.difference(self.client.list(directory)[0]):
            facts = {"file": self.client.path(min(missing)), "missing": len(missing)}
            raise MissingFileError("a copy lacks the part of a rank", facts=facts)
        self.shared.check(directory)
        before = self._named_by(step)
        self.client.put(f"{directory}/{MANIFEST_NAME}", manifest)
        self._put_commit(CommitObject(step, directory, sha256(manifest)))
        if before not in (None, directory):
            with contextlib.suppress(StorageError):  # it is committed; clear() tries again
                self._delete(str(before))
        with contextlib.suppress(StorageError, CorruptionError):  # the next commit tries again
            self.client.tidy(directory)
            self._sweep()

    def _sweep(self) -> None:
        """Delete shared objects that nothing refers to, if a directory was deleted before.

        No other rank copies anything now: all have done their part of the step, and wait.
        """
        if self._is_sweep_due:
            self.shared.sweep(filter(attempt_of, self.client.list()[1]))
            self._is_sweep_due = False

    def _delete(self, directory: str) -> None:
        self._is_sweep_due = True
        self.shared.forget(directory)
        self.client.delete_below(directory)

    def _put_commit(self, commit: CommitObject) -> None:
        try:
            self.client.put(commit_name(commit.step), commit.encode())
        except StorageError:
            # The answer may have been lost, and not the request. A store in files loses none, but
            # shows what it could not sync.
            if self.client.is_local or not self._confirms(commit):
                raise
        with self._guard:
            self._commits[commit.step] = commit

    def _confirms(self, commit: CommitObject) -> bool:
        with contextlib.suppress(StorageError, CorruptionError):
            return self._commit(commit.step) == commit
        return False

    def _named_by(self, step: int) -> str | None:
        """The directory that the commit object names; None if there is none, or it is damaged."""
        try:
            commit = self._commit(step)
        except CorruptionError:
            return None  # clear() finds the directory that it should have named
        return commit.directory if commit else None

    # -- deleting --------------------------------------------------------------------------

    def retire(self, step: int) -> None:
        """Retire a step: first its commit object, then its files. A missing step is no error."""
        directory = self._named_by(step)
        self._forget(step)
        self.client.delete(commit_name(step))
        if directory is not None:
            self._delete(directory)

    def quarantine(self, step: int) -> str:
        """Set a damaged step aside: no reader takes it, its files stay. Returns its new path."""
        self._forget(step)
        aside = f"{step_name(step)}{CORRUPT}"
        with contextlib.suppress(MissingFileError):  # a request that was repeated has done it
            self.client.rename(commit_name(step), aside)
        return self.client.path(aside)

    def abandon(self, step: int, attempt: str) -> None:
        """Give up an attempt that was not published. clear() deletes what cannot be deleted now.

        An attempt that was published after all, although no answer said so, stays.
        """
        directory = directory_name(step, attempt)
        with contextlib.suppress(StorageError):
            if self._named_by(step) != directory:
                self._delete(directory)

    def clear(self, but_for: int | None = None, *, and_newer: bool = True) -> None:
        """Delete the directories that no commit object names, except attempts at the step
        `but_for`, and without `and_newer` those at newer steps: other ranks may be ahead. Those at
        a step that was set aside stay, too: its commit object may be damaged.

        For the one job that writes: it also deletes attempts of other jobs that are under way.
        """
        self.client.tidy()
        names, directories = self.client.list()
        committed = {step_of_commit(name) for name in names}
        found = {name: known for name in directories if (known := attempt_of(name))}
        several = Counter(step for step, _ in found.values())
        for directory, (step, _) in found.items():
            # The only directory of a committed step is its own, so that needs no request.
            is_named = step in committed and several[step] == 1
            stays = but_for is not None and (step == but_for or (step > but_for and not and_newer))
            stays = stays or f"{step_name(step)}{CORRUPT}" in names
            if not is_named and not stays:
                self._clear_one(step, directory)

    def _clear_one(self, step: int, directory: str) -> None:
        try:
            commit = self._commit(step)
        except CorruptionError:
            return  # it may be the step's own: left for a person
        if commit is None or commit.directory != directory:
            self._delete(directory)


# -- files that several steps have -----------------------------------------------------------------
# Such a file is one object, and references to it:
#
# 1. A rank puts the reference object of its files into the directory of the attempt.
# 2. It uploads those of the shared objects that are not there. Their names follow from their
#    content.
# 3. The rank that commits checks that all objects that the attempt refers to are there (`check`).
# 4. The commit object makes the step.
# 5. If steps were deleted since the last commit, it deletes the objects to which no directory
#    refers (`sweep`).
#
# An object goes only after the reference objects of all steps that had it, so a committed step
# never refers to an object that is being deleted. One thread does 3 and 5, one after the other: an
# object that another rank found in 2, and that a sweep deleted since, is missing in 3. Then the
# copy fails, and the next one uploads it. If a reference object cannot be read, nothing is deleted.


_REFERENCES_BYTES_MAX = 1 << 20
_READS_AT_ONCE = 16


class SharedObjects:
    """The shared objects below the URL of a run. Thread-safe."""

    def __init__(self, client: ObjectClient) -> None:
        self._client = client
        self._guard = threading.Lock()
        self._known: dict[str, Mapping[str, str]] = {}  # by the path of the reference object

    # -- by every rank ---------------------------------------------------------------------

    def refer(self, directory: str, files: Mapping[str, str]) -> None:
        """Step 1, for files of any ranks: data file -> shared object."""
        by_rank: dict[str, dict[str, str]] = {}
        for file, name in files.items():
            by_rank.setdefault(_references_of(file), {})[file] = name
        for reference, its in by_rank.items():
            self._client.put(f"{directory}/{reference}", encode_references(its))

    def has(self, name: str, size: int) -> bool:
        """Whether a shared object is there."""
        return self._client.has(f"{SHARED}/{name}", size)

    def upload(
        self, name: str, size: int, blocks: Iterable[memoryview], before: Callable[[int], None]
    ) -> None:
        """Step 2. As ObjectSteps.upload()."""
        self._client.upload(f"{SHARED}/{name}", size, blocks, before)

    # -- by readers ------------------------------------------------------------------------

    def path_of(self, directory: str, file: str) -> str:
        """The object with the bytes of a file of a step."""
        found = file_of(file)
        if found is None or not found[2]:
            return f"{directory}/{file}"  # the first file of a rank is of one step only
        name = self._references(f"{directory}/{_references_of(file)}").get(file)
        return f"{directory}/{file}" if name is None else f"{SHARED}/{name}"

    def forget(self, directory: str) -> None:
        """The directory is being deleted, or may be another one now."""
        with self._guard:
            self._known = {
                path: files
                for path, files in self._known.items()
                if not path.startswith(f"{directory}/")
            }

    def _references(self, path: str) -> Mapping[str, str]:
        with self._guard:
            known = self._known.get(path)
        if known is None:
            try:
                raw = self._client.get(path, _REFERENCES_BYTES_MAX)
            except MissingFileError:
                return {}  # the next attempt may put it there
            known = decode_references(raw, self._client.path(path))
            with self._guard:
                self._known[path] = known
        return known

    # -- by the rank that commits ------------------------------------------------------------

    def check(self, directory: str) -> None:
        """Step 3. Raises MissingFileError."""
        wanted = self._wanted_by([directory])
        missing = wanted.difference(self._there()) if wanted else wanted
        if missing:
            self.forget(directory)
            facts = {"file": self._client.path(min(missing)), "missing": len(missing)}
            raise MissingFileError("an object that the step shares is gone", facts=facts)

    def sweep(self, directories: Iterable[str]) -> None:
        """Step 5. directories: all that are there, of steps and of attempts."""
        self._client.tidy(SHARED)
        if there := self._there():
            wanted = self._wanted_by(directories)
            for path in there - wanted:
                self._client.delete(path)

    def _there(self) -> set[str]:
        """The shared objects. Whatever else lies there is of somebody else."""
        paths = self._client.list(SHARED)[0]
        return {path for path in paths if _SHARED_OBJECT.fullmatch(path.rpartition("/")[2])}

    def _wanted_by(self, directories: Iterable[str]) -> set[str]:
        """The paths of the objects to which directories refer."""
        lists = [partial(self._client.list, each) for each in directories]
        listed = side_by_side(lists, _READS_AT_ONCE)
        found = [path for names, _ in listed for path in names if path.endswith(_REFERENCES)]
        files = side_by_side([partial(self._references, each) for each in found], _READS_AT_ONCE)
        return {f"{SHARED}/{name}" for each in files for name in each.values()}


def _references_of(file: str) -> str:
    """The reference object for a data file: that of the rank whose file it is."""
    found = file_of(file)
    assert found is not None
    return f"rank-{found[0]:05d}-of-{found[1]:05d}{_REFERENCES}"


# -- names, and the commit object ------------------------------------------------------------------
# Parsing is strict. A directory of an attempt has the objects manifest.json,
# rank-00000-of-00001.safetensors and rank-00000-of-00001.shared.json. The last of these says which
# data files of a rank are shared objects.


FORMAT = "statehold.commit"
VERSION = 1
COMMIT_BYTES_MAX = 4096

_DIRECTORY = re.compile(rf"{STEP_NAME.pattern}\.({ATTEMPT})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
SHARED = "shared"
_SHARED_FORMAT = "statehold.shared"
_REFERENCES = ".shared.json"
_SHARED_MEMBERS = ("format", "version", "files", "shared_sha256")
_SHARED_OBJECT = re.compile(r"[0-9a-f]{64}\.safetensors")
_MEMBERS = ("format", "version", "step", "directory", "manifest_sha256", "commit_sha256")


CORRUPT = ".corrupt"


def commit_name(step: int) -> str:
    return f"{step_name(step)}.commit"


def step_of_commit(name: str) -> int | None:
    """The step whose commit object has this name; None for any other name."""
    stem, _, end = name.rpartition(".")
    return step_of(stem) if end == "commit" else None


def directory_name(step: int, attempt: str) -> str:
    name = f"{step_name(step)}.{attempt}"
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
        if not directory.startswith(f"{step_name(step)}."):
            check.fail("directory", expected, repr(directory))
        digest = check.text(
            document["manifest_sha256"], "manifest_sha256", _DIGEST, "64 digits 0-9 and a-f"
        )
        return CommitObject(step, directory, digest)
