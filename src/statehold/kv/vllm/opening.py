"""What vLLM's configuration says of pages: where they lie, and what they depend on.

Invariants: the identity of pages follows from the content of the weights that this process serves.
If a run was loaded, it is the step that was loaded, and not the newest one of the run.
Not here: the store itself (kv/store), its use (connector, tier).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from statehold.errors import PeerFailedError, RunBusyError, UsageError, WaitTimeout, refused
from statehold.kv.identity import folded, identity
from statehold.kv.page import identity_in
from statehold.kv.store import DEADLINE_S, PageStore
from statehold.process.warn import logger

# Of the pages of vLLM: how their bytes are put together here.
FORMAT = 1

Sums = dict[str, Any]  # by tensor, of the pieces that it consists of

_serves: list[Any] = []
_sums: Sums = {}


def serve(content: Any, sums: Sums | None = None) -> None:
    """This process serves weights with these checksums, of all (kv/identity.content_of) and of each
    tensor."""
    _serves[:] = [content]
    _sums.clear()
    _sums.update(sums or {})


def served() -> Sums:
    """The checksums of the tensors that are served, as far as they are known."""
    return _sums


@dataclass(frozen=True, slots=True)
class PagesOptions:
    """Options of a PageStore.

    weights: a directory or a step, as statehold.kv.identity takes it; None: the model that vLLM
    loads. identity: 32 hexadecimal digits instead of all that; only weights of a run count, too.
    staging: memory for pages on their way between processes. buffers: memory for pages that are on
    their way to the store.
    """

    path: str
    capacity: int | str = "16GiB"
    memory: int | str = "1GiB"
    deadline_s: float = DEADLINE_S
    weights: str | None = None
    identity: str | None = None
    staging: int | str = "512MiB"
    buffers: int | str = "256MiB"
    behind: str | None = None
    behind_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> PagesOptions:
        """Raises UsageError for names that mean nothing, and without a path."""
        known = [each.name for each in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            summary = "the pages of vLLM have no such option"
            raise refused(summary, ", ".join(known), ", ".join(unknown))
        if not given.get("path"):
            hint = 'give kv_connector_extra_config={"path": "/nvme/kv"}'
            raise UsageError("the pages of vLLM need a directory", hint=hint)
        return cls(**given)

    def opened(self, page_bytes: int, identity: bytes) -> PageStore:
        """The store of pages. Raises as PageStore does."""
        return PageStore(
            self.path, page_bytes=page_bytes, capacity=self.capacity, memory=self.memory,
            identity=identity, deadline_s=self.deadline_s, behind=self.behind,
            behind_options=self.behind_options,
        )  # fmt: skip

    def identity_of(
        self, model: str, config: Mapping[str, Any] | None = None, loaded: Any = None, **layout: Any
    ) -> bytes:
        """What pages of the weights that are served depend on. model: what vLLM was given; loaded:
        how vLLM has loaded it, where that is not the files as they are."""
        if self.identity is not None:
            given = identity_in(self.identity)
            return folded(_serves, {}, {"given": self.identity}) if _serves else given
        facts = {**layout, "engine": "vllm", "format": FORMAT}
        if _serves:
            return folded(_serves[0], config or {}, facts)
        weights = self.weights or model
        if not os.path.exists(weights.partition("@")[0]):
            hint = "give the option weights= the directory that vLLM has loaded"
            expected = "a directory, or a step of a run"
            raise refused("the weights of these pages are not known", expected, weights, hint)
        return identity(weights, config, **facts, loaded=loaded)


def change(store: PageStore, identity: bytes) -> None:
    """Its pages depend on other weights. That never fails: an engine would end."""
    try:
        store.identity = identity
    except (RunBusyError, WaitTimeout):  # it finds no page of before all the same
        logger.exception("pages of the new weights may not stay in %s", store.path)


def all_ranks(mine: Any) -> list[Any]:
    """What each rank of this engine gives here. The first ones are those of pipeline stage 0."""
    from torch import distributed
    from vllm.distributed import get_pcp_group, get_pp_group, get_tp_group

    found = [mine]
    for group in (get_tp_group(), get_pcp_group(), get_pp_group()):
        said: list[Any] = [None] * group.world_size
        distributed.all_gather_object(said, found, group.cpu_group)
        found = [each for ranks in said for each in ranks]
    return found


def agree(error: BaseException | None, content: Any, told_by: Callable[[Any], list[Any]]) -> None:
    """Raise the error; PeerFailedError if another rank has one, or other content."""
    told = told_by((str(error or ""), repr(content)))
    if error is not None:
        raise error
    for rank, (reason, other) in enumerate(told):
        if reason or other != repr(content):
            raise PeerFailedError(rank, reason or "it has other weights, or none")


def made_when_asked(name: str, make: Callable[[], type[Any]]) -> Callable[[str], Any]:
    """The __getattr__ of a module that has one class, which derives from a class of vLLM."""

    def found(asked: str) -> Any:
        if asked == name:
            return make()
        raise AttributeError(f"module {make.__module__!r} has no attribute {asked!r}")

    return found
