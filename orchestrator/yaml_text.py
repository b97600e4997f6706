"""YAML text as plain data with its line numbers; every fault of it is one exception.

PyYAML's own faults come in many kinds: a date of month 13 is a ``ValueError``, ``!!int ""`` an
``IndexError``, a thousand brackets a ``RecursionError``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

# libyaml's, where PyYAML has it: 1,000 containers take 0.1 s in place of 1 s.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Where = tuple[str | int, ...]


class YamlFault(Exception):
    """What is wrong with a text, and at which line (from 1) as far as that is known."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.line = line


def parse(text: str) -> tuple[Any, dict[Where, int]]:
    """A text's content (None where it is empty) and the line of each key path.

    :raises YamlFault: not YAML, a value that its tag does not fit, or a key given twice, of which
        YAML takes the last without a word.
    """
    try:
        loader = LOADER(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines = dict(_lines(node, (), set()))
        return loader.construct_document(node), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise YamlFault(_in_words(error), mark.line + 1 if mark else None) from None
    except RecursionError:
        raise YamlFault("it is nested too deeply") from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise YamlFault(f"a value does not fit its type: {error}") from None


def one_line(value: object) -> str:
    """A value as YAML that fits behind a key."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return str(text).removesuffix("...\n").strip()


# libyaml speaks of its own grammar, and names the place where it gave up, not where it began.
_WORDS = (
    (
        r"did not find expected node content",
        "a value is missing, or it begins with a character "
        "that YAML reserves (% @ `): put it in quotes",
    ),
    (
        r"did not find expected key",
        "no key where one should stand: is the indentation that of its "
        "neighbours, and every bracket and quote closed?",
    ),
    (
        r"did not find expected '-' indicator",
        "the list ends here without a word: does each of its "
        "entries begin with - at the same indentation?",
    ),
    (
        r"cannot start any token",
        "a tab, or a character that YAML reserves (% @ `): indent with "
        "spaces, put the value in quotes",
    ),
    (
        r"mapping values are not allowed",
        "a second `: ` on one line: put the value in quotes, or begin a new line",
    ),
)


def _in_words(error: yaml.YAMLError) -> str:
    said = getattr(error, "problem", None) or str(error)
    words = next((words for pattern, words in _WORDS if re.search(pattern, said)), said)
    what = re.match(r"while (?:parsing|scanning) an? (.*)", getattr(error, "context", None) or "")
    began = getattr(error, "context_mark", None)
    mark = getattr(error, "problem_mark", None)
    if what is None or began is None or mark is None or began.line == mark.line:
        return words
    return f"{words} (in the {what[1]} that begins in line {began.line + 1})"


def _lines(node: yaml.Node, where: Where, seen: set[int]) -> Iterator[tuple[Where, int]]:
    # An alias is the node it stands for. Each is walked once: aliases of aliases grow without
    # bound, and one may contain itself.
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            line = key.start_mark.line + 1
            if name in names:
                raise YamlFault(f"{name!r} is given twice", line)
            names.add(name)
            yield (*where, name), line
            yield from _lines(value, (*where, name), seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*where, index), value.start_mark.line + 1
            yield from _lines(value, (*where, index), seen)
