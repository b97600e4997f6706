"""The race as real torch makes it: one thread inside a symbolic trace, another in a warm call."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from orchestrator.diag import Evidence, diagnose

pytestmark = [pytest.mark.torch, pytest.mark.slow]

RACE = '''
import threading, sys
import torch
from torch.fx import Tracer

if tuple(int(p) for p in torch.__version__.split(".")[:2]) >= (2, 14):
    sys.exit(77)  # the flag is thread-local from there on
torch.set_num_threads(1)
inside, leave = threading.Event(), threading.Event()


class Frozen(Tracer):
    """Stands still where the process-wide flag is already set."""

    def create_args_for_root(self, *args, **kwargs):
        inside.set()
        leave.wait(60)
        return super().create_args_for_root(*args, **kwargs)


step = torch.compile(lambda x: x * 2 + 1, backend="eager")
step(torch.ones(4))
print("step 1/400 | loss 9.0 | 20.0k tok/s", flush=True)
tracer = threading.Thread(target=lambda: Frozen().trace(torch.nn.Linear(4, 4)), name="drafter-0")
tracer.start()
inside.wait(60)
drafter = threading.Thread(target=lambda: step(torch.ones(4)), name="drafter-1")
drafter.start()
drafter.join()
leave.set()
tracer.join()
print("a drafter died, stopping", flush=True)
sys.exit(1)
'''


def test_real_torch_without_a_lock_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RACE],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this torch keeps the flag per thread")

    report = diagnose(Evidence.from_text(done.stdout + done.stderr, {"exit_record": {"code": 1}}))

    assert "using FX to symbolically trace" in done.stderr, done.stderr
    assert report.findings[0].code == "compile.fx_race"
