"""Servers that speak S3, of three makes, on loopback: started, killed and started again by a test.

Owns: their configuration, their ports and their processes. A server keeps its ports and its files
over a restart. `start` returns when a request is answered.
Invariant: every process that a server starts has ended when `kill` returns.
Not here: a network that interferes (network).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from support.agents import wait_for
from support.faults import must

DEADLINE_S = 250.0  # a setup may take 300 s; Swift takes 6, and on a busy machine minutes
BUCKET = "bucket"
SWIFT = pytest.mark.programs(
    "swift-proxy-server", "swift-object-server", "swift-ring-builder", root=True
)
SEAWEED = pytest.mark.programs("weed")


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody has now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Server(ABC):
    """One server, whose files are below `folder`. `port`: where it speaks S3."""

    key, secret = "testkey", "testsecret"
    ports_needed = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = free_ports(self.ports_needed)
        self.port = self.ports[0]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._refusal = ""
        self._configure()

    @abstractmethod
    def _configure(self) -> None:
        """Write the configuration."""

    @abstractmethod
    def _commands(self) -> list[list[str]]:
        """The processes of the server."""

    def start(self) -> None:
        """Start the server; it answers when this returns."""
        with open(self.folder / "log", "ab") as log:
            for command in self._commands():
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env={**os.environ, "HOME": str(self.folder)},
                        cwd=self.folder,
                    )
                )
        wait_for(self._answers, self._silence, DEADLINE_S)

    def _silence(self) -> str:
        return f"no answer: {self._refusal}\n{self.log()[-3000:]}"

    def _answers(self) -> bool:
        codes = [each.poll() for each in self._processes]
        must(codes == [None] * len(codes), lambda: f"{codes}\n{self.log()[-3000:]}")
        try:
            client = self.client()
            client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="probe", Body=b"probe")
        except ClientError as error:
            self._refusal = repr(error)
            return error.response["Error"]["Code"].startswith("BucketAlready")
        except BotoCoreError as error:
            self._refusal = repr(error)
            return False
        return True

    def kill(self) -> None:
        """End the server at once, whatever it does."""
        for each in self._processes:
            each.kill()
        for each in self._processes:
            each.wait()
        self._processes.clear()

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    # -- what is in it, as another client sees it ---------------------------------------------

    def client(self, key: str | None = None, secret: str | None = None) -> Any:
        config = Config(
            retries={"max_attempts": 0},
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            read_timeout=10,
        )
        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id=key or self.key,
            aws_secret_access_key=secret or self.secret,
            region_name="us-east-1",
            config=config,
        )

    def objects(self, prefix: str) -> list[str]:
        """The names below a prefix, without it."""
        pages = (
            self.client()
            .get_paginator("list_objects_v2")
            .paginate(Bucket=BUCKET, Prefix=f"{prefix}/")
        )
        found = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        return sorted(name.removeprefix(f"{prefix}/") for name in found)

    def uploads(self) -> list[str]:
        """The names of uploads that were begun, and neither ended nor given up."""
        answer = self.client().list_multipart_uploads(Bucket=BUCKET)
        return [entry["Key"] for entry in answer.get("Uploads", [])]


@contextmanager
def running(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.kill()


def become(patched: pytest.MonkeyPatch, key: str, secret: str) -> None:
    """From now on this process is the client with these credentials."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            patched.delenv(name)
    patched.setenv("AWS_ACCESS_KEY_ID", key)
    patched.setenv("AWS_SECRET_ACCESS_KEY", secret)
    patched.setenv("AWS_REGION", "us-east-1")
    patched.setenv("AWS_ALLOW_HTTP", "true")


class SeaweedFs(Server):
    """Its master, volume server, filer and gateway are one process. `data`: its disk."""

    ports_needed = 8
    reader = ("readerkey", "readersecret")  # who may read, and no more

    def __init__(self, folder: Path, data: Path | None = None) -> None:
        self.data = data or folder / "data"
        super().__init__(folder)

    def _configure(self) -> None:
        self.data.mkdir(exist_ok=True)
        identities = [
            _identity(
                "tests", (self.key, self.secret), "Admin", "Read", "Write", "List", "Tagging"
            ),
            _identity("reader", self.reader, "Read", "List"),
        ]
        (self.folder / "s3.json").write_text(json.dumps({"identities": identities}))

    def _commands(self) -> list[list[str]]:
        names = ["s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port",
                 "volume.port.grpc", "filer.port", "filer.port.grpc"]  # fmt: skip
        ports = [f"-{name}={port}" for name, port in zip(names, self.ports, strict=True)]
        # Ports that are not given are fixed, and a second server would find them taken.
        return [
            ["weed", "server", f"-dir={self.data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *ports,
             "-filer", "-s3", f"-s3.config={self.folder / 's3.json'}", "-s3.port.iceberg=0",
             "-s3.port.lance=0", "-master.volumeSizeLimitMB=64", "-volume.max=30",
             "-master.telemetry=false"]
        ]  # fmt: skip


def _identity(name: str, credentials: tuple[str, str], *actions: str) -> dict[str, Any]:
    access, secret = credentials
    keys = [{"accessKey": access, "secretKey": secret}]
    return {"name": name, "credentials": keys, "actions": list(actions)}


class Swift(Server):
    """OpenStack Swift: one replica, four processes. An object in parts stays in parts there.

    Its proxy would not ask a process for a minute that did not answer ten times.
    """

    key, secret = "test:tester", "testing"
    ports_needed = 4
    kinds = ("object", "container", "account")

    def _configure(self) -> None:
        (self.folder / "disk" / "d1").mkdir(parents=True)
        self._write("swift.conf", _SWIFT)
        rings = dict(zip(self.kinds, self.ports[1:], strict=True))
        for kind, port in rings.items():
            self._write(f"{kind}.conf", self._default(port) + _SWIFT_SERVER.format(kind=kind))
        # Nine calls of swift-ring-builder would each import for a second what one script does.
        with open(str(shutil.which("swift-ring-builder"))) as builder:
            python = builder.readline().removeprefix("#!").split()
        command = [*python, "-c", _SWIFT_RINGS, json.dumps(rings)]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True)
        self._write("proxy.conf", self._default(self.port) + _SWIFT_PROXY)

    def _default(self, port: int) -> str:
        return _SWIFT_DEFAULT.format(port=port, folder=self.folder)

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def _commands(self) -> list[list[str]]:
        return [[f"swift-{kind}-server", f"{kind}.conf"] for kind in (*self.kinds, "proxy")]


_SWIFT = """
[swift-hash]
swift_hash_path_suffix = tests
swift_hash_path_prefix = tests
[storage-policy:0]
name = one
default = yes
"""
_SWIFT_DEFAULT = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = root
swift_dir = {folder}
devices = {folder}/disk
mount_check = false
fallocate_reserve = 0
"""
_SWIFT_RINGS = """
import json, sys
from swift.common.ring import RingBuilder
for kind, port in json.loads(sys.argv[1]).items():
    ring = RingBuilder(2, 1, 0)
    ring.add_dev({"region": 1, "zone": 1, "ip": "127.0.0.1", "port": port, "device": "d1",
                  "replication_ip": "127.0.0.1", "replication_port": port, "weight": 1.0})
    ring.rebalance()
    ring.get_ring().save(kind + ".ring.gz")
"""
_SWIFT_SERVER = """
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
"""
_SWIFT_PROXY = """
[pipeline:main]
pipeline = catch_errors cache s3api tempauth slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
error_suppression_limit = 1000000
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:1
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:slo]
use = egg:swift#slo
"""


class Rclone(Server):
    """It answers every request for a part of an object with the whole object."""

    def _configure(self) -> None:
        (self.folder / "store").mkdir()

    def _commands(self) -> list[list[str]]:
        return [
            ["rclone", "serve", "s3", str(self.folder / "store"), "--addr",
             f"127.0.0.1:{self.port}", "--auth-key", f"{self.key},{self.secret}"]
        ]  # fmt: skip


def why_no_rclone() -> str | None:
    """Rclone before 1.65 has no server of S3."""
    if (program := shutil.which("rclone")) is None:
        return "not installed: rclone"
    done = subprocess.run([program, "serve", "s3", "--help"], capture_output=True, check=False)
    return None if b"--auth-key" in done.stdout else "this rclone has no `serve s3`"
