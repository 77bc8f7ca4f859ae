"""One replica under MPI with ULFM: the communicator shrinks, and one allreduce is done again.

It is the floor of what a failure costs: the microbatches of who died are left out of the step, and
nobody comes back.
"""

from __future__ import annotations

from mpi4py import MPI
from torch import Tensor

from bench.resilience.killed.work import Order, Worker


def reduced(world: MPI.Intracomm, mine: Tensor) -> tuple[Tensor, MPI.Intracomm]:
    """The sum over all that live, and their communicator."""
    while True:
        total = mine.clone()
        try:
            world.Allreduce(MPI.IN_PLACE, total)
            has_all = 1
        except MPI.Exception:
            world.Revoke()
            has_all = 0
        try:
            has_all = world.Agree(has_all)
        except MPI.Exception:
            has_all = 0
        if has_all:
            return total, world
        world.Revoke()
        world = world.Shrink()


def main() -> None:
    order, world = Order.given(), MPI.COMM_WORLD
    worker = Worker(order, world.rank)
    world.Set_errhandler(MPI.ERRORS_RETURN)
    for step in range(order.until):
        for index in worker.share:
            worker.loss(step, index).backward()
        total, world = reduced(world, worker.gradients())
        worker.set_gradients(total / (world.size * len(worker.share)))
        worker.optimizer.step()
        worker.optimizer.zero_grad()
        worker.committed(step, worker.share)


if __name__ == "__main__":
    main()
