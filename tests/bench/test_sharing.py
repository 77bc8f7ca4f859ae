"""bench.sharing finds what states have in common, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from bench import sharing


def state(seed: int) -> sharing.State:
    return {"weights": np.random.default_rng(seed).integers(0, 256, 1 << 20, np.uint8)}


def test_equal_pieces_are_found_at_any_place() -> None:
    old, new, size = state(1), state(2), 64 << 10
    assert sharing.equal_share(new, [old], size) == 0.0
    assert sharing.equal_share(new, [old, new], size) == 1.0
    new["weights"][: 4 * size] = old["weights"][-4 * size :]
    assert sharing.equal_share(new, [old], size) == 4 / 16


def test_planes_keep_all_bytes() -> None:
    data = np.arange(24, dtype=np.uint8)
    assert sharing.planes(data, 4).tolist()[:6] == [0, 4, 8, 12, 16, 20]
    assert sorted(sharing.planes(data, 4)) == sorted(data)


def test_what_is_alike_gets_small() -> None:
    pytest.importorskip("zstandard")
    old, new = state(1), state(1)
    new["weights"][::1000] ^= 1
    found = sharing.measured(new, old, 4, 1)
    assert found["zstd"]["weights"][0] < 1.01
    assert found["xor"]["weights"][0] > 20


def test_a_tiny_model(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zstandard")
    assert sharing.main(["--model", "tiny", "--steps", "3", "--batch", "1", "--kept", "1"]) == 0
    assert "step 3 against step 2" in capsys.readouterr().out
