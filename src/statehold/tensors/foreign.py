"""Values of torch and NumPy that are no tensors: sizes, dtypes, scalars, arrays.

Not here: plain Python values (encoding.values), tensors (captured, matching).
"""

from __future__ import annotations

import base64
import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import PurePath
from typing import Any

import torch

from statehold.encoding import values
from statehold.errors import ManifestError, UnsupportedValueError
from statehold.tensors import dtypes


def torch_node(value: Any) -> Any | None:
    """The node of a torch.Size, dtype or device, or the text of a path; None for anything else."""
    if isinstance(value, PurePath):
        return values.encode(str(value), "")
    if isinstance(value, torch.Size):
        return {"$torch": {"size": list(value)}}
    if isinstance(value, torch.dtype):
        return {"$torch": {"dtype": str(value).removeprefix("torch.")}}
    if isinstance(value, torch.device):
        return {"$torch": {"device": str(value)}}
    return None


def numpy_node(value: Any, path: str, add: Callable[[torch.Tensor, str], str]) -> Any | None:
    """The node of a NumPy number or array; None for anything else, and for what has no dtype of a
    step. add: takes the elements of an array, and returns the name of that tensor."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return scalar_node(value)
    if numpy is None or not isinstance(value, numpy.ndarray):
        return None
    found = array_of(value, path)
    if found is None:
        return None
    array, is_complex = found
    node = {"$ndarray": add(array, path)}
    return {"$complex128": node} if is_complex else node


def scalar_node(value: Any) -> Any | None:
    """The node of a NumPy scalar; None where its dtype cannot be stored."""
    name = value.dtype.name
    if not dtypes.is_numpy_scalar(name):
        return None
    little = value.astype(value.dtype.newbyteorder("<"))
    data = base64.b64encode(little.tobytes()).decode("ascii")
    return {"$npscalar": {"dtype": name, "bytes": data}}


def array_of(value: Any, path: str) -> tuple[torch.Tensor, bool] | None:
    """A private copy of a NumPy array as a tensor, and whether that has pairs for complex128; None
    for an array of a subclass. Raises UnsupportedValueError for a dtype that no step can hold."""
    if type(value).__name__ != "ndarray":
        return None
    known = value.dtype.name == "complex128" or value.dtype.name in dtypes.NUMPY_TO_TORCH
    if not known or not value.dtype.isnative:
        raise UnsupportedValueError(
            "a NumPy array has a dtype that no step can hold",
            facts={"path": path, "dtype": str(value.dtype)},
            hint="convert it with astype() to a number type in native byte order",
        )
    # A copy: a tensor cannot borrow read-only arrays or those with negative strides.
    array = torch.from_numpy(value.copy(order="C"))
    is_complex = array.dtype == torch.complex128
    return (torch.view_as_real(array) if is_complex else array), is_complex


def mapping_of(members: dict[Any, Any]) -> Any:
    """The node of a dict of nodes, with any key that key_of gives."""
    return values.mapping_of(members, lambda key, path: torch_node(key) or scalar_node(key))


def value_of(tag: str, payload: Any) -> Any:
    """The value of a node of NumPy or torch that is not a tensor. Raises ManifestError."""
    if tag == "$npscalar":
        return _numpy_scalar(payload["dtype"], base64.b64decode(payload["bytes"]))
    if "size" in payload:
        return torch.Size(payload["size"])
    if "device" in payload:
        return torch.device(payload["device"])
    dtype = getattr(torch, payload["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ManifestError("no such torch dtype", facts={"got": payload["dtype"]})
    return dtype


def _numpy_scalar(name: str, raw: bytes) -> Any:
    numpy = importlib.import_module("numpy")
    expected = numpy.dtype(name).itemsize if dtypes.is_numpy_scalar(name) else None
    if len(raw) != expected:
        raise ManifestError(
            "no such NumPy scalar",
            facts={"dtype": name, "expected": f"{expected} bytes", "got": f"{len(raw)} bytes"},
        )
    return numpy.frombuffer(raw, dtype=numpy.dtype(name).newbyteorder("<")).astype(name)[0]


# The key of a dict that a node means: all readers of a tree decode its keys here.
key_of = partial(values.decode, leaf=value_of)
