"""Learns and verifies which tensors of one name, on several ranks, are one tensor.

A DTensor on a mesh of all ranks says which rank holds what. But under tensor parallelism a norm is
a DTensor on the data-parallel mesh alone, once for each tensor-parallel rank. A buffer is a plain
tensor everywhere. Both are one tensor to the model, and several to us. Experts that every rank
keeps under the same name look exactly alike, and are not one tensor. Trusting the name would lose
experts; trusting nothing would write everything many times. So:

    first save      every claimant writes its own version; the ranks compare fingerprints of the
                    contents, and learn those that are equal on all claimants
    later saves     learned tensors are laid out as replicas and written once; the ranks still
                    compare fingerprints; a difference fails the save, and learning starts again

A claim is the tensors of one rank under one name at the top of the state ("model"), on one mesh
that is not the whole world (a plain tensor's mesh is its rank). Claims with the same tensors in the
same shape are siblings if their meshes have the same shape and do not overlap. Because a claim has
one name, a tensor that only rank 0 has elsewhere does not part the buffers of the model.

Invariants: for a save, all ranks use the lessons up to the last save but one before it (no more
saves than that are under way), so they plan alike. A rank that missed an outcome has another
`version` than the others, and the committer fails the save for it.
Not here: fingerprints (tensors/captured), messages between ranks (peers), who writes (share).
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statehold.errors import ReplicasDifferError, some
from statehold.layout.layout import ExplicitLayout, Layout, Mesh
from statehold.layout.plan import TensorSpec
from statehold.ranks.membership import Membership


@dataclass(frozen=True)
class Claim:
    """The tensors `names` of one rank on `mesh`, under one name of the state. `key` is equal for
    siblings."""

    key: str
    mesh: Mesh
    names: tuple[str, ...]


@dataclass(frozen=True)
class Siblings:
    """Claims on `meshes` that are equal for the tensors `equal`, and not for the others."""

    meshes: tuple[Mesh, ...]
    equal: tuple[str, ...]


Lesson = Mapping[str, Siblings]  # by the key of the claims


@dataclass(frozen=True, slots=True)
class Comparison:
    """The tensors of a claim whose contents must be compared.

    learned: the number of siblings among which they were equal, and must stay equal; 0 if unknown.
    """

    claim: Claim
    names: tuple[str, ...]
    learned: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """The specs with the known layouts, and the comparisons that they need."""

    specs: tuple[TensorSpec, ...]
    comparisons: tuple[Comparison, ...]


class Claims:
    """The knowledge of one rank. `learn` and `forget` may be called from another thread."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._due: dict[int, Lesson | None] = {}
        self._known: dict[str, Siblings] = {}
        self._specs: tuple[TensorSpec, ...] | None = None
        self._resolved = Resolved((), ())

    def learn(self, save: int, lesson: Lesson) -> None:
        """Take in the lesson of the committed save number `save`; it may be empty."""
        self._due[save] = lesson

    def forget(self, save: int) -> None:
        """The save failed, here or everywhere: start again."""
        self._due[save] = None

    @property
    def version(self) -> str:
        """Equal on all ranks with the same knowledge, which they need to plan alike."""
        return _digest(lesson_document(self._known))

    def resolve(self, specs: Sequence[TensorSpec], settled: int) -> Resolved:
        """The knowledge for a save, from the saves up to number `settled`, which have ended.

        Cheap while the specs stay equal.
        """
        changed = self._absorb(settled)
        specs = tuple(specs)
        if changed or specs != self._specs:
            self._specs = specs
            self._resolved = self._resolve(specs)
        return self._resolved

    def _absorb(self, upto: int) -> bool:
        before = self._known
        for save in sorted(save for save in list(self._due) if save <= upto):
            lesson = self._due.pop(save)
            self._known = {} if lesson is None else {**self._known, **lesson}
        return self._known != before

    def _resolve(self, specs: tuple[TensorSpec, ...]) -> Resolved:
        comparisons = []
        joined: dict[tuple[Mesh, str], Mesh] = {}
        for claim in self._claims(specs) if self._membership.world > 1 else ():
            known = self._known.get(claim.key)
            if known is None:
                comparisons.append(Comparison(claim, claim.names, 0))
            elif len(known.meshes) > 1 and known.equal and claim.mesh in known.meshes:
                comparisons.append(Comparison(claim, known.equal, len(known.meshes)))
                mesh = _joined(known.meshes)  # once: meshes are long, and known by identity
                joined.update({(claim.mesh, name): mesh for name in known.equal})
        if not joined:
            return Resolved(specs, tuple(comparisons))
        found = [
            joined.get((held_on, spec.name)) if held_on is not None else None
            for spec, held_on in zip(specs, map(self._mesh_of, specs), strict=True)
        ]
        resolved = [
            spec._replace(layout=_layout_on(mesh, spec)) if mesh else spec
            for spec, mesh in zip(specs, found, strict=True)
        ]
        return Resolved(tuple(resolved), tuple(comparisons))

    def _claims(self, specs: Sequence[TensorSpec]) -> list[Claim]:
        members: defaultdict[tuple[str, Mesh], list[TensorSpec]] = defaultdict(list)
        for spec in specs:
            held_on = self._mesh_of(spec)
            if held_on is not None and len(held_on.ranks) < self._membership.world:
                members[spec.name.partition(".")[0], held_on].append(spec)
        return [_claim(mesh, group) for (_, mesh), group in members.items()]

    def _mesh_of(self, spec: TensorSpec) -> Mesh | None:
        """None for boxes that were listed: no rank claims more than is in the list."""
        if isinstance(spec.layout, ExplicitLayout):
            return None
        return spec.layout.mesh if spec.layout else Mesh((1,), (self._membership.rank,))


def _claim(mesh: Mesh, specs: Sequence[TensorSpec]) -> Claim:
    ordered = sorted(specs, key=lambda spec: spec.name)
    tensors = [
        (spec.name, spec.dtype, spec.global_shape or spec.shape, _splits(spec)) for spec in ordered
    ]
    return Claim(_digest([mesh.shape, tensors]), mesh, tuple(spec.name for spec in ordered))


def _splits(spec: TensorSpec) -> tuple[tuple[int, int], ...]:
    return spec.layout.splits if isinstance(spec.layout, Layout) else ()


def _joined(meshes: Sequence[Mesh]) -> Mesh:
    """The meshes of all siblings as one: a new axis in front, along which they replicate."""
    ranks = tuple(rank for mesh in meshes for rank in mesh.ranks)
    return Mesh((len(meshes), *meshes[0].shape), ranks)


def _layout_on(mesh: Mesh, spec: TensorSpec) -> Layout:
    return Layout(mesh, tuple((axis + 1, dim) for axis, dim in _splits(spec)))


# -- messages of the ranks --------------------------------------------------------


def message(
    rank: int, comparisons: Iterable[Comparison], fingerprints: Mapping[str, int]
) -> dict[str, Any]:
    """The message of `rank` to the committer, as plain values.

    The first rank of a mesh stands for the mesh. Contents that should be equal become one digest,
    so the messages of steady saves do not grow with the tensors.
    """
    entries = {}
    for comparison in comparisons:
        claim, names = comparison.claim, list(comparison.names)
        contents = [f"{fingerprints[name]:016x}" for name in names]
        if comparison.learned:
            names, contents = [f"{names[0]} or one of {len(names)} like it"], [_digest(contents)]
        entries[claim.key] = {
            "mesh": _mesh_document(claim.mesh) if rank == claim.mesh.ranks[0] else None,
            "learned": comparison.learned,
            "names": names,
            "contents": contents,
        }
    return entries


def judge(messages: Sequence[Mapping[str, Any]]) -> Lesson:
    """The lesson from the messages of all ranks, in order.

    Raises ReplicasDifferError if a learned tensor has diverged.
    """
    by_key: defaultdict[str, dict[int, Any]] = defaultdict(dict)
    for rank, message in enumerate(messages):
        for key, entry in message.items():
            by_key[key][rank] = entry
    lesson = {}
    for key, entries in by_key.items():
        siblings = _compared(entries)
        learned = max(entry["learned"] for entry in entries.values())
        if not learned:
            lesson[key] = siblings
        elif len(siblings.meshes) != learned or not siblings.equal:
            raise _no_longer_equal(entries)
    return lesson


def _compared(entries: Mapping[int, Any]) -> Siblings:
    """The meshes all of whose ranks claim, and the tensors that are equal on all of them."""
    known = [_mesh_of_document(entry["mesh"]) for entry in entries.values() if entry["mesh"]]
    meshes = tuple(mesh for mesh in known if all(rank in entries for rank in mesh.ranks))
    ranks = [rank for mesh in meshes for rank in mesh.ranks]
    if len(set(ranks)) != len(ranks):
        return Siblings(meshes, ())  # meshes that overlap: no conclusion
    names = next(iter(entries.values()))["names"]
    same = [True] * len(names)
    for alike in zip(*(mesh.ranks for mesh in meshes), strict=True):
        first = entries[alike[0]]["contents"]
        for contents in {tuple(entries[rank]["contents"]) for rank in alike[1:]} - {tuple(first)}:
            same = [s and a == b for s, a, b in zip(same, contents, first, strict=True)]
    return Siblings(
        meshes, tuple(name for name, is_same in zip(names, same, strict=True) if is_same)
    )


def _no_longer_equal(entries: Mapping[int, Any]) -> ReplicasDifferError:
    ranks = sorted(entries)
    return ReplicasDifferError(
        "a tensor that was equal on several ranks has diverged",
        facts={
            "tensor": entries[ranks[0]]["names"][0],
            "ranks": some(ranks),
        },
        hint="if these should be equal, the ranks have diverged. The next saves write every "
        "rank's own version",
    )


# -- as plain values -----------------------------------------------------------------------


def lesson_document(lesson: Lesson) -> dict[str, Any]:
    """A lesson as plain values."""
    return {
        key: {"meshes": [_mesh_document(mesh) for mesh in found.meshes], "equal": [*found.equal]}
        for key, found in sorted(lesson.items())
    }


def lesson_of(document: Mapping[str, Any]) -> Lesson:
    """The lesson that `lesson_document` described."""
    return {
        key: Siblings(
            tuple(_mesh_of_document(mesh) for mesh in found["meshes"]), tuple(found["equal"])
        )
        for key, found in document.items()
    }


def _mesh_document(mesh: Mesh) -> list[list[int]]:
    return [list(mesh.shape), list(mesh.ranks)]


def _mesh_of_document(document: Sequence[Sequence[int]]) -> Mesh:
    shape, ranks = document
    return Mesh(tuple(shape), tuple(ranks))


def _digest(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]
