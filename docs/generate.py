"""Write docs/reference/*.md from the code: ``.venv/bin/python docs/generate.py``.

``--check`` writes nothing and fails if a page is stale.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from generator.diagnosis import diagnosis  # noqa: E402
from generator.fields import config, events, inventory, playbooks  # noqa: E402
from generator.reading import HEADER, classes_of, docstring_after, first_paragraph, table  # noqa: E402
from generator.verbs import verbs  # noqa: E402

from orchestrator.paths import ContainerPaths, HostPaths, LaptopPaths, RunPaths  # noqa: E402

OUT = ROOT / "docs" / "reference"


def run_folder() -> str:
    nodes = classes_of("orchestrator/paths.py")
    places: list[tuple[str, str, Any]] = [
        ("A run", "RunPaths", RunPaths("RUN")),
        ("A container", "ContainerPaths", ContainerPaths()),
        ("A Proxmox host", "HostPaths", HostPaths()),
        ("The laptop", "LaptopPaths", LaptopPaths({"HOME": "/home/you"})),
    ]
    parts = [
        HEADER.format(sources="orchestrator/paths.py"),
        "# Where everything lies\n\n",
        "A run's folder is `<workdir>/dflashctl/runs/<run id>/` in its container, `RUN` below. The "
        "container holds\nthe truth; `dflashctl pull` copies it. The trainer adds `data/`, "
        "`evaluation.json`, `nonfinite/` and, under\ntorchrun, `ranks/`.\n",
    ]
    for title, name, instance in places:
        parts.append(f"\n## {title}\n\n{first_paragraph(nodes[name])}\n\n")
        parts.append(table(("path", "what it is"), list(path_rows(nodes[name], instance))))
    return "".join(parts)


def path_rows(node: ast.ClassDef, instance: Any) -> Iterator[tuple[str, str]]:
    for function in (n for n in node.body if isinstance(n, ast.FunctionDef)):
        if function.name != "__init__":
            names = [argument.arg for argument in function.args.args[1:]]
            values = ["ab12…" if name == "digest" else f"<{name}>" for name in names]
            shown = getattr(instance, function.name)(*values)
            shown = shown.root if isinstance(shown, RunPaths) else shown
            yield f"`{home(shown)}`", first_paragraph(function)
            continue
        for at, statement in enumerate(function.body):
            if not isinstance(statement, ast.Assign):
                continue
            name = ast.unparse(statement.targets[0]).removeprefix("self.")
            if name.isidentifier() and name not in ("workdir", "root", "run_id"):
                if not isinstance(shown := getattr(instance, name, None), (str, Path)):
                    continue
                yield f"`{home(shown)}`", docstring_after(function.body, at)


def home(path: object) -> str:
    return str(path).replace("/home/you", "~")


PAGES: dict[str, Callable[[], str]] = {
    "verbs.md": verbs,
    "config.md": config,
    "inventory.md": inventory,
    "playbooks.md": playbooks,
    "run-folder.md": run_folder,
    "diagnosis.md": diagnosis,
    "events.md": events,
}


def stale() -> list[str]:
    """The pages that differ from the code."""
    return [
        name
        for name, page in PAGES.items()
        if not (OUT / name).is_file() or (OUT / name).read_text(encoding="utf-8") != page()
    ]


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    arguments.add_argument("--check", action="store_true", help="write nothing; fail if stale")
    if arguments.parse_args().check:
        for name in (old := stale()):
            print(
                f"docs/reference/{name} is stale; run .venv/bin/python docs/generate.py",
                file=sys.stderr,
            )
        return int(bool(old))
    OUT.mkdir(exist_ok=True)
    for name in stale():
        (OUT / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"wrote docs/reference/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
