"""The parts of torch that have no public name and differ between versions, behind one door.

Read and run on torch 2.11, 2.13, 2.14 and 2.15. Everything is looked up at each call: torch (and
other libraries) may put another object in the same place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
import torch.fx._symbolic_trace as symbolic_trace
from torch._dynamo import callback as dynamo_callback
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo import exc as dynamo_exceptions

FX_RACE = "Detected that you are using FX to symbolically trace a dynamo-optimized function"
"""Start of torch's message when a compiled function is called while the tracing flag is set."""

RecompileLimitHit = dynamo_exceptions.FailOnRecompileLimitHit
"""Under ``fullgraph=True``, instead of an eager run."""

COMPILES = ("DYNAMO", "LAZY_BACKWARD")
"""Names of the triggers that mean "a graph is compiled"; recording a CUDA graph does not."""


class ReentrantLock(Protocol):
    """What ``threading.RLock`` offers, in C and in Python; ``_is_owned`` is what
    ``threading.Condition`` relies on."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool: ...

    def release(self) -> None: ...

    def _is_owned(self) -> bool: ...


def compile_lock() -> ReentrantLock:
    """Torch's own lock: held over every frame that dynamo compiles and over inductor's compile of a
    backward, whichever thread they run in. AttributeError on a torch that has no such lock."""
    return cast("ReentrantLock", convert_frame.compile_lock)


def owns_compile_lock() -> bool:
    return compile_lock()._is_owned()


def tracing_flag() -> bool:
    """Whether somebody is inside ``Tracer.trace``: anybody up to 2.13, this thread from 2.14 on."""
    if tracing_flag_is_global():
        return bool(symbolic_trace._is_fx_tracing_flag)
    return bool(symbolic_trace._get_is_fx_tracing())  # type: ignore[attr-defined,unused-ignore]


def tracing_flag_is_global() -> bool:
    return hasattr(symbolic_trace, "_is_fx_tracing_flag")


def modules_are_patched() -> bool:
    """``Tracer.trace`` replaces two methods of ``nn.Module`` in all threads while it runs."""
    return (
        torch.nn.Module.__call__ is not symbolic_trace._orig_module_call
        or torch.nn.Module.__getattr__ is not symbolic_trace._orig_module_getattr
    )


def stance() -> str:
    return str(eval_frame._stance.stance)


def last_recompile_reason() -> str:
    """Of the newest compile that had one ("" if none): which guard failed."""
    for metric in reversed(torch._dynamo.utils.get_compilation_metrics()):
        if metric.recompile_reason:
            return str(metric.recompile_reason)
    return ""


@contextlib.contextmanager
def thread_configuration(recompile_limit: int) -> Iterator[None]:
    """Dynamo's and AOTAutograd's settings of the calling thread (per thread from 2.12 on).

    Up to 2.11 the settings belong to the process, and taking them back when one thread leaves
    would change them under the others: there they stay.
    """
    settings = {
        (torch._dynamo.config, "recompile_limit"): recompile_limit,
        (torch._dynamo.config, "accumulated_recompile_limit"): max(256, 8 * recompile_limit),
        # The second shape would otherwise replace the first one's kernel by a slower dynamic one;
        # `dynamic=False` says the same but on 2.11 patches the process's settings at each call.
        (torch._dynamo.config, "automatic_dynamic_shapes"): False,
        # The backward is compiled within the forward call, and so under the lock.
        (functorch_config, "force_non_lazy_backward_lowering"): True,
    }
    before = {(module, name): getattr(module, name) for module, name in settings}
    for (module, name), value in settings.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        if not _settings_are_global():
            for (module, name), value in before.items():
                setattr(module, name, value)


def _settings_are_global() -> bool:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) < (2, 12)


class CompileWatch:
    """Calls ``seen(trigger, compile_id)`` in the compiling thread when a compile begins.

    Torch holds a lock of its own meanwhile: ``seen`` must not raise and must not compile.
    """

    def __init__(self, seen: Callable[[str, str], None]) -> None:
        self._seen = seen
        dynamo_callback.on_compile_start(self._started)

    def _started(self, arguments: Any) -> None:
        if arguments.callback_trigger.name in COMPILES:
            self._seen(arguments.callback_trigger.name, str(arguments.compile_id))

    def close(self) -> None:
        handler = dynamo_callback.callback_handler
        if self._started in handler.start_callbacks:
            handler.remove_start_callback(self._started)


class TracerHook:
    """Calls ``entered(tracer)`` at the start of every ``Tracer.trace``, in its thread, for as long
    as the hook is open. A diagnostic: torch offers no other way to see who traces."""

    def __init__(self, entered: Callable[[Any], None]) -> None:
        self._entered = entered
        self._original = symbolic_trace.Tracer.trace
        symbolic_trace.Tracer.trace = self._wrap(self._original)  # type: ignore[method-assign]

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def trace(tracer: Any, *args: Any, **kwargs: Any) -> Any:
            self._entered(tracer)
            return original(tracer, *args, **kwargs)

        return trace

    def close(self) -> None:
        symbolic_trace.Tracer.trace = self._original  # type: ignore[method-assign]
