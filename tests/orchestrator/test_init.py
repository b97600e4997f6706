"""What `init` writes is valid as it stands, and it replaces nothing."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import warm_cli
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import inventory as inventories
from orchestrator.errors import DflashctlError, UsageError
from orchestrator.launch import START_SCRIPT
from orchestrator.paths import LaptopPaths
from orchestrator.starter import Choices, config_text, inventory_text, script_text, write
from trainer.config import load_config

CHOICES = Choices("root@10.1.2.6:2222", 200, name="night", python="/venv/bin/python")


def dflashctl(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return warm_cli.dflashctl(words, cwd=tmp_path, variables={"HOME": str(tmp_path / "home")})


def test_the_inventory_reads_as_what_was_chosen(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(inventory_text(CHOICES))
    known = inventories.load(path, LaptopPaths({"HOME": str(tmp_path)}))
    host = known.hosts["pve"]
    assert (host.address, host.user, host.port) == ("10.1.2.6", "root", 2222)
    assert known.containers["night"].python == "/venv/bin/python"
    assert known.containers["night"].ct == 200


def test_the_config_fits_the_trainers_schema(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(config_text(Choices("h", 200, model="org/a: b #c")))
    config = load_config(path)
    assert config.target.model == "org/a: b #c"
    assert config.pipeline.executor == "inline"


@pytest.mark.parametrize("workdir", ["/workspace", "/", "/mnt/a b: #c/"])
def test_its_data_lies_outside_of_any_run_so_that_a_resumed_one_finds_it(
    tmp_path: Path, workdir: str
) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(config_text(Choices("h", 200, name="night", workdir=workdir)))
    assert load_config(path).data.folder == Path(workdir) / "data" / "night"


def test_the_script_is_bash_and_says_what_to_do_where_the_trainer_is_missing(
    tmp_path: Path,
) -> None:
    path = tmp_path / START_SCRIPT
    # An interpreter as a container has it: without this checkout installed.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    path.write_text(script_text(Choices("h", 200, python=str(python))))
    done = subprocess.run(
        ["bash", path], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == 2
    # The hint alone: a traceback above it would be what diag speaks of.
    assert done.stderr == (
        "no trainer here; this brings it along: dflashctl launch --config train.yaml\n"
    )


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_hostile_choices_are_refused_or_read_back(name: str, python: str, workdir: str) -> None:
    choices = Choices("h", 200, name=name, python=python, workdir=workdir)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "inventory.yaml"
        try:
            path.write_text(inventory_text(choices), encoding="utf-8")
            known = inventories.load(path, LaptopPaths({"HOME": folder}))
        except DflashctlError:
            return
    assert (known.containers[name].python, known.containers[name].workdir) == (python, workdir)


def test_a_file_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    mine = tmp_path / START_SCRIPT
    mine.write_text("mine")
    written = write({mine: "theirs", tmp_path / "new" / "train.yaml": "x"})
    assert [w.made for w in written] == [False, True]
    assert mine.read_text() == "mine"


def test_the_verb_writes_three_files_and_then_keeps_them(tmp_path: Path) -> None:
    words = ("init", "--host", "root@pve1", "--ct", "200", "job")
    first = dflashctl(tmp_path, *words)
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("wrote") == 3
    assert (tmp_path / "job" / START_SCRIPT).stat().st_mode & 0o111
    assert (tmp_path / "home/.config/dflashctl/inventory.yaml").is_file()
    second = dflashctl(tmp_path, *words)
    assert second.stdout.count("kept") == 3
    assert "add train" not in second.stderr and "dflashctl doctor train " in second.stdout
    other = dflashctl(tmp_path, *words[:4], "300", "--name", "other", "job")
    assert "add other (host root@pve1, container 300) to it" in other.stderr
    assert "dflashctl doctor --host root@pve1 --ct 300 " in other.stdout
    assert dflashctl(tmp_path, "inventory", "list").stdout.count("train") == 1


def test_without_a_terminal_a_missing_answer_is_a_usage_error(tmp_path: Path) -> None:
    done = dflashctl(tmp_path, "init", "--ct", "200")
    assert done.returncode == 2
    assert "--host is missing, and there is no terminal" in done.stderr
    assert not list(tmp_path.iterdir())


def test_who_knows_no_container_yet_is_told_how_to_begin(tmp_path: Path) -> None:
    listed = dflashctl(tmp_path, "inventory", "list")
    assert listed.returncode == 0
    assert "dflashctl init" in listed.stdout and "inventory discover HOST" in listed.stdout


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "a b", ""])
def test_a_host_that_ssh_would_not_take_is_refused(host: str) -> None:
    with pytest.raises(UsageError):
        inventory_text(Choices(host, 200))
