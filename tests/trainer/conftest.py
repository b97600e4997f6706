"""What the tests of compiled calls in threads share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from compile_threads import Events, Freezer

    from trainer.compile_lock import CompileLock


@pytest.fixture(autouse=True)
def no_structured_trace() -> Iterator[None]:
    """Pytest's log capture makes torch write megabytes of structured trace at each compile."""
    logger = logging.getLogger("torch.__trace")
    level = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(level)


@pytest.fixture
def freezer(monkeypatch: pytest.MonkeyPatch) -> Freezer:
    import torch
    from compile_threads import Freezer

    # The first compile of a process sets up process-wide state: let it be another function's.
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    return Freezer(monkeypatch)


@pytest.fixture
def events() -> Events:
    from compile_threads import Events

    return Events()


@pytest.fixture
def locking(events: Events) -> Iterator[CompileLock]:
    from trainer.compile_lock import CompileLock

    lock = CompileLock(event=events, foreign_trace_limit_s=30)
    yield lock
    lock.close()
