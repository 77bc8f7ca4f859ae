"""Without vLLM these tests are skipped, and counted. What vLLM warns about is its own business."""

from __future__ import annotations

import importlib.util

import pytest

IS_THERE = importlib.util.find_spec("vllm") is not None


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.filterwarnings("ignore"))
    if not IS_THERE:
        item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make serving"))
