"""Writes tests/golden/v3: a tiny step of format version 3, which must load for ever.

Run once; the result is committed and never written again. It holds what version 3 added: complex128
tensors and arrays, and a tensor that is made of others, one of them complex.

    python tests/golden/make_v3.py
"""

from __future__ import annotations

import ctypes
from typing import Any

from golden.make_v1 import Step

CONTEXT = {"$tuple": ["rows", 1.5, {"$torch": {"dtype": "float32"}}]}


def main() -> None:
    from statehold import _core

    def hash64(data: bytes) -> int:
        buffer = ctypes.create_string_buffer(data, len(data))
        return int(_core.hash_memory(ctypes.addressof(buffer), len(data)))

    step = Step()
    inner = {
        "codes": step.tensor("made.codes", "I8", 2, 3),
        "scale": step.tensor("made.scale", "F32", 2),
        "levels": {"$complex128": step.tensor("made.levels", "F64", 4, 2)},
    }
    array = {"$ndarray": step.tensor("array", "F64", 3, 2)["$tensor"]}
    state: dict[str, Any] = {
        "complex": {"$complex128": step.tensor("complex", "F64", 2, 2, 2)},
        "scalar": {"$complex128": step.tensor("scalar", "F64", 2)},
        "array": {"$complex128": array},
        "made": {
            "$subclass": {
                "class": "support.quantized.Made",
                "context": CONTEXT,
                "shape": [2, 3],
                "stride": [3, 1],
                "part": None,
                "tensors": inner,
            }
        },
    }
    step.write(9, state, hash64, "v3")


if __name__ == "__main__":
    main()
