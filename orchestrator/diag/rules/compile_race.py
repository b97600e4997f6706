"""torch.compile in threads: the race on the global FX-tracing flag."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding

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
    traced, told = _who_traced(e)
    threads = _threads(e)
    if not (flag or companions or custom or guards):
        return
    # torch.export or a nested trace in one thread says the same words: then nothing else points
    # here.
    if flag and not (companions or guards or custom or threads) and _traces_itself(e):
        return
    if companions and not (flag or threads or custom or guards):
        return
    yield e.found(
        "compile.fx_race",
        "a compiled call met torch's global FX-tracing flag, which another thread's trace had set"
        + (f" ({len(flag)} times)" if len(flag) > 1 else "")
        + traced,
        [
            *flag[:3],
            *companions[:2],
            *guards[:1],
            *custom[:1],
            *told,
        ],
        "every compiled call under one lock, torch's own: with "
        "torch._dynamo.convert_frame.compile_lock:\n"
        "one code object per drafter thread; torch.autograd.set_multithreading_enabled(False) "
        "in each;\n"
        "torch._functorch.config.force_non_lazy_backward_lowering = True\n"
        "never error_on_nested_fx_trace=False: with checkpointing the gradients are silently "
        "wrong\n"
        "the `trainer` package does all of this; torch ≥ 2.14 has the flag per thread\n"
        "python -m trainer trace YOUR_SCRIPT.py ARGS   # names the thread that traces, and its "
        "line;\n"
        "of our trainer: python -m trainer train CONFIG --trace-compile",
        confidence=0.96 if flag else 0.8,
        lasting=True,
    )


def _who_traced(e: Evidence) -> tuple[str, list[Hit]]:
    """Of the opt-in trace (``fx_trace`` events): the threads that set the flag and are not the one
    that met it, the last of them with its innermost line of the user's. Those without torch's lock
    before those with it: torch's own compiles hold it, and it is the warm call that does not."""
    failing = {f.thread for f in e.errors if "FX to symbolically trace" in f.message}
    found: dict[bool, dict[str, tuple[Hit, str]]] = {True: {}, False: {}}
    for hit in e.search(r'"event": ?"fx_trace"', quiet=True):
        try:
            detail = json.loads(hit.line.text)["detail"]
            thread, stack = str(detail["thread"]), list(detail["stack"])
        except (ValueError, KeyError, TypeError):
            continue
        if thread not in failing:
            where = str(stack[-1]) if stack else "?"
            found[bool(detail.get("lock_held"))][thread] = hit, where
    suspects = found[False] or found[True]
    if not suspects:
        return "", []
    thread, (_, line) = list(suspects.items())[-1]
    return f"; last set by thread {thread} at {line}", [hit for hit, _ in suspects.values()][-2:]


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


RULES = (fx_race,)
