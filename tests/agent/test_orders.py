"""An agent's orders say what the trainer has, and it believes nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from statehold import Directory, Keep, Memory, ObjectStore
from statehold.checkpoint.agent.orders import Orders
from statehold.errors import CorruptionError, StateholdError, UsageError

BEST = Keep(last=2, every=100, best=2, metric="val_loss", pinned=[7, "good"])
LEVELS = (
    Memory(path="/dev/shm/x", keep=3),
    Directory(every=10, bytes_per_s="5MB", name="disk", keep=BEST),
    ObjectStore("s3://b/p", every="30min", options={"endpoint": "http://127.0.0.1:9"}),
)


def orders(**changes: Any) -> Orders:
    told: dict[str, Any] = {
        "trainer": 7, "pidfd": 3, "path": ["/a", "/b"], "run": "/r\udcff", "levels": LEVELS,
        "backend": "threads", "queue_depth": 4, "buffer_bytes": 1 << 20,
    }  # fmt: skip
    return Orders(**told | changes)


def test_all_of_it_arrives_in_one_line() -> None:
    line = orders().encode()
    assert line.count(b"\n") == 1
    assert Orders.decode(line) == orders(path=["/a", "/b"])


def test_relative_paths_are_the_trainers(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    line = orders(levels=[Memory(path="near"), Directory()]).encode()
    assert Orders.decode(line).levels == (Memory(path=str(tmp_path / "near")), Directory())


def test_options_that_are_no_json_are_refused() -> None:
    levels = [*LEVELS[:2], ObjectStore("s3://b/p", options={"region": object()})]
    with pytest.raises(UsageError, match="cannot be described"):
        orders(levels=levels).encode()


WITH_KEEP = json.loads(orders().encode())["levels"][1]


@pytest.mark.parametrize(
    "change",
    [
        {"format": "another"},
        {"levels": []},
        {"levels": [{"kind": "Level"}]},
        {"levels": [{"kind": "Directory", "every": 1}]},
        {"levels": 3},
        {"levels": [WITH_KEEP | {"keep": {"last": 0}}]},
        {"levels": [WITH_KEEP | {"keep": {"path": "/"}}]},
        {"more": 1},
    ],
)
def test_what_is_not_an_order_is_refused(change: dict[str, Any]) -> None:
    told = json.loads(orders().encode()) | change
    with pytest.raises(StateholdError):
        Orders.decode(json.dumps(told).encode())


def test_nonsense_is_refused() -> None:
    for line in (b"", b"{", b"[]", b"\xff", b"[" * 100):
        with pytest.raises(CorruptionError):
            Orders.decode(line)
