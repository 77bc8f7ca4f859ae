"""States that change at random between captures, in all the ways that capture has to notice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.hooks import RemovableHandle

import statehold
from statehold.tensors.storable import local_of
from support.quantized import Made

SHAPES = [(2, 3), (3, 2), (3, 3), (6,), (), (0, 3)]
DTYPES = [torch.float32, torch.float16, torch.int32, torch.complex64, torch.complex128]
MARKS = [lambda each: each, lambda each: each, statehold.Gated, statehold.Volatile]


class Changing:
    """Two modules, their optimizers, and what else a state may hold.

    mesh: of two ranks, for DTensors and for modules that DistributedDataParallel replicates.
    """

    def __init__(self, seed: int, mesh: DeviceMesh | None) -> None:
        self.random = random.Random(seed)
        self.mesh = mesh
        self.modules = {name: self._module() for name in ("one", "two")}
        self.optimizers = {name: self._optimizer(each) for name, each in self.modules.items()}
        self.others: dict[str, Any] = {"x": self._tensor(), "n": 1}
        self.marks = dict.fromkeys(("one", "two", "optimizers", "others"), MARKS[0])
        self.first: dict[str, Any] = {}
        self.is_shown: set[str] = set()  # given as state_dict()
        self.is_replicated = False
        self.is_wrapped = False
        self.stepping: list[torch.optim.Optimizer] = []
        self.hooks: dict[nn.Module, RemovableHandle] = {}
        self.holder = Holder(self)

    def state(self) -> dict[str, Any]:
        parts: dict[str, Any] = self.first | {
            name: each.state_dict(keep_vars=True) if name in self.is_shown else each
            for name, each in self.modules.items()
        }
        if self.is_replicated and self.mesh is not None:
            parts["one"] = Replicated(self.modules["one"], self.mesh.get_group())
        if self.is_wrapped:
            parts["two"] = nn.ModuleDict({"two": self.modules["two"]})
        optimizers = {
            name: each.state_dict() if f"its {name}" in self.is_shown else each
            for name, each in self.optimizers.items()
        }
        parts |= {"optimizers": optimizers, "others": self.others, "holder": self.holder}
        return {name: self.marks.get(name, MARKS[0])(each) for name, each in parts.items()}

    def change(self) -> None:
        """Change something at random, and put back what was refused."""
        self.first = {}
        for module in self.modules.values():
            module.register_buffer("b0", self._tensor() if _is_refused(module.b0) else module.b0)
        self.random.choice(CHANGES)(self)

    # -- what there is ---------------------------------------------------------------------

    def _tensor(self) -> torch.Tensor:
        dtype = self.random.choice(DTYPES) if self.random.random() < 0.3 else torch.float32
        shape = self.random.choice(SHAPES)
        tensor = torch.ones(shape, dtype=dtype)
        return tensor.t() if len(shape) == 2 and self.random.random() < 0.3 else tensor

    def _parameter(self) -> nn.Parameter:
        tensor = self._tensor()
        if self.mesh is not None and tensor.dim() and self.random.random() < 0.3:
            place = [self.random.choice([Shard(0), Replicate()])]
            tensor = DTensor.from_local(tensor, self.mesh, place)
        return nn.Parameter(tensor, requires_grad=False)

    def _module(self) -> nn.Module:
        module = nn.Module()
        for index in range(4):
            module.register_parameter(f"p{index}", self._parameter())
            module.register_buffer(f"b{index}", self._tensor())
        return module

    def _optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(module.parameters())
        for parameter in module.parameters():
            optimizer.state[parameter] = {
                "n": self.random.randrange(3),
                "step": torch.tensor(1.0),
                "moment": torch.ones_like(parameter),
                "whole": torch.ones(2, 3),
            }
        return optimizer

    # -- to choose from --------------------------------------------------------------------

    def module(self) -> nn.Module:
        return self.random.choice(list(self.modules.values()))

    def parameter(self) -> tuple[nn.Module, str]:
        module = self.module()
        return module, self.random.choice(["p0", "p1", "p2", "p3"])

    def moments(self) -> dict[Any, Any]:
        if not any(optimizer.state for optimizer in self.optimizers.values()):
            return {"step": torch.tensor(1.0), "moment": torch.ones(2)}
        optimizer = self.random.choice([each for each in self.optimizers.values() if each.state])
        return self.random.choice(list(optimizer.state.values()))

    def unusual(self) -> torch.Tensor:
        """Of the kinds that take the long way."""
        plain = torch.ones(2, 3)
        with torch.inference_mode():
            inference = torch.ones(2, 3)
        whole = torch.ones(3, 3)
        kinds = [
            inference,
            torch._neg_view(plain),
            torch.ones(2, 3, dtype=torch.complex64).conj(),
            whole[:2],
            whole,
            torch.ones(1, 3).expand(2, 3),
            Made(torch.ones(2, 3, dtype=torch.int8), torch.ones(2), torch.ones(4), None),
            torch.ones(2, 3),
        ]
        return self.random.choice(kinds)


class Holder:
    """An object that gives its state itself: averages by name, and moments by number."""

    def __init__(self, of: Changing) -> None:
        self.averages = {f"a{index}": of._tensor() for index in range(4)}
        self.moments: dict[Any, Any] = {
            index: {"n": index, "m": of._tensor(), "v": of._tensor()} for index in range(4)
        }

    def state_dict(self) -> dict[str, Any]:
        return {"averages": dict(self.averages), "moments": self.moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is restored")


class Replicated(nn.parallel.DistributedDataParallel):
    """What capture reads of DistributedDataParallel, without its collectives."""

    def __init__(self, module: nn.Module, group: Any) -> None:
        nn.Module.__init__(self)
        self.module, self.process_group = module, group
        self.broadcast_buffers, self.parameters_to_ignore = True, set[str]()


def _is_refused(tensor: torch.Tensor) -> bool:
    return tensor.is_sparse or tensor.is_meta


# -- changes -------------------------------------------------------------------------------------


def _assign(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """As a parameter or as a buffer, in the place of what has this name."""
    is_parameter = isinstance(value, nn.Parameter)
    if isinstance(getattr(module, name, None), nn.Parameter) is not is_parameter:
        if hasattr(module, name):
            delattr(module, name)
        (module.register_parameter if is_parameter else module.register_buffer)(name, value)
    else:
        setattr(module, name, value)


def _in_place(of: Changing) -> None:
    for value in of.moments().values():
        is_usual = type(value) is torch.Tensor and value.dtype is torch.float32
        if is_usual and not value.is_inference() and value.is_contiguous():
            value.add_(1)


def _new_parameter(of: Changing) -> None:
    _assign(*of.parameter(), of._parameter())


def _new_data(of: Changing) -> None:
    parameter = getattr(*of.parameter())
    if not isinstance(parameter, DTensor):
        parameter.data = of._tensor()


def _views_of_one(of: Changing) -> None:
    whole = torch.ones(3, 3)
    for data in (whole, whole[:2], whole.t(), whole.view(torch.int32)):
        parameter = getattr(*of.parameter())
        if not isinstance(parameter, DTensor):
            parameter.data = data


def _swap_data(of: Changing) -> None:
    one, other = getattr(*of.parameter()), getattr(*of.parameter())
    if not isinstance(one, DTensor) and not isinstance(other, DTensor):
        one.data, other.data = other.data, one.data


def _swap(of: Changing) -> None:
    (module, name), (other, its) = of.parameter(), of.parameter()
    first, second = getattr(module, name), getattr(other, its)
    _assign(module, name, second)
    _assign(other, its, first)


def _tie(of: Changing) -> None:
    _assign(*of.parameter(), getattr(*of.parameter()))


def _tie_moment(of: Changing) -> None:
    of.moments()["moment"] = getattr(*of.parameter()).detach()


def _swap_moments(of: Changing) -> None:
    one, other = of.moments(), of.moments()
    one["whole"], other["step"] = other.get("step"), one.get("whole")


def _other_moments(of: Changing) -> None:
    key = of.random.choice(["step", "whole", "moment", 1, True, "list"])
    value: Any = of.random.choice([of._tensor(), of.unusual(), 3, [of._tensor(), {"a": 1}]])
    of.moments()[key] = value


def _fewer_moments(of: Changing) -> None:
    moments = of.moments()
    if len(moments) > 1:
        del moments[of.random.choice(list(moments))]


def _buffer(of: Changing) -> None:
    value = of.random.choice([of._tensor(), of.unusual(), of.unusual()])
    of.module().register_buffer(f"b{of.random.randrange(6)}", value)


def _refused(of: Changing) -> None:
    refused = [torch.ones(2, 3).to_sparse(), torch.empty(2, 3, device="meta")]
    of.module().register_buffer("b0", of.random.choice(refused))


def _buffer_is_parameter(of: Changing) -> None:
    module, name = of.parameter()
    value = getattr(module, name)
    _assign(module, name, value.detach())
    if of.random.random() < 0.5:
        _assign(module, "p9", value)


def _names_meet(of: Changing) -> None:
    """A tensor that comes first has a name of a module's, or has it no more."""
    of.first = {} if of.first else {"two.b1": of._tensor()}


def _set(of: Changing) -> None:
    buffer = of.module().b0
    is_usual = type(buffer) is torch.Tensor and buffer.dtype is torch.float32
    if is_usual and not _is_refused(buffer) and not buffer.is_inference():
        with torch.no_grad():
            buffer.set_(torch.ones(3, 2))


def _dtype(of: Changing) -> None:
    buffer = of.module()
    for name, value in list(buffer.named_buffers()):
        if value.dtype in (torch.float32, torch.float16) and value.layout is torch.strided:
            buffer.register_buffer(name, value.half())


def _mark(of: Changing) -> None:
    of.marks[of.random.choice(list(of.marks))] = of.random.choice(MARKS)


def _show(of: Changing) -> None:
    of.is_shown ^= {of.random.choice(["one", "two", "its one", "its two"])}


def _replicate(of: Changing) -> None:
    of.is_replicated = not of.is_replicated


def _wrap(of: Changing) -> None:
    of.is_wrapped = not of.is_wrapped


def _step(of: Changing) -> None:
    of.stepping = [each for each in of.optimizers.values() if of.random.random() < 0.7]


def _forget_optimizer(of: Changing) -> None:
    """Leave one out of the state that steps all the same, or put it back."""
    name = of.random.choice(["one", "two"])
    if name in of.optimizers:
        of.stepping = [of.optimizers.pop(name)]
    else:
        of.optimizers[name] = of._optimizer(of.modules[name])


def _average(of: Changing) -> None:
    """Averages, some of which are an optimizer's or a module's memory."""
    values = [of._tensor(), of.unusual(), of.moments().get("moment", of._tensor())]
    parameter = getattr(*of.parameter())
    values.append(parameter.detach())
    of.holder.averages[f"a{of.random.randrange(5)}"] = of.random.choice(values)


def _held_moments(of: Changing) -> None:
    key, name = of.random.randrange(5), of.random.choice(["n", "m", "v", "$v"])
    moments = of.holder.moments.get(key, {})
    if of.random.random() < 0.4:  # equal keys of other types
        first, second = of.random.sample([1, True], 2)
        moments[second] = moments.pop(first, of._tensor())
        return
    value = of.random.choice([of._tensor(), of.random.randrange(9), None, [1]])
    if type(of.holder.moments) is dict:
        of.holder.moments.setdefault(key, {})[name] = value


def _other_names(of: Changing) -> None:
    """The same tensors under other keys."""
    averages = of.holder.averages
    key = of.random.choice(list(averages))
    of.holder.averages = {
        (f"{name}'" if name == key else name): each for name, each in averages.items()
    }


def _hook(of: Changing) -> None:
    """One that shows something else than the module holds; or none."""
    module = of.module()
    if (before := of.hooks.pop(module, None)) is not None:
        before.remove()
    kind = of.random.randrange(5)
    tensor, buffer = of._tensor(), module.p1.detach()

    def shown(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        name = f"{prefix}b0"
        if f"{prefix}p1" not in state:
            return  # that of a module around this one
        if kind == 0 and name in state:
            state[name] = tensor
        elif kind == 1:
            state.pop(name, None)
        elif kind == 2:
            state[f"{prefix}more"] = 7
        elif kind == 3:  # the same memory, and no parameter
            state[f"{prefix}p1"] = buffer

    if kind < 4:
        of.hooks[module] = module.register_state_dict_post_hook(shown)


def _requires_grad(of: Changing) -> None:
    parameter = getattr(*of.parameter())
    if parameter.dtype.is_floating_point and not parameter.is_inference():
        parameter.requires_grad_(not parameter.requires_grad)
        parameter.requires_grad_(False)


def _convert(of: Changing) -> None:
    module = of.module()
    tensors = [*module.parameters(), *module.buffers()]
    if not any(isinstance(each, DTensor | Made) or _is_special(each) for each in tensors):
        module.to(of.random.choice([torch.float32, torch.float64]))


def _resize(of: Changing) -> None:
    buffer = of.module().b1
    if type(buffer) is torch.Tensor and buffer.is_contiguous() and not _is_special(buffer):
        buffer.resize_(3, 2)


def _transpose(of: Changing) -> None:
    """The same memory, shown in another way."""
    buffer = of.module().b2
    if type(buffer) is torch.Tensor and buffer.dim() == 2 and not _is_special(buffer):
        buffer.t_()


def _show_other_values(of: Changing) -> None:
    """The same memory, whose values are shown with another sign, or as another dtype."""
    module, name = of.parameter()
    parameter = getattr(module, name)
    is_usual = not isinstance(parameter, DTensor) and not _is_special(parameter)
    if not is_usual or parameter.dtype is not torch.float32:
        return
    data = of.random.choice([torch._neg_view(parameter.data), parameter.data.view(torch.int32)])
    if data.dtype is torch.float32:
        parameter.data = data
    else:
        _assign(module, name, nn.Parameter(data, requires_grad=False))


def _is_special(tensor: torch.Tensor) -> bool:
    return _is_refused(tensor) or tensor.is_inference() or tensor.is_neg() or tensor.is_complex()


def _reshard(of: Changing) -> None:
    """The same memory here, as a part of another whole."""
    module, name = of.parameter()
    parameter = getattr(module, name)
    if isinstance(parameter, DTensor) and of.mesh is not None:
        other = [Shard(0) if isinstance(parameter.placements[0], Replicate) else Replicate()]
        tensor = DTensor.from_local(local_of(parameter), of.mesh, other)
        fresh = nn.Parameter(tensor, requires_grad=False)
        for optimizer in of.optimizers.values():
            for group in optimizer.param_groups:
                held = group["params"]
                group["params"] = [fresh if each is parameter else each for each in held]
            if parameter in optimizer.state:
                states = list(optimizer.state.items())
                optimizer.state.clear()
                for key, state in states:
                    optimizer.state[fresh if key is parameter else key] = state
        _assign(module, name, fresh)


def _born(of: Changing) -> None:
    """The state of an optimizer is made anew, or is not there yet."""
    if not of.optimizers:
        return
    name = of.random.choice(list(of.optimizers))
    of.optimizers[name] = of._optimizer(of.modules[name])
    if of.random.random() < 0.3:
        of.optimizers[name].state.clear()


def _groups(of: Changing) -> None:
    """Parameters in another order, or in other groups, with other options."""
    if not of.optimizers:
        return
    optimizer = of.random.choice(list(of.optimizers.values()))
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    of.random.shuffle(parameters)
    first, second = optimizer.param_groups[0], dict(optimizer.param_groups[0])
    at = of.random.randrange(len(parameters))
    first["params"], second["params"], second["lr"] = parameters[:at], parameters[at:], at
    optimizer.param_groups[:] = [first, second]


def _plain_values(of: Changing) -> None:
    of.others["n"] += 1
    for moments in of.holder.moments.values():
        if type(moments.get("n")) is int:
            moments["n"] += 1


CHANGES: list[Callable[[Changing], None]] = [
    _in_place,
    _new_parameter,
    _new_data,
    _views_of_one,
    _swap_data,
    _swap,
    _tie,
    _tie_moment,
    _swap_moments,
    _other_moments,
    _fewer_moments,
    _buffer,
    _buffer,
    _refused,
    _buffer_is_parameter,
    _names_meet,
    _set,
    _dtype,
    _mark,
    _mark,
    _mark,
    _show,
    _replicate,
    _replicate,
    _replicate,
    _wrap,
    _step,
    _forget_optimizer,
    _average,
    _held_moments,
    _other_names,
    _hook,
    _hook,
    _held_moments,
    _requires_grad,
    _convert,
    _resize,
    _transpose,
    _show_other_values,
    _reshard,
    _reshard,
    _reshard,
    _born,
    _groups,
    _plain_values,
]
