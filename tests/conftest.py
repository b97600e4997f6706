"""One torch thread a test process: idle OpenMP threads spin, and two test processes with two
threads each on two cores spend their time waiting for one another."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import settings

# A shell's background job starts with SIGINT ignored, and so would every process under test.
signal.signal(signal.SIGINT, signal.default_int_handler)
# `make test-fast` asks for it.
settings.register_profile("fast", max_examples=25)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Torch's and the tests' own modules are 400,000 objects that stay: looked through again and
    again, they cost each test process 1.5 s."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How a test failed that was tried again: the second may fail of what the first one left."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"first try of {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
