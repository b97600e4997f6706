"""Stacks of threads and ranks, from py-spy, faulthandler or a per-rank summary: who is the odd one?

In a hang all ranks wait in the same collective but one: that one is the cause. Two samples tell
besides who moved in between.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.diag.probes import Probe, Probes
from orchestrator.diag.text import Line

_SUMMARY = re.compile(
    r"^(?:rank|ranks|drafter|target|worker|thread|pid)s?[ :#-]*([\d, -]+?)(?: pid "
    r"(\d+))?\s*[:=]\s+(.+)$"
)
_KIND = re.compile(r"^(rank|drafter|target|worker|thread|pid)")
_PROCESS = re.compile(r"^Process (\d+): (.*)")
_THREAD = re.compile(
    r'^\s*Thread (?:0x)?([0-9a-fA-F]+) \((?P<state>[\w+]+)\)(?:: "(?P<name>[^"]+)")?'
)
_FAULT = re.compile(
    r"^(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[([^\]]+)\])? \(most recent call first\)"
)
_FRAME = re.compile(r"^\s+([\w.<>~]+) \(([^()]+?)(?::(\d+))?\)\s*$")
_FAULT_FRAME = re.compile(r'^\s+File "([^"]+)", line (\d+) in (\S+)')
_RANK_OF = re.compile(r"\bRANK[= ](\d+)|\brank[= _](\d+)")
_SAMPLE = re.compile(r"(?i)\bsample[ _#:]*(\d)|\b(second|2nd) (?:sample|dump)")
_IDLE_THREADS = re.compile(
    r"tqdm|TMonitor|pin_memory|_monitor|ThreadPool|asyncio|QueueFeeder|wandb|watchdog|heartbeat",
    re.I,
)
_ELASTIC_AGENT = re.compile(r"\btorchrun\b|torch[./]distributed[./](?:run|launch)\b")
"""torchrun's own process, which only watches the ranks."""
_JOINS = re.compile(r"^(?:join|_shutdown|_wait_for_tstate_lock|wait) \(\S*(?:threading|process)\b")


@dataclass(frozen=True)
class Stack:
    """One thread at one time, innermost frame first."""

    who: str
    frames: tuple[str, ...]
    line: Line
    sample: int = 1

    @property
    def where(self) -> str:
        return " ← ".join(self.frames[:3])

    @property
    def shape(self) -> str:
        """What it does, without line numbers."""
        return re.sub(r":\d+", "", self.frames[0]) if self.frames else ""


@dataclass(frozen=True)
class Odd:
    who: str
    where: str
    line: Line
    moved: bool | None = None
    """Between two samples; ``None`` if there was one."""


def read_stacks(probes: Iterable[Probe]) -> list[Stack]:
    """Every thread of every probe that holds stacks."""
    found: list[Stack] = []
    for probe in probes:
        if (
            re.search(r"py_?spy|stack|threads?|faulthandler|gdb", probe.key)
            or "Thread" in probe.text
        ):
            found += _read(probe)
    return found


def _read(probe: Probe) -> list[Stack]:
    stacks: list[Stack] = []
    sample = int(m[1]) if (m := re.search(r"(\d)$", probe.key)) else 1
    process = who = ""
    agent = False
    frames: list[str] = []
    at: Line | None = None

    def close() -> None:
        if at is not None and frames and not agent:
            stacks.append(Stack(who, tuple(frames), at, sample))

    for line in probe.lines:
        text = line.raw
        if (match := _SAMPLE.search(text)) is not None and "(" not in text:
            sample = int(match[1] or 2)
        elif (match := _PROCESS.match(text)) is not None:
            close()
            at = None
            rank = _RANK_OF.search(match[2])
            agent = rank is None and _ELASTIC_AGENT.search(match[2]) is not None
            process = f"rank {rank[1] or rank[2]}" if rank else f"PID {match[1]}"
        elif (match := _SUMMARY.match(text)) is not None:
            close()
            at = None
            parts = [p.strip() for p in re.split(r"\s*(?:<-|←)\s*", match[3])]
            kind = (_KIND.match(text) or ["rank"])[0]
            for number in _numbers(match[1]):
                stacks.append(Stack(f"{kind} {number}", tuple(parts), line, sample))
        elif (match := _THREAD.match(text)) is not None:
            close()
            who = " ".join(p for p in (process, match["name"] or f"thread {match[1]}") if p)
            frames, at = [], line
        elif (match := _FAULT.match(text)) is not None:
            close()
            who = " ".join(p for p in (process, match[2] or f"thread {match[1]}") if p)
            frames, at = [], line
        elif at is not None and (match := _FRAME.match(text)) is not None:
            frames.append(f"{match[1]} ({match[2]}{':' + match[3] if match[3] else ''})")
        elif at is not None and (match := _FAULT_FRAME.match(text)) is not None:
            frames.append(f"{match[3]} ({match[1]}:{match[2]})")
    close()
    return stacks


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for piece in re.split(r"[, ]+", text.strip(" ,")):
        if (match := re.fullmatch(r"(\d+)-(\d+)", piece)) is not None:
            found += range(int(match[1]), min(int(match[2]), int(match[1]) + 4096) + 1)
        elif piece.isdigit():
            found.append(int(piece))
    return found


def moved(stacks: Iterable[Stack]) -> dict[str, bool]:
    """Who stood elsewhere in the second sample; empty with one sample."""
    samples: dict[str, dict[int, tuple[str, ...]]] = defaultdict(dict)
    for stack in stacks:
        samples[stack.who][stack.sample] = stack.frames
    return {
        who: len(set(by_sample.values())) > 1
        for who, by_sample in samples.items()
        if len(by_sample) > 1
    }


def working(stacks: Iterable[Stack]) -> list[Stack]:
    """The first sample, without threads that always wait: pools, monitors, a main thread that has
    only started the others."""
    busy = [s for s in stacks if s.frames and not _IDLE_THREADS.search(s.who)]
    if not busy:
        return []
    first = min(s.sample for s in busy)
    busy = [s for s in busy if s.sample == first]
    named = [s for s in busy if "thread" not in s.who.lower() or "MainThread" in s.who] or busy
    return [s for s in named if not ("MainThread" in s.who and _JOINS.search(s.frames[0]))] or named


def summary(probes: Probes) -> list[str]:
    """Who stands where, the fewest first: ``rank 3: get (queue.py:171)``, then the crowd."""
    groups: dict[str, list[Stack]] = defaultdict(list)
    for stack in working(read_stacks(probes)):
        groups[stack.shape].append(stack)
    lines = []
    for group in sorted(groups.values(), key=len):
        names = list(dict.fromkeys(s.who for s in group))
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        lines.append(f"{', '.join(names[:8])}{more}: {group[0].where}")
    return lines


def odd_one_out(probes: Probes) -> Odd | None:
    """The rank (or thread) that does not stand where most of them stand."""
    every = read_stacks(probes)
    main = working(every)
    if not main:
        return None
    changes = moved(every)
    groups: dict[str, list[Stack]] = defaultdict(list)
    for stack in main:
        groups[stack.shape].append(stack)
    if len(main) == 1:
        one = main[0]
        return Odd(one.who, one.where, one.line, changes.get(one.who))
    ordered = sorted(groups.values(), key=len)
    smallest = ordered[0]
    if len(ordered) == 1 or len(smallest) * 2 > len(main):
        return None
    if len(ordered) == 2 and len(main) == 2:  # two ranks: the one outside of the collective
        smallest = next((g for g in ordered if not _collective(g[0])), smallest)
    one = smallest[0]
    who = ", ".join(dict.fromkeys(s.who for s in smallest[:4]))
    return Odd(who, one.where, one.line, changes.get(one.who))


def _collective(stack: Stack) -> bool:
    return (
        re.search(
            r"all_?reduce|all_?gather|reduce_scatter|broadcast|barrier|_wait_for|"
            r"distributed_c10d|nccl",
            stack.where,
        )
        is not None
    )
