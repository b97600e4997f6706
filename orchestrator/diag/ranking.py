"""Root causes before symptoms.

Three orders decide. A code that says *what* beats a code that says only *that* (depth). Between two
that both say what, a known pair tells which one causes the other. What is left goes by time: the
first line in the log wins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.diag.finding import ORDER, Finding

# What a finding of this code can be the mere effect of. A pattern is matched against the cause's
# code.
EFFECT_OF: dict[str, str] = {
    "code.error": r"run\.(?:interrupted|killed)|(?!code\.error|unknown|run\.|exit\.|"
    r"throughput\.|nccl\.peer_lost|loss\.diverged|loss\.stuck|env\.clock).*",
    "run.killed": r"(?!run\.killed|unknown|exit\.masked|throughput\.|code\.error|"
    r"nccl\.peer_lost|loss\.|compile\.eager|"
    r"compile\.recompile_storm).*|code\.error",
    "run.hang": r"gpu\.xid|gpu\.illegal_access|ct\.|mem\.oom|compile\.fx_race|tmux\.died|ssh\.|"
    r"gpu\.oom|run\.not_started|"
    r"disk\.full|env\.clock|code\.error|nccl\.(?:init|timeout)",
    "run.not_started": r"ssh\.|ct\.|tmux\.missing|env\.(?:path|locale|import|version)|disk\.|"
    r"code\.error|dist\.|gpu\.|data\.|model\.|hub\.|nccl\.",
    "run.interrupted": r"ct\.rebooted|ct\.stopped",
    "exit.masked": r"(?!exit\.masked|unknown|throughput\.|checkpoint\.partial|tmux\.).*",
    "nccl.timeout": r"(?!nccl\.|unknown|exit\.|run\.(?:killed|hang)|throughput\.|dist\.|"
    r"code\.error|loss\.|compile\.(?:eager|recompile)).*|code\.error",
    "nccl.peer_lost": r"(?!nccl\.peer_lost|unknown|exit\.|run\.(?:killed|hang)|throughput\.|"
    r"dist\.|loss\.).*",
    "nccl.init": r"gpu\.(?!oom)|gpu\.oom|mem\.|shm\.|env\.version|ct\.|dist\.rendezvous|"
    r"compile\.fx_race",
    "dist.rendezvous": r"gpu\.|mem\.|env\.(?:import|version)|code\.error|hub\.|data\.|model\.|"
    r"ct\.|tmux\.|disk\.|shm\.|nccl\.timeout",
    "tmux.died": r"ct\.(?:rebooted|stopped|frozen)|mem\.oom_killed|disk\.full",
    "tmux.socket_lost": r"ct\.",
    "ct.locked": r"ct\.(?:frozen|missing|exec_failed)",
    "ct.stopped": r"ct\.missing|ct\.exec_failed|ct\.locked",
    "ct.missing": r"ct\.exec_failed",
    "ct.exec_failed": r"ct\.(?:stopped|missing|locked)|ssh\.|tmux\.missing|env\.path",
    "env.path": r"tmux\.missing|ct\.(?:missing|stopped)",
    "ssh.unreachable": r"ssh\.(?:auth|host_key)",
    "ssh.auth": r"ssh\.host_key",
    "gpu.none": r"gpu\.(?:driver|uvm|node|permission|busy|xid)|nccl\.init",
    "gpu.driver_missing": r"gpu\.(?:driver_mismatch|node_invalid|permission|uvm_missing|xid)",
    "gpu.permission": r"gpu\.(?:node_invalid|driver_mismatch)|mem\.pinned_limit",
    "gpu.uvm_missing": r"gpu\.(?:node_invalid|driver_mismatch|driver_missing)",
    "gpu.illegal_access": r"gpu\.xid|data\.tokenizer",
    "gpu.oom": r"gpu\.busy|compile\.(?:recompile_limit|eager_fallback|fx_race|backend_failed)",
    "gpu.xid": r"$^",
    "gpu.throttled": r"gpu\.xid",
    "gpu.arch_unsupported": r"compile\.backend_failed",
    "compile.backend_failed": r"gpu\.(?:arch_unsupported|driver_mismatch|xid|illegal_access)|"
    r"compile\.(?:cache|fx_race)|disk\.full|shm\.full|mem\.oom|env\.(?:version|import)",
    "compile.eager_fallback": r"compile\.(?:fx_race|recompile_limit|backend_failed)",
    "compile.recompile_limit": r"compile\.fx_race",
    "compile.recompile_storm": r"compile\.(?:fx_race|recompile_limit)",
    "compile.cache": r"disk\.readonly",
    "disk.full": r"compile\.cache|shm\.full",
    "disk.readonly": r"disk\.full",
    "throughput.collapse": r"(?!throughput\.collapse|unknown|exit|code\.error|loss\.|tmux\.).*",
    "throughput.starved": r"cpu\.|gpu\.throttled|gpu\.busy|disk\.|compile\.|"
    r"throughput\.backpressure|run\.hang",
    "throughput.backpressure": r"cpu\.|gpu\.(?:throttled|busy)|compile\.|disk\.|run\.hang",
    "cpu.oversubscribed": r"mem\.oom",
    "model.load": r"hub\.|disk\.|checkpoint\.|env\.version|model\.shape|data\.missing$|mem\.",
    "model.shape": r"checkpoint\.mismatch|env\.version|data\.tokenizer",
    "data.tokenizer": r"hub\.|env\.version|model\.load",
    "data.missing": r"hub\.|disk\.readonly|env\.path|compile\.cache",
    "data.format": r"compile\.cache|disk\.full|model\.load|checkpoint\.",
    "hub.offline": r"hub\.auth|env\.clock",
    "hub.auth": r"$^",
    "checkpoint.partial": r"disk\.|mem\.oom_killed|checkpoint\.mismatch",
    "checkpoint.mismatch": r"checkpoint\.partial",
    "env.import": r"env\.(?:version|drift|path)",
    "env.version": r"env\.drift|gpu\.driver_mismatch",
    "loss.nan": r"gpu\.(?:xid|illegal_access)|compile\.fx_race|data\.empty_mask",
    "loss.diverged": r"loss\.nan|compile\.fx_race",
    "loss.stuck": r"data\.|loss\.nan|compile\.fx_race",
    "mem.oom_killed": r"$^",
    "shm.full": r"mem\.oom_killed",
}
# Codes that say that something ended, not why.
SHALLOW = re.compile(
    r"^(?:code\.error|run\.|exit\.|nccl\.peer_lost|nccl\.timeout|unknown|throughput\.)"
)


def explains(cause: Finding, effect: Finding) -> bool:
    """``effect`` may follow from ``cause``."""
    says_what = cause.code not in ("code.error", "exit.masked", "unknown")
    mere_remark = cause.severity == "info" and effect.severity != "info"
    if (
        effect.code == "code.error"
        and says_what
        and not mere_remark
        and (set(cause.evidence) & set(effect.evidence) or _within(cause, effect))
    ):
        return True  # one exception: the code that says what it was leads
    if (cause.code, effect.code) == ("run.killed", "code.error"):
        return False
    pattern = EFFECT_OF.get(effect.code)
    if pattern is None or cause.code == effect.code or not re.match(f"(?:{pattern})", cause.code):
        return False
    if mere_remark:
        # A warning may explain a fatal end (an unfused kernel before an out-of-memory), a remark
        # may not.
        return False
    if (
        cause.code == "code.error"
        and effect.code != "exit.masked"
        and (
            set(cause.evidence) & set(effect.evidence)
            or _within(effect, cause)
            or cause.position > effect.position > 0
        )
    ):
        return False  # the same exception, or one after it
    if cause.code == "run.interrupted" and cause.position > effect.position > 0:
        return False
    if cause.wanted and not cause.position and effect.position:
        # Only the record tells of the stop: an exception may be what made somebody ask for it.
        return effect.code in ("run.killed", "exit.masked")
    if cause.position and effect.position and cause.position > effect.position + 40:
        # Later in the log than its alleged effect; buffered ranks shift by a screenful at most.
        return (
            bool(SHALLOW.match(effect.code))
            and not SHALLOW.match(cause.code)
            and (cause.position - effect.position < 400)
        )
    return True


def _within(finding: Finding, exception: Finding) -> bool:
    """Its first line is one of the exception's own: of its traceback or its long message."""
    return exception.extent > 0 and exception.position <= finding.position <= exception.extent


def ranked(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Root causes in order, each with what follows from it."""
    merged = _merged(findings)
    roots = [f for f in merged if not any(explains(c, f) for c in merged if c is not f)]
    if merged and not roots:  # a circle: the earliest breaks it
        roots = [min(merged, key=_order)]
    roots.sort(key=_order)
    # An exception that another finding explains is that finding's evidence, no symptom beside it.
    effects = [
        f
        for f in merged
        if f not in roots
        and f.code not in ("code.error", "run.killed")
        and not any(
            set(f.evidence) <= set(c.evidence) for c in merged if c is not f and explains(c, f)
        )
    ]
    children: dict[int, list[Finding]] = {}
    for effect in effects:
        cause = next((i for i, r in enumerate(roots) if explains(r, effect)), None)
        if cause is None:  # explained by something that is itself an effect
            cause = next(
                (
                    i
                    for i, r in enumerate(roots)
                    for c in effects
                    if c is not effect and explains(c, effect) and explains(r, c)
                ),
                0,
            )
        children.setdefault(cause, []).append(effect)
    whole = [_with(root, children.get(i, [])) for i, root in enumerate(roots)]
    whole = [_remark(root) if root.wanted else root for root in whole]
    return tuple(sorted(whole, key=lambda f: ORDER[f.severity]))


def _with(root: Finding, effects: list[Finding]) -> Finding:
    """A cause is as grave as the worst that came of it."""
    worst = min([root, *effects], key=lambda f: ORDER[f.severity]).severity
    ordered = tuple(sorted(effects, key=_order))
    return replace(root, severity=worst, consequences=ordered)


def _remark(finding: Finding) -> Finding:
    """What somebody asked for is no fault, nor is what came of it."""
    after = tuple(_remark(one) for one in finding.consequences)
    return replace(finding, severity="info", consequences=after)


def _order(finding: Finding) -> tuple[int, int, int, float]:
    """Worst first; what before that; first in time; surest first."""
    return (
        ORDER[finding.severity],
        1 if SHALLOW.match(finding.code) else 0,
        finding.position or 0,
        -finding.confidence,
    )


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """One finding a code: the worst and surest, with the evidence of all."""
    best: dict[str, Finding] = {}
    for finding in findings:
        known = best.get(finding.code)
        if known is None:
            best[finding.code] = finding
            continue
        keep, other = sorted(
            (known, finding), key=lambda f: (ORDER[f.severity], -f.confidence, f.position)
        )
        evidence = tuple(dict.fromkeys([*keep.evidence, *other.evidence]))[:8]
        best[finding.code] = replace(keep, evidence=evidence)
    return list(best.values())
