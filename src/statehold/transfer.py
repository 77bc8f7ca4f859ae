"""Between the pure plans and the engine: builds its jobs, and reads its results back.

Owns the order of segments, which both sides must agree on: segment 0 of a write is the file's
header and segment i + 1 the i-th tensor in file order; a read lists the header of every file and
the tensors by their position, a tensor with several destinations once for each.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from statehold._version import __version__
from statehold.errors import ChecksumError
from statehold.manifest import Manifest, record_file
from statehold.plan import BLOCK_BYTES, SavePlan

if TYPE_CHECKING:
    import torch

    from statehold._core import Engine, Mismatch, ReadJob, WriteJob
    from statehold.state.capture import CapturedTensor
    from statehold.state.destinations import Destination

FLAG_EAGER = 1
FLAG_EXTERNAL = 2


def start_write(engine: Engine, plan: SavePlan, captured: Sequence[CapturedTensor]) -> WriteJob:
    """Begin to stage `captured` (in capture order) as `plan` lays it out."""
    ordered = [captured[index] for index in plan.source_index]
    return engine.write(
        file_bytes=plan.file_bytes,
        block_bytes=BLOCK_BYTES,
        begins=array("q", plan.begins),
        sizes=array("q", [spec.nbytes for spec in plan.specs]),
        addresses=array("Q", [0 if item.external else item.address for item in ordered]),
        flags=bytes(
            [FLAG_EAGER * item.spec.eager | FLAG_EXTERNAL * item.external for item in ordered]
        ),
        strided={i: item.strided for i, item in enumerate(ordered) if item.strided},
        header=plan.header,
    )


def build_manifest(plan: SavePlan, tree: Any, sums: bytes) -> Manifest:
    """The commit record of a single-rank step, from its plan and the checksums of its bytes."""
    file, tensors = record_file(plan, sums)
    return Manifest(
        step=plan.step,
        world_size=1,
        created=datetime.now(timezone.utc).isoformat(),
        writer=f"statehold {__version__}",
        block_bytes=BLOCK_BYTES,
        files=(file,),
        tensors=tensors,
        state=tree,
    )


@dataclass(frozen=True, slots=True)
class ReadSegment:
    """A run of bytes to verify and, when it has a destination, to place."""

    file: int
    begin: int
    nbytes: int
    sums: str  # 16 hexadecimal digits a piece
    name: str  # of the tensor; "" for a file's header
    target: Destination | None

    @property
    def address(self) -> int:
        """Where the engine itself places the bytes; 0 when it only verifies them."""
        return 0 if self.target is None or self.target.external else self.target.address


@dataclass(frozen=True, slots=True)
class StepRead:
    """A read under way: the native job, and what its segment numbers mean."""

    job: ReadJob
    segments: list[ReadSegment]
    files: list[str]

    def external(self) -> dict[int, torch.Tensor]:
        """The destinations that the engine cannot reach, by segment."""
        return {
            index: segment.target.tensor
            for index, segment in enumerate(self.segments)
            if segment.target is not None and segment.target.external and segment.nbytes
        }

    def mismatch(self, found: Mismatch) -> ChecksumError:
        """The error for a piece whose bytes do not match, naming the tensor it belongs to."""
        segment = self.segments[found.segment]
        return ChecksumError(
            "bytes on disk do not match their checksum",
            facts={
                "tensor": segment.name or "none: the header of the file",
                "file": self.files[segment.file],
                "bytes": f"[{found.begin}, {found.end})",
                "xxh3-64": f"expected {found.expected:016x}, got {found.got:016x}",
            },
            hint="restore() without a step takes the newest intact one",
        )


def start_read(
    engine: Engine, directory: str, manifest: Manifest, destinations: Iterable[Destination]
) -> StepRead:
    """Begin to read and verify every byte of a step, placing what has a destination."""
    segments = _segments(manifest, destinations)
    files = [f"{directory}/{file.name}" for file in manifest.files]
    job = engine.read(
        files=files,
        file_bytes=[file.bytes for file in manifest.files],
        block_bytes=manifest.block_bytes,
        file_index=array("q", [segment.file for segment in segments]),
        begins=array("q", [segment.begin for segment in segments]),
        sizes=array("q", [segment.nbytes for segment in segments]),
        addresses=array("Q", [segment.address for segment in segments]),
        flags=bytes([FLAG_EXTERNAL if s.target and s.target.external else 0 for s in segments]),
        strided={
            i: s.target.strided for i, s in enumerate(segments) if s.target and s.target.strided
        },
        sums=_to_bytes("".join([segment.sums for segment in segments])),
    )
    return StepRead(job, segments, files)


def _segments(manifest: Manifest, destinations: Iterable[Destination]) -> list[ReadSegment]:
    targets: defaultdict[str, list[Destination | None]] = defaultdict(list)
    for destination in destinations:
        targets[destination.name].append(destination)
    segments = [
        ReadSegment(index, 0, file.data_begin, file.header_sums, "", None)
        for index, file in enumerate(manifest.files)
    ]
    segments += [
        ReadSegment(chunk.file, chunk.begin, chunk.end - chunk.begin, chunk.sums, name, target)
        for name, tensor in manifest.tensors.items()
        for chunk in tensor.chunks
        for target in targets.get(name, [None])
    ]
    return sorted(segments, key=lambda segment: (segment.file, segment.begin, segment.nbytes))


def _to_bytes(sums: str) -> bytes:
    """Hexadecimal sums as the engine takes them: 8 little-endian bytes each."""
    values = array("Q", bytes.fromhex(sums))
    values.byteswap()  # reverses each group of eight, whatever the byte order of this machine
    return values.tobytes()
