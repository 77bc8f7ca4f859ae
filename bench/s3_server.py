"""A part of S3, as fast as Python allows: the server that bench.objects measures against.

Not for storing anything: objects live in memory, no signature is checked, and only what obstore
asks of a bucket is answered: PUT, copies, GET (a range, or all), HEAD, DELETE, uploads in parts,
listing.
GET /-/received says how many bytes of bodies have come in.
A thread for every connection; bodies are received into memory that is reused, and sent without a
copy. So what a benchmark sees is the client, and the kernel's loopback.
"""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import threading
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

_XML = '<?xml version="1.0" encoding="UTF-8"?>\n'
_DATE = b'Last-Modified: Sat, 01 Jan 2000 00:00:00 GMT\r\nETag: "0"\r\n'
_POOL_MAX = 64


@dataclass
class Bucket:
    """Objects as lists of parts, uploads under way, and buffers that were parts before."""

    objects: dict[str, list[memoryview]] = field(default_factory=dict)
    uploads: dict[str, dict[int, memoryview]] = field(default_factory=dict)
    spare: list[bytearray] = field(default_factory=list)
    received: int = 0
    guard: threading.Lock = field(default_factory=threading.Lock)

    def buffer(self, size: int) -> memoryview:
        with self.guard:
            for index, spare in enumerate(self.spare):
                if len(spare) >= size:
                    return memoryview(self.spare.pop(index))[:size]
        return memoryview(bytearray(size))

    def replace(self, key: str, parts: list[memoryview] | None) -> None:
        with self.guard:
            for part in self.objects.pop(key, []):
                if len(self.spare) < _POOL_MAX and isinstance(part.obj, bytearray):
                    self.spare.append(part.obj)
            if parts is not None:
                self.objects[key] = parts


class Connection:
    """The requests of one connection, one after the other."""

    def __init__(self, bucket: Bucket, peer: socket.socket) -> None:
        self._bucket = bucket
        self._peer = peer
        self._file = peer.makefile("rb", buffering=1 << 16)

    def serve(self) -> None:
        with self._peer, contextlib.suppress(OSError):
            while line := self._file.readline():
                method, target = line.decode().split(" ")[:2]
                headers = self._headers()
                body = self._body(int(headers.get("content-length", 0)))
                self._answer(method, target, headers, body)

    def _headers(self) -> dict[str, str]:
        headers = {}
        while (line := self._file.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return headers

    def _body(self, size: int) -> memoryview:
        body = self._bucket.buffer(size)
        done = 0
        while done < size:  # straight from the socket once the buffered bytes are used up
            count = self._file.readinto1(body[done:])  # type: ignore[attr-defined]
            if not count:
                raise ConnectionError("the client went away")
            done += count
        with self._bucket.guard:
            self._bucket.received += size
        return body

    def _answer(self, method: str, target: str, headers: dict[str, str], body: memoryview) -> None:
        url = urlsplit(target)
        _, _, key = unquote(url.path).lstrip("/").partition("/")
        query = parse_qs(url.query, keep_blank_values=True)
        if url.path == "/-/received":
            self._send("200 OK", [str(self._bucket.received).encode()])
        elif method in ("GET", "HEAD") and key:
            self._read(method, key, headers.get("range"))
        elif method == "GET":
            self._send("200 OK", [self._listing(query)])
        elif method == "PUT" and "x-amz-copy-source" in headers:
            self._copy(headers["x-amz-copy-source"], key)
        elif method == "PUT":
            self._write(key, query, body)
        elif method == "DELETE":
            self._bucket.replace(key, None)
            self._send("204 No Content", [])
        else:
            self._post(key, query, body)

    def _read(self, method: str, key: str, wanted: str | None) -> None:
        parts = self._bucket.objects.get(key)
        if parts is None:
            self._send("404 Not Found", [b"<Error><Code>NoSuchKey</Code></Error>"], method)
            return
        size = sum(map(len, parts))
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted or "")
        if span is None:
            self._send("200 OK", parts, method)
            return
        begin, end = int(span[1]), min(int(span[2]) + 1, size)
        more = f"Content-Range: bytes {begin}-{end - 1}/{size}\r\n"
        self._send("206 Partial Content", _cut(parts, begin, end), method, more)

    def _copy(self, source: str, key: str) -> None:
        parts = self._bucket.objects.get(unquote(source).lstrip("/").partition("/")[2])
        if parts is None:
            self._send("404 Not Found", [b"<Error><Code>NoSuchKey</Code></Error>"])
            return
        copied = b"".join(parts)  # memory of its own: that of the source may be used again
        self._bucket.replace(key, [memoryview(copied)])
        self._send(
            "200 OK", [f"{_XML}<CopyObjectResult><ETag>0</ETag></CopyObjectResult>".encode()]
        )

    def _write(self, key: str, query: dict[str, list[str]], body: memoryview) -> None:
        if "uploadId" in query:
            self._bucket.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
        elif key:
            self._bucket.replace(key, [body])
        self._send("200 OK", [])

    def _post(self, key: str, query: dict[str, list[str]], body: memoryview) -> None:
        if "uploads" in query:
            upload = str(id(body))
            self._bucket.uploads[upload] = {}
            names = f"<Bucket>b</Bucket><Key>{key}</Key><UploadId>{upload}</UploadId>"
            kind = "InitiateMultipartUploadResult"
            self._send("200 OK", [f"{_XML}<{kind}>{names}</{kind}>".encode()])
        elif "delete" in query:
            keys = re.findall(r"<Key>(.*?)</Key>", bytes(body).decode())
            for found in keys:
                self._bucket.replace(found, None)
            shown = "".join(f"<Deleted><Key>{found}</Key></Deleted>" for found in keys)
            self._send("200 OK", [f"{_XML}<DeleteResult>{shown}</DeleteResult>".encode()])
        else:
            parts = self._bucket.uploads.pop(query["uploadId"][0])
            self._bucket.replace(key, [parts[number] for number in sorted(parts)])
            names = f"<Location>l</Location><Bucket>b</Bucket><Key>{key}</Key><ETag>0</ETag>"
            kind = "CompleteMultipartUploadResult"
            self._send("200 OK", [f"{_XML}<{kind}>{names}</{kind}>".encode()])

    def _listing(self, query: dict[str, list[str]]) -> bytes:
        prefix = query.get("prefix", [""])[0]
        keys, folders = [], set()
        for key, parts in sorted(self._bucket.objects.items()):
            rest = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if "delimiter" in query and "/" in rest:
                folders.add(prefix + rest.partition("/")[0] + "/")
                continue
            keys.append(
                f"<Contents><Key>{key}</Key><LastModified>2000-01-01T00:00:00.000Z</LastModified>"
                f'<ETag>"0"</ETag><Size>{sum(map(len, parts))}</Size></Contents>'
            )
        shown = [f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in folders]
        inner = "".join(
            [f"<IsTruncated>false</IsTruncated><KeyCount>{len(keys)}</KeyCount>", *keys]
        )
        text = f"{_XML}<ListBucketResult>{inner}{''.join(shown)}</ListBucketResult>"
        return text.encode()

    def _send(
        self, status: str, parts: list[bytes] | list[memoryview], method: str = "", more: str = ""
    ) -> None:
        size = sum(map(len, parts))
        head = f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n{more}".encode() + _DATE + b"\r\n"
        self._peer.sendall(head)
        for part in parts if method != "HEAD" else []:
            self._peer.sendall(part)


def _cut(parts: list[memoryview], begin: int, end: int) -> list[memoryview]:
    """The bytes [begin, end) of some parts, without a copy."""
    found, at = [], 0
    for part in parts:
        low, high = max(begin - at, 0), min(end - at, len(part))
        if low < high:
            found.append(part[low:high])
        at += len(part)
    return found


def main() -> None:
    """Print the port, serve, and end when standard input does."""
    bucket = Bucket()
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def accept() -> None:
        while True:
            peer, _ = listener.accept()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(bucket, peer)
            threading.Thread(target=connection.serve, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
