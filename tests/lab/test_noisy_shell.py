"""A login shell on the host that prints before anything else: no verb takes that for an answer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from laptop import Cli, Terminal, own_lines

from orchestrator.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]

# Lines, half a line, something like one of our own markers, bytes that are no text, both streams.
NOISE = (
    r"printf 'Welcome to PVE\n\0DFLASH\n'; seq 3000; printf '\377\376 half a line'; "
    r"seq 3000 >&2; printf 'you have mail' >&2"
)


@pytest.fixture(autouse=True)
def noisy(lab: Lab) -> Iterator[None]:
    profile = "/root/.bashrc"
    lab.host(["sh", "-c", f"test ! -e {profile} || mv {profile} {profile}.kept"])
    lab.host(["tee", profile], input=f"{NOISE}\n")
    assert "Welcome" in lab.ssh("true", errors="replace").stdout
    yield
    lab.host(["rm", profile])
    lab.host(["sh", "-c", f"test ! -e {profile}.kept || mv {profile}.kept {profile}"])


def test_a_whole_life(cli: Cli, lab: Lab, code: Path, tmp_path: Path) -> None:
    (code / "start_training.sh").write_text(
        "echo on\ntrap 'echo saved; exit 130' INT\nwhile :; do sleep 0.1; done\n"
    )
    assert cli.json("push", "lab-201", cwd=code)["existing"] is False
    run_id = cli.json("launch", "lab-201", cwd=code)["run_id"]
    runs = cli.json("ps")["runs"]
    assert run_id in [run["run_id"] for run in runs]
    assert cli.json("status", run_id)["state"] == "training"
    assert [line for line in cli("top").stdout.splitlines() if "lab-201" in line]
    assert cli.json("stop", run_id)["state"] == "stopped"
    lines = own_lines(cli("tail", run_id, "-n", "100", code=0).stdout)
    assert lines == ["on", "saved"]
    assert cli("watch", run_id, "--json").returncode == 0
    cli("pull", run_id, "--to", tmp_path / "out", code=0)
    assert (tmp_path / "out/train.log").read_bytes().startswith(b"on\nsaved\n")
    assert json.loads(cli("diag", run_id, "--json").stdout)["state"] == "stopped"
    cli("report", run_id, "-o", tmp_path / "page.html", code=0)


def test_looking_and_doing(cli: Cli, lab: Lab, code: Path, tmp_path: Path) -> None:
    assert cli("exec", "lab-201", "--", "echo", "hi", code=0).stdout == "hi\n"
    assert cli.json("doctor", "lab-201", "--no-trainer")["ready"] is True
    frozen = tmp_path / "lock.yaml"
    cli("env", "freeze", "lab-201", "-o", frozen, code=0)
    assert frozen.stat().st_size > 100
    assert "3 known" in cli("inventory", "discover", "lab", code=0).stderr
    book = code / "book.yaml"
    book.write_text(
        "description: d\nsteps:\n  - preflight:\n  - push:\n  - exec: {command: [echo, done]}\n"
    )
    played = cli("play", book, "lab-201", cwd=code, code=0)
    assert "done" in played.stdout + played.stderr


def test_attaching(cli: Cli, code: Path) -> None:
    words = ("launch", "lab-201", "--", "sh", "-c", "while :; do echo alive; sleep 0.5; done")
    run_id = cli.json(*words, cwd=code)["run_id"]
    terminal = Terminal(cli, "attach", run_id)
    terminal.until(b"alive")
    while b"detached" not in terminal.seen:
        # Keys that come before the terminal is tmux's are lost.
        terminal.type(b"\x02d")
        with contextlib.suppress(AssertionError):
            terminal.until(b"detached", 2)
    assert terminal.exit_code() == 0


@pytest.mark.parametrize(
    ("start_up", "printed"),
    [
        ("echo no service today; exit 1", "it printed: no service today"),
        ("exit", "nothing was printed"),
        ("exec sh", ""),
        ("read answer", ""),
        ("exec cat", ""),
    ],
)
def test_a_login_shell_that_runs_nothing_is_named_with_its_remedy(
    cli: Cli, lab: Lab, start_up: str, printed: str
) -> None:
    lab.host(["tee", "/root/.bashrc"], input=f"{start_up}\n")
    verbs = (("exec", "lab-201", "--", "true"), ("doctor", "lab-201"), ("ps",))
    heard = [cli(*verb, code=3) for verb in verbs]
    lab.host(["tee", "/root/.bashrc"], input="")
    for done in heard:
        said = done.stdout + done.stderr
        assert "the login shell of root on the host does not run what it is given" in said
        assert printed in said
        assert "~root/.bashrc" in said and "interactive" in said
        assert "dflashctl doctor" not in said
        # It is the host's fault, and all its containers': once.
        assert said.count("~root/.bashrc") == 1
