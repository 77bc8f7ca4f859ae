"""Evolution of networks, where a child begins with the layers that a relative has trained.

Regularized evolution (Real et al., "Regularized Evolution for Image Classifier Architecture
Search", AAAI 2019): take the best of a few networks of the population, change a layer of it, train
the child, and let the oldest network die. Each network trains for the same number of steps, and has
a run of its own. With transfer, the child asks which saved step shares the most layers with it, the
most accurate one of several, and begins with these layers. A search that was stopped goes on when
it is started again.

python examples/evolution.py                      # two minutes; --seeds 1 for less
statehold tree runs/evolution/0-transfer          # who began from whom
"""

from __future__ import annotations

import argparse
import collections
import random
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

import statehold
from evolution_space import Genes, Task, mutated, network, random_genes
from statehold.lineage import Graph, nearest

POPULATION, SAMPLE = 10, 4
MEMORY = "32MiB"


@dataclass
class Candidate:
    """A network of the search. transferred: how many of its layers a relative has trained."""

    genes: Genes
    score: float
    transferred: int


def candidate(run: Path, genes: Genes, task: Task, steps: int, seed: int, *, transfer: bool):
    """Train and save the network of a run, or find it there."""
    torch.manual_seed(seed)
    model = network(genes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    result = {"score": 0.0, "transferred": 0}
    state = {"model": model, "graph": Graph(model), "optimizer": optimizer, "result": result}
    with statehold.Checkpointer(run, keep=1, staging_bytes=MEMORY) as ckpt:
        if ckpt.restore(state) is None:
            relative = nearest(model, run.parent, metric="accuracy") if transfer else None
            if relative is not None:
                ckpt.restore(state, source=relative.source, prefix=True)
                result["transferred"] = relative.layers
            task.train(model, optimizer, steps, seed)
            result["score"] = task.score(model)
            ckpt.save(steps, state, metrics={"accuracy": result["score"]})
    return Candidate(genes, result["score"], result["transferred"])


def search(runs: Path, seed: int, candidates: int, steps: int, *, transfer: bool):
    """All candidates of one search, in their order."""
    rng, task = random.Random(seed), Task(seed)
    population: collections.deque[Candidate] = collections.deque(maxlen=POPULATION)
    found: list[Candidate] = []
    for number in range(candidates):
        if len(found) < POPULATION:
            genes = random_genes(rng)
        else:
            sample = rng.sample(list(population), SAMPLE)
            genes = mutated(max(sample, key=lambda each: each.score).genes, rng)
        child = candidate(
            runs / f"{number:03d}", genes, task, steps, 1000 * seed + number, transfer=transfer
        )
        population.append(child)  # the oldest one dies
        found.append(child)
    return found


def best_so_far(found: list[Candidate]) -> list[float]:
    best: list[float] = []
    for each in found:
        best.append(max(best[-1], each.score) if best else each.score)
    return best


def report(results: dict[int, dict[bool, list[Candidate]]], steps: int) -> str:
    """The best score of each search, and how soon transfer reaches that of the other."""
    lines = ["seed  scratch  transfer  layers taken over  candidates until transfer has caught up"]
    for seed, by_kind in results.items():
        scratch, transfer = best_so_far(by_kind[False]), best_so_far(by_kind[True])
        until = next((i for i, each in enumerate(transfer, 1) if each >= scratch[-1]), None)
        taken = statistics.mean(each.transferred for each in by_kind[True])
        lines.append(
            f"{seed:4d}  {scratch[-1]:7.3f}  {transfer[-1]:8.3f}  {taken:17.2f}  {until or 'never'}"
        )
    ends = {kind: [max(each.score for each in by_kind[kind]) for by_kind in results.values()]
            for kind in (False, True)}  # fmt: skip
    count = len(next(iter(results.values()))[True])
    lines.append(f"mean  {statistics.mean(ends[False]):7.3f}  {statistics.mean(ends[True]):8.3f}")
    lines.append(f"each search: {count} candidates of {steps} training steps")
    return "\n".join(lines)


def plot(results: dict[int, dict[bool, list[Candidate]]], steps: int, file: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed, so nothing is drawn")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for kind, name, colour in ((False, "from scratch", "tab:gray"), (True, "transfer", "tab:blue")):
        curves = [best_so_far(by_kind[kind]) for by_kind in results.values()]
        spent = [steps * number for number in range(1, len(curves[0]) + 1)]
        for curve in curves:
            axes.plot(spent, curve, color=colour, alpha=0.3, linewidth=1)
        mean = [statistics.mean(values) for values in zip(*curves, strict=True)]
        axes.plot(spent, mean, color=colour, linewidth=2, label=f"{name}, mean of {len(curves)}")
    axes.set_xlabel("training steps of all candidates")
    axes.set_ylabel("best accuracy so far")
    axes.legend(loc="lower right")
    figure.savefig(file)
    print(f"drawn: {file}")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/evolution"))
    parser.add_argument("--seeds", type=int, default=3, help="how many searches of each kind")
    parser.add_argument("--candidates", type=int, default=60)
    parser.add_argument("--steps", type=int, default=60, help="of training, for each candidate")
    args = parser.parse_args(words)
    results: dict[int, dict[bool, list[Candidate]]] = {}
    for seed in range(args.seeds):
        results[seed] = {}
        for transfer in (False, True):
            runs = args.runs / f"{seed}-{'transfer' if transfer else 'scratch'}"
            runs.mkdir(parents=True, exist_ok=True)
            results[seed][transfer] = search(
                runs, seed, args.candidates, args.steps, transfer=transfer
            )
    print(report(results, args.steps))
    plot(results, args.steps, args.runs / "evolution.png")


if __name__ == "__main__":
    main()
