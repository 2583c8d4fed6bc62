"""Where there is no CUDA device, the tests that need one are deselected, and the last lines say so."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.gpu.device import missing

# On a machine without vLLM the tests of its transfer code cannot even be read.
collect_ignore = [] if importlib.util.find_spec("vllm") is not None else ["test_vllm_transfers.py"]

_deselected = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if marked and missing():
        items[:] = [item for item in items if item not in marked]
        config.stash[_deselected] = len(marked)
        config.hook.pytest_deselected(items=marked)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    count = config.stash.get(_deselected, 0)
    if count:
        terminalreporter.write_line(f"{count} GPU tests were not run: {missing()} (make test-gpu runs them)")
