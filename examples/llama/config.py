"""What a run is: its settings, from the command line and from the run directory.

Owns RunConfig and RUN/config.json. Invariants: a run keeps the settings that its numbers depend on
from its first start to its last, and a start that contradicts them is refused. So resuming needs
no option but --run, and a resumed run computes what an uninterrupted one would.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model import ModelConfig

# These change how long a run goes on, on what, and how it is saved, not what it computes. (`steps`
# also places the end of the learning rate schedule: training on means a new schedule from here.
# `tp`, as the number of ranks, changes the order of sums, and with it their last bits.)
ADJUSTABLE = frozenset(
    {"steps", "save_every", "keep", "staging", "peer_timeout_s", "lease_s"}
    | {"validate_every", "tp"}
    | {"offload", "host", "subgroup", "memory"}
)


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Every setting of a run; each field is an option of the command line."""

    data: str | None = _option(None, "text file, or directory of text (Python's own source)")
    dim: int = _option(256, "model dimension")
    layers: int = _option(6, "decoder layers")
    heads: int = _option(8, "query heads")
    kv_heads: int = _option(4, "key/value heads")
    seq: int = _option(256, "bytes in a sequence")
    tie: bool = _option(True, "share the input and output embeddings")
    batch: int = _option(8, "sequences in a forward pass")
    accumulate: int = _option(1, "forward passes in a step")
    steps: int = _option(1000, "steps in all")
    lr: float = _option(3e-3, "peak learning rate")
    warmup: int = _option(20, "steps until the peak learning rate; then a cosine to a tenth of it")
    weight_decay: float = _option(0.1, "AdamW weight decay, on matrices")
    clip: float = _option(1.0, "largest norm of the gradient")
    save_every: int = _option(1, "steps between two saves")
    keep: int = _option(3, "committed steps to keep")
    staging: str = _option("1GiB", "host memory for copies in flight")
    peer_timeout_s: float = _option(600.0, "seconds until a rank that does not answer is lost")
    lease_s: float = _option(1.0, "seconds until a replica that says nothing is lost")
    validate_every: int = _option(100, "steps between two validations")
    seed: int = _option(0, "of the initial parameters and the order of the data")
    device: str = _option("cpu", "torch device")
    dtype: str = _option("float32", "of the weights; others have float32 masters in the optimizer")
    offload: str = _option("", "DIR[=RATE],...: paths that keep the state of the optimizer")
    host: str = _option("0B", "memory that keeps it, too")
    subgroup: str = _option("", "state that is read, updated and written at once (chosen)")
    memory: int = _option(0, "MiB that a run may take beyond weights and gradients (no limit)")
    threads: int = _option(0, "of torch on the CPU (all processors, divided among the ranks)")
    low_rank: int = _option(0, "rank of pairs in place of the layers of decoders (full rank)")
    tp: int = _option(1, "ranks that share each matrix, under torchrun; the others are FSDP2's")

    def __post_init__(self) -> None:
        for name in ("batch", "accumulate", "steps", "save_every", "keep", "validate_every", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def model(self) -> ModelConfig:
        """The shape of the model."""
        names = ("dim", "layers", "heads", "kv_heads", "seq", "tie")
        return ModelConfig(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One start of a run: where it lives, what it is, and whether it saves and logs checksums."""

    run: Path
    config: RunConfig
    saves: bool
    label: str
    checksums: bool


def parse(arguments: Sequence[str] | None = None) -> Start:
    """Read the command line, and the settings the run already has; exits with a usage error."""
    parser = _parser()
    values = vars(parser.parse_args(arguments))
    run = Path(values.pop("run"))
    flags = {name: values.pop(name) for name in ("saves", "label", "checksums")}
    try:
        config = _settle(run, values)
    except ValueError as error:
        parser.error(str(error))
    return Start(run=run, config=config, **flags)


def record(run: Path, config: RunConfig) -> None:
    """Write RUN/config.json, whole or not at all."""
    run.mkdir(parents=True, exist_ok=True)
    unfinished = run / "config.json.new"
    unfinished.write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    unfinished.replace(run / "config.json")


def _settle(run: Path, given: dict[str, Any]) -> RunConfig:
    """The defaults, under what the run recorded, under what this start gives."""
    if "data" in given:  # a later start may be made from another directory
        given["data"] = str(Path(given["data"]).expanduser().resolve())
    path = run / "config.json"
    recorded = json.loads(path.read_text()) if path.exists() else {}
    for name, value in given.items():
        if name not in ADJUSTABLE and recorded.get(name, value) != value:
            raise ValueError(
                f"this run was started with {name} = {recorded[name]}, not {value}; "
                "leave the option out, or give the new run a directory of its own"
            )
    config = RunConfig(**{**recorded, **given})
    _ = config.model  # refuses a shape that cannot be, before anything is written
    # Sums are split over the threads, so their number is part of the numbers of a run.
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // ranks_here)
    return dataclasses.replace(config, threads=threads)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a small Llama-style model on bytes of text, saving as it goes. "
        "Start it again with the same --run, and it goes on from the newest committed step.",
    )
    parser.add_argument("--run", required=True, metavar="DIR", help="directory of the run")
    parser.add_argument("--no-save", dest="saves", action="store_false", help="only train and log")
    parser.add_argument("--label", default="train", help="name at the left of the display")
    parser.add_argument("--checksums", action="store_true", help="log a checksum of every state")
    # An option that is not given leaves no value, which tells it from a default.
    options = parser.add_argument_group("settings of the run", argument_default=argparse.SUPPRESS)
    for setting in dataclasses.fields(RunConfig):
        name = setting.name.replace("_", "-")
        default, text = setting.default, setting.metadata["help"]
        if isinstance(default, bool):
            options.add_argument(f"--{name}", action="store_true", help=f"{text} (default)")
            options.add_argument(f"--un{name}", dest=name, action="store_false", help="do not")
            continue
        kind = str if default is None else type(default)
        shown = "" if default in (None, 0, "") else f" ({default})"
        options.add_argument(
            f"--{name}", type=kind, metavar=kind.__name__.upper(), help=text + shown
        )
    return parser
