"""`dflashctl lab up|down|status` as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from orchestrator.errors import UsageError
from orchestrator.lab import Container, Lab
from orchestrator.lab.cli import app
from orchestrator.lab.cli import make_lab as make_lab_of

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def own(make_lab: Callable[..., Lab]) -> Lab:
    return make_lab((Container(200),))


def invoke(lab: Lab, *words: str, **variables: str) -> Result:
    """In this process; the progress goes to stderr, apart from the JSON."""
    variables = {"DFLASHCTL_LAB_ROOT": str(lab.layout.root)} | variables
    return CliRunner().invoke(app, words, env=variables)


def test_up_status_down(own: Lab) -> None:
    port = str(own.spec.port)
    up = invoke(own, "up", "--port", port, "--containers", "200,205:stopped", "--json")
    assert up.exit_code == 0, up.output
    state = json.loads(up.stdout)
    assert state["up"] is True
    assert {ct["ct"]: ct["state"] for ct in state["containers"]} == {
        200: "running",
        205: "stopped",
    }
    assert "starting 200" in up.stderr

    assert json.loads(invoke(own, "status", "--json").stdout) == state
    readable = invoke(own, "status").stdout
    assert f"port {port}" in readable
    assert "dflashctl launch --host lab --ct 200" in readable
    # A lab in a folder of its own writes no inventory where the verbs look.
    assert f"export DFLASHCTL_INVENTORY={state['inventory']}" in readable

    down = invoke(own, "down", "--json")
    assert json.loads(down.stdout) == {"up": False, "found": True}
    assert json.loads(invoke(own, "status", "--json").stdout)["up"] is False
    assert "dflashctl lab up" in invoke(own, "status").stdout
    assert "there was no lab" in invoke(own, "down").stderr


def test_variables_choose_the_backend_and_the_cost_of_pct(own: Lab) -> None:
    words = ("up", "--port", str(own.spec.port), "--containers", "200", "--json")
    up = invoke(own, *words, DFLASHCTL_LAB_BACKEND="unshare", DFLASHCTL_LAB_PCT_DELAY="0.1")
    assert json.loads(up.stdout)["backend"] == "unshare"
    assert (own.layout.faults / "pct-delay").read_text() == "0.1"
    invoke(own, "down")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--containers", "200;201"), "container list: '200;201' is not NUMBER"),
        (("--backend", "docker"), "lab backend 'docker' is unknown"),
        (("--port", "0"), "port 0 is not a port"),
        (("--root", "relative"), "lab folder relative is not absolute"),
    ],
)
def test_wrong_options_are_usage_errors(own: Lab, words: tuple[str, ...], message: str) -> None:
    error = invoke(own, "up", *words).exception
    assert isinstance(error, UsageError)
    assert message in str(error)


def test_an_error_is_one_message_and_an_exit_code(own: Lab) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", "lab", "up", "--containers", "200;201"],
        env=os.environ | {"DFLASHCTL_LAB_ROOT": str(own.layout.root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "container list" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_only_the_default_lab_writes_into_the_users_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/xdg")
    assert make_lab_of(None).inventory == Path("/xdg/dflashctl/inventory.d/lab.yaml")
    # Not below tmp_path, which is too long for a lab's sockets.
    other = Path("/var/tmp/dfl-other")
    assert make_lab_of(other).inventory == other / "inventory.yaml"
