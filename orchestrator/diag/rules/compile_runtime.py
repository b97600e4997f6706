"""What torch.compile does at run time: recompiles, its limit, calls that ran eagerly."""

from __future__ import annotations

import re
from collections.abc import Iterator

from orchestrator.diag.evidence import Evidence, Hit
from orchestrator.diag.finding import Finding
from orchestrator.diag.text import Line

_HARD = r"FailOnRecompileLimitHit|RecompileLimitExceeded|FailOnCacheLimitHit"
LIMIT = (
    r"torch\._dynamo hit config\.(?:recompile_limit|cache_size_limit|"
    r"accumulated_\w+_limit) \((\d+)\)",
    r"(?:accumulated_)?(?:recompile|cache_size)[_ ]limit (?:reached|exceeded|hit)",
    _HARD,
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
    hard = bool(e.raised(_HARD)) or any("Hard failure" in h.line.text for h in hits)
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
    storm = (
        growing_sizes
        or growing
        or len([h for h in named if "Recompiling" in h.line.text or '"recompile"' in h.line.text])
        >= 5
        or (not e.series and len(hits) >= 12)
        or (len(late) >= 10 and bool(named))
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
    hits = [h for h in e.search(*EAGER) if not _taken_back(e, h)]
    flex = [h for h in hits if any(word in h.line.text for word in ("flex", "eager", "WON'T"))]
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


def _taken_back(e: Evidence, hit: Hit) -> bool:
    """A fallback that some line right after takes back."""
    return e.outcome.moved_on(hit.line.number) and bool(
        re.search(r"create_block_mask|test|probe|reference|check", hit.line.text)
    )


RULES = (recompile_limit, recompile_storm, eager_fallback)
