"""One update: what happens to a subgroup while it is in memory.

A subgroup is updated in strips that fit into the cache of a processor: gradients in 16 bit are
widened, the kernel runs, and masters are rounded into their parameters. So the memory moves no more
bytes than in an update of float32 parameters.

Invariants: a gradient is widened where it is used, into memory of one strip. It is never kept, and
never on storage. Every span is updated from the gradients that were there when the update began.
Not here: where subgroups are (pipeline), the kernels (rules).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from statehold.offload.parameters import MASTER, Parameter
from statehold.offload.rules import Batch, Rule
from statehold.offload.subgroups import FieldPart, Span, Subgroup, strips
from statehold.offload.workers import STRIP, Workers


def parts(subgroup: Subgroup, memory: torch.Tensor) -> Iterator[tuple[FieldPart, torch.Tensor]]:
    """Every field of every span, and its elements in the buffer of the subgroup."""
    for part in subgroup.parts:
        yield part, memory[part.begin : part.begin + part.span.numel]


def make(subgroup: Subgroup, memory: torch.Tensor, parameters: Sequence[Parameter]) -> None:
    """The state of parameters that were never updated: masters, and zeros."""
    memory.zero_()
    for part, values in parts(subgroup, memory):
        if part.field == MASTER:
            values.copy_(_cut(parameters[part.span.parameter].weights, part.span))


class Fields:
    """The fields of the spans of a subgroup, in memory with its content."""

    def __init__(self, subgroup: Subgroup, memory: torch.Tensor) -> None:
        self._memory = memory
        self._shifts = {(part.span.parameter, part.field): part.begin - part.span.begin
                        for part in subgroup.parts}  # fmt: skip

    def of(self, span: Span, name: str) -> torch.Tensor:
        """The elements of a span, which may be a piece of one of the subgroup."""
        shift = self._shifts[span.parameter, name]
        return self._memory[span.begin + shift : span.end + shift]


class Side(Protocol):
    """What the spans of a strip are updated from, beside their fields: all on one device.

    scale: what gradients are divided by.
    """

    scale: torch.Tensor | None

    def weights(self, parameter: Parameter) -> torch.Tensor:
        """The elements of a parameter."""

    def gradient(self, span: Span, begin: int) -> torch.Tensor:
        """The gradient of a span in float32. begin: of the span in memory for those of a strip."""

    def step(self, parameter: Parameter) -> torch.Tensor:
        """How many updates the parameter has had, with this one."""


class OptimizerUpdate:
    """An update of the parameters that have a gradient now.

    grads: by parameter, flat, on the host. grad_scale: on the host, too.
    """

    def __init__(
        self,
        rule: Rule,
        parameters: Sequence[Parameter],
        groups: Sequence[Mapping[str, Any]],
        grads: Mapping[int, torch.Tensor],
        grad_scale: torch.Tensor | None,
        workers: Workers,
    ) -> None:
        self.rule, self._parameters, self._groups = rule, parameters, groups
        self.scale, self._workers = grad_scale, workers
        self.active, self.grads = sorted(grads), grads
        self._changed = {index for index in self.active if parameters[index].was_changed}

    def use(self, subgroup: Subgroup, memory: torch.Tensor, is_fresh: bool) -> list[Span]:
        """Update a subgroup in its buffer, and the parameters of its spans. Returns these."""
        active, fields = self.prepare(subgroup, memory, is_fresh), Fields(subgroup, memory)

        def use_strip(strip: Sequence[Span]) -> None:
            self.run(strip, fields, _Host(self.grads, self.scale, self._workers.scratch()))

        self._on_workers(use_strip, active)
        return active

    def prepare(self, subgroup: Subgroup, memory: torch.Tensor, is_fresh: bool) -> list[Span]:
        """What the host does before a subgroup is updated. Returns the spans to update."""
        if is_fresh:
            make(subgroup, memory, self._parameters)
        active = [span for span in subgroup.spans if span.parameter in self.grads]
        fields = Fields(subgroup, memory)
        if not self._changed.isdisjoint(span.parameter for span in active):
            self._on_workers(lambda strip: self._adopt(strip, fields), active)
        return active

    def run(self, strip: Sequence[Span], fields: Fields, side: Side) -> None:
        """Update spans, and round their masters into their parameters."""
        batches: dict[int, Batch] = {}
        begin = 0
        for span in strip:
            parameter = self._parameters[span.parameter]
            batch = batches.setdefault(parameter.group, Batch())
            batch.params.append(
                fields.of(span, MASTER)
                if parameter.has_master
                else _cut(side.weights(parameter), span)
            )
            batch.grads.append(side.gradient(span, begin))
            batch.steps.append(side.step(parameter))
            for name in parameter.kept:
                batch.fields.setdefault(name, []).append(fields.of(span, name))
            begin += span.numel
        for group, batch in batches.items():
            self.rule.update(batch, self._groups[group], side.scale)
        for span in strip:
            parameter = self._parameters[span.parameter]
            if parameter.has_master:
                _cut(side.weights(parameter), span).copy_(fields.of(span, MASTER))

    def _on_workers(self, call: Callable[[Sequence[Span]], None], spans: Sequence[Span]) -> None:
        self._workers.run(call, strips(spans, STRIP, self._workers.count))

    def _adopt(self, strip: Sequence[Span], fields: Fields) -> None:
        """Elements of a parameter that are not its rounded master were changed by somebody else."""
        for span in strip:
            if span.parameter in self._changed:
                own = _cut(self._parameters[span.parameter].weights, span)
                master = fields.of(span, MASTER)
                changed = own != master.to(own.dtype)
                master[changed] = own[changed].float()


class _Host:
    """The Side of a strip on the host, with memory for its gradients."""

    def __init__(
        self, grads: Mapping[int, torch.Tensor], scale: torch.Tensor | None, scratch: torch.Tensor
    ) -> None:
        self._grads, self.scale, self._scratch = grads, scale, scratch

    def weights(self, parameter: Parameter) -> torch.Tensor:
        return parameter.weights

    def gradient(self, span: Span, begin: int) -> torch.Tensor:
        grad = _cut(self._grads[span.parameter], span)
        if grad.dtype == torch.float32:
            return grad
        return self._scratch[begin : begin + span.numel].copy_(grad)

    def step(self, parameter: Parameter) -> torch.Tensor:
        return parameter.step


def _cut(elements: torch.Tensor, span: Span) -> torch.Tensor:
    return elements[span.begin : span.end]
