"""A board in memory, for ranks that are threads of one process; they share one MemoryBoard.

It is a StoreBoard over a store that behaves as those of torch.distributed do, so what is tested
with it is what runs.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Sequence

from statehold.ranks.board import StoreBoard


class MemoryStore:
    """The methods of a torch.distributed store that a StoreBoard uses; wakes waiters at once."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def clone(self) -> MemoryStore:
        """Itself: its calls do not queue behind one that waits."""
        return self

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._changed:
            return [self._values[key] for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta) -> None:
        with self._changed:
            there = self._changed.wait_for(lambda: self.check(keys), timeout.total_seconds())
        if not there:
            raise RuntimeError(f"wait timeout, keys: {', '.join(keys)}")

    def delete_key(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    def keys_left(self) -> list[str]:
        """Every key there is, for tests of what is left over."""
        with self._changed:
            return sorted(self._values)


class MemoryBoard(StoreBoard):
    """A board that ends with the process."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        super().__init__(self.store, "memory")
