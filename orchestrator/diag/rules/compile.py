"""torch.compile: the tracing race, limits, eager fallbacks, backends, caches."""

from __future__ import annotations

import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding
from orchestrator.diag.rules.shared import mount_of, path_in
from orchestrator.diag.text import Line
from orchestrator.diag.tracebacks import Failure

FX_FLAG = (
    r"Detected that you are using FX to (?:symbolically trace|torch\.jit\.trace)[^\n]*",
    r"using FX to symbolically trace a dynamo-optimized function",
)
CONCURRENT = (
    r"CURRENT_PATCHER (?:is None in finally block|was changed during a revert_all_patches)",
    r"module is not installed as a submodule",
    r"both a fallback and a decomp for same op",
    r"NameError: (?:module is not installed|name '_?\w*' is not defined)[^\n]*(?:fx|"
    r"symbolic_trace)",
    r"Detected recompile when torch\.compile stance is 'fail_on_recompile'",
    r"is_fx_tracing|_is_fx_tracing_flag",
)
GUARDS = (
    r"BACKEND_MATCH failure: torch\.compile detected different backend callables",
    r"Unexpected recompilation: runtime guards failed even though they passed",
    r"Guard failed on the same frame it was created",
)
LIMIT = (
    r"torch\._dynamo hit config\.(?:recompile_limit|cache_size_limit|"
    r"accumulated_\w+_limit) \((\d+)\)",
    r"(?:accumulated_)?(?:recompile|cache_size)_limit (?:reached|exceeded|hit)",
    r"FailOnRecompileLimitHit|RecompileLimitExceeded|FailOnCacheLimitHit",
    r"(?:recompile|cache_size)_limit \(\d+\)|Hard failure due to (?:fullgraph=True|fail_on)",
)
EAGER = (
    r"flex_attention called without torch\.compile\(\)",
    r"flex_attention[^\n]*(?:unfused implementation|materializes the full scores)",
    r"WON'T CONVERT \S+",
    r"(?:falling|fell) back to eager|suppress_errors[^\n]*eager|running (?:the )?\w+ eagerly",
    r'"event": ?"eager_fallback"',
    r"torch\.compile (?:is )?(?:disabled|off)[^\n]*flex",
)
RECOMPILE = (
    r"Recompiling function (\S+) in (\S+)",
    r"\[__recompiles\]\s+-? ?\d+/\d+: ",
    r'"event": ?"recompile"',
    r"CUDAGraph supports dynamic shapes by recording a new graph for each distinct input size\.",
    r"We have observed (\d+) distinct sizes",
    r"torch\._dynamo[^\n]*(?:recompil\w+) (?:again|\d+ times)",
)
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
    r"(?:codecache|FxGraphCache|AOTAutogradCache|triton_bundler)[^\n]*(?:EOFError|"
    r"UnpicklingError|JSONDecodeError|BadZip)",
)


def fx_race(e: Evidence) -> Iterator[Finding]:
    """torch 2.0 to 2.13: the FX tracing flag is process-wide, so while one thread traces, another's
    warm compiled call fails with ``Detected that you are using FX to symbolically trace a
    dynamo-optimized function``. Its companions on 2.11 to 2.15: ``CURRENT_PATCHER …``, ``module is
    not installed as a submodule``, ``both a fallback and a decomp for same op``, spurious guard
    failures (``BACKEND_MATCH failure``). The eager flex warning beside them is its effect."""
    flag = e.search(*FX_FLAG)
    companions = e.search(*CONCURRENT)
    guards = e.search(*GUARDS)
    custom = [
        f
        for f in e.errors
        if f.name == "KeyError"
        and "'custom'" in f.message
        and any("fx/traceback" in fr.file for fr in f.frames)
    ]
    events = e.search(r'"event": ?"(?:fx_trace)"')
    threads = _threads(e)
    if not (flag or companions or custom or len(guards) >= 1):
        return
    # torch.export or a nested trace in one thread says the same words: then nothing else points
    # here.
    nested = flag and not (companions or guards or custom or threads) and _traces_itself(e)
    if nested:
        return
    if companions and not flag and not threads and not custom and not guards:
        return
    many = sum(1 for _ in flag)
    yield e.found(
        "compile.fx_race",
        "several threads traced at once: a compiled call met torch's global FX-tracing flag"
        + (f" ({many} times)" if many > 1 else ""),
        [
            *flag[:3],
            *companions[:2],
            *guards[:1],
            *custom[:1],
            *events[:1],
        ],
        "every compiled call under one lock, torch's own: with "
        "torch._dynamo.convert_frame.compile_lock:\n"
        "one code object per drafter thread; torch.autograd.set_multithreading_enabled(False) "
        "in each;\n"
        "torch._functorch.config.force_non_lazy_backward_lowering = True\n"
        "never error_on_nested_fx_trace=False: with checkpointing the gradients are silently "
        "wrong\n"
        "the `trainer` package does all of this; torch ≥ 2.14 has the flag per thread",
        confidence=0.96 if flag else 0.8,
        lasting=True,
    )


def _threads(e: Evidence) -> bool:
    """Several threads of one process at work."""
    if e.search(r"\b(?:drafter|trainer|worker)[-_ ](?:thread[-_ ]?)?\d+\b", quiet=True):
        return True
    if any(f.thread for f in e.errors):
        return True
    return bool(
        e.search(
            r"Exception in thread|threading\.py|Thread-\d+|concurrent/futures/thread",
            r"\b\d+ (?:drafter|trainer|worker|compile)? ?threads\b",
            quiet=True,
        )
    )


def _traces_itself(e: Evidence) -> bool:
    """A symbolic_trace, export or fx pass stands in the traceback of the same thread."""
    return any(
        re.search(
            r"symbolic_trace|make_fx|export|\.trace\(|quantize_fx|fx_pass",
            f"{fr.function} {fr.code}",
        )
        for f in e.errors
        if "FX" in f.message
        for fr in f.frames
    )


def recompile_limit(e: Evidence) -> Iterator[Finding]:
    """``torch._dynamo hit config.recompile_limit (8)`` (2.6 and later; before: cache_size_limit
    (64) (8)), ``accumulated_recompile_limit``; with fullgraph a hard
    ``FailOnRecompileLimitHit``."""
    hits = e.search(*LIMIT)
    hits = [h for h in hits if not re.search(r"set(?:ting)? |raised to|= ?\d+$", h.line.text)]
    if not hits:
        return
    window = [li for li in e.lines if 0 <= li.number - hits[0].line.number <= 6]
    reason = next((li for li in window if "last reason" in li.text), None)
    what = next((li for li in window if "function:" in li.text), None)
    hard = bool(
        e.raised(r"FailOnRecompileLimitHit|RecompileLimitExceeded|FailOnCacheLimitHit")
    ) or any("Hard failure" in h.line.text for h in hits)
    title = "the recompile limit was hit" + (
        ", and fullgraph made that an error" if hard else ": the function runs eagerly from here on"
    )
    if reason is not None:
        title += f" ({reason.text.split('last reason:')[-1].strip()[:120]})"
    yield e.found(
        "compile.recompile_limit",
        title,
        [*hits[:2], *(li for li in (what, reason) if li is not None)],
        "pad to a few fixed shapes, or mark the moving one: torch._dynamo.mark_dynamic(x, 1)\n"
        "TORCH_LOGS=recompiles   # names the guard each time\n"
        "threads count: each device and each thread is an entry of one code object; give each "
        "drafter its\n"
        "own function; only then raise torch._dynamo.config.recompile_limit",
        severity="fatal" if hard else "warning",
        confidence=0.93,
        lasting=not hard,
    )


def recompile_storm(e: Evidence) -> Iterator[Finding]:
    """``TORCH_LOGS=recompiles`` lines, CUDA graphs' ``We have observed 57 distinct sizes``, or the
    trainer's own recompile events, *again and again after the first steps*. Two at the warm-up are
    healthy."""
    hits = e.search(*RECOMPILE)
    start = _warm_line(e)
    late = [h for h in hits if h.line.source != "log" or h.line.number > start]
    sizes = [
        int(m[1]) for h in hits if (m := re.search(r"observed (\d+) distinct sizes", h.line.text))
    ]
    named = [
        h
        for h in late
        if re.search(r"Recompiling function|\"recompile\"|\[(\d+)/(\d+)\]", h.line.text)
    ]
    counts = [s.recompiles for s in e.progress if s.recompiles is not None]
    growing = len(counts) >= 4 and counts[-1] - counts[len(counts) // 4] >= 8
    growing_sizes = len(sizes) >= 2 and sizes[-1] > sizes[0] + 4
    functions = len({h.match[0] for h in named})
    storm = (
        growing_sizes
        or growing
        or len([h for h in named if "Recompiling" in h.line.text or '"recompile"' in h.line.text])
        >= 5
        or (not e.series and len(hits) >= 12)
        or (len(late) >= 10 and functions >= 1)
    )
    if not storm:
        return
    shown: list[Hit | Line] = [*(late or hits)[:3], *(late or hits)[-1:]]
    if growing and not shown:
        shown = [e.progress[0].line, e.progress[-1].line]
    yield e.found(
        "compile.recompile_storm",
        "shapes keep changing and every new one compiles again"
        + (f": {sizes[-1]} distinct sizes" if sizes else f": {len(late)} recompiles after warm-up"),
        shown,
        "pad to a few fixed lengths (buckets), drop or pad the last batch\n"
        "TORCH_LOGS=recompiles   # which guard, which dimension\n"
        "torch._dynamo.mark_dynamic(x, DIM); CUDA graphs: torch._inductor.config.triton."
        "cudagraph_skip_dynamic_graphs=True",
        severity="warning",
        confidence=0.88,
        lasting=True,
    )


def _warm_line(e: Evidence) -> int:
    """Line of the third step of the last attempt: before it compiling is expected."""
    after = e.series.after(e.outcome.attempt_line)
    return after[2].number if len(after) > 3 else 0


def eager_fallback(e: Evidence) -> Iterator[Finding]:
    """``flex_attention called without torch.compile() - this will use an unfused implementation``
    (2.8 and later; once a process), dynamo's ``WON'T CONVERT``."""
    hits = [h for h in e.search(*EAGER) if not _of_warmup_only(e, h)]
    flex = [
        h
        for h in hits
        if "flex" in h.line.text
        or "eager_fallback" in h.line.text
        or "WON'T" in h.line.text
        or "eager" in h.line.text
    ]
    if flex:
        yield e.found(
            "compile.eager_fallback",
            "flex_attention ran unfused: the full score matrix is made, slow and large",
            flex[:3],
            "compile a function of your own that calls flex_attention: torch.compile(attend, "
            "fullgraph=True)\n"
            "TORCH_LOGS=graph_breaks,recompiles   # why it left the compiled path\n"
            "several threads: see compile.fx_race",
            severity="warning",
            confidence=0.85,
            lasting=True,
        )


def _of_warmup_only(e: Evidence, hit: Hit) -> bool:
    """A fallback that some line right after takes back."""
    return e.outcome.moved_on(hit.line.number) and bool(
        re.search(r"create_block_mask|test|probe|reference|check", hit.line.text)
    )


def backend_failed(e: Evidence) -> Iterator[Finding]:
    """Inductor (``BackendCompilerFailed`` ≤ 2.6, ``InductorError`` ≥ 2.7), Triton (``out of
    resource: shared memory``, ``PTXASError``, ``Failed to find C compiler``), gcc and ld under
    them. One autotuning choice that did not fit is no failure."""
    hits = [h for h in e.search(*BACKEND) if not _one_choice(h)]
    hits = [h for h in hits if not e.recovered(h.line)]
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


RULES = (fx_race, recompile_limit, recompile_storm, eager_fallback, backend_failed, cache)
