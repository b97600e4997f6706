"""Every way in which a verb can fail, as one tree.

Each error says what happened, to which host, container and run, and what to do next; the command
line prints exactly that and exits with the class's code. Nothing else is caught there: any other
exception is a fault of ours and shows its traceback.

    DflashctlError
    ├── UsageError            2  the command or a file given to it is wrong
    │   └── InventoryError    2  the inventory does not parse or does not fit its schema
    ├── UnreachableError      3  the state is unknown: never taken for "failed"
    │   ├── HostUnreachable   3  no TCP, no SSH banner, no DNS
    │   ├── AuthenticationFailed 3
    │   ├── HostKeyMismatch   3
    │   ├── ConnectionLost    3  it was there and went away
    │   └── ExecFailed        3  pct, lxc-attach or python never reached our agent
    │       └── LoginShellBroken 3  nor will they in any other container of that host
    ├── RefusedError          4  preflight, lease, double launch
    │   └── ContainerNotRunning 4
    ├── NotFoundError         5  no such host, container, run or file
    │   ├── ContainerMissing  5
    │   └── RunNotFound       5
    ├── RunFailed             1  the run itself failed
    └── TransferError         1  push or pull did not verify; what was there before is still there
"""

from __future__ import annotations

from typing import Any


class DflashctlError(Exception):
    """``what`` happened, ``where``, and what to do ``next``."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        next_step: str = "",
        host: str | None = None,
        ct: int | None = None,
        run_id: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.next_step = next_step
        self.host = host
        self.ct = ct
        self.run_id = run_id
        self.container: str | None = None
        """What the user calls it; ``Fleet.named`` knows."""

    @property
    def where(self) -> str:
        """``train-a run r1``, or ``pve1/200 run r1``: the parts that are known."""
        numbers = "/".join(str(p) for p in (self.host, self.ct) if p is not None)
        place = self.container or numbers
        return " ".join(p for p in (place, f"run {self.run_id}" if self.run_id else "") if p)

    def __str__(self) -> str:
        prefix = f"{self.where}: " if self.where else ""
        suffix = f"\n  next: {self.next_step}" if self.next_step else ""
        return f"{prefix}{self.what}{suffix}"

    def as_dict(self) -> dict[str, Any]:
        """The same for ``--json``."""
        return {
            "error": type(self).__name__,
            "message": self.what,
            "next": self.next_step,
            "host": self.host,
            "ct": self.ct,
            "run_id": self.run_id,
            "exit_code": self.exit_code,
        }


class UsageError(DflashctlError):
    exit_code = 2


class InventoryError(UsageError):
    pass


class UnreachableError(DflashctlError):
    exit_code = 3


class HostUnreachable(UnreachableError):
    pass


class AuthenticationFailed(UnreachableError):
    pass


class HostKeyMismatch(UnreachableError):
    pass


class ConnectionLost(UnreachableError):
    pass


class ExecFailed(UnreachableError):
    pass


class LoginShellBroken(ExecFailed):
    pass


class RefusedError(DflashctlError):
    exit_code = 4


class ContainerNotRunning(RefusedError):
    pass


class NotFoundError(DflashctlError):
    exit_code = 5


class ContainerMissing(NotFoundError):
    pass


class RunNotFound(NotFoundError):
    pass


class RunFailed(DflashctlError):
    exit_code = 1


class TransferError(DflashctlError):
    exit_code = 1


def silence(error: DflashctlError) -> str:
    """Why a container does not tell of its runs, in a word; never a state of a run. One that
    answered, and will not do (a missing interpreter), is no dead link."""
    if isinstance(error, ContainerNotRunning):
        return "not running"
    return "unreachable" if isinstance(error, UnreachableError) else "unknown"
