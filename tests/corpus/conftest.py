"""The corpus' base is built once in a session; `tests/conftest.py` prints its score at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus_world import ImageWorld, World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("corpus"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def image_world(world: World) -> Iterator[ImageWorld]:
    """The registry client reads proxies and credentials from the environment: here there are none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", world.environ["HOME"])
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "REQUESTS_CA_BUNDLE"):
            patch.delenv(name, raising=False)
        made = ImageWorld(world)
        yield made
        made.served.server.shutdown()
        made.served.server.server_close()
