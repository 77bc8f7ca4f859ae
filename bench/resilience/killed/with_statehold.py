"""One replica under Replicas with the exact reduction: the others finish the step."""

from __future__ import annotations

import sys

from bench.resilience.killed.work import Order, Worker
from statehold.resilience import Replicas


def main() -> None:
    order = Order.given()
    worker = Worker(order, int(sys.argv[2]))
    with Replicas(
        worker.model,
        worker.optimizer,
        microbatches=order.microbatches,
        samples=order.microbatches * order.until,
        batch=1,
        seed=1,
        coordinator=order.coordinator,
    ) as replicas:
        for step in replicas.steps(order.until):
            for microbatch in step:
                microbatch.backward(worker.loss(microbatch.step, microbatch.index))
            worker.optimizer.step()
            worker.optimizer.zero_grad()
            worker.committed(step.number, step.share)


if __name__ == "__main__":
    main()
