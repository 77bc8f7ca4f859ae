"""safetensors headers: what we write, stock readers read; what they write, we read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from statehold.encoding import header
from statehold.encoding.header import DTYPE_BITS, Entry
from statehold.errors import InvariantError
from statehold.layout.plan import TensorSpec, plan_save
from support.steps import spec

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")


def test_layout() -> None:
    raw = header.encode([Entry("a", "F32", (2,), 0, 8)], {"k": "v"})
    assert len(raw) == header.PAGE
    assert int.from_bytes(raw[:8], "little") == header.PAGE - 8
    text = raw[8:].decode()
    assert text.startswith(
        '{"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  '
    )
    assert text == text.rstrip(" ") + " " * (len(text) - len(text.rstrip(" ")))


def test_padding_at_the_edge_of_a_page() -> None:
    empty = len(json.dumps({"__metadata__": {"k": ""}}, separators=(",", ":")))
    for filler, pages in [(4088 - empty, 1), (4089 - empty, 2)]:
        raw = header.encode([], {"k": "v" * filler})
        assert len(raw) == pages * header.PAGE


def test_names_are_utf8_and_must_be_text() -> None:
    raw = header.encode([Entry("\u00fc\u6f22", "U8", (1,), 0, 1)], {})
    assert "\u00fc\u6f22".encode() in raw
    with pytest.raises(InvariantError):
        header.encode([Entry("\ud800", "U8", (1,), 0, 1)], {})


def test_a_name_twice_is_our_mistake() -> None:
    with pytest.raises(InvariantError):
        header.encode([Entry("a", "U8", (1,), 0, 1), Entry("a", "U8", (1,), 1, 2)], {})
    with pytest.raises(InvariantError):
        header.encode([Entry("__metadata__", "U8", (1,), 0, 1)], {})


def test_what_follows_the_header_is_ignored() -> None:
    raw = header.encode([Entry("a", "U8", (3,), 0, 3)], {})
    assert header.decode(raw + b"abc", len(raw) + 3, "f") == header.decode(raw, len(raw) + 3, "f")


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("F32", (), 4),
        ("F4", (2, 3), 3),
        ("F4", (3,), None),
        ("F6_E2M3", (4,), 3),
        ("F64", (0, 5), 0),
        ("U8", (2**60 - 1,), 2**60 - 1),
        ("U8", (2**61,), None),
        ("F32", (2**40, 2**40), None),
        ("F32", (2,) * 10**6, None),
    ],
)
def test_sizes(dtype: str, shape: tuple[int, ...], expected: int | None) -> None:
    assert header.bytes_of(dtype, shape) == expected


TORCH_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}


def write(path: Path, specs: list[TensorSpec], data: dict[str, bytes], step: int = 3) -> None:
    plan = plan_save(specs, step=step)
    path.write_bytes(plan.header + b"".join(data[tensor.name] for tensor in plan.specs))


def test_stock_safetensors_reads_our_files(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    specs = [spec(dtype, dtype, 2, 3) for dtype in TORCH_DTYPES]
    specs += [spec("scalar \u00fc", "F32"), spec("empty", "F32", 0, 4)]
    data = {s.name: bytes(i % 2 for i in range(s.nbytes)) for s in specs}
    write(path, specs, data)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["statehold.step"] == "000000000003"
        assert set(file.keys()) == {s.name for s in specs}
        for tensor in specs:
            found = file.get_tensor(tensor.name)
            assert tuple(found.shape) == tensor.shape
            dtype = TORCH_DTYPES.get(tensor.name, "float32")
            assert found.dtype == getattr(torch, dtype)
            flat = found.reshape(-1).view(torch.uint8) if found.numel() else found
            assert bytes(flat.tolist()) == data[tensor.name]


def test_stock_safetensors_accepts_sub_byte_dtypes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    specs = [spec(dtype, dtype, 4) for dtype in DTYPE_BITS if DTYPE_BITS[dtype] < 8]
    write(path, specs, {s.name: bytes(s.nbytes) for s in specs})
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == {s.name for s in specs}


def test_we_read_stock_files(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {
        "b": torch.zeros(3, dtype=torch.bool),
        "w": torch.ones(2, 5),
        "e": torch.empty(0, 7, dtype=torch.bfloat16),
        "s": torch.tensor(1.5, dtype=torch.float64),
    }
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"made": "elsewhere"})
    raw = path.read_bytes()
    entries, metadata, data_begin = header.decode(raw, len(raw), str(path))
    assert metadata == {"made": "elsewhere"}
    assert {e.name: e.shape for e in entries} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert data_begin + entries[-1].end == len(raw)
