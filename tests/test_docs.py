"""The documentation agrees with the code: references are fresh, links lead somewhere, and every
command that a page shows exists with the options that it is given."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import generate
import pytest
import yaml
from generator import fields, reading
from generator.verbs import subparsers, trainer_parser

from orchestrator import inventory
from orchestrator.cli.app import VERBS, load
from orchestrator.playbook import book
from trainer.config import parse_config

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def label(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# -- references and links -------------------------------------------------------------------------


def test_the_references_are_what_the_code_says() -> None:
    assert generate.stale() == [], "run: .venv/bin/python docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), target


@pytest.mark.parametrize(
    "path",
    [
        "trainer/config.py",
        "trainer/data/settings.py",
        "trainer/drafter/config.py",
        "trainer/objective.py",
        "orchestrator/inventory.py",
        "orchestrator/playbook/actions.py",
    ],
)
def test_every_field_that_a_user_may_set_is_documented(path: str) -> None:
    classes = reading.classes_of(path)
    everywhere = {**classes, **reading.classes_of("trainer/objective.py")}
    everywhere |= reading.classes_of("trainer/data/settings.py")
    models = {n: c for n, c in classes.items() if is_model(c, everywhere)}
    assert models
    silent = [
        f"{name}.{field}"
        for name, node in models.items()
        for field, kind, _, _, text in fields.fields(node)
        if not fields.meaning(kind, text, everywhere)
    ]
    assert silent == []


def is_model(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    bases = {ast.unparse(base) for base in node.bases}
    return "BaseModel" in bases or any(is_model(classes[b], classes) for b in bases & set(classes))


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / t).resolve() for t in LINK.findall(index.read_text(encoding="utf-8"))}
    pages = {page for page in PAGES if page.is_relative_to(index.parent)} - {index}
    assert pages <= linked, sorted(label(page) for page in pages - linked)


def test_the_map_of_the_code_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.split("\n") if line.startswith("    "))
    named = re.findall(r"^    ((?:orchestrator|trainer)/[\w/.]+)", lines, re.MULTILINE)
    named += re.findall(r"`((?:orchestrator|trainer|tests|playbooks|docs)/[\w/.-]+)`", text)
    assert len(named) > 50
    assert [path for path in named if not (ROOT / path).exists()] == []


# -- commands -------------------------------------------------------------------------------------


def code_of(text: str) -> Iterator[str]:
    """Every piece of code: lines of blocks, and spans within lines."""
    text = text.replace("\\\n", " ")
    for line in FENCE.sub(lambda m: re.sub("^", "    ", m[2], flags=re.MULTILINE), text).split(
        "\n"
    ):
        if line.startswith("    "):
            yield line.strip()
        else:
            yield from re.findall(r"`([^`]+)`", line)


def calls(text: str) -> Iterator[list[str]]:
    """The words after ``dflashctl`` of every command that is shown."""
    for code in code_of(text):
        for piece in re.split(r"[;&(]|\|(?=\s)", re.sub(r"\s#\s.*", "", code)):
            found = re.search(r"(?:^|\s|/)dflashctl ([a-z_].*)", piece)
            if found:
                words = shlex.split(found[1].replace("'", "").replace('"', ""))
                yield [word.rstrip("),:.") or word for word in words]


@cache
def verb(name: str) -> Any:
    return load(name, VERBS[name])


def options_of(command: Any) -> dict[str, bool]:
    """Option → whether it takes a value."""
    found = {"--help": False}
    for param in command.params:
        if param.param_type_name == "option":
            takes = not (param.is_flag or param.count)
            found |= dict.fromkeys([*param.opts, *param.secondary_opts], takes)
    return found


def check(words: list[str]) -> None:
    shown = "dflashctl " + " ".join(words)
    assert words[0] in VERBS, f"no such verb: {shown}"
    command, rest = verb(words[0]), words[1:]
    parts = getattr(command, "commands", None)
    if parts and rest and re.fullmatch(r"[a-z]+", rest[0]):
        # A table may name several at once: `inventory list|discover|check`.
        assert rest[0] in parts, f"no such verb: {shown}"
        command, rest = parts[rest[0]], rest[1:]
    elif parts:
        return
    if "--" in rest:
        assert VERBS[words[0]].takes_command, f"takes no command: {shown}"
        rest = rest[: rest.index("--")]
    known = options_of(command)
    for word in rest:
        if re.match(r"--?[a-z]", word):
            assert word.partition("=")[0] in known, f"no option {word}: {shown}"
    required = [p for p in command.params if p.param_type_name == "argument" and p.required]
    assert len(rest) >= len(required) or not rest, f"needs {len(required)} words: {shown}"


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_every_command_exists_with_its_options(page: Path) -> None:
    for words in calls(page.read_text(encoding="utf-8")):
        check(words)


def test_a_wrong_option_would_be_seen() -> None:
    found = list(
        calls("Stop it: `dflashctl stop --force`.\n\n    sudo dflashctl tail -n 5  # last\n")
    )
    assert found == [["stop", "--force"], ["tail", "-n", "5"]]
    check(found[1])
    with pytest.raises(AssertionError, match="no option --force"):
        check(found[0])


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_every_command_of_the_trainer_parses(page: Path) -> None:
    parsers = dict(subparsers(trainer_parser(), "trainer"))
    for code in code_of(page.read_text(encoding="utf-8")):
        for found in re.finditer(
            r"-m trainer ((?:[a-z]+ ?)+)([^#|;]*)", re.sub(r"\s#\s.*", "", code)
        ):
            words = found[1].split()
            names = [
                name for name in parsers if f"trainer {' '.join(words)} ".startswith(f"{name} ")
            ]
            assert names or "|" in code, f"no such command: {code}"
            for option in re.findall(r"(?<!\S)--[a-z-]+", found[2]):
                assert option in parsers[names[0]]._option_string_actions, f"{option}: {code}"


# -- files that a page shows ----------------------------------------------------------------------


def shown_files(key: str) -> list[Any]:
    return [
        pytest.param(text, id=f"{label(page)}-{number}")
        for page in PAGES
        for number, (kind, text) in enumerate(FENCE.findall(page.read_text(encoding="utf-8")))
        if kind == "yaml" and key in yaml.safe_load(text)
    ]


@pytest.mark.parametrize("text", shown_files("containers"))
def test_every_inventory_is_valid(text: str, tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(text, encoding="utf-8")
    found = inventory.load(path, inventory.LaptopPaths({"HOME": str(tmp_path)}))
    assert found.containers


@pytest.mark.parametrize("text", shown_files("steps"))
def test_every_playbook_is_valid(text: str) -> None:
    assert book.parse(text, "the page").steps


@pytest.mark.torch
@pytest.mark.parametrize("text", shown_files("target"))
def test_every_config_is_valid(text: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from trainer.config import load_config

    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    assert load_config(path).target.model


@pytest.mark.parametrize("name", ["docs/trainer.md", "docs/howto/resume.md"])
def test_what_may_change_on_a_resume_is_what_the_fingerprint_leaves_out(name: str) -> None:
    (told,) = re.findall(r"Free to change\S*(.*?)\.\s", (ROOT / name).read_text(), re.DOTALL)
    config = parse_config(
        {"target": {"model": "m"}, "data": {"files": ["f"]}, "optimization": {"steps": 1}},
        source="test",
        base=ROOT,
    )
    kept = {key.split(".")[0] for key in config.fingerprint()}
    left_out = set(config.model_dump()) - kept
    in_data = {f"data.{field}" for field in config.model_dump()["data"]}
    held = {".".join(key.split(".")[:2]) for key in config.fingerprint()}
    assert set(re.findall(r"`([\w.]+)`", told)) == left_out | (in_data - held)
