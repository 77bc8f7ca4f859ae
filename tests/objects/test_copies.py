"""A store copies shared objects from one run to another, and only what is whole there counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from statehold.errors import ClosedError
from statehold.io.objects.client import ObjectClient, around, no_limit
from statehold.steps.objects import ObjectSteps
from support import s3

NAMES = [f"{number:064x}.safetensors" for number in range(20)]
CONTENT = {name: name.encode() * (1 + index) for index, name in enumerate(NAMES)}
SIZES = {name: len(data) for name, data in CONTENT.items()}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("s3://b/runs/one", "s3://b/runs/two", ("s3://b/runs", "one/", "two/")),
        ("s3://b/one", "s3://b/two/deep", ("s3://b", "one/", "two/deep/")),
        ("s3://b/one", "s3://b/one/two", ("s3://b/one", "", "two/")),
        ("gs://b", "gs://b/one", ("gs://b", "", "one/")),
        ("s3://b/run", "s3://b/runs", ("s3://b", "run/", "runs/")),
        ("s3://b/a%20b", "s3://b/c d", ("s3://b", "a b/", "c d/")),
        ("file:///data/one", "file:///data/two", ("file:///data", "one/", "two/")),
        ("file:///data/one", "file:///mnt/two", None),
        ("s3://b/one", "s3://b/one", None),
        ("s3://b/one", "s3://c/one", None),
        ("s3://b/one", "gs://b/two", None),
        ("memory://", "memory://", None),
    ],
)
def test_what_one_store_has(one: str, other: str, expected: object) -> None:
    assert around(one, other) == expected


class Two:
    """A run whose shared objects are there, and one that wants them."""

    def __init__(self, url: str, endpoint: str | None = None) -> None:
        options = {} if endpoint is None else {"endpoint": endpoint}
        self.first = ObjectSteps(f"{url}/the first%21/ü", options=options)
        self.second = ObjectSteps(f"{url}/second run/a%20b", options=options, deadline_s=6.0)
        for name, data in CONTENT.items():
            self.first.shared.upload(name, len(data), [memoryview(data)], no_limit)
        self.neighbour = self.second.neighbour(self.first.where)

    def brought(self) -> set[str]:
        return self.neighbour.bring(SIZES, no_limit)

    def content(self) -> dict[str, bytes]:
        """What the second run has, when the first one has nothing any more."""
        for name in NAMES:
            self.first.client.delete(f"shared/{name}")
        client = self.second.client
        return {
            path.rpartition("/")[2]: client.get(path, 1 << 20) for path in client.list("shared")[0]
        }


@pytest.fixture(params=["file", "s3"])
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Two:
    if request.param == "file":
        return Two(f"file://{tmp_path}")
    request.getfixturevalue("s3_environment")
    port = request.getfixturevalue("s3_port")
    return Two(request.getfixturevalue("s3_url"), f"http://127.0.0.1:{port}")


@pytest.mark.thorough
def test_copies_are_whole_and_belong_to_the_run(two: Two) -> None:
    assert two.brought() == set(NAMES)
    assert two.content() == CONTENT


@pytest.mark.thorough
def test_only_objects_of_the_same_size_are_copied(two: Two) -> None:
    missing, cut, *rest = NAMES
    two.first.client.delete(f"shared/{missing}")
    two.first.client.put(f"shared/{cut}", CONTENT[cut][:-1])
    assert two.brought() == set(rest)
    assert two.content() == {name: CONTENT[name] for name in rest}


def test_an_object_that_is_replaced_while_it_is_copied_does_not_count(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, *rest = NAMES
    real = ObjectClient.copy
    replaced = []

    def copy(client: ObjectClient, source: str, target: str) -> None:
        if source.endswith(bad):
            replaced.append(source)
            client.put(source, b"short")
        real(client, source, target)

    monkeypatch.setattr(ObjectClient, "copy", copy)
    assert two.brought() == set(rest)
    assert len(replaced) == 1


def test_an_object_that_is_deleted_while_it_is_copied_does_not_count(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, *rest = NAMES
    real = ObjectClient.copy
    deleted = []

    def copy(client: ObjectClient, source: str, target: str) -> None:
        if source.endswith(bad):
            deleted.append(source)
            client.delete(source)
        real(client, source, target)

    monkeypatch.setattr(ObjectClient, "copy", copy)
    assert two.brought() == set(rest)
    assert len(deleted) == 1
    assert bad not in two.content()


def test_copying_ends_when_the_job_stops(two: Two) -> None:
    def stopped(_: int) -> None:
        raise ClosedError("stopped")

    with pytest.raises(ClosedError):
        two.neighbour.bring(SIZES, stopped)
    assert two.content() == {}


def test_a_store_that_refuses_copies_is_not_asked_for_all(proxy: s3.Proxy, s3_url: str) -> None:
    two = Two(s3_url, f"http://127.0.0.1:{proxy.port}")
    proxy.fault = lambda method, _: "denied" if method == "PUT" else None
    assert two.brought() == set()
    assert 1 <= proxy.fired["denied"] < len(NAMES)
    proxy.fault = lambda method, target: None
    assert two.content() == {}


def test_a_copy_without_an_answer_is_made_again(proxy: s3.Proxy, s3_url: str) -> None:
    two = Two(s3_url, f"http://127.0.0.1:{proxy.port}")
    proxy.fault = lambda method, _: "lose" if method == "PUT" and proxy.fired["lose"] < 3 else None
    assert two.brought() == set(NAMES)
    assert proxy.fired["lose"] >= 3
    assert two.content() == CONTENT
