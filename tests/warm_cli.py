"""``dflashctl`` without its imports; see ``fork_server.py``.

That the program starts from nothing too is shown by ``test_version.py``, ``test_interrupt.py`` and
the lab.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from fork_server import ForkServer

ROOT = Path(__file__).parents[1]
MODULE = "orchestrator.cli"
IMPORTS = """
from orchestrator.agent_bundle import bundle
from orchestrator.cli.app import VERBS, load
from orchestrator.diag.diagnosis import diagnose
from orchestrator.diag.evidence import Evidence
import fabric
for name, verb in VERBS.items(): load(name, verb)
bundle()
diagnose(Evidence.from_text("a line", {}))
"""


@cache
def _server() -> ForkServer:
    """Has imported every verb, packed the agent (a third of a verb's CPU) and prepared the rules'
    patterns (four fifths of a diagnosis's)."""
    return ForkServer(IMPORTS, base_environment())


def base_environment() -> dict[str, str]:
    kept = {"PATH", "LANG", "LC_ALL", "TERM"} & os.environ.keys()
    return {**{name: os.environ[name] for name in kept}, "PYTHONPATH": str(ROOT)}


def dflashctl(
    words: Sequence[str], *, cwd: Path, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run to the end, with nothing on standard input; ``variables`` beside the base's."""
    environment = {**base_environment(), **variables}
    return _server().run(MODULE, words, cwd=cwd, variables=environment, limit_s=120)
