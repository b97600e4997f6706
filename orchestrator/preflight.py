"""What must hold before a run may start, read from the agent's ``preflight``. Pure."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import DflashctlError, RefusedError
from orchestrator.target import Target
from trainer.telemetry import duration

# A run without these cannot work or would leave nothing behind; the others are told and no more.
REQUIRED = frozenset({"python", "modules", "tmux", "disk", "workdir", "gpu"})
FORCED = frozenset({"runs", "leases"})
"""Refused too, but not under ``--force``."""
CLOCK_S = 60.0
"""Ages are reckoned on one clock; but the dates in logs and records are what two clocks say."""
MODULES = ("torch", "transformers", "pydantic")
"""What the trainer needs inside the container."""

NEXT_STEPS = {
    "python": "install Python 3.10 or later in the container, or set `python` in the inventory",
    "modules": "install them into the container's interpreter: {python} -m pip install {missing}",
    "tmux": "install it in the container: apt install tmux",
    "disk": "what is large there: dflashctl exec {name} -- sh -c 'du -xh --max-depth=3 {workdir} | "
    "sort -h | tail'; delete what is not needed, or set `workdir` in the inventory; --force does "
    "not pass this",
    "workdir": "make it writable, or set `workdir` of the container in the inventory",
    "tmp": "free some room there (dflashctl exec {name} -- sh -c 'du -xsh /tmp/*'), or give the "
    "run another folder that is there: launch --env TMPDIR=FOLDER",
    "gpu": "pass the GPU through to the container, or correct `gpus` in the inventory",
    "shm": "give the container a larger /dev/shm: data loaders and NCCL use it",
    "limits": "on the host, in /etc/pve/lxc/{ct}.conf: lxc.prlimit.memlock: unlimited, "
    "lxc.prlimit.nofile: 1048576; then pct reboot {ct}",
    "memory": "raise the container's memory limit: pct set {ct} --memory MIB",
    "clock": "set the host's clock (chrony): ages are reckoned on the container's own",
    "cpu": "give the container more cores, or start fewer workers",
    "runs": "wait for it, stop it, or launch beside it with --force",
}


HUNG_DRIVER = (
    "the driver hangs, often on a lost card; on the host: dmesg -T | grep -i xid; ps -eo "
    "pid,stat,wchan:20,args | grep nvidia-smi (state D cannot be killed); then reset the card or "
    "reboot the host"
)
SOCKET_FOLDER = (
    "move it aside, and tmux makes its own (sessions in it live on): "
    "dflashctl exec {name} -- mv {folder} {folder}.aside"
)
SOCKET_PLACE = (
    "make room there, or mount it writable: dflashctl exec {name} -- sh -c 'df -h {place}; df -i "
    "{place}; grep {place} /proc/mounts'"
)
NOEXEC = (
    "mount it anew: dflashctl exec {name} -- mount -o remount,exec /tmp; or give the run another "
    "folder that is there: launch --env TMPDIR=FOLDER"
)
# Of the system's own interpreter: Debian refuses pip there.
PEP_668 = (
    "Debian keeps pip out of its own Python (PEP 668): dflashctl exec {name} -- python3 -m venv "
    "/opt/venv; dflashctl exec {name} -- /opt/venv/bin/python -m pip install {missing}; then set "
    "`python: /opt/venv/bin/python` in the inventory"
)
SYSTEM_PYTHON = re.compile(r"(?:/usr)?(?:/bin/)?python[\d.]*")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    required: bool
    text: str
    """What was found, as words."""
    next_step: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ok": self.ok,
            "required": self.required,
            "text": self.text,
            "next": self.next_step,
        }


def request_fields(target: Target, modules: tuple[str, ...], size: int | None) -> dict[str, Any]:
    """The fields of the agent's ``preflight``."""
    return {
        "python": target.settings.python,
        "modules": list(modules),
        "gpus": list(target.settings.gpus),
        **({"release_bytes": size} if size is not None else {}),
    }


def read(answer: dict[str, Any], target: Target, now: float | None = None) -> list[Check]:
    """Each check of the agent's answer, the failed required ones first.

    :param now: this machine's time; default: when it is asked.
    """
    found = dict(answer["checks"])
    if "clock" in found:
        found["clock"] = _compared(found["clock"], time.time() if now is None else now)
    checks = [_check(name, value, target) for name, value in found.items()]
    return sorted(checks, key=lambda check: (check.ok, not check.required, check.name))


def refusal(checks: list[Check], target: Target) -> DflashctlError | None:
    """The error that keeps a run from starting, or None.

    A run that lives there already is not looked at: a start that is asked for again after a cut
    finds itself there.
    """
    bad = [check for check in checks if not check.ok and check.required]
    if not bad:
        return None
    first, *others = bad
    also = "".join(f"\n    also: {check.text}" for check in others)
    return RefusedError(
        f"{first.text}{also}",
        next_step=first.next_step,
        **target.place,
    )


def blocked(checks: list[Check]) -> bool:
    """Whether a launch without --force would be refused."""
    return any(not check.ok and (check.required or check.name in FORCED) for check in checks)


def leases(held: list[str]) -> Check:
    """:param held: what keeps the target's GPUs, as its host tells (``lease.held``)."""
    text = "; ".join(held) or "nobody has its GPUs"
    next_step = "wait for it, end it, choose other GPUs, or launch beside it with --force"
    return Check("leases", not held, False, text, next_step if held else "")


def _check(name: str, found: dict[str, Any], target: Target) -> Check:
    ok = bool(found.get("ok"))
    value = found.get("value")
    text = str(found.get("error") or "") or _words(value)
    facts = value if isinstance(value, dict) else {}
    missing = " ".join(facts.get("missing", []))
    python = target.settings.python
    step = NEXT_STEPS.get(name, "")
    if missing and SYSTEM_PYTHON.fullmatch(python):
        step = PEP_668
    folder, place = str(facts.get("folder", "")), str(facts.get("place", ""))
    if name == "gpu" and text.startswith("timed out"):
        text, step = f"nvidia-smi {text}", HUNG_DRIVER
    if name == "tmux" and folder:
        step = SOCKET_FOLDER
    if name == "tmux" and place:
        step = SOCKET_PLACE
    if name == "tmp" and facts.get("noexec"):
        step = NOEXEC
    step = step.format(
        python=python,
        missing=missing,
        ct=target.ct,
        name=target.name,
        folder=folder,
        place=place,
        workdir=target.settings.workdir,
    )
    if name == "locale" and not ok:
        # No launch need warn of what it mends itself.
        ok, text = True, f"{text}: dflashctl sets LC_ALL=C.UTF-8 for the run"
    return Check(name, ok, name in REQUIRED, text or "none", "" if ok else step)


def stacks(found: bool, target: Target) -> Check:
    """Whether ``diag`` can see where a silent run stands; only ``doctor`` asks."""
    python = target.settings.python
    step = f"{python} -m pip install py-spy in the container, or pip install py-spy on the host"
    if found:
        return Check("stacks", True, False, "py-spy")
    text = "no py-spy, neither beside the container's interpreter nor on the host: of a run that"
    return Check("stacks", False, False, f"{text} hangs diag shows no Python stacks", step)


def _compared(clock: dict[str, Any], now: float) -> dict[str, Any]:
    """The container's clock against this machine's."""
    theirs = (clock.get("value") or {}).get("time")
    if not isinstance(theirs, (int, float)) or abs(theirs - now) < CLOCK_S:
        return clock
    side = "ahead of" if theirs > now else "behind"
    text = f"its clock is {duration(abs(theirs - now))} {side} this machine's"
    return {**clock, "ok": False, "error": text}


# Fields of the agent's answers that are bytes.
BYTES = frozenset({"free", "total", "available", "limit", "used", "needed", "locked_memory"})


def _words(value: Any) -> str:
    """``path /workspace, free 80.3 GB``."""
    if isinstance(value, dict):
        pairs = ((k, v) for k, v in value.items() if v not in (None, "", [], {}, False))
        return ", ".join(_pair(key, found) for key, found in pairs)
    if isinstance(value, list):
        return ", ".join(_words(item) for item in value)
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _pair(key: str, value: Any) -> str:
    if value is True:
        return key
    if key == "time":
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(value))
    return f"{key.replace('_', ' ')} {_size(value) if key in BYTES else _words(value)}"


def _size(value: Any) -> str:
    if not isinstance(value, (int, float)):
        return str(value)
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"
