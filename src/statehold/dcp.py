"""The public name of the drop-in for torch.distributed.checkpoint."""

from __future__ import annotations

from statehold.integrations.dcp import StockReport, StorageReader, StorageWriter, restore_stock

__all__ = ["StockReport", "StorageReader", "StorageWriter", "restore_stock"]
