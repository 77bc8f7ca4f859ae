"""What copies between levels read of the files that they copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from statehold.steps.copying import Copy


class Travelled:
    """What is read of the files that are copied, where they come from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[tuple[str, int, int]] = []
        opened = Copy.opened

        @contextlib.contextmanager
        def counted(copy: Copy, file: Any) -> Iterator[Any]:
            with opened(copy, file) as found:
                yield Counted(found, self.reads, file.name)

        monkeypatch.setattr(Copy, "opened", counted)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.reads)


class Counted:
    def __init__(self, found: Any, reads: list[tuple[str, int, int]], name: str) -> None:
        self._found, self._reads, self._name = found, reads, name

    def read_into(self, memory: memoryview, offset: int) -> None:
        self._reads.append((self._name, offset, len(memory)))
        self._found.read_into(memory, offset)
