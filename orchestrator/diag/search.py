"""Patterns over many lines: 1,600 regular expressions, of which a log needs a dozen.

Every match of an expression contains some literal, or one of a few (of ``(?:CUDA|GPU) error`` that
is `` error``, of ``(?:oomed|killed) by`` one of two). Literals are found by ``str.find`` in the
joined text; only lines that hold one are shown to the expression, and only then is it compiled.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.diag.text import Line


@dataclass(frozen=True)
class Hit:
    """A place where a pattern was found."""

    line: Line
    match: re.Match[str]

    def __getitem__(self, group: int | str) -> str:
        return self.match[group] or ""


SAME_SHAPE = 24  # lines of one shape that are searched: half from the front, half from the back


def distinct(lines: Sequence[Line]) -> list[Line]:
    """Without the bulk of lines that differ from others only in their digits."""
    shapes = [line.text.translate(_NO_DIGITS) for line in lines]
    left = Counter(shapes)
    taken: Counter[str] = Counter()
    kept = []
    for line, shape in zip(lines, shapes, strict=True):
        taken[shape] += 1
        left[shape] -= 1
        if taken[shape] <= SAME_SHAPE // 2 or left[shape] < SAME_SHAPE // 2:
            kept.append(line)
    return kept


_NO_DIGITS = dict.fromkeys(map(ord, "0123456789"))


class Text:
    """Lines joined once. A pattern's branch is tried only on lines that hold a literal of it.

    Some 900 branches over a log of 20,000 unlike lines took 17 s as plain searches.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        self.text = "\n".join(li.text.replace("\n", " ") for li in lines)
        self.lower = self.text.lower()
        if len(self.lower) != len(self.text):  # a few letters have longer lower forms
            self.lower = "".join(c.lower() if len(c.lower()) == 1 else c for c in self.text)
        self.starts: list[int] = []
        offset = 0
        for line in lines:
            self.starts.append(offset)
            offset += len(line.text) + 1
        self._found: dict[str, dict[int, Hit]] = {}
        # By whether case is folded.
        self._places: tuple[dict[str, list[int]], dict[str, list[int]]] = ({}, {})

    def search(self, patterns: Iterable[str]) -> list[Hit]:
        if not self.lines:
            return []
        found: dict[int, Hit] = {}
        for pattern in patterns:
            known = self._found.get(pattern)
            if known is None:
                known = self._found[pattern] = self._hits(pattern)
            for index, hit in known.items():
                found.setdefault(index, hit)
        return [found[i] for i in sorted(found)]

    def _hits(self, pattern: str) -> dict[int, Hit]:
        hits: dict[int, Hit] = {}
        for literals, folded, source in _branches(pattern):
            text = self.lower if folded else self.text
            # Nearly all branches end here, some thousand a log: a loop costs less than a call.
            for literal in literals:
                if literal in text:
                    break
            else:
                if literals:
                    continue
            for index in self._holding(literals, folded):
                match = _compiled(source).search(self.lines[index].text)
                if match is not None:
                    hits.setdefault(index, Hit(self.lines[index], match))
        return hits

    def _holding(self, literals: tuple[str, ...], folded: bool) -> Sequence[int]:
        """Indices of the lines that contain one of ``literals``; all of them if there is none."""
        if not literals:
            return range(len(self.lines))
        places, found = self._places[folded], []
        for literal in literals:
            known = places.get(literal)
            if known is None:
                known = places[literal] = self._find(literal, folded)
            if known:
                found.append(known)
        if len(found) < 2:
            return found[0] if found else ()
        return sorted(set().union(*found))

    def _find(self, literal: str, folded: bool) -> list[int]:
        text = self.lower if folded else self.text
        found = []
        at = text.find(literal)
        while at >= 0:
            index = bisect_right(self.starts, at) - 1
            found.append(index)
            after = self.starts[index + 1] if index + 1 < len(self.starts) else len(text)
            at = text.find(literal, after)
        return found


@lru_cache(maxsize=4096)
def _branches(pattern: str) -> tuple[tuple[tuple[str, ...], bool, str], ...]:
    """A pattern's top-level alternatives, each with literals of which a match contains one."""
    folded = pattern.startswith("(?i)")
    made = []
    for branch in alternatives(pattern.removeprefix("(?i)")):
        literals = tuple(sorted(needles(branch)))
        source = ("(?i)" if folded else "") + branch
        made.append((tuple(map(str.lower, literals)) if folded else literals, folded, source))
    return tuple(made)


# Only those whose literal occurs are ever compiled: all of them take 0.3 s.
_compiled = lru_cache(maxsize=4096)(re.compile)


def alternatives(pattern: str) -> list[str]:
    """Split at the bars outside of groups and classes; whole if it has numbered groups, whose
    numbers a split would shift."""
    numbered = re.search(r"(?<!\\)\((?!\?)", re.sub(r"\\.|\[\^?\]?[^]]*\]", "", pattern))
    return [pattern] if numbered else split(pattern)


def split(pattern: str) -> list[str]:
    """At the bars outside of groups and classes."""
    pieces, depth, start = [], 0, 0
    for at, char in _signs(pattern):
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            pieces.append(pattern[start:at])
            start = at + 1
    return [*pieces, pattern[start:]]


def _signs(pattern: str) -> Iterable[tuple[int, str]]:
    """Its characters without what is escaped or stands in a class."""
    at = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 2
            continue
        if pattern[at] == "[":
            at = _class_end(pattern, at)
            continue
        yield at, pattern[at]
        at += 1


def _class_end(pattern: str, at: int) -> int:
    """The place after a class that begins at ``at``; its first ``]`` may be a member."""
    end = pattern.find("]", at + (3 if pattern[at + 1 : at + 2] == "^" else 2))
    return end + 1 if end > 0 else len(pattern)


FEW = 24
"""A group of more alternatives than this is not searched for one by one."""


def needles(pattern: str) -> frozenset[str]:
    """Literals of which every match of ``pattern`` contains one; empty if none is sure."""
    pieces = split(pattern)
    if len(pieces) > 1:
        return _union(needles(piece) for piece in pieces)
    found: list[frozenset[str]] = []
    run, at = "", 0
    while at < len(pattern):
        literal, inner, after = _token(pattern, at)
        optional = pattern[after : after + 1] in ("?", "*") or pattern[after : after + 2] == "{0"
        quantified = optional or pattern[after : after + 1] in ("+", "{")
        if literal and not quantified:
            run += literal
        else:
            if run:
                found.append(frozenset({run}))
            run = ""
            if literal and not optional:
                found.append(frozenset({literal}))
            if inner and not optional:
                found.append(needles(inner))
        at = after
        if quantified:
            at = pattern.find("}", at) + 1 if pattern[at] == "{" else at + 1
            at += pattern[at : at + 1] == "?"
    if run:
        found.append(frozenset({run}))
    sure = [one for one in found if one]
    return max(sure, key=lambda one: (min(map(len, one)), -len(one)), default=frozenset())


def _token(pattern: str, at: int) -> tuple[str, str, int]:
    """One step: the literal there, or the inside of a plain group; and the place after it."""
    char = pattern[at]
    if char == "\\":
        after = pattern[at + 1 : at + 2]
        return ("" if after.isalnum() else after), "", at + 2
    if char == "[":
        return "", "", _class_end(pattern, at)
    if char == "(":
        end = _group_end(pattern, at)
        inside = pattern[at + 1 : end - 1]
        if inside.startswith("?:"):
            return "", inside[2:], end
        return "", "" if inside.startswith("?") else inside, end
    return ("" if char in ".^$" else char), "", at + 1


def _group_end(pattern: str, start: int) -> int:
    depth = 0
    for at, char in _signs(pattern):
        if at < start:
            continue
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return at + 1
    return len(pattern)


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    """Of alternatives: all of their literals, or nothing if one has none."""
    every = list(sets)
    if not all(every) or sum(map(len, every)) > FEW:
        return frozenset()
    return frozenset().union(*every)
