"""``python -m trainer`` without its 5 s of imports; see ``fork_server.py``.

That the command starts from nothing too is shown by an export in ``test_train.py``, by
``test_pipeline_train.py`` and by the lab.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from fork_server import ForkServer

ROOT = Path(__file__).parents[2]
IMPORTS = "import trainer.train, transformers.modeling_utils"
# What `trainer.__main__` sets before it imports either; one thread each, for there are several.
VARIABLES = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(Path(__file__).parent))),
}


@cache
def server() -> ForkServer:
    return ForkServer(IMPORTS, {**os.environ, **VARIABLES})


class Trainer:
    """One call of the command, running. Its output goes into ``log``."""

    module = "trainer"

    def __init__(self, log: Path, *arguments: str | Path, **environment: str) -> None:
        self.log = log
        with log.open("w") as stream:
            self._process = server().start(
                self.module,
                [str(argument) for argument in arguments],
                cwd=ROOT,
                variables={**os.environ, **VARIABLES, **environment},
                stdout=stream.fileno(),
                stderr=stream.fileno(),
            )

    def said(self) -> str:
        return self.log.read_text()

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def wait(self, limit_s: float = 150) -> int:
        """The exit code; a negative one is a signal's."""
        return self._process.wait(limit_s)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._process.ended:
            with suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self.wait()


def wait_for(condition: Callable[[], bool], limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
