from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Profiles that tests measure are nobody else's."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("EMBODIED_RL_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    monkeypatch.undo()
