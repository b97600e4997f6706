"""Runs inside a container, in the training interpreter: prints its environment as one JSON object.

Sent as text (``python -c``), so it stands alone: standard library of Python 3.10, nothing of ours.
It never imports torch (2–5 s, and a CUDA context on some builds); versions are read from the
installed metadata and from ``torch/version.py``. With an argument ``FILE`` it leaves the caller's
process group and writes there instead, by rename.
"""

from __future__ import annotations

import ast
import glob
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

# Variables that change what a training run does. Everything else of the environment is private.
PREFIXES = (
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "GLOO_", "UCX_", "TORCH", "PYTORCH_"),
    *("TRITON_", "INDUCTOR_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "HF_", "TRANSFORMERS_"),
    *("TOKENIZERS_", "SAFETENSORS_", "DFLASH_", "LC_", "MALLOC_", "PYTHON"),
)
NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "LANG", "PATH", "TMPDIR", "XDG_CACHE_HOME", "HOME")
SECRET = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL|AUTH", re.IGNORECASE)
# A cache of a long project holds 10^5 files; its size is only a hint.
CACHE_FILES = 20_000
# It may be sent a moment before the folder it writes to is made, and never if that is refused.
FOLDER_WAIT_S = 30.0


def collect() -> dict[str, Any]:
    versions, sources = packages()
    return {
        "format": 1,
        "time": time.time(),
        "hostname": platform.node(),
        "system": system(),
        "python": python(),
        "torch": torch_build(),
        "driver": driver(),
        "gpus": gpus(),
        "packages": versions,
        "sources": sources,
        "tools": tools(),
        "caches": caches(),
        "variables": variables(os.environ),
    }


def system() -> dict[str, Any]:
    name = ""
    try:
        with open("/etc/os-release", encoding="utf-8") as stream:
            name = dict(line.rstrip().partition("=")[::2] for line in stream).get("PRETTY_NAME", "")
    except OSError:
        pass
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {
        "os": name.strip('"'),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory, 1),
    }


def python() -> dict[str, Any]:
    managed = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    virtual = sys.prefix != sys.base_prefix
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "virtual": virtual,
        "managed": not virtual and os.path.exists(managed),
    }


def torch_build() -> dict[str, Any] | None:
    """What torch/version.py states: ``__version__ = '2.11.0+cu130'``, ``cuda: … = '13.0'``."""
    try:
        found = metadata.distribution("torch")
        path = str(found.locate_file("torch/version.py"))
        with open(path, encoding="utf-8") as stream:
            tree = ast.parse(stream.read())
    except (metadata.PackageNotFoundError, OSError, SyntaxError):
        return None
    stated: dict[str, Any] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            stated[target.id] = value.value
    return {
        "version": str(stated.get("__version__") or found.version),
        "cuda": stated.get("cuda"),
        "hip": stated.get("hip"),
    }


def driver() -> dict[str, Any] | None:
    """The kernel's driver, seen also where nvidia-smi is missing."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as stream:
            text = stream.read()
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return {"version": found.group(1) if found else "", "nvidia_smi": shutil.which("nvidia-smi")}


def gpus() -> list[dict[str, str]]:
    fields = "--query-gpu=index,uuid,name,memory.total,compute_cap"
    said = run(["nvidia-smi", fields, "--format=csv"])
    rows = [row.split(", ") for row in said.splitlines()[1:]]
    found = [
        {"uuid": row[1], "name": row[2], "memory": row[3], "capability": row[4]}
        for row in rows
        if len(row) == 5
    ]
    if found:
        return found
    for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        try:
            with open(path, encoding="utf-8") as stream:
                facts = dict(line.partition(":")[::2] for line in stream)
        except OSError:
            continue
        name, uuid = facts.get("Model", "").strip(), facts.get("GPU UUID", "").strip()
        found.append({"uuid": uuid, "name": name, "memory": "", "capability": ""})
    return found


def run(argv: list[str], limit: float = 10) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=limit)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def packages() -> tuple[dict[str, str], dict[str, str]]:
    """Name → version of everything installed, and name → origin of what came from no index."""
    versions: dict[str, str] = {}
    origins: dict[str, str] = {}
    for found in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", found.metadata["Name"] or "").lower()
        if not name or name in versions:  # the first on sys.path is the one that is imported
            continue
        versions[name] = found.version
        try:
            direct = json.loads(found.read_text("direct_url.json") or "null")
        except ValueError:
            direct = None
        if direct:
            commit = (direct.get("vcs_info") or {}).get("commit_id")
            vcs = (direct.get("vcs_info") or {}).get("vcs")
            url = direct.get("url", "")
            origins[name] = f"{vcs}+{url}@{commit}" if commit else url
    return versions, origins


def tools() -> dict[str, str | None]:
    beside = os.path.dirname(sys.executable)
    home = os.path.expanduser("~")
    places = [beside, f"{home}/.local/bin", f"{home}/.cargo/bin", "/usr/local/bin", "/usr/bin"]
    uv = shutil.which("uv") or shutil.which("uv", path=os.pathsep.join(places))
    try:
        pip = metadata.version("pip")
    except metadata.PackageNotFoundError:
        pip = None
    return {"uv": uv, "pip": pip}


def caches() -> dict[str, Any]:
    environment = os.environ
    user = environment.get("USER") or environment.get("LOGNAME") or user_name()
    inductor = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    triton = os.path.expanduser("~/.triton/cache")
    return {
        "inductor": cache(environment.get("TORCHINDUCTOR_CACHE_DIR") or inductor),
        "triton": cache(environment.get("TRITON_CACHE_DIR") or triton),
    }


def user_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def cache(path: str) -> dict[str, Any]:
    files = size = 0
    newest = 0.0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                status = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            files, size = files + 1, size + status.st_size
            newest = max(newest, status.st_mtime)
        if files >= CACHE_FILES:
            break
    return {"path": path, "files": files, "bytes": size, "newest": newest or None}


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for name, value in sorted(environment.items()):
        if name in NAMES or name.startswith(PREFIXES):
            found[name] = "(set)" if SECRET.search(name) else value
    return found


def write(path: str, text: str) -> None:
    deadline = time.monotonic() + FOLDER_WAIT_S
    while not os.path.isdir(os.path.dirname(path)):
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)
    temporary = f"{path}.{os.getpid()}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(temporary, path)


def main(arguments: list[str]) -> None:
    if arguments:
        os.setsid()
        write(arguments[0], json.dumps(collect()))
    else:
        print(json.dumps(collect()))


if __name__ == "__main__":
    main(sys.argv[1:])
