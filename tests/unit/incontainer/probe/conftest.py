from pathlib import Path

import pytest
from probe_world import Venv


@pytest.fixture
def env(tmp_path: Path) -> Venv:
    made = Venv(tmp_path / "env")
    made.install("demo", {"demo/__init__.py": b"X = 1\n", "demo/data.bin": bytes(range(256)) * 99})
    return made
