"""`dflashctl lab up|down|status` as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.lab import Container, Lab

pytestmark = pytest.mark.lab

Verb = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def own(make_lab: Callable[..., Lab]) -> Lab:
    return make_lab((Container(200),))


@pytest.fixture
def verb(own: Lab, tmp_path: Path) -> Verb:
    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "orchestrator.cli", "lab", *words],
            env=os.environ
            | {"DFLASHCTL_LAB_ROOT": str(own.layout.root), "HOME": str(tmp_path)}
            | variables,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    return run


def test_up_status_down(verb: Verb, own: Lab) -> None:
    port = str(own.spec.port)
    up = verb("up", "--port", port, "--containers", "200,205:stopped", "--json")
    assert up.returncode == 0, up.stderr
    state = json.loads(up.stdout)
    assert state["up"] is True
    assert {ct["ct"]: ct["state"] for ct in state["containers"]} == {
        200: "running",
        205: "stopped",
    }
    assert "containers" in up.stderr  # progress, apart from the JSON

    assert json.loads(verb("status", "--json").stdout) == state
    readable = verb("status").stdout
    assert f"port {port}" in readable
    assert "dflashctl launch --host lab --ct 200" in readable

    down = verb("down", "--json")
    assert json.loads(down.stdout) == {"up": False, "found": True}
    assert json.loads(verb("status", "--json").stdout)["up"] is False
    assert "there was no lab" in verb("down").stderr


def test_variables_choose_the_backend_and_the_cost_of_pct(verb: Verb, own: Lab) -> None:
    words = ("up", "--port", str(own.spec.port), "--containers", "200", "--json")
    up = verb(*words, DFLASHCTL_LAB_BACKEND="unshare", DFLASHCTL_LAB_PCT_DELAY="0.1")
    assert json.loads(up.stdout)["backend"] == "unshare"
    assert (own.layout.faults / "pct-delay").read_text() == "0.1"
    verb("down")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--containers", "200;201"), "container list: '200;201' is not NUMBER"),
        (("--backend", "docker"), "lab backend 'docker' is unknown"),
        (("--port", "0"), "port 0 is not a port"),
        (("--root", "relative"), "lab folder relative is not absolute"),
    ],
)
def test_wrong_options_get_one_message_and_exit_code_2(
    verb: Verb, words: tuple[str, ...], message: str
) -> None:
    done = verb("up", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
