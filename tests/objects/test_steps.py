"""The steps of a run in stores of every kind: commit, replace, retire, what is left over."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import statehold
from statehold.errors import ManifestError, MissingFileError, StepNotFoundError, StorageError
from statehold.format.saved import MANIFEST_NAME
from statehold.io.objects.client import no_limit
from statehold.steps.objects import ObjectSteps, commit_name

FIRST, SECOND, OTHER = "5f3a09c1-7", "5f3a09c1-8", "00000000-1"
DATA = "rank-00000-of-00001.safetensors"
BYTES_MAX = 1 << 20


def add(steps: ObjectSteps, step: int, attempt: str = FIRST, data: bytes = b"data") -> None:
    upload(steps, step, attempt, data)
    steps.publish(step, attempt, b"manifest of " + attempt.encode())


def upload(steps: ObjectSteps, step: int, attempt: str, data: bytes = b"data") -> None:
    steps.upload(step, attempt, DATA, len(data), [memoryview(data)])


def fetched(steps: ObjectSteps, step: int, size: int) -> bytes:
    memory = bytearray(size)
    steps.fetch(step, DATA, [(0, memoryview(memory))])
    return bytes(memory)


def below(steps: ObjectSteps) -> tuple[list[str], list[str]]:
    names, directories = steps.client.list()
    return sorted(names), sorted(directories)


def beside(steps: ObjectSteps) -> ObjectSteps:
    """Another user of the same store, who knows nothing of what is committed."""
    other = ObjectSteps("memory://")
    other.client = steps.client
    return other


def test_a_step_counts_when_it_is_published(steps: ObjectSteps) -> None:
    upload(steps, 7, FIRST)
    assert steps.steps() == []
    assert steps.size(7, DATA) is None
    with pytest.raises(StepNotFoundError):
        steps.read(7, DATA, BYTES_MAX)
    steps.publish(7, FIRST, b"manifest")
    assert steps.steps() == [7]
    assert steps.read(7, MANIFEST_NAME, BYTES_MAX) == b"manifest"
    assert steps.size(7, DATA) == 4
    assert steps.size(7, "rank-00001-of-00001.json") is None
    assert fetched(steps, 7, 4) == b"data"


def test_steps_are_listed_in_order(steps: ObjectSteps) -> None:
    wanted = [0, 3, 20, 100, 1000, 10**12 - 1]
    for step in reversed(wanted):  # with directories more than one page of the S3 server
        add(steps, step)
    steps.client.put("notes.txt", b"of somebody else")
    assert steps.steps() == wanted


def test_missing_and_too_large_files_are_named(steps: ObjectSteps) -> None:
    add(steps, 7)
    for name in (DATA, "no-such-file"):
        expected = StorageError if name == DATA else MissingFileError
        with pytest.raises(expected) as caught:
            steps.read(7, name, 3)
        assert FIRST in str(caught.value)


def test_has_says_what_was_uploaded_whole(steps: ObjectSteps) -> None:
    upload(steps, 7, FIRST)
    assert steps.has(7, FIRST, DATA, 4)
    assert not steps.has(7, FIRST, DATA, 5)
    assert not steps.has(7, SECOND, DATA, 4)


def test_a_step_saved_again_replaces_the_first(steps: ObjectSteps) -> None:
    add(steps, 7, FIRST, b"first")
    reader = beside(steps)
    first = fetched(reader, 7, 5)
    assert first == b"first"
    add(steps, 7, SECOND, b"second")
    assert steps.steps() == [7]
    assert below(steps)[1] == [f"step-000000000007.{SECOND}"]
    assert fetched(steps, 7, 6) == b"second"
    with pytest.raises(MissingFileError):
        fetched(reader, 7, 5)
    assert fetched(reader, 7, 6) == b"second"


def test_publishing_twice_is_publishing(steps: ObjectSteps) -> None:
    add(steps, 7)
    steps.publish(7, FIRST, b"manifest")
    assert fetched(steps, 7, 4) == b"data"


def test_another_manifest_than_the_committed_one_is_damage(steps: ObjectSteps) -> None:
    add(steps, 7)
    steps.client.put(f"step-000000000007.{FIRST}/{MANIFEST_NAME}", b"another")
    with pytest.raises(ManifestError):
        steps.read(7, MANIFEST_NAME, BYTES_MAX)


def test_a_retired_step_is_gone(steps: ObjectSteps) -> None:
    add(steps, 7)
    add(steps, 8)
    steps.retire(7)
    steps.retire(7)
    assert steps.steps() == [8]
    assert below(steps) == ([commit_name(8)], [f"step-000000000008.{FIRST}"])
    with pytest.raises(StepNotFoundError):
        steps.fetch(7, DATA, [(0, memoryview(bytearray(4)))])


def test_abandoning_leaves_what_is_committed(steps: ObjectSteps) -> None:
    add(steps, 7, FIRST)
    upload(steps, 7, SECOND)
    steps.abandon(7, SECOND)
    steps.abandon(7, FIRST)
    steps.abandon(9, FIRST)
    assert below(steps) == ([commit_name(7)], [f"step-000000000007.{FIRST}"])


def test_clear_takes_what_nothing_names(steps: ObjectSteps) -> None:
    add(steps, 7, SECOND)
    for step, attempt in [(7, FIRST), (8, FIRST), (9, OTHER)]:
        upload(steps, step, attempt)
    steps.client.put("notes/of-somebody-else.txt", b"")
    steps.clear(but_for=9)
    kept = ["notes", f"step-000000000007.{SECOND}", f"step-000000000009.{OTHER}"]
    assert below(steps) == ([commit_name(7)], kept)


def test_a_damaged_commit_object(steps: ObjectSteps) -> None:
    add(steps, 7, FIRST)
    upload(steps, 7, SECOND)
    steps.client.put(commit_name(7), b"{}")
    with pytest.raises(ManifestError):
        steps.read(7, MANIFEST_NAME, BYTES_MAX)
    steps.clear()
    assert len(below(steps)[1]) == 2  # one of them may be the step: left for a person
    steps.publish(7, SECOND, b"manifest")
    steps.clear()
    assert below(steps)[1] == [f"step-000000000007.{SECOND}"]


def test_a_step_set_aside_counts_no_more_and_keeps_its_files(steps: ObjectSteps) -> None:
    shared, file = f"{7:064x}.safetensors", "rank-00000-of-00001-1.safetensors"
    steps.refer(7, FIRST, {file: shared})
    steps.shared.upload(shared, 4, [memoryview(b"both")], no_limit)
    add(steps, 7, FIRST)
    assert steps.quarantine(7) == steps.client.path("step-000000000007.corrupt")
    assert steps.steps() == []
    with pytest.raises(StepNotFoundError):
        steps.read(7, MANIFEST_NAME, BYTES_MAX)
    for act in (steps.clear, beside(steps).clear):
        act()
    add(steps, 7, SECOND)  # the same step again, and a sweep of shared objects after it went
    steps.retire(7)
    add(steps, 8)
    steps.clear()
    aside = f"step-000000000007.{FIRST}"
    kept = ["shared", aside, f"step-000000000008.{FIRST}"]
    assert below(steps) == (["step-000000000007.corrupt", commit_name(8)], kept)
    assert steps.client.get(f"{aside}/{DATA}", BYTES_MAX) == b"data"
    assert steps.shared.has(shared, 4)
    assert steps.quarantine(7).endswith(".corrupt")  # a repeated request, or another process
    steps.client.delete("step-000000000007.corrupt")  # a person is done with it
    steps.clear()
    assert aside not in below(steps)[1]


@pytest.mark.thorough
@pytest.mark.parametrize("steps", ["memory", "s3"], indirect=True)
def test_a_reader_never_sees_half_a_step(steps: ObjectSteps) -> None:
    """Two steps are saved again and again, and retired, while another one lists and reads."""
    reader, done, whole = beside(steps), threading.Event(), 0

    def write() -> None:
        for number in range(10_000):
            if number >= 25 and whole:
                break
            add(steps, number % 2, f"00000000-{number}", b"manifest of 00000000-%d" % number)
            if number % 5 == 4:
                steps.retire(number % 2)
        done.set()

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        while not done.is_set() and not writing.done():
            for step in reader.steps():
                # It may be gone, or replaced, by the time that it is read; never half there.
                with contextlib.suppress(StepNotFoundError, MissingFileError):
                    manifest = reader.read(step, MANIFEST_NAME, BYTES_MAX)
                    data = fetched(reader, step, len(manifest))
                    assert data == manifest
                    whole += 1
        writing.result()
    assert whole > 0


class Died(BaseException):
    """The process ends here."""


def interrupt(steps: ObjectSteps, at: int) -> Callable[[], None]:
    """Die before the operation number `at` that changes the store; returns how to live on."""
    client, made = steps.client, iter(range(10**6))

    def before(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if next(made) == at:
                raise Died
            return real(*args)

        return call

    names = ("put", "upload", "delete", "delete_below")
    for name in names:
        setattr(client, name, before(getattr(client, name)))

    def live_on() -> None:
        for name in names:
            delattr(client, name)

    return live_on


def replace_and_retire(steps: ObjectSteps) -> Iterator[None]:
    add(steps, 7, SECOND, b"second")
    yield
    steps.retire(6)


def died_at(steps: ObjectSteps, at: int) -> bool:
    live_on = interrupt(steps, at)
    try:
        for _ in replace_and_retire(steps):
            pass
    except Died:
        return True
    finally:
        live_on()
    return False


def test_a_death_before_any_operation_leaves_whole_steps(tmp_path: Path) -> None:
    deaths = 0
    for at in range(20):
        steps = ObjectSteps(f"file://{tmp_path}/{at}")
        add(steps, 6, FIRST, b"sixth")
        add(steps, 7, FIRST, b"first")
        deaths += died_at(steps, at)
        after = ObjectSteps(f"file://{tmp_path}/{at}")
        contents = {
            step: fetched(after, step, after.size(step, DATA) or 0) for step in after.steps()
        }
        assert contents.pop(7) in (b"first", b"second")
        assert contents in ({}, {6: b"sixth"})
        after.clear()
        assert len(below(after)[1]) == len(after.steps())
    assert deaths == 6  # upload, manifest, commit, the old directory; commit, directory


@pytest.mark.thorough
def test_ten_thousand_steps_are_listed() -> None:
    steps = ObjectSteps("memory://")
    for step in range(10_000):
        steps.client.put(commit_name(step), b"")
    assert steps.steps() == list(range(10_000))


def test_a_saved_step_is_the_same_step_there(steps: ObjectSteps, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with statehold.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(5, {"w": torch.arange(1000.0), "n": 3}).wait("committed", timeout=60)
    local = tmp_path / "run" / "step-000000000005"
    for path in local.iterdir():
        if path.name != MANIFEST_NAME:
            data = path.read_bytes()
            steps.upload(5, FIRST, path.name, len(data), [memoryview(data)])
    steps.publish(5, FIRST, (local / MANIFEST_NAME).read_bytes())
    saved = steps.open(5)
    assert saved.step == 5
    assert saved.tensors["w"].shape == (1000,)
    (entry,) = saved.files
    memory = bytearray(entry.bytes)
    steps.fetch(5, entry.name, [(0, memoryview(memory))])
    expected = hashlib.sha256((local / entry.name).read_bytes()).digest()
    assert hashlib.sha256(memory).digest() == expected
    with pytest.raises(StepNotFoundError):
        steps.open(6)
