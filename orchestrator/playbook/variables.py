"""``{{name}}`` in a playbook's parameters. Values are put in once, as data, and never read again.

A text that is nothing but one variable takes the value with its type (a list stays a list); inside
a longer text the value is written out. A value that itself holds ``{{other}}`` stays as it is, and
nothing here or later gives a value to a shell: a command is a list of words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.inventory import nearest

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_REFERENCE = re.compile(r"\{\{\s*([^{}]*?)\s*\}\}")

Value = str | int | float | bool | list[str] | None
"""``None`` as a default: the variable must be given."""


def references(tree: Any) -> Iterator[str]:
    """Every variable named in the values of ``tree``, in order, with repeats."""
    if isinstance(tree, str):
        yield from _REFERENCE.findall(tree)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from references(value)
    elif isinstance(tree, Sequence):
        for value in tree:
            yield from references(value)


def substitute(tree: Any, values: Mapping[str, Value]) -> Any:
    """``tree`` with every reference replaced. Keys of mappings are left alone."""
    if isinstance(tree, str):
        whole = _REFERENCE.fullmatch(tree)
        if whole:
            return values[whole[1]]
        return _REFERENCE.sub(lambda match: _text(values[match[1]]), tree)
    if isinstance(tree, Mapping):
        return {key: substitute(value, values) for key, value in tree.items()}
    if isinstance(tree, list):
        return [substitute(value, values) for value in tree]
    return tree


def _text(value: Value) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def bind(defaults: Mapping[str, Value], settings: Sequence[str], source: str) -> dict[str, Value]:
    """The value of every variable: the defaults, and ``name=value`` as given by ``--set``.

    A value is text, unless the default is a number, true or false, or a list (then JSON).

    :raises UsageError: an unknown name, a value of the wrong kind, or one that is missing.
    """
    values = dict(defaults)
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(
                f"--set {setting!r} has no value", next_step=f"write --set {name}=VALUE"
            )
        if name not in defaults:
            raise UsageError(
                f"{source} has no variable {name!r}{nearest(name, defaults)}",
                next_step=f"its variables: {', '.join(defaults) or 'none'}",
            )
        values[name] = _parse(name, text, defaults[name])
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise UsageError(
            f"{source} needs a value for {', '.join(missing)}",
            next_step="add " + " ".join(f"--set {name}=VALUE" for name in missing),
        )
    return values


def _parse(name: str, text: str, default: Value) -> Value:
    if default is None or isinstance(default, str):
        return text
    wanted = _kind(default)
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if _kind(value) == wanted or (wanted == "a number" and _kind(value) == "a whole number"):
        return value
    example = '["a", "b"]' if wanted == "a list of texts" else json.dumps(default)
    raise UsageError(
        f"--set {name}={text}: the variable is {wanted}",
        next_step=f"write it as JSON, such as {name}={example}",
    )


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int):
        return "a whole number"
    if isinstance(value, float):
        return "a number"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "a list of texts"
    return "something else"
