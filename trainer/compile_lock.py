"""torch.compile in threads: one lock, one code object a function, no silent eager run.

Torch keeps process-wide state while it traces. One thread's *warm* compiled call that meets another
thread's trace fails ("Detected that you are using FX to symbolically trace ..."), falls back to
eager, or, under activation checkpointing, gives wrong gradients without a word. The rules:

1. Every compiled forward call holds torch's own compile lock, over guards, compile and launch. A
   lock of our own would miss the compiles that torch makes under its own, in other threads.
2. Nothing is held across ``backward``. The autograd engine and a checkpoint's recompute take the
   lock themselves; holding it while they wait for each other hangs. ``backward`` refuses it.
3. Everything else that traces (``create_block_mask``, ``torch.export``, ``make_fx``,
   ``torch._dynamo.reset``, a change of stance) runs in ``exclusive()``.
4. Each thread enters ``thread()`` first: backward in the calling thread (on one device several
   threads otherwise share one autograd thread, and hang), compiled within the forward call.
5. Each ``compile`` gives a function with a code object of its own. Warm calls that share one with
   several entries fail their guards spuriously about 1 % of the time (0 of 7,500 with its own).

A warm call costs about 3 µs. Compiles after ``end_warm_up`` and waits are counted and reported;
an eager run raises. The CPU's default random generator is rolled back at the end of a compile: a
stage that draws numbers needs a ``torch.Generator`` of its own.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from trainer import torch_internals
from trainer.errors import TrainerError

Policy = Literal["warn", "fail"]
"""What a compile after warm-up does: an event, or an error in the thread that caused it."""

EventSink = Callable[..., None]
"""``RunWriter.event``: (event, **detail). Called from any thread."""

TRACE_VARIABLE = "DFLASH_TRACE_COMPILE"
LONG_WAIT_S = 1.0


class CompileError(TrainerError):
    """A rule of this module was broken, by us or by another library in the process."""

    exit_code = 1


class LockHeldError(CompileError):
    """``backward`` while this thread holds the compile lock."""


class RecompileError(CompileError):
    """Compiled after warm-up under the policy ``fail``, or more often than the limit allows."""


class EagerRunError(CompileError):
    """A function that should be compiled ran as plain Python."""


class CompileRaceError(CompileError):
    """The tracing flag stayed set: a tracer outside the lock never ended, or left it set."""


@dataclass(frozen=True)
class LockStats:
    """Counts since the lock was made; ``recompiles`` since ``end_warm_up``."""

    waits: int = 0
    """Takes of the lock that had to wait for another thread."""
    wait_s: float = 0.0
    compiles: int = 0
    recompiles: int = 0
    eager_runs: int = 0
    foreign_traces: int = 0
    """Calls that had to wait for a tracer that did not hold the lock."""

    def telemetry(self) -> dict[str, float]:
        """Fields of ``telemetry.StepLine``."""
        waited = round(self.wait_s, 4)
        return {"recompiles": self.recompiles, "lock_waits": self.waits, "lock_wait_s": waited}


@dataclass(frozen=True)
class Health:
    """Torch's global state, read while nothing compiles."""

    tracing_flag: bool
    modules_patched: bool
    stance: str
    is_compiling: bool

    def problems(self) -> list[str]:
        found = []
        if self.tracing_flag:
            found.append("the FX tracing flag is set while nothing compiles: warm calls would fail")
        if self.modules_patched:
            found.append("nn.Module is patched by a tracer while nothing compiles")
        if self.stance != "default":
            found.append(f"torch.compiler's stance is {self.stance!r}, not 'default'")
        if self.is_compiling:
            found.append("torch.compiler.is_compiling() is stuck at True")
        return found


class CompileLock:
    """One per process. Hands out compiled functions and watches that they stay compiled."""

    def __init__(
        self,
        *,
        policy: Policy = "warn",
        event: EventSink | None = None,
        recompile_limit: int = 64,
        foreign_trace_limit_s: float = 60.0,
    ) -> None:
        """``foreign_trace_limit_s`` bounds the wait for a tracer that does not hold the lock. Where
        ``DFLASH_TRACE_COMPILE`` is set, who sets torch's tracing flag is recorded."""
        self.policy = policy
        self._event: EventSink = _no_event if event is None else event
        self.recompile_limit = recompile_limit
        self._foreign_limit_s = foreign_trace_limit_s
        self._warm = False
        self._stats = LockStats()
        self._stats_guard = threading.Lock()
        self._local = threading.local()
        self._watch = torch_internals.CompileWatch(self._compile_started)
        traced = os.environ.get(TRACE_VARIABLE, "") not in ("", "0")
        self.trace_log = TraceLog(self._event) if traced else None

    # -- for the stages ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def thread(self) -> Iterator[None]:
        """For the life of a thread that compiles or calls compiled functions."""
        with (
            torch_internals.thread_configuration(self.recompile_limit),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield

    def compile(self, function: Callable[..., Any], name: str, **options: Any) -> LockedCompile:
        """``options`` go to ``torch.compile``; ``fullgraph=True`` unless given, because the code
        after a graph break would run outside the counted function."""
        return LockedCompile(self, function, name, options)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """For everything else that traces or changes torch's global compile state."""
        lock = torch_internals.compile_lock()
        self._acquire(lock)
        try:
            yield
        finally:
            lock.release()

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()``; LockHeldError if this thread holds the compile lock."""
        if torch_internals.owns_compile_lock():
            raise LockHeldError(
                "the compile lock is held across backward(): the autograd thread of the device "
                "would wait for it forever",
                next_step="leave exclusive() and compiled functions before calling backward",
            )
        loss.backward()

    # -- for the executor -------------------------------------------------------------------------

    def end_warm_up(self) -> None:
        """From now on every compile is a recompile."""
        self._warm = True

    def stats(self) -> LockStats:
        with self._stats_guard:
            return self._stats

    def health(self) -> Health:
        with self.exclusive():
            return Health(
                tracing_flag=torch_internals.tracing_flag(),
                modules_patched=torch_internals.modules_are_patched(),
                stance=torch_internals.stance(),
                is_compiling=torch.compiler.is_compiling(),
            )

    def close(self) -> None:
        self._watch.close()
        if self.trace_log is not None:
            self.trace_log.close()

    # -- inside -----------------------------------------------------------------------------------

    def _acquire(self, lock: torch_internals.ReentrantLock) -> None:
        if lock.acquire(blocking=False):
            return
        began = time.perf_counter()
        lock.acquire()
        waited = time.perf_counter() - began
        self._count(waits=1, wait_s=waited)
        if waited >= LONG_WAIT_S:
            self._event("lock_wait", seconds=round(waited, 3), thread=_thread_name())

    def _await_tracer(self, lock: torch_internals.ReentrantLock) -> None:
        """Holding the lock, torch itself traces nothing: a set flag is a tracer that does not take
        the lock. Wait for its end without the lock (it may need it), and hold the lock again."""
        deadline = time.monotonic() + self._foreign_limit_s
        self._count(foreign_traces=1)
        while torch_internals.tracing_flag():
            lock.release()
            try:
                time.sleep(0.001)
            finally:
                self._acquire(lock)
            if time.monotonic() > deadline:
                raise CompileRaceError(
                    f"torch's FX tracing flag has been set for {self._foreign_limit_s:.0f} s by a "
                    "tracer that does not hold the compile lock, or was left set by one",
                    next_step="run with --trace-compile to see which thread traces; trace before "
                    "the stages start, or inside exclusive()",
                )

    def _compile_started(self, trigger: str, compile_id: str) -> None:
        self._local.compiles = getattr(self._local, "compiles", 0) + 1
        self._count(compiles=1, recompiles=int(self._warm))
        # A LockedCompile reports its own compile after the call, when the reason is known.
        if self._warm and not getattr(self._local, "depth", 0):
            self._event(
                "recompile", name=f"{trigger} {compile_id}", reason="", thread=_thread_name()
            )

    def _count(self, **increments: float) -> None:
        with self._stats_guard:
            now = {name: getattr(self._stats, name) + by for name, by in increments.items()}
            self._stats = replace(self._stats, **now)


class LockedCompile:
    """A compiled function with its own code object, called under torch's compile lock."""

    def __init__(
        self, owner: CompileLock, function: Callable[..., Any], name: str, options: dict[str, Any]
    ) -> None:
        self.name = name
        self._owner = owner
        self._eager_runs = 0
        self._compiled = torch.compile(
            own_code(self._counted(function), name), **{"fullgraph": True, **options}
        )

    def _counted(self, function: Callable[..., Any]) -> FunctionType:
        def body(*args: Any, **kwargs: Any) -> Any:
            # True while dynamo traces this body, False when Python runs it: the only reliable sign
            # of a fallback, since torch warns of it once a process at most. Imported by name: each
            # attribute on the way to it would be a guard of every call.
            if not is_dynamo_compiling():
                self._eager_runs += 1
            return function(*args, **kwargs)

        assert isinstance(body, FunctionType)
        return body

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner, local = self._owner, self._owner._local
        lock = torch_internals.compile_lock()
        nested = lock._is_owned()
        owner._acquire(lock)
        try:
            # A trace of our own thread (nested) is a real nested trace: torch's error is right.
            if not nested and torch_internals.tracing_flag():
                owner._await_tracer(lock)
            compiles, eager_runs = getattr(local, "compiles", 0), self._eager_runs
            local.depth = getattr(local, "depth", 0) + 1
            try:
                result = self._run(nested, lock, args, kwargs)
            finally:
                local.depth -= 1
            if self._eager_runs != eager_runs:
                self._refuse_eager()
            if owner._warm and getattr(local, "compiles", 0) != compiles:
                self._report_recompile()
            return result
        finally:
            lock.release()

    def _run(
        self,
        nested: bool,
        lock: torch_internals.ReentrantLock,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        while True:
            try:
                return self._compiled(*args, **kwargs)
            except torch_internals.RecompileLimitHit as error:
                raise RecompileError(
                    f"{self.name} was compiled {self._owner.recompile_limit} times and needs more",
                    next_step="give it fewer distinct shapes",
                ) from error
            except RuntimeError as error:
                # Raised at entry, before anything ran: a foreign tracer began after our look at
                # the flag. Once it has ended the same call is safe.
                if nested or not str(error).startswith(torch_internals.FX_RACE):
                    raise
            self._owner._await_tracer(lock)

    def _refuse_eager(self) -> None:
        self._owner._count(eager_runs=1)
        self._owner._event("eager_fallback", name=self.name, thread=_thread_name())
        raise EagerRunError(
            f"{self.name} ran without torch.compile (stance {torch_internals.stance()!r})",
            next_step="unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE, and look above for a "
            "recompile limit",
        )

    def _report_recompile(self) -> None:
        reason = torch_internals.last_recompile_reason()
        self._owner._event("recompile", name=self.name, reason=reason, thread=_thread_name())
        if self._owner.policy == "fail":
            raise RecompileError(
                f"{self.name} was compiled again after warm-up: {reason or 'no reason recorded'}",
                next_step="give every step the shapes of the plan, or set pipeline.recompile: warn",
            )


class TraceLog:
    """Who set torch's FX tracing flag: one ``fx_trace`` event per distinct thread and stack."""

    FRAMES = 12
    """Innermost frames kept; a compile's own are about 60 deep and say nothing."""

    def __init__(self, event: EventSink) -> None:
        self._event = event
        self._guard = threading.Lock()
        self.seen: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._hook = torch_internals.TracerHook(self._entered)

    def _entered(self, tracer: Any) -> None:
        frames = traceback.extract_stack()[:-2]
        outside = [f for f in frames if "/torch/" not in f.filename.replace(os.sep, "/")]
        stack = tuple(f"{f.filename}:{f.lineno} {f.name}" for f in outside[-self.FRAMES :])
        key = (_thread_name(), stack)
        with self._guard:
            self.seen[key] += 1
            first = self.seen[key] == 1
        if first:
            self._event(
                "fx_trace",
                thread=key[0],
                tracer=type(tracer).__name__,
                lock_held=torch_internals.owns_compile_lock(),
                stack=list(stack),
            )

    def close(self) -> None:
        self._hook.close()


def own_code(function: FunctionType, name: str) -> FunctionType:
    """A copy of ``function`` with a code object of its own: its own guard cache and its own budget
    of recompiles."""
    label = f"{function.__name__}__{name}"
    twin = FunctionType(
        function.__code__.replace(co_name=label),
        function.__globals__,
        label,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _no_event(event: str, /, **detail: Any) -> None:
    pass


def _thread_name() -> str:
    return threading.current_thread().name
