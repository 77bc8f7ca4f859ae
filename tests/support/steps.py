"""Small valid headers and manifests for tests to look at and to damage."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from statehold._core import xxh3_64
from statehold.encoding.header import bytes_of
from statehold.format.entries import Again, json_of, record_file
from statehold.format.manifest import Manifest
from statehold.layout.plan import (
    BLOCK_BYTES,
    SavePlan,
    TensorSpec,
    piece_count,
    pieces,
    plan_save,
)


def spec(name: str, dtype: str, *shape: int, eager: bool = False) -> TensorSpec:
    nbytes = bytes_of(dtype, shape)
    if nbytes is None:
        raise ValueError("not a whole number of bytes")
    return TensorSpec(name, dtype, shape, nbytes, eager)


SPECS = (
    spec("model.weight", "BF16", 3, 4),
    spec("model.bias", "F32", 5, eager=True),
    spec("empty", "F32", 0, 2),
    spec("scalar", "I64"),
    spec("large", "U8", 3 * BLOCK_BYTES),
)


def again_of(document: Any, is_known: bool) -> Again | None:
    """What the document before said, if it had the same tensors."""
    if not is_known:
        return None
    said = json.loads(document.sealed())
    members = {key: said[key] for key in ("meshes", "tensors") if key in said}
    return Again(members, said["tensors"], json_of(document.state), document.state)


def sums_for(plan: SavePlan) -> bytes:
    """Checksums of the right number; their values are not what these tests are about."""
    count = piece_count(0, plan.data_begin, BLOCK_BYTES)
    for tensor, begin in zip(plan.specs, plan.begins, strict=True):
        count += piece_count(begin, tensor.nbytes, BLOCK_BYTES)
    return b"".join(i.to_bytes(8, "little") for i in range(1, count + 1))


Sums = Callable[[SavePlan, bytes], bytes]


def false_sums(plan: SavePlan, content: bytes) -> bytes:
    return sums_for(plan)


def true_sums(plan: SavePlan, content: bytes) -> bytes:
    """The checksums of a data file."""
    segments = [(0, plan.data_begin)]
    segments += [(begin, spec.nbytes) for spec, begin in zip(plan.specs, plan.begins, strict=True)]
    return b"".join(
        xxh3_64(content[begin:end]).to_bytes(8, "little")
        for at, nbytes in segments
        for begin, end in pieces(at, nbytes, BLOCK_BYTES)
    )


def manifest_of(specs: Sequence[TensorSpec] = SPECS, state: Any = None, step: int = 7) -> Manifest:
    plan = plan_save(specs, step=step)
    file, tensors = record_file(plan, sums_for(plan))
    if state is None:
        state = {"tensors": [{"$tensor": tensor.name} for tensor in specs], "epoch": 3}
    return Manifest(
        step=step,
        world_size=1,
        created="2026-11-21T07:00:00+00:00",
        writer="statehold 0.1.0",
        block_bytes=BLOCK_BYTES,
        files=(file,),
        tensors=tensors,
        state=state,
    )


def document_of(raw: bytes, what: str = "manifest") -> dict[str, Any]:
    """The JSON of a manifest or a record, without its hash."""
    document: dict[str, Any] = json.loads(raw)
    del document[f"{what}_sha256"]
    return document


def seal(body: dict[str, Any] | str, what: str = "manifest") -> bytes:
    """A manifest or a record with a correct hash, whatever nonsense its body holds."""
    text = body if isinstance(body, str) else json.dumps(body, separators=(",", ":"))
    raw = text[:-1].encode("utf-8", "surrogatepass")
    return raw + f',"{what}_sha256":"{hashlib.sha256(raw).hexdigest()}"}}\n'.encode()


def changed(document: dict[str, Any], keys: Sequence[str | int], value: Any) -> dict[str, Any]:
    """A copy of `document` in which the member reached by `keys` is `value`."""
    result = copy.deepcopy(document)
    node: Any = result
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    return result


def header_of(document: dict[str, Any] | str | bytes) -> bytes:
    """A safetensors header with a correct length, whatever its JSON."""
    if isinstance(document, dict):
        document = json.dumps(document)
    text = document.encode("utf-8", "surrogatepass") if isinstance(document, str) else document
    return len(text).to_bytes(8, "little") + text
