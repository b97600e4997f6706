"""What torch.compile builds with: inductor, Triton, the C compiler, their caches."""

from __future__ import annotations

import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding
from orchestrator.diag.rules.shared import mount_of, path_in
from orchestrator.diag.tracebacks import Failure

BACKEND = (
    r"BackendCompilerFailed",
    r"InductorError|LoweringException",
    r"CppCompileError|C\+\+ compile error|InvalidCxxCompiler|No working C\+\+ compiler found",
    r"Failed to find C compiler|Please specify via CC environment variable",
    r"TritonMissing|Cannot find a working triton installation",
    r"PTXASError|ptxas (?:fatal|error)|`ptxas` (?:failed|stderr)|PTXAS error|"
    r"Internal Triton PTX codegen error",
    r"NoTritonConfigsError|No valid triton configs",
    r"triton\.(?:compiler\.errors\.)?(?:CompilationError|UnsupportedLanguageConstruct|"
    r"CompileTimeAssertionFailure)",
    r"out of resource: (?:shared memory|triton_|threads|registers)|OutOfResources",
    r"fatal error: Python\.h: No such file",
    r"cannot find -lcuda|/usr/bin/ld: cannot find",
    r"SubprocException|Triton compilation failed",
    # torch.utils.cpp_extension
    r"Error building extension '[^']+'|/torch_extensions/\S+\.so: cannot open shared object",
    r"^ninja: build stopped: |Command '\['ninja', '-v'\]' returned non-zero exit status",
    r"A compilation subprocess exited unexpectedly|Attempting to use a closed pool",
    r"(?:gcc|g\+\+|cc|clang|nvcc|c\+\+)['\"]?[, ][^\n]*returned non-zero exit status",
    r"(?:fatal error|error): [^\n]*cuda\.h[^\n]*No such file|"
    r"Assertion `[^`]*' failed[^\n]*triton|LLVM ERROR",
    r"InternalTorchDynamoError|torch\._dynamo\.exc\.(?:Unsupported|UserError|TorchRuntimeError)",
    r"AssertionError: (?:Triton|inductor)|nvrtc: error|NVRTC_ERROR",
)
_CACHE_PATH = (
    r"(?:torchinductor|/\.triton/|triton/cache|triton_cache|inductor_cache|"
    r"torch_compile_cache|fxgraph|aotautograd/)"
)
CACHE = (
    rf"(?:Errno \d+|FileNotFoundError|OSError|PermissionError|No space left|Disk quota|Stale file|"
    rf"Read-only|noexec|failed to map segment|file too short|invalid ELF|"
    rf"timed out)[^\n]*{_CACHE_PATH}",
    rf"{_CACHE_PATH}[^\n]*(?:No space left|file too short|failed to map segment|invalid ELF header|"
    r"cannot open shared object|Permission denied|Read-only|Stale file|corrupt|truncat|"
    r"not found|undefined symbol)",
    r"(?:fx|FX)[ _]?graph cache[^\n]*(?:unable to|corrupt|failed|error|lost)",
    r"(?:inductor|triton|compile|autotune|kernel) cache[^\n]*(?:corrupt|missing|lost|truncated|"
    r"unreadable|full|slow|stale|evicted|"
    r"wiped|failed to (?:load|read|write))",
    r"(?:corrupt|truncated|unreadable|stale)[^\n]{0,40}(?:inductor|triton|compile|autotune|"
    r"kernel|FX graph) cache",
    rf"(?:lock|Lock|Timeout)[^\n]*{_CACHE_PATH}\S*[^\n]*(?:could not be acquired|timed out)",
    r"(?:codecache|FxGraphCache|AOTAutogradCache|triton_bundler)[^\n]*(?:EOFError|"
    r"UnpicklingError|JSONDecodeError|BadZip)",
)


def backend_failed(e: Evidence) -> Iterator[Finding]:
    """Inductor (``BackendCompilerFailed`` ≤ 2.6, ``InductorError`` ≥ 2.7), Triton (``out of
    resource: shared memory``, ``PTXASError``, ``Failed to find C compiler``), gcc and ld under
    them. One autotuning choice that did not fit is no failure."""
    hits = [h for h in e.search(*BACKEND) if not _one_choice(h)]
    # Since 2.9 dynamo tells a recompile limit as something unsupported.
    hits = [h for h in hits if not e.recovered(h.line) and "recompile limit" not in h.line.text]
    if not hits:
        return
    around = " ".join(h.line.text for h in hits)
    failures = [f for f in e.errors if any(f.first <= h.line.number <= f.last for h in hits)]
    around += " ".join(f.message for f in failures)
    if re.search(_CACHE_PATH, around) and re.search(
        r"No space|Errno|quota|too short|map segment", around
    ):
        return  # the cache rule's
    title = "the compiler behind torch.compile failed"
    extension = re.search(r"Error building extension '([^']+)'|/torch_\S+/(\w+)\.so: c", around)
    if extension is not None or "ninja" in around:
        begun = e.search(r"Building extension module (\w+)\.\.\.", probes=False)
        name = (extension[1] or extension[2]) if extension is not None else ""
        yield _extension(e, name or (begun[-1][1] if begun else ""), hits)
        return
    advice = "TORCHDYNAMO_VERBOSE=1 TORCH_LOGS=+inductor python …   # the whole story\n"
    if re.search(r"C compiler|Cxx|CppCompile|gcc|g\+\+|Python\.h|-lcuda", around):
        title += ": no working C compiler, headers or linker in the container"
        advice = (
            "apt-get install -y gcc g++ python3-dev; export CC=gcc; ldconfig -p | grep libcuda\n"
        )
    elif not re.search(r"ptxas|PTXAS", around) and re.search(
        r"out of resource|OutOfResources|Hardware limit|No valid triton configs", around
    ):
        title += ": no kernel configuration fits this card's shared memory"
        advice = "smaller blocks: kernel_options={'BLOCK_M': 64, 'BLOCK_N': 64, 'num_stages': 2}\n"
    if re.search(r"ptxas|PTXAS", around):
        title += ": ptxas does not know this architecture or refused the code"
        advice = (
            "export TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas   # a newer one; or a "
            "newer triton\n"
        )
    elif re.search(r"compilation subprocess exited|closed pool", around):
        title += ": one of its worker processes died"
        advice = (
            "free -g; dmesg -T | grep -i oom   # each worker takes a gigabyte or more\n"
            "export TORCHINDUCTOR_COMPILE_THREADS=1   # compiles in the run itself, which then "
            "says why\n"
        )
    elif re.search(r"TritonMissing|working triton", around):
        title += ": no triton"
        advice = "pip install triton   # the version that torch's metadata names\n"
    yield e.found(
        "compile.backend_failed",
        title,
        hits[:4],
        advice + "rm -rf /tmp/torchinductor_$USER ~/.triton/cache   # rule out a stale cache\n"
        "to tell the layers apart: torch.compile(backend='aot_eager') runs without inductor",
        confidence=0.88,
    )


def _extension(e: Evidence, name: str, hits: list[Hit]) -> Finding:
    """A C++ or CUDA extension that a library builds when it is first used (DeepSpeed's Adam)."""
    said = e.search(r"\berror: (?!ld returned|subcommand)", r"^/\S*ld: cannot find", probes=False)
    return e.found(
        "compile.backend_failed",
        (
            f"the extension {name} does not build"
            if name
            else "a C++ or CUDA extension does not build"
        )
        + (f": {said[0].line.text.strip()[:120]}" if said else ""),
        [*said[:2], *hits[:2]],
        "nvcc --version; python -c 'import torch; print(torch.version.cuda)'   # must agree\n"
        "its own first error is above “ninja: build stopped”; gcc too new for that nvcc: "
        "CC=gcc-13 CXX=g++-13\n"
        "a header of CUDA that is absent: install the whole toolkit, not the runtime alone\n"
        f"rm -rf ~/.cache/torch_extensions/*/{name or 'NAME'}   # and build again, on one rank",
        confidence=0.85,
    )


def _one_choice(hit: Hit) -> bool:
    return (
        re.search(
            r"for benchmark choice|[Ii]gnoring this choice|will be ignored|AUTOTUNE", hit.line.text
        )
        is not None
    )


def _torn_entry(f: Failure) -> bool:
    """By its own type, or by the one that inductor wraps (``InductorError: EOFError: Ran out of
    input``)."""
    torn = r"JSONDecodeError|EOFError|UnpicklingError|BadZipFile"
    wrapped = "Inductor" in f.name and re.match(rf"(?:\w+\.)*(?:{torn})\b", f.message)
    return bool(wrapped or re.search(rf"{torn}|FileNotFoundError|zlib|OSError", f.name))


def cache(e: Evidence) -> Iterator[Finding]:
    """The cache of inductor or Triton (``/tmp/torchinductor_USER``, ``~/.triton/cache``): a full or
    noexec /tmp (``failed to map segment``), a truncated entry (``file too short``, ``EOFError`` in
    codecache), a network mount (``Stale file handle``), one removed under a live run."""
    hits = [
        h
        for h in e.search(*CACHE)
        if not re.search(r"cache[^\n]*\bmiss(?:es)?\b|cold cache", h.line.text)
    ]
    inside = [
        f
        for f in e.errors
        if _torn_entry(f)
        and any(
            re.search(
                r"codecache|triton/runtime/cache|_inductor/(?:runtime|triton_bundler|remote_cache)|"
                r"autograd_cache",
                fr.file,
            )
            for fr in f.frames[-3:]
        )
    ]
    hits = [h for h in hits if not e.recovered(h.line)]
    if not hits and not inside:
        return
    text = " ".join([h.line.text for h in hits] + [f.message for f in inside])
    path = path_in(text)
    mount = mount_of(e, path) if path else None
    full = re.search(r"No space left|Errno 28|quota", text)
    noexec = re.search(r"failed to map segment|noexec", text)
    how = (
        "on a full mount" if full else "on a mount without exec" if noexec else "missing or corrupt"
    )
    yield e.found(
        "compile.cache",
        f"the compile cache is {how}" + (f": {path}" if path else ""),
        [*hits[:3], *inside[:2], *([mount.line] if mount is not None else [])],
        "export TORCHINDUCTOR_CACHE_DIR=/workspace/.cache/inductor "
        "TRITON_CACHE_DIR=/workspace/.cache/triton\n"
        "rm -rf /tmp/torchinductor_* ~/.triton/cache   # with no run alive\n"
        "a local disk with exec and room: df -h /tmp; mount | grep -e /tmp -e noexec",
        confidence=0.93 if hits else 0.85,
    )


RULES = (backend_failed, cache)
