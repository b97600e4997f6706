"""Two environments compared, and one looked at alone: differences with their weight and remedy.

Pure. ``before`` is the one that is known to be good (a lock file, an earlier run), ``after`` the
one in question; remedies are for ``after``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from orchestrator.environment.lock import Environment

Weight = Literal["breaks", "may matter", "harmless"]
ORDER: dict[str, int] = {"breaks": 0, "may matter": 1, "harmless": 2}

# NVIDIA's "minor version compatibility": the oldest Linux driver that runs each major CUDA.
OLDEST_DRIVER = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}

NEEDED = ("torch", "transformers", "safetensors", "numpy", "pydantic")
"""What the trainer cannot do without."""

# Packages whose version shows in results, speed or checkpoints. Value: why.
KEY_PACKAGES = {
    "triton": "it compiles the kernels, and its cache is keyed by its version",
    "transformers": "it holds the target model's code; hidden states may differ",
    "tokenizers": "the same text may become other tokens",
    "safetensors": "it reads and writes the checkpoints",
    "numpy": "compiled packages are bound to its major version",
    "pydantic": "configs and run records are checked with it",
    "accelerate": "it places and loads the target model",
    "gguf": "it reads GGUF targets",
    "flash-attn": "another attention kernel: speed, and bits of the result",
    "liger-kernel": "other kernels: speed, and bits of the result",
    "flashinfer-python": "other kernels: speed, and bits of the result",
    "torchao": "it must fit torch's version",
}
# Several nodes refuse each other, or hang, when these differ.
RENDEZVOUS = ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")

VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "1 makes every kernel launch wait: a debugging aid, many times slower",
    "CUDA_VISIBLE_DEVICES": "it decides which GPUs the run sees, and their order",
    "CUDA_DEVICE_ORDER": "GPU 0 may be another card",
    "LD_LIBRARY_PATH": "it may put other CUDA libraries before those that torch brings",
    "LD_PRELOAD": "it replaces functions of every program",
    "PYTHONPATH": "other modules may be imported than the installed ones",
    "TORCH_COMPILE_DISABLE": "1 runs everything eagerly",
    "TORCHDYNAMO_DISABLE": "1 runs everything eagerly",
    "TORCHINDUCTOR_CACHE_DIR": "an empty compile cache makes the first steps compile again",
    "TRITON_CACHE_DIR": "an empty kernel cache makes the first steps compile again",
    "PYTORCH_CUDA_ALLOC_CONF": "it decides how memory fragments",
    "PYTORCH_ALLOC_CONF": "it decides how memory fragments",
    "OMP_NUM_THREADS": "unset, every worker starts as many threads as there are cores",
    "TOKENIZERS_PARALLELISM": "threads of the tokenizer before a fork can hang the run",
    "PYTHONHASHSEED": "the order of sets, and whatever depends on it",
}
MATTER_BY_PREFIX = ("NCCL_", "GLOO_", "UCX_", "CUDA_", "CUBLAS_", "TORCH", "PYTORCH_", "TRITON_")


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same (or, for one environment alone, not right)."""

    key: str
    before: str | None
    after: str | None
    weight: Weight
    why: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(before: Environment, after: Environment) -> list[Difference]:
    """Every difference, the heaviest first."""
    # Of what is wrong in itself, only what was not wrong before.
    old = {fault.key for fault in faults(before)}
    found = [
        *(fault for fault in faults(after) if fault.key not in old),
        *_python(before, after),
        *_torch(before, after),
        *_devices(before, after),
        *_packages(before, after),
        *_caches(before, after),
        *_variables(before, after),
        *_system(before, after),
    ]
    return sorted(found, key=lambda d: ORDER[d.weight])


def worst(differences: list[Difference]) -> Weight | None:
    return min((d.weight for d in differences), key=lambda w: ORDER[w], default=None)


def faults(one: Environment) -> Iterator[Difference]:
    """What is wrong with an environment whatever it is compared with."""
    torch, driver = one.torch, one.driver
    if torch is None:
        yield Difference(
            *("torch", None, None, "breaks"),
            "torch is not installed for this interpreter",
            f"install it for {one.python.executable}, or set `python` in the inventory",
        )
        return
    if driver is not None and torch.cuda is None and torch.hip is None:
        yield Difference(
            *("torch build", None, torch.version, "breaks"),
            "a build for CPUs, on a machine with NVIDIA GPUs",
            "install a CUDA build of torch (`env sync` from a container that has one)",
        )
    if driver is not None and torch.cuda is not None:
        oldest = OLDEST_DRIVER.get(numbers(torch.cuda)[0])
        if oldest and numbers(driver.version) < oldest:
            yield Difference(
                *("driver", None, driver.version, "breaks"),
                f"torch {torch.version} is built for CUDA {torch.cuda}, which needs a driver "
                f"from {'.'.join(map(str, oldest))} on",
                "upgrade the driver on the host and its libraries in the container, or install "
                "torch for an older CUDA",
            )
        if driver.nvidia_smi is None:
            yield Difference(
                *("nvidia-smi", None, None, "may matter"),
                "the kernel's driver is visible but its user-space tools are not: the container "
                "lacks the driver's libraries, or has other ones",
                f"install the libraries of driver {driver.version} in the container "
                "(--no-kernel-module)",
            )


def numbers(version: str) -> tuple[int, ...]:
    """``580.65.06`` as (580, 65, 6); what follows a letter or ``+`` is left out."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else (0,)


def _python(before: Environment, after: Environment) -> Iterator[Difference]:
    a, b = before.python, after.python
    if a.version != b.version or a.implementation != b.implementation:
        same = numbers(a.version)[:2] == numbers(b.version)[:2]
        same = same and a.implementation == b.implementation
        yield Difference(
            "python",
            f"{a.implementation} {a.version}",
            f"{b.implementation} {b.version}",
            "harmless" if same else "breaks",
            "only bug fixes differ" if same else "compiled packages fit one minor version only",
            "" if same else f"make a virtual environment with Python {a.version}",
        )


def _torch(before: Environment, after: Environment) -> Iterator[Difference]:
    a, b = before.torch, after.torch
    if a is None or b is None or a == b:
        return
    if a.version.partition("+")[0] != b.version.partition("+")[0]:
        minor = numbers(a.version)[:2] == numbers(b.version)[:2]
        yield Difference(
            *("torch", a.version, b.version),
            "may matter" if minor else "breaks",
            "torch.compile, its caches and its races change between versions",
            f"install torch {a.version}",
        )
    if a.cuda != b.cuda:
        major = numbers(a.cuda or "")[0] == numbers(b.cuda or "")[0]
        yield Difference(
            *("torch CUDA", a.cuda or "none", b.cuda or "none"),
            "may matter" if major else "breaks",
            "other kernels and another compile cache" if major else "it needs another driver",
            f"install torch {a.version}",
        )


def _devices(before: Environment, after: Environment) -> Iterator[Difference]:
    a, b = before.driver, after.driver
    if a and not b:
        yield Difference(
            *("driver", a.version, None, "breaks"),
            "no NVIDIA driver is visible",
            "pass the GPUs through to the container (dev0: /dev/nvidia0 …) and load the driver",
        )
    elif b and not a:
        yield Difference("driver", None, b.version, "may matter", "the other had no driver")
    elif a and b and a.version != b.version:
        weight: Weight = (
            "may matter" if numbers(a.version)[0] != numbers(b.version)[0] else "harmless"
        )
        yield Difference("driver", a.version, b.version, weight, "another kernel driver")
    names, others = (Counter(g.name for g in e.gpus) for e in (before, after))
    if names != others:
        gone = bool(names) and not others
        yield Difference(
            *("GPUs", _counted(names), _counted(others)),
            "breaks" if gone else "may matter",
            "no GPU is visible" if gone else "speed, memory and compiled kernels go by the card",
            "check the container's passthrough lines and /dev/nvidia*" if gone else "",
        )


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in sorted(names.items())) or "none"


def _packages(before: Environment, after: Environment) -> Iterator[Difference]:
    for name in sorted(before.packages.keys() | after.packages.keys()):
        a, b = before.packages.get(name), after.packages.get(name)
        if a == b or name == "torch":
            continue
        weight, why = _package(name, a, b)
        remedy = f"install {name}=={a}" if a and weight != "harmless" else ""
        yield Difference(name, a, b, weight, why, remedy)


def _package(name: str, a: str | None, b: str | None) -> tuple[Weight, str]:
    if b is None and name in NEEDED:
        return "breaks", "the trainer cannot start without it"
    if name in RENDEZVOUS and a and b:
        return "breaks", "nodes with different NCCL hang or refuse each other"
    if name in KEY_PACKAGES:
        major = a and b and numbers(a)[0] != numbers(b)[0]
        return "breaks" if major and name in NEEDED else "may matter", KEY_PACKAGES[name]
    if name.startswith("nvidia-"):
        return "may matter", "a CUDA library that torch loads"
    return "harmless", "not a package that training depends on"


def _caches(before: Environment, after: Environment) -> Iterator[Difference]:
    for name, a in before.caches.items():
        b = after.caches.get(name)
        if b is None or bool(a.files) == bool(b.files):
            continue
        yield Difference(
            f"{name} cache",
            f"{a.files} files in {a.path}",
            f"{b.files} files in {b.path}",
            "may matter" if a.files else "harmless",
            "the first steps compile everything again" if a.files else "it is already warm",
        )


def _variables(before: Environment, after: Environment) -> Iterator[Difference]:
    for name in sorted(before.variables.keys() | after.variables.keys()):
        a, b = before.variables.get(name), after.variables.get(name)
        if a == b:
            continue
        why = VARIABLES.get(name)
        matters = why is not None or name.startswith(MATTER_BY_PREFIX)
        remedy = (f"set {name}={a}" if a is not None else f"unset {name}") if matters else ""
        if a == "(set)":
            remedy = f"set {name}"
        yield Difference(
            f"${name}",
            a,
            b,
            "may matter" if matters else "harmless",
            why or ("it steers torch or its libraries" if matters else "not known to matter"),
            remedy,
        )


def _system(before: Environment, after: Environment) -> Iterator[Difference]:
    a, b = before.system, after.system
    if a.machine != b.machine:
        yield Difference(
            *("machine", a.machine, b.machine, "breaks"), "other compiled packages are needed"
        )
    if a.libc != b.libc:
        older = numbers(b.libc.rpartition(" ")[2]) < numbers(a.libc.rpartition(" ")[2])
        yield Difference(
            *("libc", a.libc, b.libc),
            "may matter" if older else "harmless",
            "an older C library refuses packages built for a newer one"
            if older
            else "a newer C library runs what was built for an older one",
        )
    for name in ("os", "kernel", "cpus", "memory_gb"):
        one, other = getattr(a, name), getattr(b, name)
        if one != other:
            yield Difference(
                *(name, str(one), str(other), "harmless"), "the same code runs on either"
            )
