"""What a lab needs of the machine, checked before anything is made; how its programs are run."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from orchestrator.errors import RefusedError, UsageError
from orchestrator.lab.spec import Backend

Find = Callable[[str], str | None]
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CLEAN_ENV = {"PATH": SYSTEM_PATH}
"""For every program that the lab starts: nothing of the caller's environment leaks in."""

UID_MAP = Path("/proc/self/uid_map")
WHOLE = "0 0 4294967295"
"""What stands there outside of user namespaces."""

# program → Debian package
NEEDED = {
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
    "hostname": "hostname",
    "perl": "perl-base",
    "ip": "iproute2",
    "tmux": "tmux",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "pivot_root": "util-linux",
}
NEEDED_LXC = {"lxc-start": "lxc", "lxc-attach": "lxc", "lxc-stop": "lxc"}


def which(program: str) -> str | None:
    """Look where system programs are: a user's PATH often lacks /usr/sbin."""
    return shutil.which(program, path=SYSTEM_PATH)


def run(program: str, *args: str) -> None:
    """:raises RefusedError: with the program's own words."""
    argv = [which(program) or program, *args]
    done = subprocess.run(argv, env=CLEAN_ENV, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RefusedError(
            f"{program} failed: {done.stderr.strip() or done.stdout.strip()}",
            next_step=f"try it by hand: {shlex.join(argv)}",
        )


def choose_backend(asked: str | None) -> Backend:
    """``asked`` comes from the caller or $DFLASHCTL_LAB_BACKEND; None takes LXC if installed."""
    asked = asked or os.environ.get("DFLASHCTL_LAB_BACKEND") or None
    if asked is None:
        return "lxc" if which("lxc-start") else "unshare"
    if asked == "lxc":
        return "lxc"
    if asked == "unshare":
        return "unshare"
    raise UsageError(f"lab backend {asked!r} is unknown", next_step="use lxc or unshare")


def missing(backend: Backend, find: Find = which) -> list[str]:
    """Debian packages that this machine lacks for ``backend``, sorted."""
    needed = NEEDED | (NEEDED_LXC if backend == "lxc" else {})
    return sorted({package for program, package in needed.items() if find(program) is None})


def problem(
    backend: Backend,
    *,
    uid: int,
    platform: str = sys.platform,
    find: Find = which,
    separate_usr: bool = False,
    uid_map: str = WHOLE,
) -> RefusedError | None:
    """One error that names all that is missing and how to get it."""
    if not platform.startswith("linux"):
        return RefusedError(
            f"the lab needs Linux; this is {platform}",
            next_step="run it in a Linux virtual machine, or use a real Proxmox host",
        )
    if separate_usr:
        return RefusedError(
            "the lab needs /usr on the same file system as /: its containers are overlays over /",
            next_step="run it on another machine, or use a real Proxmox host",
        )
    problems, steps = [], []
    if uid != 0:
        problems.append("root (it makes namespaces, mounts and cgroups)")
        steps.append("run it again as root, for example with sudo")
    elif uid_map.split() != WHOLE.split():
        problems.append("the machine's own root (this one is a user namespace's)")
        steps.append("run it outside of that namespace or unprivileged container")
    if packages := missing(backend, find):
        problems.append("the programs of " + ", ".join(packages))
        steps.append("apt install --no-install-recommends " + " ".join(packages))
    if not problems:
        return None
    what = "the lab cannot start here; missing: " + "; ".join(problems)
    return RefusedError(what, next_step=", then ".join(steps))


def check(backend: Backend) -> None:
    """Raise what ``problem`` finds on this machine."""
    if error := _problem_here(backend):
        raise error


def _problem_here(backend: Backend) -> RefusedError | None:
    return problem(
        backend,
        uid=os.geteuid(),
        separate_usr=Path("/usr").is_mount(),
        uid_map=UID_MAP.read_text() if UID_MAP.exists() else WHOLE,
    )


def reason_to_skip() -> str | None:
    """For tests: why there can be no lab on this machine, or None."""
    error = _problem_here(choose_backend(None))
    return error.what if error else None
