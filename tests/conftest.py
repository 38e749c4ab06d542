"""What every test shares: no network, no state of the user, a steady hypothesis profile."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("entmtp", deadline=None, derandomize="CI" in os.environ)


def pytest_configure() -> None:
    """Before any test module, and so before any library reads the environment."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models; threads would only wait
    settings.load_profile("entmtp")


@pytest.fixture(autouse=True)
def home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """An empty model cache for each test; tests marked ``model`` see the user's own."""
    if request.node.get_closest_marker("model"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENTMTP_HOME", str(tmp_path_factory.mktemp("home")))
        yield
