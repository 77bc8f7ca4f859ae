"""Drop-in for torch.distributed.checkpoint (DCP): checkpoints as steps of statehold.

    dcp.save(state, checkpoint_id="run/step-100", storage_writer=StorageWriter())
    dcp.load(state, checkpoint_id="run/step-100", storage_reader=StorageReader())

The writer and the reader replace FileSystemWriter and FileSystemReader in dcp.save, dcp.async_save
and dcp.load. `restore_stock` reads the checkpoints of those (docs/dcp.md).
"""

from __future__ import annotations

from statehold.integrations.dcp.reader import StorageReader
from statehold.integrations.dcp.stock import StockReport, restore_stock
from statehold.integrations.dcp.writer import StorageWriter

__all__ = ["StockReport", "StorageReader", "StorageWriter", "restore_stock"]
