"""A playbook as it is read: checked against the actions, then bound to values.

    description: What it does, in a line.
    variables:
      config: ""            # a default; null must be given by --set
    steps:
      - preflight:
      - launch: {config: "{{config}}"}
      - wait: {until: training}
        name: warm

A step holds one action with its parameters, and perhaps a name of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestrator import yaml_text
from orchestrator.errors import NotFoundError, UsageError
from orchestrator.inventory import nearest
from orchestrator.laptop_path import did_you_mean, laptop_path, read_text
from orchestrator.playbook.actions import ACTIONS, Action
from orchestrator.playbook.variables import NAME, Value, bind, references, substitute

SECTIONS = ("description", "variables", "steps")
PACKAGED = Path(__file__).parents[1] / "_playbooks"
"""Where the wheel carries them."""
PATH_OF_ONE = "give the path of a YAML file"
A_STEP = "a step is one action with its parameters, such as `- launch: {config: train.yaml}`"
CHECKOUT = Path(__file__).parents[2] / "playbooks"


@dataclass(frozen=True)
class Step:
    """One step with its parameters as written, variables still in them."""

    name: str
    action: str
    parameters: dict[str, Any]


@dataclass(frozen=True)
class BoundStep:
    """One step with its parameters checked; what the runner takes."""

    name: str
    action: Action

    @property
    def kind(self) -> str:
        return next(name for name, model in ACTIONS.items() if isinstance(self.action, model))


@dataclass(frozen=True)
class Playbook:
    source: str
    """Its name, or the file it was read from."""
    description: str
    variables: dict[str, Value]
    steps: tuple[Step, ...]

    def bind(self, settings: Sequence[str] = ()) -> list[BoundStep]:
        """Every step with its variables filled in and its parameters checked.

        :raises UsageError: naming the step and the parameter.
        """
        values = bind(self.variables, settings, self.source)
        return [self._bound(step, values) for step in self.steps]

    def _bound(self, step: Step, values: Mapping[str, Value]) -> BoundStep:
        model = ACTIONS[step.action]
        try:
            action = model.model_validate(substitute(step.parameters, values))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            said = first["msg"].removeprefix("Value error, ")
            raise UsageError(
                f"{self.source}, step {step.name}: {where}: {said}",
                next_step="correct it there, or give another value by --set NAME=VALUE",
            ) from None
        return BoundStep(step.name, action)


def find(name: str, user_folder: Path) -> Path:
    """The file of a playbook: a path, else a name of the user's own, else one that is shipped.

    :raises NotFoundError: naming the nearest right one.
    """
    path = laptop_path(name)
    if path.suffix in {".yaml", ".yml"} or "/" in name:
        if not path.is_file():
            raise NotFoundError(
                f"there is no playbook file {name}{did_you_mean(path)}",
                next_step=PATH_OF_ONE,
            )
        return path
    known = available(user_folder)
    if name not in known:
        raise NotFoundError(
            f"there is no playbook {name!r}{nearest(name, known)}",
            next_step="`dflashctl play` lists them; a file is given by its path",
        )
    return known[name]


def available(user_folder: Path) -> dict[str, Path]:
    """Name → file. The user's own come before the shipped ones of the same name."""
    found: dict[str, Path] = {}
    for folder in (user_folder, PACKAGED if PACKAGED.is_dir() else CHECKOUT):
        for path in sorted(folder.glob("*.y*ml")):
            found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def load(path: Path, source: str | None = None) -> Playbook:
    """Read and check a file; ``source`` (default: its path) names it in messages.

    :raises UsageError: one message with file and step.
    """
    return parse(read_text(path, "playbook", PATH_OF_ONE), source or str(path))


def parse(text: str, source: str) -> Playbook:
    """Check a playbook's text; ``source`` names it in messages.

    :raises UsageError: one message, with the nearest right word where one was wrong.
    """
    try:
        tree, _ = yaml_text.parse(text)
    except yaml_text.YamlFault as fault:
        line = f":{fault.line}" if fault.line else ""
        problem = fault.problem
        remedy = "correct it there, or in the line above; `--check` reads it again"
        if "unhashable" in problem:
            # Without quotes YAML reads {{name}} as a mapping whose key is a mapping.
            remedy = 'put quotes round it: "{{name}}"'
        raise UsageError(f"{source}{line}: {problem}", next_step=remedy) from None
    if not isinstance(tree, dict):
        raise UsageError(
            f"{source} is no playbook", next_step=f"it has the keys {', '.join(SECTIONS)}"
        )
    for key in tree:
        if key not in SECTIONS:
            raise UsageError(
                f"{source}: unknown key {key!r}{nearest(str(key), SECTIONS)}",
                next_step=f"a playbook has the keys {', '.join(SECTIONS)}",
            )
    variables = _variables(tree.get("variables") or {}, source)
    steps = _steps(tree.get("steps"), source)
    for step in steps:
        for name in references(step.parameters):
            if name not in variables:
                raise UsageError(
                    f"{source}, step {step.name}: unknown variable {name!r}"
                    f"{nearest(name, variables)}",
                    next_step="every variable is listed under `variables` with its default",
                )
    return Playbook(source, str(tree.get("description") or ""), variables, steps)


def _variables(tree: Any, source: str) -> dict[str, Value]:
    if not isinstance(tree, dict):
        raise UsageError(
            f"{source}: variables is not a mapping of name to default",
            next_step="write it as `variables: {config: train.yaml}`",
        )
    for name, value in tree.items():
        if not isinstance(name, str) or not NAME.match(name):
            raise UsageError(
                f"{source}: {name!r} is no name for a variable",
                next_step="use letters, digits and underscores, no digit first",
            )
        plain = value is None or isinstance(value, str | int | float | bool)
        texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if not plain and not texts:
            raise UsageError(
                f"{source}: the default of {name} is neither text, number, true or false, "
                "nor a list of texts",
                next_step="give it such a default; null makes it one that must be set",
            )
    return dict(tree)


def _steps(tree: Any, source: str) -> tuple[Step, ...]:
    if not isinstance(tree, list) or not tree:
        raise UsageError(f"{source}: steps is not a list of steps", next_step=A_STEP)
    steps: list[Step] = []
    seen: Counter[str] = Counter()
    for number, item in enumerate(tree, 1):
        action, parameters, name = _one(item, f"{source}, step {number}")
        seen[action] += 1
        default = action if seen[action] == 1 else f"{action}-{seen[action]}"
        steps.append(Step(name or default, action, parameters))
    twice = [name for name, count in Counter(s.name for s in steps).items() if count > 1]
    if twice:
        raise UsageError(
            f"{source}: two steps are named {twice[0]!r}", next_step="give one another `name`"
        )
    return tuple(steps)


def _known(action: str) -> str:
    return ", ".join(ACTIONS[action].model_fields)


def _one(item: Any, where: str) -> tuple[str, dict[str, Any], str | None]:
    if isinstance(item, str):
        item = {item: None}
    if not isinstance(item, dict):
        raise UsageError(f"{where} is not a mapping with one action", next_step=A_STEP)
    name = item.get("name")
    if name is not None and (not isinstance(name, str) or not name or name.isdecimal()):
        raise UsageError(
            f"{where}: {name!r} is no name for a step",
            next_step="use a text that is no number, such as `name: first-steps`",
        )
    keys = [str(key) for key in item if key != "name"]
    for key in keys:
        if key not in ACTIONS:
            raise UsageError(
                f"{where}: unknown action {key!r}{nearest(key, ACTIONS)}",
                next_step=f"the actions: {', '.join(ACTIONS)}",
            )
    if len(keys) != 1:
        raise UsageError(f"{where} has {len(keys)} actions; a step has one", next_step=A_STEP)
    parameters = item[keys[0]] or {}
    if not isinstance(parameters, dict):
        raise UsageError(
            f"{where}: {keys[0]} takes a mapping of parameters",
            next_step=f"its parameters: {_known(keys[0])}",
        )
    known = ACTIONS[keys[0]].model_fields
    for key in parameters:
        if key not in known:
            hint = nearest(str(key), known)
            raise UsageError(
                f"{where}: {keys[0]} has no parameter {key!r}{hint}",
                next_step=f"its parameters: {_known(keys[0])}",
            )
    return keys[0], parameters, name
