"""How much consecutive states of a training have in common, beyond whole files that do not change.

`python -m bench.sharing`, or `--model 130m`. Trains a Llama on Python's own source with torch's
AdamW, keeps the same blocks of the states of some steps in memory, and looks at the newest ones:

    equal pieces     pieces that the step before, or any earlier kept step, has too, in any block
    zstd             level 1 of the bytes as they are
    planes           the first bytes of all elements, then the second ones, ...; and then zstd
    xor              with the step before; and then zstd, with and without planes

Ratios are bytes before by bytes after. Rates are bytes before in a second of one processor, over
all of the encoding. Nothing is written to storage. Needs zstandard. What follows from it:
docs/incremental.md.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
MODELS = {
    "demo": {},
    "130m": {"dim": 768, "layers": 20, "heads": 12, "kv_heads": 6, "seq": 128},
    "tiny": {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "seq": 32},
}
PIECES = (64 << 10, 256 << 10, 1 << 20)
BLOCK_BYTES = 1 << 20
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
# Kind ("weights", "exp_avg", "exp_avg_sq") -> its blocks, one after the other.
State = dict[str, Bytes]


def trained(
    model_name: str, dtype: torch.dtype, steps: int, batch: int, lr: float, blocks: int
) -> Iterator[Callable[[], State]]:
    """After each step, what takes its state."""
    sys.path.insert(0, str(ROOT / "examples" / "llama"))
    from data import TextLoader, read_corpus
    from model import Llama, ModelConfig

    torch.manual_seed(0)
    config = ModelConfig(**MODELS[model_name])
    model = Llama(config).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    loader = iter(TextLoader(read_corpus(None), seq=config.seq, batch=batch, seed=0))
    for _ in range(steps):
        tokens, targets = next(loader)
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield lambda: state_of(model, optimizer, blocks)
    print(f"loss {loss.item():.3f} after {steps} steps", file=sys.stderr)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, blocks: int) -> State:
    """So many blocks of each kind, the same ones for every step."""
    parameters = list(model.parameters())
    found = {"weights": parameters}
    for key in ("exp_avg", "exp_avg_sq"):
        found[key] = [optimizer.state[each][key] for each in parameters]
    return {
        kind: sample(np.concatenate(list(map(raw, tensors))), blocks)
        for kind, tensors in found.items()
    }


def sample(data: Bytes, blocks: int) -> Bytes:
    whole = data[: len(data) // BLOCK_BYTES * BLOCK_BYTES].reshape(-1, BLOCK_BYTES)
    if len(whole) <= blocks:
        return data
    taken = np.random.default_rng(0).choice(len(whole), blocks, replace=False)
    return whole[np.sort(taken)].reshape(-1)


def raw(tensor: torch.Tensor) -> Bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


# -- what is equal ---------------------------------------------------------------------------------


def pieces(data: Bytes, size: int) -> Iterator[bytes]:
    for begin in range(0, len(data), size):
        yield hashlib.blake2b(data[begin : begin + size], digest_size=16).digest()


def equal_share(newest: State, earlier: list[State], size: int) -> float:
    """The share of the pieces of the newest state that one of the earlier ones has."""
    known = {each for state in earlier for data in state.values() for each in pieces(data, size)}
    mine = [each for data in newest.values() for each in pieces(data, size)]
    return sum(each in known for each in mine) / len(mine)


# -- what gets smaller -----------------------------------------------------------------------------


def planes(data: Bytes, width: int) -> Bytes:
    return np.ascontiguousarray(data.reshape(-1, width).T).reshape(-1)


def encodings(width: int) -> dict[str, Callable[[Bytes, Bytes], Bytes]]:
    """What zstd gets of a block and of the same block in the step before."""
    return {
        "zstd": lambda new, old: new,
        "planes": lambda new, old: planes(new, width),
        "xor": lambda new, old: new ^ old,
        "xor, planes": lambda new, old: planes(new ^ old, width),
    }


def measured(
    newest: State, before: State, width: int, level: int
) -> dict[str, dict[str, tuple[float, float]]]:
    """For each encoding and kind: ratio, and GB a processor second."""
    import zstandard

    compressor = zstandard.ZstdCompressor(level=level)
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for name, prepared in encodings(width).items():
        found[name] = {}
        for kind, data in newest.items():
            begin, outside = time.thread_time(), 0
            for at in range(0, len(data), BLOCK_BYTES):
                block = slice(at, at + BLOCK_BYTES)
                outside += len(compressor.compress(prepared(data[block], before[kind][block])))
            taken_s = time.thread_time() - begin
            found[name][kind] = len(data) / outside, len(data) / 1e9 / taken_s
    return found


def table(states: dict[int, State], width: int, level: int) -> str:
    newest, *earlier = sorted(states, reverse=True)
    lines = []
    others = [states[each] for each in earlier]
    for size in PIECES:
        last = equal_share(states[newest], others[:1], size)
        any_step = equal_share(states[newest], others, size)
        lines.append(
            f"{size >> 10} KiB pieces: {last:.2%} equal in the step before, {any_step:.2%} in any "
            f"of steps {', '.join(map(str, reversed(earlier)))}"
        )
    for older in (earlier[0], earlier[-1]):
        found = measured(states[newest], states[older], width, level)
        lines.append(f"step {newest} against step {older}, zstd {level}: ratio (GB/s a processor)")
        for name, kinds in found.items():
            sizes = {kind: len(data) for kind, data in states[newest].items()}
            total = sum(sizes.values()) / sum(sizes[kind] / kinds[kind][0] for kind in kinds)
            rate = sum(sizes.values()) / sum(sizes[kind] / kinds[kind][1] for kind in kinds)
            each = ", ".join(f"{kind} {ratio:.2f}" for kind, (ratio, _) in kinds.items())
            lines.append(f"  {name:12} {total:5.2f} ({rate:.2f})   {each}")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sharing", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="demo")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--level", type=int, default=1, help="of zstd")
    parser.add_argument("--blocks", type=int, default=24, help="of 1 MiB, of each kind")
    parser.add_argument("--kept", type=int, nargs="+", default=[1, 10, 30],
                        help="earlier states: so many steps before the last")  # fmt: skip
    args = parser.parse_args(words)
    dtype = getattr(torch, args.dtype)
    wanted = {args.steps, *(args.steps - each for each in args.kept if each < args.steps)}
    states = {}
    run = trained(args.model, dtype, args.steps, args.batch, args.lr, args.blocks)
    for step, take in enumerate(run, 1):
        if step in wanted:
            states[step] = take()
    nbytes = sum(map(len, states[args.steps].values()))
    print(
        f"{args.model}, {args.dtype}: {args.steps} steps, lr {args.lr:g}; "
        f"{nbytes / 1e6:.0f} MB of the state are looked at"
    )
    print(table(states, dtype.itemsize, args.level))
    return 0


if __name__ == "__main__":
    sys.exit(main())
