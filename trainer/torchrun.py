"""``python -m trainer.torchrun``: torchrun, with the exit codes of ``python -m trainer``.

torchrun itself ends with 1 and a traceback of its own, whatever its ranks said: also when all of
them left cleanly after a signal, or refused a config.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Collection, Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

AFTER_SIGNAL = frozenset((128 + signal.SIGINT, 128 + signal.SIGTERM))


def launch(arguments: Sequence[str]) -> int:
    """The job's exit code, once all ranks of this machine have ended."""
    try:
        torchrun(list(arguments))
    except SignalException as stop:
        return 128 + stop.sigval
    except ChildFailedError as failed:
        code = exit_code([failure.exitcode for failure in failed.failures.values()])
        if code not in AFTER_SIGNAL:
            print(failed, file=sys.stderr, flush=True)
        return code
    return 0


def exit_code(ranks: Collection[int]) -> int:
    """What the ranks' codes come to. One that only lost its peer has 1, a killed one a negative
    code, one that torchrun then ended a signal's; another code is that of a cause."""
    if ranks and AFTER_SIGNAL.issuperset(ranks):
        return min(ranks)
    return max((code for code in ranks if 1 < code < min(AFTER_SIGNAL)), default=1)


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
