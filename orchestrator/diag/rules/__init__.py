"""Every rule, in one list. A rule is a pure function from evidence to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from orchestrator.diag.evidence import Evidence
from orchestrator.diag.finding import Finding
from orchestrator.diag.rules import (
    compile_build,
    compile_race,
    compile_runtime,
    connection,
    container,
    data,
    disk,
    environment,
    gpu,
    gpu_driver,
    hang,
    hub,
    locale_clock,
    loss,
    memory,
    model,
    nccl,
    program,
    python,
    session,
    start,
    throughput,
)

Rule = Callable[[Evidence], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    *connection.RULES,
    *container.RULES,
    *session.RULES,
    *start.RULES,
    *disk.RULES,
    *memory.RULES,
    *gpu_driver.RULES,
    *gpu.RULES,
    *nccl.RULES,
    *compile_race.RULES,
    *compile_runtime.RULES,
    *compile_build.RULES,
    *environment.RULES,
    *program.RULES,
    *locale_clock.RULES,
    *data.RULES,
    *model.RULES,
    *hub.RULES,
    *loss.RULES,
    *throughput.RULES,
    *hang.RULES,
    *python.RULES,
)
