"""Writes tests/golden/v1: two tiny steps of format version 1, which must load for ever.

Run once, with `xxhash` installed; the result is committed and never written again: a change to the
format gets a new version and a new directory. Only pure modules are used, so that these bytes
follow docs/format.md and not whatever the engine happens to do.

step-000000000007 holds every dtype that PyTorch has, 0-dim, empty, tied and optimizer tensors, and
every value tag. step-000000000008 holds the dtypes that no torch tensor of today has (F4, F6).

    python tests/golden/make_v1.py
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from statehold.encoding import values
from statehold.encoding.header import bytes_of
from statehold.format.entries import record_file
from statehold.format.manifest import Manifest
from statehold.layout import plan

HERE = Path(__file__).parent
CREATED = "2026-11-21T07:30:00Z"
WRITER = "statehold 0.1.0"
# struct codes of the dtypes whose elements struct can pack.
CODES = {
    "BOOL": "?",
    "U8": "B",
    "I8": "b",
    "I16": "h",
    "U16": "H",
    "F16": "e",
    "I32": "i",
    "U32": "I",
    "F32": "f",
    "F64": "d",
    "I64": "q",
    "U64": "Q",
}
FLOAT8 = ("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")

PLAIN: dict[str, Any] = {
    "none": None,
    "true": True,
    "false": False,
    "int": -(2**53 - 1),
    "big": 2**53,
    "bigger": -(10**60) - 1,
    "float": 1.0,
    "minus zero": -0.0,
    "tiny": 5e-324,
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "complex": complex(-0.0, float("inf")),
    "str": 'quote " backslash \\ newline \n nul \0',
    "unicode": "\u00fc\u6f22\U0001f40d",
    "bytes": bytes(range(256)),
    "no bytes": b"",
    "list": [1, [2.5, [None]], []],
    "tuple": (1, (2, "x"), ()),
    "set": {1, "a", (2, 3)},
    "frozenset": frozenset({b"k"}),
    "int keys": {0: "a", -1: "b", 2.5: "c", (1, 2): "d", None: "e", True: "f"},
    "dollar keys": {"$tensor": 1, "plain": 2},
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "counter": Counter({"x": 3, "y": -1}),
    "deque": deque([1, 2], maxlen=4),
    "endless deque": deque(["a"]),
    "empty": {},
}
TORCH = {
    "dtype": {"$torch": {"dtype": "bfloat16"}},
    "device": {"$torch": {"device": "cpu"}},
    "size": {"$torch": {"size": [2, 3]}},
    "numpy scalar": {"$npscalar": {"dtype": "float64", "bytes": "AAAAAAAA+D8="}},
}


def elements(dtype: str, count: int) -> bytes:
    """`count` elements that differ, none of them NaN."""
    if dtype == "BF16":
        return b"".join(struct.pack("<f", i - 1.5)[2:] for i in range(count))
    if dtype == "C64":
        return b"".join(struct.pack("<ff", i, -i) for i in range(count))
    code = CODES.get(dtype)
    if code is None:
        nbytes = bytes_of(dtype, (count,)) or 0
        return bytes(0x30 + i % 16 for i in range(nbytes))
    first = 0 if dtype.startswith(("U", "B")) else -2
    return b"".join(struct.pack(f"<{code}", first + i) for i in range(count))


class Step:
    """Collects tensors, then writes the step directory."""

    def __init__(self) -> None:
        self.specs: list[plan.TensorSpec] = []
        self.data: list[bytes] = []

    def tensor(self, name: str, dtype: str, *shape: int) -> dict[str, str]:
        count = 1
        for size in shape:
            count *= size
        data = elements(dtype, count)
        self.specs.append(plan.TensorSpec(name, dtype, shape, len(data), eager=len(data) < 8))
        self.data.append(data)
        return {"$tensor": name}

    def write(
        self, number: int, state: Any, hash64: Callable[[bytes], int], folder: str = "v1"
    ) -> None:
        layout = plan.plan_save(self.specs, step=number)
        content = layout.header + b"".join(self.data[i] for i in layout.source_index)
        segments = [(0, layout.data_begin)]
        segments += [(b, s.nbytes) for b, s in zip(layout.begins, layout.specs, strict=True)]
        file, tensors = record_file(layout, checksums(content, segments, hash64))
        manifest = Manifest(number, 1, CREATED, WRITER, plan.BLOCK_BYTES, (file,), tensors, state)
        directory = HERE / folder / f"step-{number:012d}"
        directory.mkdir(parents=True)
        (directory / layout.file_name).write_bytes(content)
        (directory / "manifest.json").write_bytes(manifest.encode())


def checksums(
    content: bytes, segments: Sequence[tuple[int, int]], hash64: Callable[[bytes], int]
) -> bytes:
    sums = [
        hash64(content[low:high]).to_bytes(8, "little")
        for begin, nbytes in segments
        for low, high in plan.pieces(begin, nbytes, plan.BLOCK_BYTES)
    ]
    return b"".join(sums)


def write_main_step(hash64: Callable[[bytes], int]) -> None:
    step = Step()
    dtypes = [*CODES, "BF16", "C64", *FLOAT8]
    state = {
        "dtypes": {dtype: step.tensor(f"dtypes.{dtype}", dtype, 2, 3) for dtype in dtypes},
        "shapes": {
            "scalar": step.tensor("shapes.scalar", "F32"),
            "empty": step.tensor("shapes.empty", "F32", 0, 3),
            "empty bytes": step.tensor("shapes.empty bytes", "U8", 0),
            "odd bytes": step.tensor("shapes.odd bytes", "U8", 5),
        },
        "model": {
            "embed.weight": step.tensor("model.embed.weight", "BF16", 4, 8),
            "head.weight": {"$tensor": "model.embed.weight"},
        },
        "optimizer": {
            "state": {
                "model.embed.weight": {
                    "step": step.tensor("optimizer.state.model.embed.weight.step", "F32"),
                    "exp_avg": step.tensor(
                        "optimizer.state.model.embed.weight.exp_avg", "F32", 4, 8
                    ),
                }
            },
            "param_groups": [
                {
                    "lr": 0.001,
                    "betas": {"$tuple": [0.9, 0.95]},
                    "params": ["model.embed.weight"],
                }
            ],
        },
        "plain": values.encode(PLAIN, "plain"),
        "torch": TORCH,
        "array": {"$ndarray": step.tensor("array", "I64", 3)["$tensor"]},
    }
    step.write(7, state, hash64)


def write_rare_step(hash64: Callable[[bytes], int]) -> None:
    step = Step()
    shapes = {"F4": (3, 2), "F6_E2M3": (4, 2), "F6_E3M2": (4,)}
    state = {dtype: step.tensor(f"rare.{dtype}", dtype, *shape) for dtype, shape in shapes.items()}
    step.write(8, {"rare": state}, hash64)


def main() -> None:
    import xxhash

    write_main_step(xxhash.xxh3_64_intdigest)
    write_rare_step(xxhash.xxh3_64_intdigest)


if __name__ == "__main__":
    main()
