"""Two people on one host: nobody ends or types into a colleague's run without naming it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from laptop import Cli
from test_audit import audited

from orchestrator.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]

WHAT = ("who", "action", "result")


@pytest.fixture
def ben(cli: Cli, tmp_path: Path) -> Cli:
    """Somebody else, who has launched nothing from his laptop."""
    other = Cli.at_home(tmp_path / "ben", cli.inventory)
    other.extra = {"USER": "ben", "LOGNAME": "ben"}
    return other


@pytest.fixture
def annas(cli: Cli, code: Path) -> str:
    """A run of anna's, who is ``cli``, in container 201."""
    cli.extra = {"USER": "anna", "LOGNAME": "anna"}
    return str(cli.json("launch", "lab-201", "--", "sleep", "60", cwd=code)["run_id"])


def test_a_colleagues_run_ends_by_its_id_alone(cli: Cli, ben: Cli, lab: Lab, annas: str) -> None:
    for verb in (("attach", "--dry-run"), ("stop",)):
        said = ben(*verb, code=4).stderr
        assert "no run of yours lives" in said and f"{annas} of anna@" in said
        said = ben(*verb, "lab-201", code=4).stderr
        assert "launched by anna@" in said and "not by you (ben@" in said
        assert f"dflashctl {verb[0]} {annas}" in said
    assert cli.json("status", annas)["state"] in {"starting", "training"}
    assert ben("attach", "--dry-run", annas, code=0).stdout.startswith("ssh -t ")
    assert f"{annas} stopped" in ben("stop", annas, "--grace", "1s", code=0).stdout
    lines = [line for line in audited(lab) if line.get("run_id") == annas]
    # A refusal too; an attach that is only printed is noted where it is refused.
    assert [tuple(re.split("[@:]", line[key])[0] for key in WHAT) for line in lines] == [
        ("anna", "launch", "ok"),
        ("ben", "attach", "RefusedError"),
        ("ben", "stop", "RefusedError"),
        ("ben", "stop", "ok"),
    ]


def test_ones_own_is_found_by_its_record_from_another_home(
    cli: Cli, lab: Lab, annas: str, tmp_path: Path
) -> None:
    """Its container's name is enough; the audit line says which it was."""
    same = Cli.at_home(tmp_path / "elsewhere", cli.inventory)
    same.extra = cli.extra
    assert same("attach", "--dry-run", code=0).stdout.startswith("ssh -t ")
    assert f"{annas} stopped" in same("stop", "lab-201", "--grace", "1s", code=0).stdout
    assert audited(lab)[-1]["run_id"] == annas


def test_a_second_launch_beside_a_colleagues_run_is_refused_with_its_owner(
    ben: Cli, annas: str, code: Path
) -> None:
    """Also under another name, and where no GPU is named."""
    words = ("launch", "lab-201", "--name", "mine")
    refused = ben(*words, "--", "true", cwd=code, code=4)
    assert f"{annas} of anna@" in refused.stderr and "--force" in refused.stderr
    doctor = ben("doctor", "lab-201", "--no-trainer", code=4)
    assert annas in doctor.stdout and "--force" in doctor.stdout
    ben(*words, "--force", "--wait", "--", "true", cwd=code, code=0)


def test_a_word_that_begins_a_run_or_is_off_by_a_letter_is_asked_about(
    cli: Cli, ben: Cli, annas: str
) -> None:
    for who in (cli, ben):
        for word in (annas[:6], annas[:-1] + ("0" if annas[-1] != "0" else "1")):
            done = who("diag", word, code=5)
            assert f"did you mean {annas}?" in done.stderr and "dflashctl ps" in done.stderr
    assert "inventory list" in cli("status", "nothing-like-it", code=5).stderr
