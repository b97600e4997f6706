"""What the tests of agents and of the ways to them share."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_peer import compiled_program


@pytest.fixture(scope="session")
def warm_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled_program(tmp_path_factory.mktemp("warm"))
