"""One torch thread a test process: idle OpenMP threads spin, and two test processes with two
threads each on two cores spend their time waiting for one another."""

from __future__ import annotations

import os
import signal

# A shell's background job starts with SIGINT ignored, and so would every process under test.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")
