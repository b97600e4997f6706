"""The agent's own file: who uses it, what it says of itself, which old ones may go."""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
import time
from typing import Any, BinaryIO

KEEP = 3
"""Newest programs that stay although nobody uses them: laptops of several ages take turns."""


def hold(lock: BinaryIO) -> None:
    """Keep the program from being pruned for as long as this process and its children live."""
    import fcntl

    fcntl.flock(lock, fcntl.LOCK_SH)
    os.set_inheritable(lock.fileno(), False)


def hello(digest: str, workdir: str, program: str) -> dict[str, Any]:
    from orchestrator.agent.vendored import LIBTMUX_VERSION

    uname = os.uname()
    return {
        "version": digest,
        "python": sys.version.split()[0],
        "hostname": uname.nodename,
        "platform": f"{uname.sysname} {uname.release} {uname.machine}",
        "pid": os.getpid(),
        "boot_id": boot_id(),
        "time": time.time(),
        "libtmux": LIBTMUX_VERSION,
        "tmux": which("tmux"),
        "uid": os.getuid(),
        "workdir": workdir,
        "stored": "workdir" if program.startswith(f"{workdir}/") else "temporary",
    }


def boot_id() -> str:
    """Changes when the container reboots: LXC gives each container its own."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def search_path(environment: dict[str, str] | None = None) -> str:
    """PATH with the folders that ``pct exec`` leaves out (/usr/local/bin among them) at its end."""
    given = (os.environ if environment is None else environment).get("PATH", "")
    parts = [part for part in given.split(":") if part]
    parts += [part for part in SEARCH_PATH.split(":") if part not in parts]
    return ":".join(parts)


def of_interpreter(python: str | None, given: dict[str, str]) -> dict[str, str]:
    """What makes ``python``, ``pip`` and ``torchrun`` those of the inventory's interpreter: its
    folder first on PATH, and VIRTUAL_ENV where it is a virtual environment's.

    Nothing for a bare ``python3``: PATH finds that one by itself. What was ``given`` stays.
    """
    if not python or not python.startswith("/"):
        return {}
    folder = os.path.dirname(python)
    found = {}
    if "PATH" not in given:
        parts = [part for part in search_path().split(":") if part != folder]
        found["PATH"] = ":".join([folder, *parts])
    root = os.path.dirname(folder)
    if "VIRTUAL_ENV" not in given and os.path.isfile(f"{root}/pyvenv.cfg"):
        found["VIRTUAL_ENV"] = root
    return found


def set_environment() -> None:
    """For all our children: a whole PATH, a home, and UTF-8 (else tmux shows underscores)."""
    os.environ["PATH"] = search_path()
    # `pct exec --keep-env 0` gives none, and a script with `set -u` that names $HOME ends there.
    with contextlib.suppress(KeyError):  # a user number without a line in /etc/passwd
        user = pwd.getpwuid(os.getuid())
        known = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
        os.environ.update({key: value for key, value in known.items() if not os.environ.get(key)})
    names = (os.environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    effective = next((name for name in names if name), "")
    if "utf8" not in effective.lower().replace("-", ""):
        os.environ["LC_ALL"] = "C.UTF-8"


def which(command: str) -> str | None:
    for folder in search_path().split(":"):
        path = f"{folder}/{command}"
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return None


def tidy(program: str) -> None:
    """After the last answer: compile for this Python, prune programs that nobody uses."""
    with contextlib.suppress(OSError):
        if os.path.basename(os.path.dirname(program)).startswith("dflashctl-"):
            _remove_temporary(program)
            return
        compile_for_this_python(program)
        os.utime(program)
        prune(os.path.dirname(program))


def _remove_temporary(program: str) -> None:
    os.unlink(program)
    os.rmdir(os.path.dirname(program))


def compile_for_this_python(program: str) -> None:
    """``<hash>-<tag>.pyz`` with byte code: the next start saves the compiler's 100–200 ms.

    Not compressed, fsynced and renamed, so that a crash cannot leave half of one.
    """
    target = f"{program[:-4]}-{sys.implementation.cache_tag}.pyz"
    if os.path.exists(target):
        return
    import importlib.util
    import marshal
    import zipfile

    prefix = importlib.util.MAGIC_NUMBER + bytes(12)  # flags, time and size: none is checked here

    temporary = f"{target}.{os.getpid()}"
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w+b") as file:
            with zipfile.ZipFile(program) as source, zipfile.ZipFile(file, "w") as compiled:
                for name in source.namelist():
                    code = compile(source.read(name), f"{program}/{name}", "exec", optimize=2)
                    compiled.writestr(f"{name}c", prefix + marshal.dumps(code))
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def runnable(program: str) -> str:
    """The compiled one if it is there. Both go together, when nobody holds the plain one."""
    compiled = f"{program[:-4]}-{sys.implementation.cache_tag}.pyz"
    return compiled if os.path.exists(compiled) else program


def plain(program: str) -> str:
    """The one that carries the lock."""
    return (
        program.removesuffix(f"-{sys.implementation.cache_tag}.pyz").removesuffix(".pyz") + ".pyz"
    )


def prune(folder: str) -> None:
    """Remove all but the newest programs, never one that a process holds."""
    from orchestrator.agent.files import taken

    names = os.listdir(folder)
    programs = sorted(
        (name for name in names if name.endswith(".pyz") and "-" not in name),
        key=lambda name: os.stat(f"{folder}/{name}").st_mtime,
        reverse=True,
    )
    for name in programs[KEEP:]:
        path = f"{folder}/{name}"
        with open(path, "rb") as file:
            if taken(file.fileno()):
                continue
            os.unlink(path)
            for other in names:
                if other.startswith(f"{name[:-4]}-"):
                    os.unlink(f"{folder}/{other}")
    for name in names:
        # A loader that was killed while it wrote. An hour: longer than any upload of 100 KB.
        if not name.endswith(".pyz") and time.time() - os.stat(f"{folder}/{name}").st_mtime > 3600:
            os.unlink(f"{folder}/{name}")
