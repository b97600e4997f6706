"""Ctrl-C in a verb that changes something: it leaves at once and says how things stand."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from laptop import Cli, until

from orchestrator.lab import Lab
from orchestrator.lab.proxy import Proxy

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]

CT = "lab-201"
LAUNCH = ("launch", CT, "--no-push")


def interrupted(process: subprocess.Popen[str]) -> tuple[str, str]:
    process.send_signal(signal.SIGINT)
    # A host that does not answer is given up after 10 s, a link after 9: nobody waits for that.
    out, err = process.communicate(timeout=6)
    assert process.returncode == 130, err
    assert "Traceback" not in err, err
    return out, err


def test_before_anything_was_asked_nothing_was_started(cli: Cli, lab: Lab, proxied: Proxy) -> None:
    before = Cli(cli.home, lab.inventory).run_ids(CT)
    proxied.black_hole()
    process = cli.start(*LAUNCH, "--", "true")
    until(lambda: proxied.traffic()["connections"])
    time.sleep(0.3)
    _, err = interrupted(process)
    assert "interrupted: nothing was started" in err
    proxied.black_hole(False)
    assert cli.run_ids(CT) == before


def test_a_start_that_was_asked_for_may_have_come_about(cli: Cli, proxied: Proxy) -> None:
    cli("exec", CT, "--", "true", code=0)
    proxied.set(rtt_ms=600)
    process = cli.start(*LAUNCH, "--name", "asked", "--", "sleep", "60")
    until(lambda: [*cli.home.rglob("runs/asked-*.json")])
    _, err = interrupted(process)
    (run_id,) = [path.stem for path in cli.home.rglob("runs/asked-*.json")]
    assert f"{run_id} may have started on {CT}" in err
    assert f"dflashctl status {run_id}" in err and f"dflashctl stop {run_id}" in err


@pytest.mark.parametrize("option", ["--wait", "--follow"])
def test_a_run_that_is_followed_goes_on(cli: Cli, option: str) -> None:
    process = cli.start(*LAUNCH, option, "--", "sleep", "60")
    assert process.stdout
    run_id = process.stdout.readline().strip()
    while "what is wrong" not in process.stdout.readline():
        pass
    time.sleep(0.5)
    _, err = interrupted(process)
    assert "the run goes on" in err and f"dflashctl stop {run_id}" in err
    assert cli.json("status", run_id)["state"] in {"starting", "training"}


def test_a_push_and_a_playbook_say_how_to_go_on(cli: Cli, proxied: Proxy, code: Path) -> None:
    (code / "a").write_text("a\n")
    for words, said in (
        (("push", CT), "push again to go on from what has arrived"),
        (("play", "launch", CT), "dflashctl play launch lab-201 --start-at preflight"),
    ):
        before = proxied.traffic()["connections"]
        proxied.black_hole()
        process = cli.start(*words, cwd=code)
        until(lambda before=before: proxied.traffic()["connections"] > before)  # type: ignore[misc]
        time.sleep(0.3)
        assert said in interrupted(process)[1]
        proxied.black_hole(False)


def test_on_a_dead_link_nobody_waits_for_the_hosts_record(cli: Cli, proxied: Proxy) -> None:
    process = cli.start("exec", CT, "--", "sh", "-c", "echo begun; sleep 60")
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    proxied.black_hole()
    assert "lab has not yet taken its record of this exec" in interrupted(process)[1]
    proxied.black_hole(False)


@pytest.mark.parametrize(
    "words",
    [
        ("ps",),
        ("doctor", CT),
        ("inventory", "check"),
        ("push", "lab-200", CT),
        ("exec", "lab-200", CT, "--", "true"),
        ("launch", "lab-200", CT, "--", "true"),
        ("stop", CT),
    ],
    ids=lambda words: words[0],
)
def test_while_several_are_asked_nobody_waits_for_a_dead_one(
    cli: Cli, proxied: Proxy, code: Path, words: tuple[str, ...]
) -> None:
    (code / "a").write_text("a\n")
    proxied.black_hole()
    process = cli.start(*words, cwd=code)
    until(lambda: proxied.traffic()["connections"])
    time.sleep(0.3)
    interrupted(process)
