"""An S3 server that fails: errors named within the deadline, no half steps, the next try works."""

from __future__ import annotations

import contextlib
import errno
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from statehold.errors import ClosedError, MissingFileError, StorageError, UnavailableError
from statehold.format.saved import MANIFEST_NAME
from statehold.io.objects.client import ObjectClient, naming
from statehold.steps.objects import ObjectSteps
from statehold.units import MiB
from support import s3

ATTEMPT, SECOND = "5f3a09c1-7", "5f3a09c1-8"
NAME = "rank-00000-of-00001.safetensors"
PART = 5 * MiB
HASTY_S = 5.0  # until a store that fails for ever is given up
DEADLINE_S = 60.0
DATA = bytes(range(256)) * (PART // 128)  # two parts
CLOSED_PORT = 1


@pytest.fixture
def steps(proxy: s3.Proxy, s3_url: str) -> ObjectSteps:
    return at(proxy.port, s3_url)


@pytest.fixture
def hasty(proxy: s3.Proxy, s3_url: str) -> ObjectSteps:
    """The same steps, given up soon: for operations that fail until their deadline."""
    return at(proxy.port, s3_url, HASTY_S)


def at(port: int, url: str, deadline_s: float = DEADLINE_S) -> ObjectSteps:
    options = {"endpoint": f"http://127.0.0.1:{port}"}
    return ObjectSteps(url, options=options, part_bytes=PART, deadline_s=deadline_s)


def upload(steps: ObjectSteps, attempt: str = ATTEMPT) -> None:
    steps.upload(1, attempt, NAME, len(DATA), [memoryview(DATA)])


def fetch(steps: ObjectSteps) -> None:
    memory = bytearray(len(DATA))
    steps.fetch(1, NAME, [(0, memoryview(memory))])
    assert memory == DATA


OPERATIONS: dict[str, Callable[[ObjectSteps], object]] = {
    "steps": lambda steps: steps.steps(),
    "read": lambda steps: steps.read(1, MANIFEST_NAME, 100),
    "size": lambda steps: steps.size(1, NAME),
    "has": lambda steps: steps.has(1, ATTEMPT, NAME, len(DATA)),
    "fetch": fetch,
    "upload": lambda steps: upload(steps, SECOND),
    "publish": lambda steps: steps.publish(1, SECOND, b"manifest"),
    "clear": lambda steps: steps.clear(),
    "retire": lambda steps: steps.retire(1),
}
EXPECTED = {
    "busy": (UnavailableError, errno.EAGAIN),
    "drop": (UnavailableError, errno.ECONNRESET),
    "stall": (UnavailableError, errno.ETIMEDOUT),
    "denied": (StorageError, errno.EACCES),
    "skewed": (StorageError, errno.EACCES),
}


def failures(steps: ObjectSteps) -> dict[str, BaseException | None]:
    """What each operation raises, all at the same time: each of them takes until the deadline."""
    with ThreadPoolExecutor(len(OPERATIONS)) as threads:
        runs = {name: threads.submit(run, steps) for name, run in OPERATIONS.items()}
        return {name: future.exception() for name, future in runs.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", EXPECTED)
def test_a_failing_store_is_named_in_time(
    steps: ObjectSteps, hasty: ObjectSteps, proxy: s3.Proxy, fault: str
) -> None:
    upload(steps)
    steps.publish(1, ATTEMPT, b"manifest")
    kind, number = EXPECTED[fault]
    proxy.fault = lambda method, target: fault
    begin = time.monotonic()
    raised = failures(hasty)
    taken = time.monotonic() - begin
    assert {name: type(error) for name, error in raised.items()} == dict.fromkeys(raised, kind)
    assert {getattr(error, "errno", 0) for error in raised.values()} == {number}
    assert proxy.fired[fault] >= len(OPERATIONS)
    assert taken < DEADLINE_S  # a machine that is overloaded, and not forever
    proxy.fault = lambda method, target: None
    assert steps.steps() == [1]  # nothing that was committed is lost
    for operation in OPERATIONS.values():
        operation(steps)
    assert steps.steps() == []


@pytest.mark.thorough
def test_a_server_that_is_not_there(s3_environment: None, s3_url: str) -> None:
    raised = failures(at(CLOSED_PORT, s3_url, HASTY_S))
    assert {type(error) for error in raised.values()} == {UnavailableError}
    assert {getattr(error, "errno", 0) for error in raised.values()} == {errno.ECONNREFUSED}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["busy", "drop"])
def test_a_fault_that_passes_is_not_noticed(
    steps: ObjectSteps, proxy: s3.Proxy, fault: str
) -> None:
    """Every third request fails."""
    numbers = itertools.count()
    proxy.fault = lambda method, target: fault if next(numbers) % 3 == 1 else None
    upload(steps)
    steps.publish(1, ATTEMPT, b"manifest")
    fetch(steps)
    steps.retire(1)
    assert proxy.fired[fault] > 2
    assert steps.steps() == []


@pytest.mark.thorough
@pytest.mark.parametrize("times", [1, 10**6])
def test_an_answer_that_breaks_off(
    steps: ObjectSteps, hasty: ObjectSteps, proxy: s3.Proxy, times: int
) -> None:
    """Once: the rest is asked for, and nobody notices. For ever: an error, and no half a range."""
    upload(steps)
    steps.publish(1, ATTEMPT, b"manifest")
    left = iter(range(times))
    proxy.fault = lambda method, target: (
        "truncate" if NAME in target and next(left, None) is not None else None
    )
    if times == 1:
        fetch(steps)
    else:
        with pytest.raises(UnavailableError) as caught:
            fetch(hasty)
        assert caught.value.errno == errno.ECONNRESET
    assert proxy.fired["truncate"] >= min(times, 3)
    proxy.fault = lambda method, target: None
    fetch(steps)


@pytest.mark.parametrize(
    "read",
    [ObjectSteps.steps, fetch, lambda steps: steps.note("run.json")],
    ids=["steps", "fetch", "note"],
)
def test_what_breaks_off_twice_is_asked_for_again(
    steps: ObjectSteps, hasty: ObjectSteps, proxy: s3.Proxy, read: Callable[[ObjectSteps], object]
) -> None:
    """Otherwise a job ends at its start, if its steps are only there, and no step gets there."""
    upload(steps)
    steps.publish(1, ATTEMPT, b"manifest")
    steps.put_note("run.json", b"note")
    expected, times = read(steps), iter(range(2))
    proxy.fault = lambda method, target: "truncate" if next(times, None) is not None else None
    assert read(steps) == expected
    assert proxy.fired["truncate"] == 2
    proxy.fault = lambda method, target: "truncate"
    with pytest.raises(UnavailableError) as caught:
        read(hasty)
    assert caught.value.errno == errno.ECONNRESET


@pytest.mark.parametrize("fault", ["truncate", "reset"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_deletion_passes_where_every_other_request_breaks_off(
    steps: ObjectSteps, proxy: s3.Proxy, fault: str, first: int
) -> None:
    upload(steps)
    steps.publish(1, ATTEMPT, b"manifest")
    numbers = itertools.count(first)
    proxy.fault = lambda method, target: fault if next(numbers) % 2 else None
    steps.retire(1)
    assert proxy.fired[fault]
    proxy.fault = lambda method, target: None
    assert steps.client.list() == ([], [])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("request_", "fault"),
    [("PUT partNumber=1", "cut"), ("PUT partNumber=2", "busy"), ("POST uploadId=", "busy")],
)
def test_an_upload_that_fails_in_the_middle_leaves_nothing(
    steps: ObjectSteps,
    hasty: ObjectSteps,
    proxy: s3.Proxy,
    s3_port: int,
    request_: str,
    fault: str,
) -> None:
    its_method, query = request_.split()
    proxy.fault = lambda method, target: fault if method == its_method and query in target else None
    with pytest.raises(UnavailableError):
        upload(hasty)
    assert proxy.fired[fault] > 0
    assert not steps.has(1, ATTEMPT, NAME, len(DATA))
    assert b"<UploadId>" not in s3.request(s3_port, "GET", "/bucket?uploads")
    proxy.fault = lambda method, target: None
    upload(steps)
    assert steps.has(1, ATTEMPT, NAME, len(DATA))


def test_an_upload_whose_last_answer_is_lost_is_there_for_the_next_copy(
    steps: ObjectSteps, proxy: s3.Proxy
) -> None:
    """It is no damage, for which a copy deletes what is there, and an agent takes an older step."""
    faults = iter(["lose", "ended"])
    proxy.fault = lambda method, target: (
        next(faults, None) if method == "POST" and "uploadId=" in target else None
    )
    with pytest.raises(StorageError):
        upload(steps)
    assert proxy.fired == {"lose": 1, "ended": 1}
    assert steps.has(1, ATTEMPT, NAME, len(DATA))


@pytest.mark.thorough
def test_a_commit_whose_answer_is_lost_counts(
    steps: ObjectSteps, hasty: ObjectSteps, proxy: s3.Proxy
) -> None:
    upload(steps)
    proxy.fault = lambda method, target: (
        "lose" if method == "PUT" and target.endswith(".commit") else None
    )
    hasty.publish(1, ATTEMPT, b"manifest")
    assert proxy.fired["lose"] > 0
    proxy.fault = lambda method, target: None
    assert steps.steps() == [1]
    steps.abandon(1, ATTEMPT)
    fetch(steps)


def test_data_is_whole_before_the_commit_object_and_goes_after_it(
    steps: ObjectSteps, proxy: s3.Proxy
) -> None:
    upload(steps)
    steps.publish(1, ATTEMPT, b"manifest")
    upload(steps, SECOND)
    proxy.requests.clear()
    steps.publish(1, SECOND, b"manifest")
    steps.retire(1)
    changes = [method for method, _ in proxy.requests if method in ("PUT", "POST", "DELETE")]
    targets = [target for method, target in proxy.requests if method in ("PUT", "POST", "DELETE")]
    assert targets[0].endswith(f"{SECOND}/{MANIFEST_NAME}")
    assert targets[1].endswith(".commit")
    assert "delete" in targets[2]  # the first attempt's files, in one request
    assert len(changes) == 5


def test_a_bucket_that_is_not_there(proxy: s3.Proxy) -> None:
    steps = at(proxy.port, "s3://no-such-bucket/run")
    for operation in (OPERATIONS["steps"], OPERATIONS["upload"]):
        with pytest.raises(StorageError) as caught:
            operation(steps)
        assert not isinstance(caught.value, MissingFileError)
        assert caught.value.errno == errno.ENOENT


def test_a_store_that_is_silent_is_not_asked_each_question(
    hasty: ObjectSteps, proxy: s3.Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart has many: each of them would wait as long for its failure."""
    proxy.fault = lambda method, target: "stall"
    for question in (hasty.steps, hasty.steps, lambda: hasty.note("run.json")):
        with pytest.raises(UnavailableError) as caught:
            question()
        assert caught.value.errno == errno.ETIMEDOUT
        asked = len(proxy.requests)
    assert "does not answer; it is given up after" in caplog.text
    assert caplog.text.count("does not answer") == 1
    proxy.fault = lambda method, target: None
    with pytest.raises(UnavailableError):
        hasty.steps()
    assert len(proxy.requests) == asked
    hasty.ask_again()
    assert hasty.steps() == []


@pytest.fixture
def heard() -> Iterator[None]:
    """SIGINT, also where a shell has begun the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_a_signal_ends_the_waiting_for_a_store(steps: ObjectSteps, proxy: s3.Proxy) -> None:
    proxy.fault = lambda method, target: "stall"
    ended, in_time = threading.Event(), []

    def interrupt() -> None:
        while not proxy.fired["stall"]:
            ended.wait(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        in_time.append(ended.wait(DEADLINE_S))
        proxy.close()  # answers, by ending the connection

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        steps.clear()
    ended.set()
    helper.join()
    assert in_time == [True]


def test_nobody_waits_for_a_store_after_stop(
    steps: ObjectSteps, proxy: s3.Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statehold.io.objects.client.GRACE_S", 0.0)
    proxy.fault = lambda method, target: "stall"
    with ThreadPoolExecutor() as threads:
        uploads = threads.submit(upload, steps)
        while not proxy.fired["stall"]:
            with contextlib.suppress(TimeoutError):
                uploads.exception(0.01)
        steps.stop()
        assert isinstance(uploads.exception(), ClosedError)


def test_a_store_that_gives_no_ranges_back_is_found_by_the_first_upload(
    steps: ObjectSteps, hasty: ObjectSteps, proxy: s3.Proxy
) -> None:
    proxy.fault = lambda method, target: "whole"
    for size in (len(DATA), 20):  # in parts, and in one request
        with pytest.raises(StorageError, match="does not give back parts of objects") as caught:
            steps.upload(1, ATTEMPT, NAME, size, [memoryview(DATA)[:size]])
        assert caught.value.errno == errno.EPROTO
    proxy.fault = lambda method, target: None
    upload(steps)
    steps.publish(1, ATTEMPT, b"manifest")
    proxy.fault = lambda method, target: "whole"  # of steps that are there already
    with pytest.raises(StorageError, match="does not give back parts of objects"):
        fetch(steps)


def test_a_store_that_gives_other_bytes_back_is_found_by_the_first_upload(
    steps: ObjectSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(ObjectClient, "fetch", lambda *_: None)
        with pytest.raises(StorageError, match="does not give back"):
            upload(steps)
    upload(steps)


def test_a_wrong_clock_is_named(steps: ObjectSteps, proxy: s3.Proxy) -> None:
    proxy.fault = lambda method, target: "skewed"
    for operation in (steps.steps, lambda: upload(steps)):
        with pytest.raises(StorageError, match="the clock of this machine"):
            operation()


@pytest.mark.parametrize(
    "text",
    [
        "<Code>AccessDenied</Code><Message>Signature expired: 20261126T is now earlier",
        "invalid_grant: Check your iat and exp values in the JWT claim",
        "kind: Connect, source: InvalidCertificate(NotValidYet)",
    ],
)
def test_a_wrong_clock_is_named_whoever_notices_it(text: str) -> None:
    def fail() -> None:
        raise OSError(f"status code: 403 {text}")

    with pytest.raises(StorageError, match="the clock of this machine"):
        naming("read", "s3://bucket/run", fail)
