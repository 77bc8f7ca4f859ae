"""Operations of torch on memory of an emulated device: queued on the current stream.

What an operation returns is made at once, with the shape that it will have; its elements come when
the stream gets there. What is passed from the host is read at once, but for pinned memory, which is
read when the copy happens. An operation that gives its result to the host waits for the stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

if TYPE_CHECKING:
    from support.cuda.machine import Machine

aten = torch.ops.aten
_MADE_ON_THE_DEVICE = {"device", "pin_memory", "layout"}


class Operations(TorchDispatchMode):
    """Entered on every thread that works with device tensors."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        flat, _ = tree_flatten((args, kwargs))
        tensors = [each for each in flat if isinstance(each, torch.Tensor)]
        if any(map(is_traceable_wrapper_subclass, tensors)):
            return NotImplemented  # a DTensor, say: what it does with its inner tensors comes here
        if any(isinstance(each, FakeTensor) for each in tensors):
            return func(*args, **kwargs)
        blocks = [self._machine.memory.block_of(each) for each in tensors]
        on_device = [block for block in blocks if block is not None]
        if not on_device or _is_view(func):
            return func(*args, **kwargs)
        device = on_device[0].device
        if any(block.device != device for block in on_device):
            raise RuntimeError("Expected all tensors to be on the same device")
        written = _written(func, args, kwargs)
        is_read = torch.Tag.data_dependent_output in func.tags  # item(), equal(), ...
        if is_read or _writes_host(self._machine, written):
            return self._to_host(func, args, kwargs, device)
        return self._queued(func, args, kwargs, written, device)

    def _to_host(self, func: Any, args: Any, kwargs: Any, device: int) -> Any:
        if func is aten.copy_.default and self._is_asynchronous(args, kwargs):
            self._launch(func, args, kwargs, device)
            return args[0]
        self._machine.current(device).synchronize()
        return self._run(func, args, kwargs)

    def _is_asynchronous(self, args: Any, kwargs: Any) -> bool:
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return bool(non_blocking) and self._machine.pins.hold(args[0])

    def _queued(self, func: Any, args: Any, kwargs: Any, written: Any, device: int) -> Any:
        if written:
            self._launch(func, args, kwargs, device)
            _count_changes(func, written)
            return _returned(func, written, args)
        shapes = _on_meta(func, args, kwargs)
        made = tree_map(lambda shape: self._empty(shape, device), shapes)
        if _name(func) not in ("empty", "new_empty", "empty_like", "new_empty_strided"):
            self._launch(func, args, kwargs, device, into=made)
        return made

    def _empty(self, shape: Any, device: int) -> Any:
        if not isinstance(shape, torch.Tensor):
            return shape
        stream = self._machine.current(device)
        return self._machine.memory.empty(device, stream, shape.shape, shape.stride(), shape.dtype)

    def _launch(self, func: Any, args: Any, kwargs: Any, device: int, into: Any = None) -> None:
        with torch.inference_mode(False):  # the work is done outside that mode
            args, kwargs = tree_map(self._shadow, (args, kwargs))
            into = tree_map(self._shadow, into)

        def work() -> None:
            with torch._C._DisableTorchDispatch(), torch.inference_mode():
                result = func(*args, **kwargs)
                if into is not None:
                    for target, value in zip(*map(_leaves, (into, result)), strict=True):
                        if value.numel():  # batch norm in eval mode makes more on other devices
                            target.copy_(value)

        self._machine.timeline.give(self._machine.current(device), work)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs)

    def _shadow(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        block = self._machine.memory.block_of(value)
        if block is not None:
            return block.like(value)
        return value.detach() if self._machine.pins.hold(value) else value.detach().clone()


def _count_changes(func: Any, written: list[Any]) -> None:
    """torch's foreach kernels move version counters themselves; its fused optimizers do not."""
    if _name(func).startswith("_foreach_"):
        changed = [each for each in _leaves(written) if not each.is_inference()]
        torch.autograd.graph.increment_version(changed)


def _leaves(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(tree)[0] if isinstance(each, torch.Tensor)]


def _schema_of(func: Any) -> Any:
    """What an operation takes, returns and writes to."""
    return func._schema


def _name(func: Any) -> str:
    return str(_schema_of(func).name).removeprefix("aten::")


def _is_view(func: Any) -> bool:
    aliases = [each.alias_info for each in _schema_of(func).returns]
    return any(each is not None and not each.is_write for each in aliases) or func in (
        aten.set_.source_Storage_storage_offset,
        aten._unsafe_view.default,
    )


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that the operation writes to."""
    found = []
    for index, each in enumerate(_schema_of(func).arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            found.append(args[index] if index < len(args) else kwargs.get(each.name))
    return [each for each in found if each is not None]


def _writes_host(machine: Machine, written: list[Any]) -> bool:
    return any(machine.memory.block_of(each) is None for each in _leaves(written))


def _returned(func: Any, written: list[Any], args: Any) -> Any:
    count = len(_schema_of(func).returns)
    if count == 0:
        return None
    return written[0] if count == 1 else tuple(written[:count])


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    def meta(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return like.conj() if value.is_conj() else like

    flat, spec = tree_flatten((args, kwargs))
    args, kwargs = tree_unflatten([meta(each) for each in flat], spec)
    names = {each.name for each in _schema_of(func).arguments}
    if "device" in names:
        kwargs = {k: v for k, v in kwargs.items() if k not in _MADE_ON_THE_DEVICE}
        kwargs["device"] = torch.device("meta")
    return func(*args, **kwargs)
