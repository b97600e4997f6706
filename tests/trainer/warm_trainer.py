"""``python -m trainer`` without its 5 s of imports: forked from a server that has made them.

Each run is a process of its own, with the command's arguments, environment, output, signals and
exit code. That the command starts from nothing too is shown by an export in ``test_train.py``,
by ``test_pipeline_train.py`` and by the lab.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["trainer.train", "transformers.modeling_utils"])
# What `trainer.__main__` sets before it imports either.
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONPATH": str(ROOT),
}


class Trainer:
    """One call of the command, running."""

    def __init__(self, log: Path, *arguments: str | Path, **environment: str) -> None:
        self.log = log
        words = ["trainer", *map(str, arguments)]
        variables = {**os.environ, **QUIET, **environment}
        self._process = SERVER.Process(target=_become, args=(log, words, variables))
        with _environment(QUIET):  # for the server, which the first of all starts
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, limit_s: float = 150) -> int:
        """The exit code; a negative one is a signal's."""
        self._process.join(limit_s)
        code = self._process.exitcode
        self.end()
        assert code is not None, f"no end within {limit_s} s: {self.said()}"
        return code

    def end(self) -> None:
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


def wait_for(condition: Callable[[], bool], limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _become(log: Path, words: list[str], variables: dict[str, str]) -> None:
    os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(variables)
    with log.open("w", buffering=1, encoding="utf-8") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.argv = words
    runpy.run_module("trainer", run_name="__main__", alter_sys=True)
