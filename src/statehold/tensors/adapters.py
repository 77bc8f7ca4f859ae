"""Tensor classes that are made of other tensors but have no `__tensor_flatten__`.

Owns: how each is taken apart and put together; which entries of a state_dict() repeat its parts.
Invariants: no library is imported here. Taking a tensor apart copies nothing and waits for no
device.
Not here: which classes a step may hold (subclasses), names and nodes (capture, composed).

Facts about bitsandbytes (0.50) that decide what is here:
- A Params4bit is a parameter whose own memory holds the packed values. Its QuantState holds the
  other tensors: absmax, code, and with double quantization offset and state2.
- Until the layer is moved to a device the weight is not quantized, and has no QuantState.
- Once it is quantized only the QuantState counts. The parameter's own blocksize and quant_type may
  be defaults.
- state_dict() of a Linear4bit adds these tensors (one as a copy), and a tensor of JSON with the
  rest. load_state_dict() of a quantized layer refuses these entries.
- A conversion of the parameter, such as fully_shard, can lose the QuantState. The layer keeps it.
- In eval on a CPU with AVX512-BF16, forward() packs the weight in another way. state_dict() of the
  layer undoes that, and changes the scales: it is not called for such a layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from statehold.errors import UnsupportedValueError
from statehold.tensors.storable import name_of

# The inner tensor that is the memory of the tensor itself, and has its name.
ITSELF = ""
_BITSANDBYTES = "bitsandbytes.nn.modules"
_QUANTIZED = "quantized"
_OPTIONS = ("quant_type", "blocksize", "compress_statistics", "quant_storage")


@dataclass(frozen=True, slots=True)
class Adapter:
    """Of one class: tensor, path -> inner tensors and context; class, these -> tensor; tensor ->
    what a person has to know of it, or ""."""

    apart: Callable[[Any, str], tuple[dict[str, torch.Tensor], Any]]
    together: Callable[[Any, Mapping[str, torch.Tensor], Any], Any]
    remark: Callable[[Any], str]


def adapter_of(cls: type) -> Adapter | None:
    """The adapter for tensors of exactly this class."""
    if cls is torch.Tensor or cls is nn.Parameter:
        return None
    return ADAPTERS.get(name_of(cls))


def inner_path(path: str, name: str) -> str:
    """What an inner tensor of the tensor at `path` is called."""
    return path if name == ITSELF else f"{path}.{name}"


def repeated(state: Mapping[str, Any]) -> list[str]:
    """The entries of a state_dict() that say again what a tensor among them is made of."""
    kinds = {kind for kind in set(map(type, state.values())) if adapter_of(kind) is not None}
    made = {name for name, value in state.items() if kinds and type(value) in kinds}
    return [name for name in state if not made.isdisjoint(_above(name))] if made else []


def _above(name: str) -> Iterable[str]:
    """The names that `name` lies below."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


# -- bitsandbytes ----------------------------------------------------------------------------------


def _apart(tensor: Any, path: str) -> tuple[dict[str, torch.Tensor], Any]:
    state, data = getattr(tensor, "quant_state", None), tensor.detach()
    if state is None and getattr(tensor, "bnb_quantized", False):
        raise _stateless(path)
    if _is_packed(state):
        raise _packed(path)
    if state is None:
        options = {name: getattr(tensor, name, None) for name in _OPTIONS}
        return {ITSELF: data}, {_QUANTIZED: False, **options}
    tensors = {ITSELF: data, "absmax": state.absmax, "quant_map": state.code}
    context = {_QUANTIZED: True, **_values(state, ("quant_type", "blocksize", "dtype", "shape"))}
    if (nested := state.state2) is not None:
        tensors |= {"nested_absmax": nested.absmax, "nested_quant_map": nested.code}
        tensors["nested_offset"] = state.offset
        context |= {f"nested_{name}": value
                    for name, value in _values(nested, ("blocksize", "dtype")).items()}  # fmt: skip
    return tensors, context


def _values(state: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(state, name) for name in names}


def _is_packed(state: Any) -> bool:
    return bool(getattr(state, "packing_format_for_cpu", False))


def _packed(path: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        "a 4-bit weight that the processor has packed for inference cannot be stored or restored",
        facts={"path": path},
        hint="its exact scales are gone: save the parameters that are trained by themselves; set "
        "support_avx512bf16_for_cpu = False on each Linear4bit before a model is evaluated",
    )


def _stateless(path: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        "a 4-bit weight without its quantization state cannot be stored",
        facts={"path": path},
        hint="run the model once, which gives the weight the state that its layer keeps; weights "
        "that fully_shard has sharded stay without it: save the parameters that are trained by "
        "themselves",
    )


def _together(cls: Any, tensors: Mapping[str, torch.Tensor], context: Any) -> Any:
    data, values = tensors[ITSELF], dict(context)
    if not values.pop(_QUANTIZED):
        return cls(data, requires_grad=False, **values)
    for name in ("dtype", "nested_dtype"):
        if name in values:
            values[name] = str(values[name]).removeprefix("torch.")
    values |= {name: tensor for name, tensor in tensors.items() if name != ITSELF}
    offset = values.get("nested_offset")
    if offset is not None:
        values["nested_offset"] = 0.0  # it is copied, and its bytes have not arrived yet
    made = cls.from_prequantized(data, values, requires_grad=False, device=data.device)
    if offset is not None:
        made.quant_state.offset = offset
    return made


def _remark(tensor: Any) -> str:
    if getattr(tensor, "quant_state", None) is not None:
        return ""
    return ", which is not quantized yet (moving the model to its device quantizes it)"


ADAPTERS = {f"{_BITSANDBYTES}.Params4bit": Adapter(_apart, _together, _remark)}


def refuse_packed(module: nn.Module, path: str) -> None:
    """Raise for a 4-bit layer that state_dict() would change."""
    for where, layer in _quantized_layers(module, path):
        if _is_packed(getattr(layer.weight, "quant_state", None)):
            raise _packed(where)


def refuse_stateless(module: nn.Module, path: str) -> None:
    """Raise for a 4-bit layer whose weight has lost its quantization state.

    Call it after state_dict(): a hook of that may have swapped the weight for a sharded one.
    """
    for where, layer in _quantized_layers(module, path):
        if getattr(layer.weight, "quant_state", None) is None:
            raise _stateless(where)


def _quantized_layers(module: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    """The 4-bit layers of a module, with the paths of their weights."""
    library = sys.modules.get(_BITSANDBYTES)
    if library is None:
        return
    for name, each in module.named_modules():
        if isinstance(each, library.Linear4bit) and each.quant_state is not None:
            yield ".".join(filter(None, (path, name, "weight"))), each
