"""One thread, fixed seeds, and the jobs' folder on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from bitwitness.testing import contained

sys.path.insert(0, str(Path(__file__).parent / "jobs"))
SLOW = ("test_zoo", "test_campaign", "test_demo", "test_children", "test_discovery", "test_stop_is_final")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that start several processes first: at the end short ones fill what is left of two cores."""
    slow = {item.path for item in items if item.get_closest_marker("ranks") or item.path.stem in SLOW}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if (dynamo := sys.modules.get("torch._dynamo.utils")) is not None:
        dynamo.counters.clear()  # a guard asks them whether anything was compiled in its process


@pytest.fixture(autouse=True)
def _stops_are_exceptions():
    with contained():
        yield
