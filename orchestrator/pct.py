"""Command lines for ``pct``, and what its failures mean. Pure: nothing here runs anything.

``pct exec`` hands argv straight through; only the login shell that ssh starts on the host parses
the line. So a command is a list up to the last moment, and :func:`shell_line` quotes it once.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.errors import (
    ContainerMissing,
    ContainerNotRunning,
    DflashctlError,
    ExecFailed,
    LoginShellBroken,
    RefusedError,
)


def exec_argv(ct: int, argv: Sequence[str], *, pct: str = "pct") -> list[str]:
    """``pct exec`` of ``argv`` in container ``ct``.

    ``--keep-env 0``, because the default lets the host's SSH_*, LANG and HOME into the container
    and gives a PATH without /usr/local/bin, where a container's own Python often lives. What it
    leaves out (HOME) the agent sets from the password database.

    ``--``, because without it pct takes options of the command for its own.
    """
    if not argv:
        raise ValueError("pct exec needs a command")
    return [pct, "exec", str(ct), "--keep-env", "0", "--", *argv]


def attach_argv(ct: int, argv: Sequence[str]) -> list[str]:
    """The same by LXC's own tool, which ``pct exec`` becomes after its 0.5 to 1 s of Perl."""
    if not argv:
        raise ValueError("lxc-attach needs a command")
    return ["lxc-attach", "-n", str(ct), "--clear-env", "--", *argv]


def shell_line(argv: Sequence[str]) -> str:
    """``argv`` as one line for the POSIX shell that ssh starts: each word survives untouched.

    :raises ValueError: a NUL, which no argument can hold.
    """
    if any("\0" in word for word in argv):
        raise ValueError("an argument holds a NUL byte")
    return shlex.join(argv)


def ssh_argv(
    address: str,
    command: Sequence[str],
    *,
    user: str | None = None,
    port: int | None = None,
    identity_file: str | None = None,
    known_hosts: str | None = None,
    host_keys: str | None = None,
    ssh_config: str | None = None,
    terminal: bool = False,
) -> list[str]:
    """OpenSSH's client on the same host by the same rules: for a terminal, and for show."""
    argv = ["ssh"]
    if ssh_config:
        argv += ["-F", ssh_config]
    if terminal:
        argv.append("-t")
    if user:
        argv += ["-l", user]
    if port:
        argv += ["-p", str(port)]
    if identity_file:
        argv += ["-i", identity_file, "-o", "IdentitiesOnly=yes"]
    if known_hosts:
        argv += ["-o", f"UserKnownHostsFile={known_hosts}", "-o", "GlobalKnownHostsFile=none"]
    if host_keys:
        keys = {"strict": "yes"}.get(host_keys, host_keys)
        argv += ["-o", f"StrictHostKeyChecking={keys}"]
    argv += ["-o", "ConnectTimeout=10", "--", address]
    return [*argv, shell_line(command)]


@dataclass(frozen=True)
class _Reading:
    pattern: re.Pattern[str]
    error: type[DflashctlError]
    what: str
    next_step: str


def _reading(pattern: str, error: type[DflashctlError], what: str, next_step: str) -> _Reading:
    return _Reading(re.compile(pattern, re.MULTILINE | re.IGNORECASE), error, what, next_step)


# In the order in which they are tried: pct prints its own reason before a general one.
_READINGS = (
    _reading(
        r"container '\d+' not running|^CT \d+ not running",
        ContainerNotRunning,
        "the container is not running",
        "start it on the host: pct start {ct}",
    ),
    _reading(
        r"lxc-attach: .*Failed to get init pid",
        ContainerNotRunning,
        "the container is not running, or there is none of that number",
        "`pct list` on the host tells which; start it: pct start {ct}",
    ),
    _reading(
        r"Configuration file '([^']*)' does not exist",
        ContainerMissing,
        "there is no such container on this host ({0} does not exist)",
        "`pct list` on the host shows its containers; in a cluster it may be on another node",
    ),
    _reading(
        r"CT is locked \(([^)]*)\)",
        ExecFailed,
        "the container is locked ({0})",
        "wait until the {0} ends, or `pct unlock {ct}` if it is long dead",
    ),
    _reading(
        r"can't lock file '([^']*)' - got timeout",
        ExecFailed,
        "another task holds the container's configuration lock ({0})",
        "wait for that task: it is in the host's task log",
    ),
    _reading(
        r"ipcc_send_rec\[\d+\] failed: Unknown error",
        ExecFailed,
        "pct needs root on the host",
        "connect as root: --host root@{host}, or user: root in the inventory",
    ),
    _reading(
        r"(?:Unable to load access control list|ipcc_send_rec\[\d+\] failed): Connection refused",
        ExecFailed,
        "the host's cluster filesystem is down, so pct cannot work",
        "on the host: systemctl status pve-cluster",
    ),
    _reading(
        r"cluster not ready - no quorum",
        ExecFailed,
        "the host's cluster has no quorum",
        "on the host: pvecm status",
    ),
    _reading(
        r"Unknown option: keep-env",
        ExecFailed,
        "this host's pct knows no --keep-env",
        "upgrade the host's pve-container package (Proxmox VE 8 or later)",
    ),
    _reading(
        # An environment that is still to be made: by hand, because our own way in needs it.
        r"No such file or directory - Failed to exec "
        r"\"((/(?!usr/bin|usr/local/bin)[^\"]+)/bin/python[^\"/]*)\"",
        RefusedError,
        "the container has no {0}",
        "make it on the host: pct exec {ct} -- python3 -m venv {1} (Debian: apt install "
        "python3-venv), or correct `python` of the container in the inventory",
    ),
    _reading(
        r"No such file or directory - Failed to exec \"([^\"]*)\"",
        RefusedError,
        "the container has no {0}",
        "install it there (apt install python3), or set `python` of the container in the inventory",
    ),
    _reading(
        r"Permission denied - Failed to exec \"([^\"]*)\"",
        RefusedError,
        "{0} in the container is not executable",
        "set `python` of the container in the inventory to an interpreter",
    ),
    _reading(
        r"400 Parameter verification failed",
        ExecFailed,
        "pct refused {ct} as a container number",
        "Proxmox numbers containers from 100",
    ),
    _reading(
        r"(?:^|: )lxc-attach: (?:command )?not found|lxc-attach: .*You lack access to",
        ExecFailed,
        "lxc-attach cannot be used on this host",
        "connect as root, or leave `enter: lxc-attach` of the host out of the inventory",
    ),
    _reading(
        r"(?:^|: )(\S*pct): (?:command )?not found|(\S*pct): No such file or directory",
        ExecFailed,
        "the host has no pct: it is no Proxmox host, or pct is not on this user's PATH",
        "connect as root, or set `pct` of the host in the inventory",
    ),
    _reading(
        r"(\S*python[\d.]*): (?:command )?not found|(\S*python[\d.]*): No such file or directory",
        RefusedError,
        "there is no {0}",
        "install Python 3.10 or later there, or set `python` in the inventory",
    ),
)


class SaidBy(Exception):
    """The host's own words behind an error, as its ``__cause__``."""


# Both versions of cgroups, as the host's look at a container shows them.
FROZEN = re.compile(r"\bfrozen 1\b|FROZEN")


def frozen(host: str, ct: int | None) -> ExecFailed:
    """What its host knows of a container that says nothing."""
    return ExecFailed(
        f"container {ct} is frozen: nothing in it answers",
        next_step=f"on the host: lxc-unfreeze -n {ct}, unless a backup does it itself",
        host=host,
        ct=ct,
    )


def says_why(stderr: str) -> bool:
    """Whether it holds a reason that is known here."""
    return any(reading.pattern.search(stderr) for reading in _READINGS)


def broken_shell(
    heard: str, status: int | None, *, host: str, user: str, ct: int | None
) -> LoginShellBroken:
    """A login shell that ends, or becomes another program, before it runs what ssh gives it."""
    lines = heard.strip().splitlines()
    said = f"; it printed: {lines[-1][:200]}" if lines else "; nothing was printed"
    ended = f" (exit code {status})" if status is not None else ""
    return LoginShellBroken(
        f"the login shell of {user} on the host does not run what it is given{ended}{said}",
        next_step=f"on the host, in ~{user}/.bashrc (or the start-up file of that shell): leave "
        "`exit`, `exec` and `read` to interactive shells, by `case $- in *i*) ;; *) return;; esac` "
        f"above them; `ssh {host} echo works` must print: works",
        host=host,
        ct=ct,
    )


def failure(
    stderr: str, status: int | None, *, host: str, ct: int | None, stdout: str = ""
) -> DflashctlError:
    """What it means that our program never spoke, from what was printed instead.

    The exit status decides nothing (pct's own failures and the command's share the numbers, and
    255 is ssh's too); it is only shown where the text says nothing known.
    """
    error = _read(stderr, status, host=host, ct=ct, stdout=stdout)
    error.__cause__ = SaidBy(stderr.strip() or stdout.strip())
    return error


def _read(
    stderr: str, status: int | None, *, host: str, ct: int | None, stdout: str
) -> DflashctlError:
    for reading in _READINGS:
        found = reading.pattern.search(stderr)
        if found:
            groups = [group for group in found.groups() if group] or [""]
            fields = {"ct": ct if ct is not None else "N", "host": host}
            return reading.error(
                reading.what.format(*groups, **fields),
                next_step=reading.next_step.format(*groups, **fields),
                host=host,
                ct=ct,
            )
    heard = (stderr.strip() or stdout.strip()).splitlines()
    shown = "\n    ".join(line[:300] for line in heard[-5:])
    ended = f"exit code {status}" if status is not None else "no exit code"
    return ExecFailed(
        f"the agent did not start ({ended})"
        + (f":\n    {shown}" if shown else "; nothing was printed"),
        next_step=f"do by hand what it does first: {_by_hand(host, ct)}",
        host=host,
        ct=ct,
    )


def _by_hand(host: str, ct: int | None) -> str:
    inner = ["python3", "--version"]
    argv = exec_argv(ct, inner) if ct is not None else inner
    return f"ssh {host} {shlex.quote(shell_line(argv))}"
