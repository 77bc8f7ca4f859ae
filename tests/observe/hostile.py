"""A run and a trace whose names try to become markup."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from statehold import Directory
from statehold.checkpoint.levels.remembered import remember
from support.runs import write_step

HOSTILE = [
    "</script><img src=x onerror=window.pwned=1>",
    "</title></style><script>window.pwned=2</script>",
    "\"><svg onload='window.pwned=3'>",
    "a' onmouseover='window.pwned=4",
    "<!--<script>window.pwned=5",
    "&lt;b&gt; &#60;img&#62;",
    "javascript:window.pwned=6",
    "]]>{{7*7}}${window.pwned=7}",
    "\u202egnirts\u2066\x1b[2J\x00",
]


def hostile_run(folder: Path) -> Path:
    """A run with such a name, a step with such tensors, and damage in one of them."""
    run = folder / "<img src=x onerror=window.pwned=8>&amp;"
    names = [name for name in HOSTILE if "\x00" not in name]
    arrays = {name: ("F32", np.full(40, 1.0, "<f4")) for name in names}
    arrays["model.weight"] = ("F32", np.zeros(1000, "<f4"))
    directory = write_step(run, 3, arrays, name=HOSTILE[0])
    data = directory / "rank-00000-of-00001.safetensors"
    raw = bytearray(data.read_bytes())
    raw[-5] ^= 1
    data.write_bytes(bytes(raw))
    remember([Directory(), Directory(path=f"/{HOSTILE[0]}", name="b")], str(run))
    (run / "step-000000000009.<script>window.pwned=9<").mkdir()
    (run / "step-000000000009.<img src=x>.partial").mkdir()
    return run


def hostile_trace(folder: Path) -> Path:
    """A trace whose names are such, some of it not well-formed."""
    events: list[object] = [
        {"ph": "M", "pid": 0, "tid": 1, "name": "thread_name", "args": {"name": HOSTILE[0]}},
        7, None, [], {"ph": "X"}, {"ph": "X", "pid": "0", "tid": 1, "name": "x"},
        {"ph": "X", "pid": 0, "tid": 1, "name": "x", "ts": 1e400, "dur": 1},
        {"ph": "X", "pid": 0, "tid": 1, "name": "x", "ts": 1, "dur": -1},
        {"ph": "X", "pid": 0, "tid": 1, "name": "x", "ts": 1, "dur": 1, "args": 3},
    ]  # fmt: skip
    for index, name in enumerate(HOSTILE):
        about = {"pid": 0, "tid": 1, "ts": 1000 * index, "name": name}
        facts = {"step": name, "error": name, name: name, "event": "restore"}
        events.append({"ph": "X", "dur": 500, "args": facts, **about})
        facts = {"event": "save", "step": name, "written_bytes": name, "committed_s": name}
        events.append({"ph": "b", "id": name, "args": facts, **about})
        events.append({"ph": "e", "id": name, "args": {}, **about})
    path = folder / "hostile.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path
