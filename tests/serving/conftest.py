"""Without vLLM these tests are skipped, and counted. What vLLM warns about is its own business."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent
IS_THERE = importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if not IS_THERE:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make serving"))
