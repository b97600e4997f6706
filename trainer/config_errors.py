"""One pydantic error in words: where, what, and the nearest right key."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel


def explain(item: Any, root: type[BaseModel]) -> str:
    """One pydantic error as ``section.field: what is wrong``."""
    location = [part for part in item["loc"] if part not in ("file", "self")]
    where = ".".join(str(part) for part in location)
    if item["type"] == "extra_forbidden":
        names = _known_keys(location[:-1], root)
        near = difflib.get_close_matches(str(location[-1]), names, n=1, cutoff=0.5)
        hint = f"; did you mean `{near[0]}`?" if near else f"; known: {', '.join(names)}"
        return f"{where}: unknown key{hint}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "missing":
        return f"{where}: missing"
    given = item.get("input")
    shown = f" (it is {given!r:.80})" if isinstance(given, (str, int, float, bool)) else ""
    return f"{where}: {message}{shown}" if where else message


def _known_keys(location: Sequence[str | int], root: type[BaseModel]) -> list[str]:
    """The keys of the section that a path leads to; of all kinds where there are several."""
    models: list[type[BaseModel]] = [root]
    for key in location:
        if isinstance(key, str):
            fields = [m.model_fields[key] for m in models if key in m.model_fields]
            models = [model for field in fields for model in _models_in(field.annotation)]
    return list(dict.fromkeys(name for model in models for name in model.model_fields))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated, list):
        return [model for part in get_args(annotation) for model in _models_in(part)]
    return []
