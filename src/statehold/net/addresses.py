"""Addresses of hosts: as text, to listen at, and which of its own a host tells to others.

Invariants: a name is looked up for every family of addresses, and "[::1]:80" is text like
"10.1.2.3:80". A host tells a loopback address only to those that reach it there.
Not here: the connections.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator

from statehold.errors import PortInUseError, UsageError

_ELSEWHERE = "192.0.2.1"  # of RFC 5737: no host has it
_SIOCGIFADDR = 0x8915


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """The host and the port of "host:port". ValueError: it is something else."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port[:6]) > 65535:
        raise ValueError(f"not an address: {address[:80]!r}")
    return host.strip("[]"), int(port)


def listen(host: str, port: int = 0) -> socket.socket:
    """A listener at the first address of `host` that this host has; "" takes all of its own."""
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 is turned off, or the port is taken
            family = socket.AF_INET6
            return socket.create_server(
                ("", port), family=family, backlog=1024, dualstack_ipv6=True
            )
    host = host or "0.0.0.0"
    failed = OSError(errno.EADDRNOTAVAIL, "the name has no address", host)
    for family, *_, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return socket.create_server(target[:2], family=family, backlog=1024)
        except OSError as error:
            failed = error
        if failed.errno == errno.EADDRINUSE:  # another family would be another port
            break
    raise failed


def listener(what: str, host: str, port: int = 0, hint: str | None = None) -> socket.socket:
    """As listen(), for `what` a user has asked for. Raises PortInUseError, and UsageError for an
    address of another machine."""
    try:
        return listen(host, port)
    except OSError as error:
        facts = {"address": joined(host or "*", port), "cause": str(error)}
        if error.errno == errno.EADDRINUSE:
            text = f"something else listens on the port of {what}"
            raise PortInUseError(text, facts=facts, hint=hint) from error
        raise UsageError(f"{what} cannot listen at this address", facts=facts, hint=hint) from error


def reachable_address(other: str) -> str:
    """The address of this host that the others reach: that of the way to `other`, if it is known.

    Many hosts take their own name for one of their loopback addresses, which no other host reaches.
    That answer counts only if `other` is a loopback address, too. Otherwise the default route
    decides, and then the first interface of a network.
    """
    if other == "localhost" or is_loopback(other):
        return other if is_loopback(other) else "127.0.0.1"
    for found in (*_ways_to(other), *_ways_to(socket.gethostname()), *_ways_to(_ELSEWHERE)):
        if not is_loopback(found):
            return found
    return next(_of_interfaces(), "127.0.0.1")


def is_loopback(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(text.partition("%")[0]).is_loopback
    return False


def _ways_to(host: str) -> Iterator[str]:
    """The addresses from which this host reaches `host`; nothing is sent."""
    with contextlib.suppress(OSError):  # nobody knows the name
        for family, kind, protocol, _, target in (
            socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else ()
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as way:
                way.connect(target)
                yield str(way.getsockname()[0])


def _of_interfaces() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                asked = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, asked)
                found = socket.inet_ntoa(answer[20:24])
                if not is_loopback(found):
                    yield found
