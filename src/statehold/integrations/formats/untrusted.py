"""What others have pickled, read without trust: files of torch.save, metadata of checkpoints.

Owns: the one call of torch.load() for what others have written, and the error for all that is not
data; the one place that unpickles and pickles the `.metadata` of stock checkpoints.
Invariants: no code that a file names runs, unless the user has named it, too, with
torch.serialization.add_safe_globals.
Not here: which file, and where in it (archives).
"""

from __future__ import annotations

import importlib
import io
import pathlib
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from statehold.errors import CorruptionError, StateholdError, UnsupportedValueError
from statehold.layout.layout import Box
from statehold.process.worker import apart

# What torch.load(weights_only=True) raises for a pickle that holds more than data.
UnpicklingError = pickle.UnpicklingError

# -- the metadata of stock checkpoints -------------------------------------------------------------
# Only the classes of stock metadata, listed here, are imported or called. Any other name in the
# pickle is an error before anything of it happens.

_ADMITTED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    # A path in the metadata is only information, so it becomes one that cannot touch the disk.
    **{
        (module, name): pathlib.PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath")
    },
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
}


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"not a layout of torch: {name!r}")
    return found


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ADMITTED:
            return _ADMITTED[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        raise UnsupportedValueError(
            "the metadata of a checkpoint names a class that does not belong in metadata",
            facts={"name": f"{module}.{name}"},
            hint="it may run foreign code when it is unpickled; check where the file comes from",
        )


def load_metadata(raw: bytes, path: str) -> Metadata:
    """The metadata in a pickle; `path` is for messages."""
    try:
        found = _Restricted(io.BytesIO(raw)).load()
    except UnsupportedValueError as error:
        raise error.with_fact("file", path) from None
    except Exception as fault:
        facts = {"file": path, "cause": f"{type(fault).__name__}: {fault}"[:200]}
        raise CorruptionError("the metadata of a checkpoint cannot be read", facts=facts) from fault
    if not isinstance(found, Metadata):
        facts = {"file": path, "expected": "Metadata", "got": type(found).__name__}
        raise CorruptionError("the metadata of a checkpoint cannot be read", facts=facts)
    return found


def tensor_metadata(
    dtype: torch.dtype, shape: Sequence[int], boxes: Iterable[Box]
) -> metadata.TensorStorageMetadata:
    """What metadata say of a tensor, which lies in these boxes."""
    chunks = [
        metadata.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape))
        for box in boxes
    ]
    properties = metadata.TensorProperties(dtype=dtype)
    return metadata.TensorStorageMetadata(properties, torch.Size(shape), chunks)


def dump_metadata(metadata: Metadata) -> bytes:
    """The pickle of metadata, as stock writers write it."""
    return pickle.dumps(metadata)


# -- files of torch.save ---------------------------------------------------------------------------
# weights_only is on: data are tensors, plain values and NumPy. What torch does not know becomes a
# Foreign, which does nothing. So an entry that nobody takes does no harm, and one that is taken is
# refused with its place.


_GLOBAL = re.compile(r"(?:GLOBAL|class|Unsupported operand) (\S+)")
_UNKNOWN = re.compile(r"Unsupported global: GLOBAL (\S+) was not")
_FOREIGN_MAX = 100  # of one file; each costs another look at its pickle
_KINDS = "?bhilqBHILQefdFD"


class Foreign:
    """Something in a file that is not data. `name`: what the file calls its class or function."""

    name = ""

    def __new__(cls, *args: Any, **options: Any) -> Foreign:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None: ...


def load(source: Any, file: str, *, classes: Sequence[Any] = (), **options: Any) -> Any:
    """What torch.save has written to `source`, of `file`. Raises as refused() says.

    classes: what may be made in addition to data. options: of torch.load.
    """
    known, found = [*classes, *_of_numpy(), (_no_bytes, "builtins.bytes")], set[str]()
    begin = source.tell() if hasattr(source, "tell") else None
    while True:
        try:
            return apart(_loaded, source, known, options)
        except UnpicklingError as fault:
            unknown = _UNKNOWN.search(str(fault))
            if unknown is None or unknown[1] in found or len(found) == _FOREIGN_MAX:
                raise refused(file, fault) from fault
            found.add(unknown[1])
            known += _stand_ins(unknown[1])
        except Exception as fault:
            raise refused(file, fault) from fault
        if begin is not None:
            source.seek(begin)


def _loaded(source: Any, known: list[Any], options: Mapping[str, Any]) -> Any:
    with torch.serialization.safe_globals(known):
        return torch.load(source, weights_only=True, **options)


def _no_bytes() -> bytes:
    """The only bytes that torch.save pickles as a call of `bytes`."""
    return b""


def _stand_ins(name: str) -> list[tuple[Any, str]]:
    module, _, last = name.rpartition(".")
    made = type(last, (Foreign,), {"__module__": module or "builtins", "name": name})
    return [(made, name if module else f"builtins.{name}")]


def _of_numpy() -> list[tuple[Any, str]]:
    """What arrays and numbers of NumPy consist of in a pickle, under the names of all its versions;
    nothing where there is no NumPy."""
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        return []
    made = numpy.array(0).__reduce__()[0], numpy.float64(0).__reduce__()[0]
    kinds = {type(numpy.dtype(kind)) for kind in _KINDS}
    return [
        (numpy.ndarray, "numpy.ndarray"),
        (numpy.dtype, "numpy.dtype"),
        *((kind, f"numpy.dtypes.{kind.__name__}") for kind in kinds),
        *((each, f"numpy.core.multiarray.{each.__name__}") for each in made),
        *((each, f"numpy._core.multiarray.{each.__name__}") for each in made),
    ]


def foreign_in(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, name) of each Foreign in a value, and the path of the dict entry that holds it."""
    left = [(path, value)]
    while left:
        path, value = left.pop()
        if isinstance(value, Foreign) or (isinstance(value, type) and issubclass(value, Foreign)):
            yield path, value.name
        elif isinstance(value, Mapping):
            left += [(path, key) for key in value]
            left += [(f"{path}.{key}" if path else str(key), each) for key, each in value.items()]
        elif isinstance(value, list | tuple | set):
            left += [(path, each) for each in value]


def check_data(value: Any, path: str, file: str, way_out: str) -> None:
    """Raise UnsupportedValueError for a value that holds a Foreign. way_out: how the rest is
    taken."""
    for where, name in foreign_in(value, path):
        raise untrusted(file, name, where, way_out)


def refused(file: str, fault: Exception) -> StateholdError:
    """The error for what torch.load(weights_only=True) raises of a file."""
    if isinstance(fault, StateholdError):
        return fault
    if isinstance(fault, UnpicklingError):
        # torch's own text advises to trust the file, so only the name in it is shown.
        name = _GLOBAL.search(str(fault))
        return untrusted(file, name[1].strip("`'\"<>.,") if name else "more than data")
    if isinstance(fault, NotImplementedError) and "meta tensor" in str(fault):
        # torch 2.15 looks at the elements of sparse tensors, and those of archives are not read.
        summary, hint = "a file of torch.save holds a sparse tensor", "save what to_dense() gives"
        return UnsupportedValueError(summary, facts={"file": file}, hint=hint)
    facts = {"file": file, "cause": str(fault).split("\n")[0][:200]}
    return CorruptionError("a file of torch.save cannot be read", facts=facts)


def untrusted(file: str, name: str, path: str = "", way_out: str = "") -> UnsupportedValueError:
    """The error for `name`, which is not data; path: where it is in the file."""
    facts = {"file": file, **({"path": path} if path else {}), "it holds": name}
    trusted = f"where you trust the file, torch.serialization.add_safe_globals([{name}])"
    return UnsupportedValueError(
        "a file of torch.save holds more than tensors and plain values, and statehold does not "
        "trust it",
        facts=facts,
        hint=f"{way_out}; {trusted}" if way_out else f"{trusted} before the call",
    )
