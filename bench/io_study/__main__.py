"""`python -m bench.io_study PATH [options of statehold bench io]`: docs/io_study.md."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.io_study import plot
from bench.io_study.alternatives import Alternative, comparisons, uniform
from bench.io_study.threads import PythonSession
from statehold.cli import arguments, bench
from statehold.cli.study.measure import Bench, TimedStrategy
from statehold.cli.study.strategies import State, Strategy, llama


class AllStrategies(Bench):
    """Runs the alternatives, too; some of them save a state of equal tensors."""

    def __init__(self, directory: str, model: State, equal: State) -> None:
        super().__init__(directory, model, equal)
        self._states = {"model": model, "uniform": equal}

    def open(self, strategy: Strategy) -> tuple[TimedStrategy, int]:
        if not isinstance(strategy, Alternative):
            return super().open(strategy)
        state = self._states[strategy.state]
        session = PythonSession(strategy, state, self.memory, self.directory)
        return session, state.total_bytes


def main(words: list[str]) -> int:
    args = arguments(["bench", "io", *words])
    found = bench.study_at(
        args,
        lambda directory, size: AllStrategies(directory, llama(size), uniform(size)),
        comparisons(),
    )
    if args.out and plot.is_possible():
        plot.draw(found, Path(args.out) / "io-plot.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
