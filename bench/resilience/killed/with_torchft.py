"""One replica under torchft: the survivors discard the step, and do it again without who died.

The timeout of collectives is 5 s instead of 60; everything else is as it comes. Gradients are
summed by Manager.allreduce: in torchft 0.2.0, DistributedDataParallel ends the survivors of a death
with an AssertionError, if the operation of Gloo fails before its timeout (`assert fut._fut`).
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchft import Manager, Optimizer, ProcessGroupGloo

from bench.resilience.killed.work import Order, Worker

TIMEOUT = timedelta(seconds=5)


def managed(worker: Worker, order: Order, replica: int, store_port: int) -> Manager:
    def state() -> dict[str, Any]:
        return {"model": worker.model.state_dict(), "optimizer": worker.optimizer.state_dict()}

    def load(found: dict[str, Any]) -> None:
        worker.model.load_state_dict(found["model"])
        worker.optimizer.load_state_dict(found["optimizer"])

    return Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=TIMEOUT,
        init_sync=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store_port,
        lighthouse_addr=order.coordinator,
        replica_id=f"replica{replica}",
        hostname="127.0.0.1",
    )


def meet(order: Order, replica: int) -> None:
    """All replicas are here, so that the first step has all of them."""
    store = dist.FileStore(str(Path(order.folder, "meeting")), order.replicas)
    store.set(str(replica), "here")
    store.wait([str(each) for each in range(order.replicas)])


def main() -> None:
    order, replica = Order.given(), int(sys.argv[2])
    worker = Worker(order, replica)
    meet(order, replica)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = managed(worker, order, replica, store.port)
    optimizer = Optimizer(manager, worker.optimizer)
    while manager.current_step() < order.until:
        step = manager.current_step()
        optimizer.zero_grad()
        for index in worker.share:
            worker.loss(step, index).backward()
        mean = worker.gradients() / len(worker.share)
        manager.allreduce(mean).wait()
        worker.set_gradients(mean)
        optimizer.step()
        if manager.current_step() > step:
            worker.committed(step, worker.share)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
