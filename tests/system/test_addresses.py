"""Addresses: names and both families are understood; others hear none that only this host has."""

from __future__ import annotations

import errno
import socket

import pytest

from statehold.net import addresses
from statehold.net.addresses import joined, listen, reachable_address, split

Resolved = list[tuple[int, int, int, str, tuple[object, ...]]]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The addresses of names, instead of those that this host knows."""
    known: dict[str, list[str]] = {}
    original = socket.getaddrinfo

    def look_up(host: str, port: int, *args: int, **more: int) -> Resolved:
        if host in known and not known[host]:
            raise socket.gaierror("nobody knows it")
        found = known.get(host, [host])
        return [info for each in found for info in original(each, port, *args, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


@pytest.mark.parametrize("address", ["10.1.2.3:80", "[::1]:65535", "node-0:0"])
def test_an_address_is_text_and_back(address: str) -> None:
    assert joined(*split(address)) == address


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:80x", "host:65536", "h:\u0663"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an address"):
        split(text)


@pytest.mark.parametrize("host", ["", "127.0.0.1", "::1", "localhost"])
def test_who_knows_the_host_reaches_its_listener(host: str) -> None:
    with listen(host) as listener:
        port = listener.getsockname()[1]
        for each in [host] if host else ["127.0.0.1", "::1"]:
            socket.create_connection((each, port), timeout=20).close()


def test_a_name_is_looked_up_for_both_families(names: dict[str, list[str]]) -> None:
    names["both"] = ["2001:db8::1", "127.0.0.1"]  # the first one is that of another host
    with listen("both") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_port_that_is_taken_is_not_taken_in_another_family(names: dict[str, list[str]]) -> None:
    names["both"] = ["127.0.0.1", "::1"]
    with listen("127.0.0.1") as other, pytest.raises(OSError) as raised:
        listen("both", other.getsockname()[1])
    assert raised.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("other", ["localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_who_is_on_this_host_hears_a_loopback_address(other: str) -> None:
    assert reachable_address(other) == (other if other[0] in "1:" else "127.0.0.1")


def test_a_name_that_this_host_takes_for_a_loopback_address_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = {"node0": ["127.0.1.1"], socket.gethostname(): ["127.0.0.1"], "192.0.2.1": ["10.1.2.3"]}
    monkeypatch.setattr(addresses, "_ways_to", lambda host: ways[host])
    assert reachable_address("node0") == "10.1.2.3"
    ways["node0"] += ["10.9.9.9"]
    assert reachable_address("node0") == "10.9.9.9"


@pytest.mark.parametrize(
    ("own", "expected"), [(["10.7.7.1"], "10.7.7.1"), ([], "127.0.0.1")], ids=["network", "none"]
)
def test_without_any_way_out_an_interface_tells_the_address(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, own: list[str], expected: str
) -> None:
    names["node0"] = ["127.0.1.1"]
    names[socket.gethostname()] = names["192.0.2.1"] = []

    monkeypatch.setattr(addresses, "_of_interfaces", lambda: iter(own))
    assert reachable_address("node0") == expected


def test_a_name_that_nobody_knows_is_no_error(names: dict[str, list[str]]) -> None:
    names["unknown"] = []
    assert reachable_address("unknown")
    assert reachable_address("")
