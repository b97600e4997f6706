"""What the shell may offer next. Quick: standard library only, local files only.

``dflashctl __complete WORD...`` (the words after the program's name, the last one unfinished)
prints candidates, one a line, ``value<TAB>what it is``; the line ``:files`` stands for file names.
The table of verbs and options is made once for each version and kept in the cache, because making
it imports every verb (0.5 s); so are the inventory's names, for each state of its files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.paths import LaptopPaths

FILES = ":files"
RUNS_OFFERED = 50

Candidate = tuple[str, str]
"""A value, and what it is."""


@dataclass(frozen=True)
class Names:
    """What this laptop knows by name."""

    hosts: Sequence[str] = ()
    containers: Sequence[str] = ()
    groups: Sequence[str] = ()
    runs: Sequence[str] = ()
    """Launched from here, the newest first."""
    playbooks: Sequence[str] = ()

    def targets(self) -> list[Candidate]:
        found = [(name, "container") for name in self.containers]
        return found + [(name, "group") for name in self.groups]

    def of_kind(self, metavar: str) -> list[Candidate]:
        """The candidates for an argument, by what its metavar calls for."""
        words = metavar.upper().strip("[].").replace("]", "").split("|")
        found: list[Candidate] = []
        if "RUN" in words:
            found += [(run, "run") for run in self.runs]
        if {"TARGET", "BEFORE", "AFTER"} & set(words):
            found += self.targets()
        if {"BEFORE", "AFTER"} & set(words):
            found += [*((run, "run") for run in self.runs), (FILES, "")]
        if "HOST" in words:
            found += [(name, "host") for name in self.hosts]
        if "PLAYBOOK" in words:
            found += [(name, "playbook") for name in self.playbooks]
        if {"FILE", "FOLDER"} & set(words):
            found.append((FILES, ""))
        return found


@dataclass(frozen=True)
class Command:
    """One verb: its options (name → help, whether it takes a value), arguments, own verbs."""

    summary: str = ""
    options: dict[str, tuple[str, bool]] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    """Metavars; the last one stands for all that follow."""
    commands: dict[str, Command] = field(default_factory=dict)

    @classmethod
    def parse(cls, tree: dict[str, Any]) -> Command:
        return cls(
            tree["summary"],
            {name: (text, bool(takes)) for name, (text, takes) in tree["options"].items()},
            tree["arguments"],
            {name: cls.parse(part) for name, part in tree["commands"].items()},
        )

    def as_tree(self) -> dict[str, Any]:
        return {
            "summary": self.summary,
            "options": {name: list(value) for name, value in self.options.items()},
            "arguments": list(self.arguments),
            "commands": {name: part.as_tree() for name, part in self.commands.items()},
        }


def candidates(words: Sequence[str], top: Command, names: Names) -> list[Candidate]:
    """What fits the last of ``words``; empty after ``--``, where the words are not ours."""
    *before, last = words or [""]
    if "--" in before:
        return [(FILES, "")]
    command, given, open_option = _walk(before, top)
    if open_option:
        found = names.of_kind("HOST") if open_option == "--host" else [(FILES, "")]
    elif last.startswith("-"):
        found = [(name, text) for name, (text, _) in command.options.items()]
    elif command.commands:
        found = [(name, part.summary) for name, part in command.commands.items()]
    else:
        taken = set(before)
        at = min(given, len(command.arguments) - 1)
        kind = command.arguments[at] if command.arguments else ""
        found = [c for c in names.of_kind(kind) if c[0] not in taken]
    return [c for c in found if c[0] == FILES or c[0].startswith(last)]


def _walk(before: Iterable[str], top: Command) -> tuple[Command, int, str | None]:
    """The verb that the words lead to, its arguments so far, and an option that awaits a value."""
    command, given = top, 0
    open_option: str | None = None
    for word in before:
        if open_option:
            open_option = None
        elif word.startswith("-"):
            takes = command.options.get(word, ("", False))[1]
            open_option = word if takes else None
        elif word in command.commands:
            command = command.commands[word]
        else:
            given += 1
    return command, given, open_option


def main(words: Sequence[str]) -> None:
    """The ``__complete`` entry."""
    laptop = LaptopPaths()
    top = read_table(laptop) or _make_table(laptop)
    for value, text in candidates(words, top, read_names(laptop)):
        line = " ".join(text.split())
        print(f"{value}\t{line}" if line else value)


# The table of verbs


def table_path(laptop: LaptopPaths) -> Path:
    return laptop.cache / "completion.json"


def fingerprint() -> list[Any]:
    """Changes whenever a verb's module does."""
    folder = Path(__file__).parent
    return sorted((entry.name, entry.stat().st_mtime_ns) for entry in folder.glob("*.py"))


def read_table(laptop: LaptopPaths) -> Command | None:
    """The kept table, or None where it is absent or of another version."""
    try:
        kept = json.loads(table_path(laptop).read_bytes())
        if kept["of"] == [list(item) for item in fingerprint()]:
            return Command.parse(kept["top"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return None


def _make_table(laptop: LaptopPaths) -> Command:
    from orchestrator.cli.completion import build_table

    top = build_table()
    _keep(table_path(laptop), {"of": fingerprint(), "top": top.as_tree()})
    return top


def _keep(path: Path, data: Any) -> None:
    """A cache that cannot be written costs time, nothing else."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_text(json.dumps(data), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        return


# Names


def read_names(laptop: LaptopPaths) -> Names:
    """Everything that has a name here, from local files."""
    tree = _inventory(laptop)
    return Names(
        tree["hosts"], tree["containers"], tree["groups"], _runs(laptop), _playbooks(laptop)
    )


def _runs(laptop: LaptopPaths) -> list[str]:
    found = []
    for path in laptop.runs.glob("*.json"):
        try:
            found.append((path.stat().st_mtime, path.stem))
        except OSError:
            continue
    return [name for _, name in sorted(found, reverse=True)[:RUNS_OFFERED]]


def _playbooks(laptop: LaptopPaths) -> list[str]:
    packaged = Path(__file__).parents[1] / "_playbooks"
    folder = packaged if packaged.is_dir() else Path(__file__).parents[2] / "playbooks"
    paths = [*laptop.playbooks.glob("*.y*ml"), *folder.glob("*.y*ml")]
    return sorted({path.stem for path in paths})


def _inventory(laptop: LaptopPaths) -> dict[str, list[str]]:
    """Names of hosts, containers and groups, kept for each state of the files."""
    files = _inventory_files(laptop)
    state = [[str(path), path.stat().st_mtime_ns] for path in files]
    cache = laptop.cache / "completion-names.json"
    try:
        kept = json.loads(cache.read_bytes())
        if kept["of"] == state:
            return {key: list(kept["names"][key]) for key in ("hosts", "containers", "groups")}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    names = _parse(files)
    _keep(cache, {"of": state, "names": names})
    return names


def _inventory_files(laptop: LaptopPaths) -> list[Path]:
    chosen = os.environ.get("DFLASHCTL_INVENTORY")
    if chosen:
        source = Path(chosen).expanduser()
        places = sorted(source.glob("*.y*ml")) if source.is_dir() else [source]
    else:
        places = [laptop.inventory, *sorted(laptop.inventory_folder.glob("*.y*ml"))]
    return [path for path in places if path.is_file()]


def _parse(files: Sequence[Path]) -> dict[str, list[str]]:
    """Names only; whatever else is wrong with a file the verbs will tell."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    hosts: list[str] = []
    containers: list[str] = []
    groups: list[str] = []
    for path in files:
        try:
            tree = yaml.load(path.read_bytes(), Loader=loader)
        except (OSError, RecursionError, ValueError, LookupError, AttributeError, yaml.YAMLError):
            continue
        if not isinstance(tree, dict):
            continue
        known = tree.get("containers")
        hosts += _keys(tree.get("hosts"))
        containers += _keys(known)
        for entry in known.values() if isinstance(known, dict) else ():
            groups += _texts(entry.get("groups") if isinstance(entry, dict) else None)
    return {"hosts": hosts, "containers": containers, "groups": list(dict.fromkeys(groups))}


def _keys(tree: Any) -> list[str]:
    return [str(key) for key in tree] if isinstance(tree, dict) else []


def _texts(items: Any) -> list[str]:
    return [str(item) for item in items] if isinstance(items, list) else []
