"""What the shell offers: the pure choice, the caches, and the real shells' own words."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli import complete
from orchestrator.cli.app import VERBS
from orchestrator.cli.complete import FILES, Command, Names, candidates
from orchestrator.cli.completion import SCRIPTS, Shell, build_table
from orchestrator.paths import LaptopPaths

ROOT = Path(__file__).parents[2]
RUN = "night-20260101-000000-ab12"
NAMES = Names(["pve1"], ["train-a", "train-b"], ["all"], [RUN], ["launch"])
TOP = Command(
    options={"--version": ("Show the version.", False)},
    commands={
        "tail": Command(
            "Follow.",
            {"--follow": ("Follow.", False), "--grep": ("", True), "--host": ("", True)},
            ["[RUN|TARGET]..."],
        ),
        "exec": Command("Run.", {"--json": ("", False)}, ["[TARGET]..."]),
        "env": Command("", {}, [], {"diff": Command("", {}, ["BEFORE", "AFTER"])}),
    },
)


def values(*words: str) -> list[str]:
    return [value for value, _ in candidates(words, TOP, NAMES)]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ([""], ["tail", "exec", "env"]),
        (["e"], ["exec", "env"]),
        (["--"], ["--version"]),
        (["tail", ""], [RUN, "train-a", "train-b", "all"]),
        (["tail", "train"], ["train-a", "train-b"]),
        (["tail", "train-a", ""], [RUN, "train-b", "all"]),
        (["tail", "--f"], ["--follow"]),
        (["tail", "--host", ""], ["pve1"]),
        (["tail", "--grep", ""], [FILES]),
        (["tail", "--follow", "a"], ["all"]),
        (["exec", ""], ["train-a", "train-b", "all"]),
        (["exec", "train-a", "--", "l"], [FILES]),
        (["env", ""], ["diff"]),
        (["env", "diff", "x.json", "train-"], ["train-a", "train-b", FILES]),
        ([], ["tail", "exec", "env"]),
    ],
)
def test_what_is_offered_follows_from_the_words_before(
    words: list[str], offered: list[str]
) -> None:
    assert values(*words) == offered


@given(st.lists(st.text(max_size=5), max_size=5))
def test_any_words_give_candidates_that_begin_with_the_last(words: list[str]) -> None:
    for value, _ in candidates(words, TOP, NAMES):
        assert value == FILES or value.startswith(words[-1] if words else "")


def test_the_table_knows_every_verb_and_survives_its_cache() -> None:
    table = build_table()
    assert list(table.commands) == list(VERBS)
    assert "--json" in table.commands["ps"].options
    assert table.commands["ps"].options["--host"][1] is True
    assert "discover" in table.commands["inventory"].commands
    assert Command.parse(json.loads(json.dumps(table.as_tree()))).as_tree() == table.as_tree()


def leaves(command: Command, name: str) -> dict[str, Command]:
    if not command.commands:
        return {name: command}
    parts = (leaves(part, f"{name} {word}") for word, part in command.commands.items())
    return {path: leaf for found in parts for path, leaf in found.items()}


def test_every_verb_has_json() -> None:
    found = leaves(build_table(), "dflashctl")
    assert len(found) > len(VERBS)
    assert [path for path, leaf in found.items() if "--json" not in leaf.options] == []


@pytest.fixture
def home(tmp_path: Path) -> Path:
    laptop = LaptopPaths({"HOME": str(tmp_path)})
    laptop.config.mkdir(parents=True)
    laptop.inventory.write_text(
        "hosts: {pve1: {}}\ncontainers: {train-a: {host: pve1, ct: 200, groups: [night]}}\n"
    )
    laptop.runs.mkdir(parents=True)
    (laptop.runs / f"{RUN}.json").write_text("{}")
    return tmp_path


def test_names_are_read_again_when_the_inventory_changes(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DFLASHCTL_INVENTORY", raising=False)
    laptop = LaptopPaths({"HOME": str(home)})
    first = complete.read_names(laptop)
    assert (first.hosts, first.groups, first.runs) == (["pve1"], ["night"], [RUN])
    laptop.inventory.write_text("containers: {other: {}}")
    os.utime(laptop.inventory, ns=(1, 1))
    assert complete.read_names(laptop).containers == ["other"]
    laptop.inventory.write_text("][")
    assert complete.read_names(laptop).containers == []


def test_a_file_that_is_no_inventory_hides_no_other(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DFLASHCTL_INVENTORY", raising=False)
    laptop = LaptopPaths({"HOME": str(home)})
    laptop.inventory_folder.mkdir()
    (laptop.inventory_folder / "notes.yaml").write_text("hosts: 3\ncontainers: [train-b]\n")
    found = complete.read_names(laptop)
    assert (found.hosts, found.containers, found.groups) == (["pve1"], ["train-a"], ["night"])


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kept table of verbs: to make it takes 0.3 s."""
    home = tmp_path_factory.mktemp("kept")
    variables = {"HOME": str(home), "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "orchestrator.cli", "__complete", ""]
    subprocess.run(argv, env=variables, capture_output=True, check=True)
    return complete.table_path(LaptopPaths(variables))


@pytest.fixture
def environment(home: Path, table: Path) -> dict[str, str]:
    """A PATH with a ``dflashctl`` on it, that has completed before."""
    kept = complete.table_path(LaptopPaths({"HOME": str(home)}))
    kept.parent.mkdir(parents=True)
    shutil.copy(table, kept)
    program = home / "bin" / "dflashctl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m orchestrator.cli "$@"\n'
    )
    program.chmod(0o755)
    return {"HOME": str(home), "PATH": f"{program.parent}:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}


@pytest.mark.parametrize("shell", [Shell.bash, Shell.fish, Shell.zsh])
def test_its_first_lines_install_it_in_a_home_that_has_nothing(
    shell: Shell, environment: dict[str, str]
) -> None:
    lines = SCRIPTS[shell].split("\n_", 1)[0].splitlines()
    install = [li.removeprefix("#   ") for li in lines if re.match(r"#   (mkdir|dflashctl) ", li)]
    subprocess.run(["bash", "-ec", "\n".join(install)], env=environment, check=True)
    written = Path(install[0].split()[-1].replace("~", environment["HOME"]))
    assert [file.read_text() for file in written.iterdir()] == [SCRIPTS[shell]]


def in_bash(words: list[str]) -> str:
    quoted = " ".join(f"'{word}'" for word in words)
    return (
        f"{SCRIPTS[Shell.bash]}\n"
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}\n"
        '_dflashctl; printf "%s\\n" "${COMPREPLY[@]}"'
    )


def in_fish(words: list[str]) -> str:
    line = " ".join(words)
    return f'{SCRIPTS[Shell.fish]}\ncomplete -C "{line}" | string split -f1 \\t'


@pytest.mark.parametrize(("shell", "script"), [("bash", in_bash), ("fish", in_fish)])
def test_the_shells_themselves_offer_names_runs_and_verbs(
    shell: str, script: Callable[[list[str]], str], environment: dict[str, str]
) -> None:
    if not shutil.which(shell):
        pytest.skip(f"no {shell} here")

    def offered(*words: str) -> list[str]:
        done = subprocess.run(
            [shell, "-c", script(["dflashctl", *words])],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    assert offered("stop", "tra") == ["train-a"]
    assert offered("stop", "nig") == sorted([RUN, "night"], key=[RUN, "night"].index)
    assert offered("watc") == ["watch"]
    assert "--webhook" in offered("watch", "--w")


def test_zsh_takes_the_script(environment: dict[str, str]) -> None:
    if not shutil.which("zsh"):
        pytest.skip("no zsh here")
    script = SCRIPTS[Shell.zsh]
    probe = (
        "autoload -Uz compinit; compinit -u -D\n" + script + "\n"
        "_describe() { print -l -- ${(P)3} }\n"
        "words=(dflashctl stop tra); CURRENT=3; _dflashctl"
    )
    done = subprocess.run(
        ["zsh", "-fc", probe], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["train-a:container"]


def test_completing_loads_nothing_slow(environment: dict[str, str]) -> None:
    slow = "{'pydantic', 'typer', 'click', 'rich', 'fabric', 'paramiko'}"
    script = (
        "import sys; from orchestrator.cli.complete import main; main(['stop', '']); "
        f"found = {slow} & sys.modules.keys(); sys.exit(str(found) if found else 0)"
    )
    argv = [sys.executable, "-c", script]
    variables = {**environment, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
