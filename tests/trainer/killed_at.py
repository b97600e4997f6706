"""``python -m killed_at EVENT NAME WORDS``: the trainer, killed as it is about to do something to a
path that ends in NAME. EVENT is one of Python's audit events, such as ``open`` or ``os.rename``."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any

if __name__ == "__main__":
    _, wanted, name, *words = sys.argv

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == wanted and str(arguments[0]).endswith(name):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    sys.argv = ["trainer", *words]
    runpy.run_module("trainer", run_name="__main__", alter_sys=True)
