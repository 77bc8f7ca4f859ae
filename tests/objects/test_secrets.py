"""Credentials stay in the environment: not in URLs, options, reprs, errors, chains, or logs."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from statehold.errors import StateholdError, UsageError
from statehold.format.saved import MANIFEST_NAME
from statehold.io.objects.client import open_store
from statehold.steps.objects import ObjectSteps
from support import s3

# None of these strings is part of any other word that may be shown.
SECRETS = ["Zecret4Key", "Zession5Token", "Zasswort6", "Zignature7", "Zuser8"]
KEY, TOKEN, PASSWORD, SIGNATURE, USER = SECRETS
ATTEMPT = "5f3a09c1-7"
SHORT_S = 0.3
DEADLINE_S = 60.0


def everything_said(error: BaseException) -> str:
    """The error, all that is chained to it, and what they hold."""
    said = ["".join(traceback.format_exception(error))]
    while True:
        said += [repr(error), str(error), repr(vars(error)), repr(error.args)]
        chained = error.__cause__ or error.__context__
        if chained is None:
            return "\n".join(said)
        error = chained


def leaks(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret.lower() in text.lower()]


@pytest.mark.parametrize(
    "url",
    [
        f"s3://{USER}:{PASSWORD}@bucket/run",
        f"s3://bucket/run?X-Amz-Signature={SIGNATURE}",
        f"az://container/run?sig={SIGNATURE}",
        f"s3://bucket/run#{SIGNATURE}",
        f"https://{USER}:{PASSWORD}@store.example/run?sig={SIGNATURE}",
    ],
)
def test_a_url_with_a_secret_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        ObjectSteps(url)
    assert leaks(everything_said(caught.value).replace(repr(url), "")) == []


@pytest.mark.parametrize(
    "options",
    [
        {"secret_access_key": KEY},
        {"aws_session_token": TOKEN},
        {"config": {"access_key_id": KEY}},
        {"default_headers": {"Authorization": TOKEN}},
        {"endpoint": f"https://{USER}:{PASSWORD}@store.example"},
        {"endpoint": f"https://store.example?sig={SIGNATURE}"},
    ],
)
def test_an_option_with_a_secret_is_refused_without_showing_it(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        ObjectSteps("s3://bucket/run", options=options)
    assert leaks(str(caught.value)) == []
    assert "environment" in str(caught.value)


@pytest.fixture
def secret_environment(monkeypatch: pytest.MonkeyPatch, proxy: s3.Proxy) -> s3.Proxy:
    """Every place of the environment where obstore finds a secret has one."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", USER)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEY)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    endpoint = f"http://{USER}:{PASSWORD}@127.0.0.1:{proxy.port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    return proxy


def broken_blocks() -> Iterator[memoryview]:
    yield memoryview(b"")


OPERATIONS: list[Callable[[ObjectSteps], object]] = [
    ObjectSteps.steps,
    lambda steps: steps.read(1, MANIFEST_NAME, 100),
    lambda steps: steps.size(1, "x"),
    lambda steps: steps.fetch(1, "x", [(0, memoryview(bytearray(10)))]),
    lambda steps: steps.upload(1, ATTEMPT, "x", 1, broken_blocks()),
    lambda steps: steps.upload(1, ATTEMPT, "x", 3, [memoryview(b"abc")]),
    lambda steps: steps.publish(1, ATTEMPT, b"manifest"),
    lambda steps: steps.clear(),
    lambda steps: steps.retire(1),
]


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["busy", "denied", "drop", "stall", "truncate"])
def test_no_error_and_no_log_says_a_secret(
    secret_environment: s3.Proxy, s3_url: str, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    caplog.set_level(logging.DEBUG)
    steps = ObjectSteps(s3_url, deadline_s=SHORT_S)
    said = [repr(steps), str(steps)]
    secret_environment.fault = lambda method, target: fault
    raised = 0
    for operation in OPERATIONS:
        try:
            operation(steps)
        except StateholdError as error:
            raised += 1
            said.append(everything_said(error))
    assert secret_environment.fired[fault] >= len(OPERATIONS) - 2
    assert raised >= 3
    assert leaks("\n".join([*said, caplog.text])) == []


def test_obstore_itself_would_say_it(secret_environment: s3.Proxy, s3_url: str) -> None:
    """The test above can fail: what is kept back is there."""
    secret_environment.fault = lambda method, target: "denied"
    store = open_store(s3_url, {}, DEADLINE_S)
    with pytest.raises(Exception, match="AccessDenied") as caught:
        store.get("x")
    assert leaks(everything_said(caught.value)) == [PASSWORD, USER]


def test_without_obstore_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(UsageError, match=r"pip install 'statehold\[objects\]'"):
        ObjectSteps("s3://bucket/run").steps()


@pytest.mark.parametrize(
    "url", ["", "bucket/run", "/tmp/run", "http://store/run", "s3:///run", "s3:x"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="not the URL of an object store"):
        ObjectSteps(url)
