"""A tensor of a step: its bytes, verified, as numbers, and statistics of them. The only module that
needs NumPy.

Owns: reading a range of a chunk by its pieces; assembling a box of a tensor from its chunks. Every
dtype of the format as NumPy has it. NumPy has no bfloat16 and no 8-bit floats, so they are widened
to float32. Statistics over any number of parts, and differences.
Invariants: no byte is returned before its checksum was verified. Memory is PART_BYTES for each
tensor, or, if a chunk is wider, the range between the first and the last element of a row.
Integers are exact. Sums are in double precision and over finite elements. Two elements
are equal if their bits are, so a NaN equals itself and 0.0 differs from -0.0. Elements of 4 and 6
bits are not unpacked: they have no statistics, and differ by bytes.
Not here: the speed of the device (checking).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from statehold.cli.checking import ScannedSpan, scan_bytes
from statehold.encoding.header import DTYPE_BITS
from statehold.errors import ChecksumError, CorruptionError, UsageError
from statehold.layout.layout import Box
from statehold.units import MiB

if TYPE_CHECKING:
    import numpy as np

    from statehold.format.saved import PlacedChunk, SavedStep

    Array = np.ndarray[Any, Any]

# -- numbers ---------------------------------------------------------------------------------------


_PLAIN = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "I16": "<i2",
    "U16": "<u2",
    "F16": "<f2",
    "I32": "<i4",
    "U32": "<u4",
    "F32": "<f4",
    "C64": "<c8",
    "F64": "<f8",
    "I64": "<i8",
    "U64": "<u8",
}
# Bits of the exponent and of the mantissa, bias, and the code of a NaN.
_FLOAT8 = {
    "F8_E5M2": (5, 2, 15, "ieee"),
    "F8_E4M3": (4, 3, 7, "all ones"),
    "F8_E4M3FNUZ": (4, 3, 8, "minus zero"),
    "F8_E5M2FNUZ": (5, 2, 16, "minus zero"),
}


def numpy() -> Any:
    """NumPy. Raises UsageError if it is not installed."""
    try:
        import numpy
    except ImportError as error:
        hint = "pip install numpy; ls, verify, prune, doctor and show of a step do not need it"
        raise UsageError("this needs NumPy, which is not installed", hint=hint) from error
    return numpy


def has_numbers(dtype: str) -> bool:
    """Whether `numbers_of` knows the dtype."""
    return dtype in _PLAIN or dtype in _FLOAT8 or dtype in ("BF16", "F8_E8M0")


def numbers_of(dtype: str, bits: Array) -> Array:
    """The values of elements as `bits_of` has them."""
    if dtype in _PLAIN:
        return bits.view(_PLAIN[dtype])
    if dtype == "BF16":
        wide: Array = bits.astype("<u4") << 16
        return wide.view("<f4")
    values: Array = _table(dtype)[bits]
    return values


def bits_of(dtype: str, raw: bytes | bytearray) -> Array:
    """Elements as unsigned integers; as bytes if elements have 4 or 6 bits."""
    size = max(1, DTYPE_BITS[dtype] // 8)
    found: Array = numpy().frombuffer(raw, f"<u{size}")
    return found


@cache
def _table(dtype: str) -> Array:
    """The value of each of the 256 codes of an 8-bit float."""
    values: Array = numpy().array([_value(dtype, code) for code in range(256)], "<f4")
    return values


def _value(dtype: str, code: int) -> float:
    if dtype == "F8_E8M0":
        return math.nan if code == 255 else 2.0 ** (code - 127)
    exponent_bits, mantissa_bits, bias, special = _FLOAT8[dtype]
    sign = -1.0 if code & 0x80 else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    if special == "minus zero" and code == 0x80:
        return math.nan
    if special == "all ones" and code & 0x7F == 0x7F:
        return math.nan
    if special == "ieee" and exponent == (1 << exponent_bits) - 1:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits)


@dataclass
class Statistics:
    """Statistics of the elements given to `add`; of a complex element, of its magnitude."""

    count: int = 0
    finite: int = 0
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    min: float | int | None = None
    max: float | int | None = None
    mean: float | None = None
    _squares: float = 0.0  # sum of (x - mean)^2

    def add(self, values: Array) -> None:
        """Merge the statistics of one part (Chan, Golub and LeVeque)."""
        np = numpy()
        if values.dtype.kind == "c":
            values = np.abs(values)
        if values.dtype.kind == "b":
            values = values.view("u1")
        self.count += values.size
        self.zeros += int(np.count_nonzero(values == 0))
        if values.dtype.kind == "f":
            self.nan += int(np.count_nonzero(np.isnan(values)))
            self.inf += int(np.count_nonzero(np.isinf(values)))
            values = values[np.isfinite(values)]
        if not values.size:
            return
        low, high = values.min().item(), values.max().item()
        self.min = low if self.min is None else min(self.min, low)
        self.max = high if self.max is None else max(self.max, high)
        wide = values.astype("f8")
        mean = float(wide.mean())
        squares = float(np.square(wide - mean).sum())
        size, before = int(values.size), self.mean or 0.0
        total = self.finite + size
        self._squares += squares + (mean - before) ** 2 * self.finite * size / total
        self.mean = before + (mean - before) * size / total
        self.finite = total

    @property
    def std(self) -> float | None:
        """Of the population."""
        return math.sqrt(self._squares / self.finite) if self.finite else None

    def document(self) -> dict[str, Any]:
        names = ("count", "finite", "zeros", "nan", "inf", "min", "max", "mean", "std")
        return {name: getattr(self, name) for name in names}


@dataclass
class Difference:
    """The difference of two tensors of one shape.

    max_abs: None if the elements that differ have no numbers; infinite or NaN if one of a pair is.
    """

    elements: int = 0
    max_abs: float | None = None

    def add(self, dtype: str, left: Array, right: Array) -> None:
        """Merge the difference of one part, given as bits."""
        np = numpy()
        differs = left != right
        count = int(np.count_nonzero(differs))
        self.elements += count
        if count and has_numbers(dtype):
            a, b = numbers_of(dtype, left[differs]), numbers_of(dtype, right[differs])
            self._add_distance(_distance(np, a, b))

    def _add_distance(self, found: float) -> None:
        if self.max_abs is None or math.isnan(found) or found > self.max_abs:
            self.max_abs = found


def _distance(np: Any, a: Array, b: Array) -> float:
    """The largest |a - b|: exact for integers, in double precision for the others."""
    if a.dtype.kind in "biu":
        low, high = np.minimum(a, b), np.maximum(a, b)
        if a.dtype.kind == "b":
            return 1.0
        # The difference of two signed numbers fits the unsigned type of their size.
        unsigned = f"u{a.dtype.itemsize}"
        return float((high.astype(unsigned) - low.astype(unsigned)).max())
    with np.errstate(invalid="ignore"):
        wide = "c16" if a.dtype.kind == "c" else "f8"
        return float(np.abs(a.astype(wide) - b.astype(wide)).max())


# -- the bytes -------------------------------------------------------------------------------------


PART_BYTES = 8 * MiB


class Content:
    """Reads tensors of one step in `directory`."""

    def __init__(self, saved: SavedStep, directory: str) -> None:
        self.saved = saved
        self._directory = directory

    def chunks(self, name: str) -> list[PlacedChunk]:
        """All of a tensor, in the order of the step."""
        return self.saved.chunks(name, Box.whole(self.saved.tensors[name].shape))

    def range(self, name: str, chunk: PlacedChunk, begin: int, end: int) -> bytearray:
        """The bytes [begin, end) of the file that holds the chunk. Raises CorruptionError."""
        block = self.saved.block_bytes
        low = max(chunk.begin, begin // block * block)
        high = min(chunk.end, -(-end // block) * block)
        path = f"{self._directory}/{chunk.file}"
        whole = ScannedSpan(
            path, chunk.file_bytes, chunk.begin, chunk.end, chunk.sums, block, name, 0
        )
        data = bytearray()
        for piece, bad in scan_bytes(whole.part(low, high)):
            if bad is not None:
                facts = {"tensor": name, "file": path, "bytes": f"[{bad.begin}, {bad.end})"}
                if bad.got is None:
                    raise CorruptionError("bytes of a step cannot be read: " + bad.why, facts=facts)
                facts["xxh3-64"] = f"expected {bad.expected}, got {bad.got}"
                hint = "statehold verify lists all damage"
                raise ChecksumError(
                    "bytes on disk do not match their checksum", facts=facts, hint=hint
                )
            data += piece
        return data[begin - low : end - low]

    def chunk_parts(self, name: str, chunk: PlacedChunk) -> Iterator[bytearray]:
        """All bytes of a chunk, whole elements at a time."""
        for begin in range(chunk.begin, chunk.end, PART_BYTES):
            yield self.range(name, chunk, begin, min(begin + PART_BYTES, chunk.end))

    def box(self, name: str, box: Box) -> Array:
        """The elements of a box, as bits."""
        np = numpy()
        dtype = self.saved.tensors[name].dtype
        item = DTYPE_BITS[dtype] // 8
        found: Array = np.empty(box.shape, f"<u{item}")
        for chunk in self.saved.chunks(name, box):
            common = chunk.box.intersection(box)
            if common is None:
                continue
            steps = [math.prod(chunk.box.shape[dim + 1 :]) for dim in range(len(box.shape))]
            wanted = common.relative_to(chunk.box)
            first = sum(low * step for low, step in zip(wanted.offsets, steps, strict=True))
            last = sum((end - 1) * step for end, step in zip(wanted.ends, steps, strict=True))
            begin = chunk.begin + first * item
            raw = self.range(name, chunk, begin, chunk.begin + (last + 1) * item)
            bits = bits_of(dtype, raw)
            strides = tuple(step * item for step in steps)
            view = np.lib.stride_tricks.as_strided(bits, common.shape, strides, writeable=False)
            target = common.relative_to(box)
            place = tuple(slice(a, b) for a, b in zip(target.offsets, target.ends, strict=True))
            found[place] = view
        return found
