"""A real browser, driven over a pipe with the DevTools protocol: no package, no port."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.faults import DEADLINE_S, must

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def installed() -> str | None:
    """A browser of this machine that can be driven, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page. `complaints`: what it has said on the console, raised, or refused to load."""

    def __init__(self, to: int, from_: int) -> None:
        self._to, self._from = to, from_
        self._number = 0
        self._session: str | None = None
        self._raw = b""
        self._happened: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._number:
                must("error" not in told, told)
                return told["result"]
            self._happened.append(told)

    def open(self, page: Path) -> None:
        """Load a file, and wait until it is there."""
        self._happened.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(each["method"] == "Page.loadEventFired" for each in self._happened):
            self._happened.append(self._next())

    def ask(self, expression: str) -> Any:
        """The value of an expression on the page."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        must("exceptionDetails" not in told, told)
        return told["result"].get("value")

    @property
    def complaints(self) -> list[Any]:
        self.ask("1")  # what has happened until now has arrived when this has
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [each["params"] for each in self._happened if each["method"] in kinds]

    @property
    def requests(self) -> list[str]:
        """What the page has asked for, itself included."""
        asked = (e for e in self._happened if e["method"] == "Network.requestWillBeSent")
        return [each["params"]["request"]["url"] for each in asked]

    def _next(self) -> dict[str, Any]:
        until_s = time.monotonic() + DEADLINE_S
        while b"\0" not in self._raw:
            ready, _, _ = select.select([self._from], [], [], max(until_s - time.monotonic(), 0))
            must(ready, "the browser does not answer")
            more = os.read(self._from, 1 << 16)
            must(more, "the browser has ended")
            self._raw += more
        told, self._raw = self._raw.split(b"\0", 1)
        return json.loads(told)


@contextmanager
def browser(path: str, folder: Path) -> Iterator[Browser]:
    """Start a browser with a profile in `folder`; it ends with the context."""
    hear, to = os.pipe()
    from_, say = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--mute-audio",
               "--disable-background-networking", "--disable-dev-shm-usage",
               "--remote-debugging-pipe", f"--user-data-dir={folder}"]  # fmt: skip
    command = f'exec "$@" 3<&{hear} 4>&{say}'
    with open(folder / "stderr", "wb") as stderr:
        process = subprocess.Popen(
            ["bash", "-c", command, "browser", path, *options],
            pass_fds=(hear, say), stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr,
        )  # fmt: skip
    os.close(hear)
    os.close(say)
    try:
        yield Browser(to, from_)
    finally:
        os.close(to)
        os.close(from_)
        process.kill()
        process.wait()
