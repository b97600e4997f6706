"""A laptop, and a run, whose locale knows no UTF-8: names and output are bytes, and stay so."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from laptop import Cli, tree

from orchestrator.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]

PLAIN = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
CT = "lab-201"


@pytest.fixture
def cli(cli: Cli) -> Cli:
    """Python's own ways out (UTF-8 mode, coercing the locale) are closed."""
    cli.extra |= PLAIN
    return cli


def test_python_really_has_no_utf8_there(cli: Cli) -> None:
    show = "import sys; print(sys.getfilesystemencoding(), sys.flags.utf8_mode)"
    argv = ["python3", "-c", show]
    said = subprocess.run(argv, env=cli.environment, capture_output=True, text=True).stdout
    assert said.split() == ["ascii", "0"]


def test_names_and_contents_arrive_as_they_are(cli: Cli, lab: Lab, code: Path) -> None:
    for name in ("ünï/文.py", "\udcff\udcfe", "a b"):
        (code / name).parent.mkdir(exist_ok=True)
        (code / name).write_text("größe = '文'\n", encoding="utf-8")
    (code / "ü.md").symlink_to("ünï/文.py")
    (code / ".dflashignore").write_text("größe*\n", encoding="utf-8")
    (code / "größe.bin").touch()
    answer = cli.json("push", CT, cwd=code)
    there = tree(lab.files(201) / answer["path"].lstrip("/"))
    assert "größe.bin" not in there
    here = tree(code)
    del here["größe.bin"]
    assert there == here


def test_a_runs_output_reaches_the_screen_byte_by_byte(cli: Cli, code: Path) -> None:
    (code / "start_training.sh").write_text(
        "echo 'Verlust größer: 文 ✓'; printf 'latin \\374\\n'; printf '%s\\n' \"$WORD\"\n",
        encoding="utf-8",
    )
    words = ("launch", CT, "--name", "plain", "--env", "WORD=grün", "--wait")
    done = cli.raw(*words, cwd=code)
    assert done.returncode == 0, done.stderr
    shown = cli.raw("tail", "-F", "-n", "100").stdout
    assert shown.startswith("Verlust größer: 文 ✓\n".encode() + b"latin \xfc\n" + "grün\n".encode())
    for words in (("ps",), ("status",), ("diag",), ("top",), ("doctor", CT, "--no-trainer")):
        done = cli.raw(*words)
        assert b"Traceback" not in done.stderr and b"internal" not in done.stderr, done.stderr
    found = cli.json("status")
    assert found["state"] == "finished" and "Verlust" in found["last_lines"][0]


def test_files_come_home_under_their_names(cli: Cli, code: Path, tmp_path: Path) -> None:
    (code / "start_training.sh").write_text(
        'cd "$DFLASH_RUN_DIR" && mkdir ünï && echo x > ünï/文 && printf y > "$(printf "\\374")"\n',
        encoding="utf-8",
    )
    run_id = cli("launch", CT, "--wait", cwd=code, code=0).stdout.splitlines()[0]
    out = tmp_path / "out"
    cli("pull", run_id, "--to", out, code=0)
    assert (out / "ünï/文").read_text() == "x\n"
    assert (out / "\udcfc").read_text() == "y"
    cli("report", run_id, "-o", tmp_path / "page.html", code=0)


def test_a_runs_own_locale_may_be_plain_too(cli: Cli, code: Path) -> None:
    (code / "train.py").write_text(
        "import os, sys\nos.mkdir('größe'.encode())\nprint(sys.stdout.encoding)\n"
        "sys.stdout.buffer.write('größe\\n'.encode())\n",
        encoding="utf-8",
    )
    given = [word for name, value in PLAIN.items() for word in ("--env", f"{name}={value}")]
    words = ("launch", CT, *given, "--wait", "--", "python3", "train.py")
    assert cli.raw(*words, cwd=code).returncode == 0
    shown = cli.raw("tail", "-F", "-n", "100").stdout
    assert "größe\n".encode() in shown
