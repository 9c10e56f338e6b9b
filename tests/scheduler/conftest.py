"""A hub and an arena of its own for each test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler import shared_memory
from scheduler.hub import Hub
from scheduler.shared_memory import Arena


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub("here")
    yield hub
    hub.close()


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """An arena of the test's own, in place of the process's."""
    arena = Arena(tmp_path)
    monkeypatch.setitem(shared_memory._arenas, os.getpid(), arena)
    monkeypatch.setattr(shared_memory, "READ_S", 0.0)
    yield arena
    arena.close()
