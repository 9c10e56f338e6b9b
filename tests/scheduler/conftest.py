"""A hub of its own for each test."""

from collections.abc import Iterator

import pytest

from scheduler.hub import Hub


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub("here")
    yield hub
    hub.close()
