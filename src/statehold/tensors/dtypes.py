"""torch dtypes <-> safetensors dtype codes.

Owns: the one table between the two, and the shape rule of packed types. Every dtype of safetensors
that this torch has is in the table; every other torch dtype is refused by name, never converted.
Facts: a torch `float4_e2m1fn_x2` element is one byte that packs two values along the last
dimension; safetensors counts values, so its last dimension is twice the torch one.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from statehold.errors import UnsupportedValueError
from statehold.layout.layout import Box

# Names, because an older torch lacks some of these dtypes.
_NAME_OF_CODE = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}
_DTYPE_OF_CODE: dict[str, torch.dtype] = {
    code: getattr(torch, name) for code, name in _NAME_OF_CODE.items() if hasattr(torch, name)
}
_CODE_OF_DTYPE = {dtype: code for code, dtype in _DTYPE_OF_CODE.items()}
_PACKED: torch.dtype | None = getattr(torch, "float4_e2m1fn_x2", None)

# numpy dtype names that have a torch dtype of the same layout.
NUMPY_TO_TORCH: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for code, name in _NAME_OF_CODE.items()
    if not code.startswith(("BF", "F8", "F4"))
}

# NumPy scalars are stored by value in the manifest, little-endian: numbers and dates.
_NUMPY_SCALARS = frozenset(NUMPY_TO_TORCH) | {"complex128"}
_NUMPY_DATE = re.compile(
    r"(datetime64|timedelta64)(\[[0-9]{0,6}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)

_HINTS = {
    "complex128": "store torch.view_as_real(tensor)",
    "complex32": "store torch.view_as_real(tensor), or convert it to complex64",
}


def is_numpy_scalar(name: str) -> bool:
    """Whether scalars of the NumPy dtype of this name can be stored."""
    return name in _NUMPY_SCALARS or _NUMPY_DATE.fullmatch(name) is not None


def code_of(dtype: torch.dtype, path: str) -> str:
    """The safetensors code of a torch dtype; refuses the others with the path of the tensor."""
    code = _CODE_OF_DTYPE.get(dtype)
    if code is None:
        raise _refused(dtype, path)
    return code


def dtype_of(code: str, path: str) -> torch.dtype:
    """The torch dtype of a safetensors code; refuses codes that this torch cannot hold."""
    dtype = _DTYPE_OF_CODE.get(code)
    if dtype is None:
        raise UnsupportedValueError(
            "a tensor of the step has a dtype that this torch does not have",
            facts={"path": path, "dtype": code, "torch": torch.__version__},
            hint="restore with a newer torch",
        )
    return dtype


def stored_shape(dtype: torch.dtype, shape: tuple[int, ...], path: str) -> tuple[int, ...]:
    """The shape that safetensors records for a torch tensor of this dtype and shape."""
    if dtype is not _PACKED:
        return shape
    if not shape:
        raise UnsupportedValueError(
            "a packed 4-bit tensor without dimensions cannot be stored",
            facts={"path": path, "dtype": dtype},
            hint="reshape it to one dimension",
        )
    return (*shape[:-1], shape[-1] * 2)


def torch_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The inverse of `stored_shape`."""
    return shape if dtype is not _PACKED else (*shape[:-1], shape[-1] // 2)


def torch_box(dtype: torch.dtype, box: Box) -> Box:
    """A box of a stored tensor in elements of torch."""
    if dtype is not _PACKED:
        return box
    return Box(torch_shape(dtype, box.offsets), torch_shape(dtype, box.shape))


def stored_box(dtype: torch.dtype, box: Box, path: str) -> Box:
    """The inverse of `torch_box`."""
    return Box(stored_shape(dtype, box.offsets, path), stored_shape(dtype, box.shape, path))


def described(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """A live tensor in the words of the format where it has them; for messages."""
    code = _CODE_OF_DTYPE.get(dtype)
    if code is None or (dtype is _PACKED and not shape):
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
    return f"{code} {list(stored_shape(dtype, shape, ''))}"


def _refused(dtype: Any, path: str) -> UnsupportedValueError:
    name = str(dtype).removeprefix("torch.")
    hint = _HINTS.get(name, "convert it to a dtype that safetensors can hold")
    if name.startswith(("q", "quint")):
        hint = "dequantize it, or store its int_repr() and its scales"
    return UnsupportedValueError(
        "a tensor has a dtype that no step can hold", facts={"path": path, "dtype": name}, hint=hint
    )
