"""One update: what happens to a subgroup while it is in memory.

A subgroup is updated in strips that fit into the cache of a processor: gradients in 16 bit are
widened, the kernel runs, and masters are rounded into their parameters. So the memory moves no more
bytes than in an update of float32 parameters.

Invariants: a gradient is widened where it is used, into memory of one strip. It is never kept, and
never on storage. Every span is updated from the gradients that were there when the update began.
Not here: where subgroups are (pipeline), the kernels (rules).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from statehold.offload.parameters import MASTER, Parameter
from statehold.offload.rules import Batch, Rule
from statehold.offload.subgroups import Part, Span, Subgroup, strips
from statehold.offload.workers import STRIP, Workers

__all__ = ["Update", "make", "parts"]


def parts(subgroup: Subgroup, memory: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
    """Every field of every span, and its elements in the buffer of the subgroup."""
    for part in subgroup.parts:
        yield part, memory[part.begin : part.begin + part.span.numel]


def make(subgroup: Subgroup, memory: torch.Tensor, parameters: Sequence[Parameter]) -> None:
    """The state of parameters that were never updated: masters, and zeros."""
    memory.zero_()
    for part, values in parts(subgroup, memory):
        if part.field == MASTER:
            values.copy_(_cut(parameters[part.span.parameter].weights, part.span))


class Update:
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
        self._rule, self._parameters, self._groups = rule, parameters, groups
        self._grad_scale, self._workers = grad_scale, workers
        self.active, self._grads = sorted(grads), grads
        self._changed = {index for index in self.active if parameters[index].was_changed}

    def use(self, subgroup: Subgroup, memory: torch.Tensor, is_fresh: bool) -> list[Span]:
        """Update a subgroup in its buffer, and the parameters of its spans. Returns these."""
        if is_fresh:
            make(subgroup, memory, self._parameters)
        begins = {(part.span.parameter, part.field): part.begin - part.span.begin
                  for part in subgroup.parts}  # fmt: skip

        def field(span: Span, name: str) -> torch.Tensor:
            shift = begins[span.parameter, name]
            return memory[span.begin + shift : span.end + shift]

        active = [span for span in subgroup.spans if span.parameter in self._grads]
        cut = strips(active, STRIP, self._workers.count)
        self._workers.run(lambda strip: self._use_strip(strip, field), cut)
        return active

    def _use_strip(self, strip: Sequence[Span], field: Any) -> None:
        batches: dict[int, Batch] = {}
        begin, scratch = 0, self._workers.scratch()
        for span in strip:
            parameter = self._parameters[span.parameter]
            batch = batches.setdefault(parameter.group, Batch())
            batch.params.append(self._master(span, field))
            batch.grads.append(self._grad(span, scratch[begin:]))
            batch.steps.append(parameter.step)
            for name in parameter.kept:
                batch.fields.setdefault(name, []).append(field(span, name))
            begin += span.numel
        for group, batch in batches.items():
            self._rule.update(batch, self._groups[group], self._grad_scale)
        for span in strip:
            parameter = self._parameters[span.parameter]
            if parameter.has_master:
                _cut(parameter.weights, span).copy_(field(span, MASTER))

    def _master(self, span: Span, field: Any) -> torch.Tensor:
        """What the kernel updates of a span: the master, or the parameter itself."""
        parameter = self._parameters[span.parameter]
        own = _cut(parameter.weights, span)
        if not parameter.has_master:
            return own
        master: torch.Tensor = field(span, MASTER)
        if span.parameter in self._changed:
            _adopt(own, master)
        return master

    def _grad(self, span: Span, scratch: torch.Tensor) -> torch.Tensor:
        grad = _cut(self._grads[span.parameter], span)
        if grad.dtype == torch.float32:
            return grad
        return scratch[: span.numel].copy_(grad)


def _cut(elements: torch.Tensor, span: Span) -> torch.Tensor:
    return elements[span.begin : span.end]


def _adopt(own: torch.Tensor, master: torch.Tensor) -> None:
    """Elements of a parameter that are not its rounded master were changed by somebody else."""
    changed = own != master.to(own.dtype)
    master[changed] = own[changed].float()
