"""Bad input gets one message naming the thing, the place and the next step; no traceback."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from laptop import Cli

from orchestrator.lab import Container, Lab
from orchestrator.lab.proxy import Proxy
from orchestrator.lab.spec import SHARED_PYTHON

pytestmark = pytest.mark.lab


@pytest.fixture
def code(code: Path) -> Path:
    (code / "start_training.sh").write_text("echo on\n")
    return code


def with_host(cli: Cli, lab: Lab, tmp_path: Path, **changes: Any) -> Cli:
    """The same inventory with some of the host's settings changed."""
    known = yaml.safe_load(lab.inventory.read_text())
    known["hosts"]["lab"] |= changes
    cli.inventory = tmp_path / "changed.yaml"
    cli.inventory.write_text(yaml.safe_dump(known))
    return cli


def said(cli: Cli, code: int, *words: str, cwd: Path) -> str:
    """The one message of a verb that fails."""
    done = cli(*words, cwd=cwd, code=code)
    assert done.stdout == ""
    assert done.stderr.count("error:") == 1
    assert "next: " in done.stderr
    return done.stderr


def test_a_host_name_that_is_none(cli: Cli, code: Path) -> None:
    text = said(cli, 3, "launch", "--host", "no-such-host.invalid", "--ct", "200", cwd=code)
    assert "no-such-host.invalid" in text and "no such host name" in text
    assert "did you mean" not in text
    slip = said(cli, 3, "launch", "--host", "lba", "--ct", "200", cwd=code)
    assert "did you mean 'lab', which the inventory has?" in slip


def test_a_closed_port(cli: Cli, lab: Lab, code: Path, tmp_path: Path) -> None:
    text = said(with_host(cli, lab, tmp_path, port=1), 3, "launch", "lab-200", cwd=code)
    assert "127.0.0.1:1 refused the connection" in text and "lab:" in text


def test_a_port_where_no_ssh_server_speaks(
    cli: Cli, lab: Lab, code: Path, tmp_path: Path, proxied: Proxy
) -> None:
    proxied.black_hole()
    text = said(cli, 3, "launch", "lab-200", cwd=code)
    assert "no SSH server spoke within 10 s" in text


def test_a_refused_key(cli: Cli, lab: Lab, code: Path, tmp_path: Path) -> None:
    key = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    changed = with_host(cli, lab, tmp_path, identity_file=str(key))
    text = said(changed, 3, "launch", "lab-200", cwd=code)
    assert "refused user root" in text and str(key) in text and "ssh-copy-id" in text


def test_a_key_file_that_is_not_there(cli: Cli, lab: Lab, code: Path, tmp_path: Path) -> None:
    changed = with_host(cli, lab, tmp_path, identity_file="/no/such/key")
    told = said(changed, 3, "launch", "lab-200", cwd=code)
    assert "/no/such/key does not exist" in told
    # A run of the lab is remembered when the lab is down.
    assert "dflashctl lab up" in told


def test_a_key_with_a_passphrase_and_nobody_to_ask(
    cli: Cli, lab: Lab, code: Path, tmp_path: Path
) -> None:
    key = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "abcde", "-f", key], check=True)
    changed = with_host(cli, lab, tmp_path, identity_file=str(key))
    assert "ssh-add" in said(changed, 3, "launch", "lab-200", cwd=code)


@pytest.mark.parametrize("policy", ["strict", "accept-new"])
def test_a_changed_host_key_is_refused_under_every_policy(
    cli: Cli, lab: Lab, code: Path, tmp_path: Path, policy: str
) -> None:
    key = tmp_path / "host"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{lab.spec.port} {key.with_suffix('.pub').read_text()}")
    changed = with_host(cli, lab, tmp_path, known_hosts=str(known), host_keys=policy)
    text = said(changed, 3, "launch", "lab-200", cwd=code)
    assert "the host key of" in text and "is not the known one" in text
    assert text.count("SHA256:") == 2 and "ssh-keygen -f" in text


def test_an_unknown_host_key_is_refused_unless_new_ones_are_accepted(
    cli: Cli, lab: Lab, code: Path, tmp_path: Path
) -> None:
    known = tmp_path / "empty" / "known_hosts"
    strict = with_host(cli, lab, tmp_path, known_hosts=str(known))
    assert "is not known here" in said(strict, 3, "launch", "lab-200", cwd=code)
    assert not known.exists()
    new = with_host(cli, lab, tmp_path, known_hosts=str(known), host_keys="accept-new")
    new("exec", "lab-201", "--", "true", code=0)
    assert known.read_text().startswith(f"[127.0.0.1]:{lab.spec.port} ssh-ed25519 ")
    with_host(cli, lab, tmp_path, known_hosts=str(known))("exec", "lab-201", "--", "true", code=0)


def test_a_user_who_is_not_there(cli: Cli, lab: Lab, code: Path, tmp_path: Path) -> None:
    changed = with_host(cli, lab, tmp_path, user="nobody-here")
    assert "refused user nobody-here" in said(changed, 3, "launch", "lab-200", cwd=code)


def test_a_container_that_is_missing(cli: Cli, code: Path) -> None:
    text = said(cli, 5, "launch", "--host", "lab", "--ct", "999", cwd=code)
    assert "lab/999: there is no such container" in text and "pct list" in text


def test_a_container_that_is_stopped(cli: Cli, code: Path) -> None:
    text = said(cli, 4, "launch", "lab-202", cwd=code)
    assert "lab-202: the container is not running" in text and "pct start 202" in text


@pytest.mark.parametrize(
    "fault,words",
    [("cluster-down", "cluster filesystem is down"), ("not-root", "pct needs root")],
)
def test_a_host_whose_pct_does_not_work(
    cli: Cli, lab: Lab, code: Path, fault: str, words: str
) -> None:
    with lab.fault(fault):
        assert words in said(cli, 3, "launch", "lab-200", cwd=code)


def test_a_host_without_pct(cli: Cli, lab: Lab, code: Path, tmp_path: Path) -> None:
    changed = with_host(cli, lab, tmp_path, pct="/no/such/pct")
    assert "the host has no pct" in said(changed, 3, "launch", "lab-200", cwd=code)


def test_nothing_to_start(cli: Cli, code: Path) -> None:
    (code / "start_training.sh").unlink()
    text = said(cli, 2, "launch", "lab-200", cwd=code)
    for way in ("-- COMMAND", "--config FILE", "start_training.sh", str(code)):
        assert way in text


def test_an_unknown_key_in_the_inventory(cli: Cli, lab: Lab, code: Path, tmp_path: Path) -> None:
    cli.inventory = tmp_path / "wrong.yaml"
    cli.inventory.write_text("hosts:\n  lab:\n    adress: 127.0.0.1\n")
    done = cli("launch", "lab-200", cwd=code, code=2)
    assert f"{cli.inventory}:3" in done.stderr and "did you mean 'address'?" in done.stderr


def test_an_unknown_name_and_half_a_target(cli: Cli, code: Path) -> None:
    assert "did you mean 'lab-20" in said(cli, 5, "launch", "lab-20", cwd=code)
    assert "--host without --ct" in said(cli, 2, "launch", "--host", "lab", cwd=code)
    assert "one" in said(cli, 2, "pull", "lab", cwd=code)


def test_no_run_yet(cli: Cli) -> None:
    text = said(cli, 5, "status", "run-20200101-000000-abcd", cwd=cli.home)
    assert "run-20200101-000000-abcd" in text and "dflashctl ps" in text


def test_an_error_is_json_where_json_was_asked_for(cli: Cli, code: Path) -> None:
    done = cli.json("launch", "lab-202", cwd=code, code=4)
    assert done == {
        "error": "ContainerNotRunning",
        "message": "the container is not running",
        "next": "start it on the host: pct start 202",
        "host": "lab",
        "ct": 202,
        "run_id": None,
        "exit_code": 4,
    }


def test_wrong_options_are_wrong_usage(cli: Cli, code: Path) -> None:
    assert cli("launch", "--no-such-option", code=2).stderr
    assert "did you mean 'launch'" in cli("lanch", code=2).stderr
    for words in (
        ("launch", "lab-200", "--env", "novalue"),
        ("launch", "lab-200", "--log", "relative.log"),
        ("launch", "lab-200", "--name", "-dash"),
        ("tail", "--since", "yesterday"),
        ("tail", "--grep", "("),
        ("exec", "lab-200"),
    ):
        said(cli, 2, *words, cwd=code)


def test_wrong_usage_is_json_where_json_was_asked_for(cli: Cli) -> None:
    for words in (("ps", "--no-such-option"), ("status", "-n", "x"), ("lanch",), ("env", "diff")):
        done = cli.json(*words, code=2)
        assert (done["error"], done["exit_code"]) == ("UsageError", 2)


def test_every_look_before_the_leap_is_json_too(cli: Cli, code: Path) -> None:
    steps = cli.json("exec", "lab-201", "--dry-run", "--", "echo", "it's")["steps"]
    sent = json.loads(steps[1]["text"].removeprefix("exec "))
    assert sent == {"command": ["echo", "it's"], "python": "/srv/python/bin/python"}
    assert cli.json("push", "lab-201", "--dry-run", cwd=code)["paths"] == ["start_training.sh"]
    rows = {row["ct"]: row["state"] for row in cli.json("top")["runs"] if row["run_id"] is None}
    assert rows[202] == "not running"


def test_characters_that_the_terminal_lacks_end_no_verb(cli: Cli, code: Path) -> None:
    cli.extra = {"PYTHONIOENCODING": "ascii"}
    (code / "\udcff").touch()
    assert "\\udcff" in cli("push", "lab-201", "--dry-run", cwd=code, code=0).stdout
    assert "\\u2026" in cli("launch", "lab-200", "--code", code / "..", code=2).stderr


def test_output_that_cannot_be_written_is_one_message(cli: Cli) -> None:
    argv = [sys.executable, "-m", "orchestrator.cli", "inventory", "list"]
    for words in (argv, [*argv, "--json"]):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                words, env=cli.environment, stdout=full, stderr=subprocess.PIPE, text=True
            )
        assert done.returncode == 1
        assert "No space left on device" in done.stderr and "Traceback" not in done.stderr


def test_a_home_folder_that_cannot_be_written_starts_nothing(cli: Cli, code: Path) -> None:
    before = cli.run_ids("lab-201")
    shutil.rmtree(cli.home / ".local", ignore_errors=True)
    shutil.rmtree(cli.home / ".cache", ignore_errors=True)
    (cli.home / ".local").write_text("in the way")
    (cli.home / ".cache").write_text("in the way")
    text = said(cli, 2, "launch", "lab-201", cwd=code)
    assert "cannot write down the run" in text and "XDG_STATE_HOME" in text
    assert cli.run_ids("lab-201") == before


def test_a_folder_that_is_gone_under_the_shell(cli: Cli, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    line = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m orchestrator.cli push lab-201"
    done = subprocess.run(
        ["sh", "-c", line], env=cli.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "the folder this shell stands in is gone" in done.stderr


def test_a_place_that_cannot_be_written_is_named(cli: Cli, code: Path, tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("of the user")
    folder.mkdir()
    run_id = cli.json("launch", "lab-201", "--", "true", cwd=code)["run_id"]
    for why, *words in (
        ("cannot be written", "pull", run_id, "--to", file),
        ("cannot be written", "env", "freeze", "lab-201", "-o", file / "x"),
        ("that is a folder", "diag", run_id, "--bundle", folder),
        ("cannot be written", "report", run_id, "-o", folder),
    ):
        assert why in cli(*words, code=2).stderr
    assert file.read_text() == "of the user"


def test_a_workdir_with_something_in_the_way(
    cli: Cli, lab: Lab, code: Path, tmp_path: Path
) -> None:
    known = yaml.safe_load(lab.inventory.read_text())
    known["containers"]["lab-201"]["workdir"] = "/etc/hostname"
    cli.inventory = tmp_path / "changed.yaml"
    cli.inventory.write_text(yaml.safe_dump(known))
    text = said(cli, 4, "launch", "lab-201", cwd=code)
    assert "lab-201: Not a directory: /etc/hostname" in text and "workdir" in text
    assert "/etc/hostname is in the way: it is no folder" in cli("doctor", "lab-201", code=4).stdout


def test_a_run_that_an_unreachable_host_may_have_is_not_called_absent(
    cli: Cli, lab: Lab, code: Path, tmp_path: Path
) -> None:
    words = ("status", "x-20260101-000000-0000")
    assert "no container of the inventory has it" in said(cli, 5, *words, cwd=code)
    text = said(with_host(cli, lab, tmp_path, port=1), 3, *words, cwd=code)
    assert "no answer from lab-200, lab-201, lab-202" in text


# The trainer's config


@pytest.mark.skipif(not SHARED_PYTHON.exists(), reason="make lab-python was not run")
def test_an_unknown_key_in_the_trainers_config(cli: Cli, lab: Lab, code: Path) -> None:
    (code / "config.yaml").write_text("targt:\n  model: x\n")
    before = cli.run_ids("lab-200")
    text = said(cli, 2, "launch", "lab-200", "--config", "config.yaml", cwd=code)
    assert "lab-200" in text and "config.yaml" in text and "did you mean `target`?" in text
    assert cli.run_ids("lab-200") == before


def test_a_config_that_is_not_there(cli: Cli, code: Path) -> None:
    text = said(cli, 2, "launch", "lab-200", "--config", "none.yaml", cwd=code)
    assert "none.yaml: no such file" in text


def test_a_container_without_what_the_trainer_needs(cli: Cli, code: Path) -> None:
    (code / "config.yaml").write_text("x: 1\n")
    text = said(cli, 4, "launch", "lab-201", "--config", "config.yaml", cwd=code)
    assert "lab-201" in text and "has no torch" in text and "-m pip install torch" in text


def test_a_trainer_of_ones_own_beside_a_config(cli: Cli, code: Path) -> None:
    (code / "config.yaml").write_text("x: 1\n")
    (code / "trainer").mkdir()
    (code / "trainer/__init__.py").write_text("")
    text = said(cli, 2, "launch", "lab-200", "--config", "config.yaml", cwd=code)
    assert "would hide the trainer" in text


# Containers that lack something


@pytest.fixture(scope="session")
def poor_lab(make_lab: Any) -> Lab:
    """210: only python3-minimal. 211: no tmux. 212: a small work folder. 213: as it should be."""
    lab: Lab = make_lab(
        containers=(
            Container(210, python="minimal"),
            Container(211, tmux=False),
            Container(212, workdir_size=4 << 20),
            Container(213),
        )
    )
    lab.up()
    return lab


@pytest.fixture
def poor(cli: Cli, poor_lab: Lab) -> Iterator[Cli]:
    cli.inventory = poor_lab.inventory
    yield cli


def test_only_python3_minimal(poor: Cli, code: Path) -> None:
    text = said(poor, 4, "launch", "lab-210", cwd=code)
    assert "only python3-minimal" in text and "apt install python3" in text


def test_no_tmux(poor: Cli, poor_lab: Lab, code: Path) -> None:
    text = said(poor, 4, "launch", "lab-211", cwd=code)
    assert "lab-211: there is no tmux" in text and "apt install tmux" in text
    left = poor_lab.pct("exec", 211, "--", "sh", "-c", "ls /workspace/dflashctl/runs 2>&1 || true")
    assert left.strip() == "" or "No such file" in left


def test_a_disk_too_small(poor: Cli, poor_lab: Lab, code: Path) -> None:
    text = said(poor, 4, "launch", "lab-212", cwd=code)
    assert re.search(r"/workspace has only \d MB left, and a run needs 1\.1 GB \(1\.1 GB for", text)
    (look,) = re.findall(r"dflashctl (exec lab-212 -- sh -c '.*?')", text)
    assert "/workspace" in poor(*shlex.split(look), code=0).stdout
    assert "--force does not pass this" in text
    assert "/workspace has only" in said(poor, 4, "launch", "lab-212", "--force", cwd=code)


def test_no_python_at_all(poor: Cli, poor_lab: Lab, code: Path, tmp_path: Path) -> None:
    known = yaml.safe_load(poor_lab.inventory.read_text())
    known["containers"]["lab-213"]["python"] = "/opt/nowhere/python3"
    poor.inventory = tmp_path / "no-python.yaml"
    poor.inventory.write_text(yaml.safe_dump(known))
    text = said(poor, 4, "launch", "lab-213", cwd=code)
    assert "the container has no /opt/nowhere/python3" in text and "inventory" in text


def test_a_disk_that_fills_during_a_push_leaves_nothing_half_made(
    poor: Cli, poor_lab: Lab, code: Path
) -> None:
    (code / "big").write_bytes(b"x" * (6 << 20))

    def names() -> list[str]:
        """Releases, runs, and whatever lies half-built in the folder for that."""
        listing = (
            "cd /workspace/dflashctl && ls -A releases runs 2>/dev/null | grep -v '^.build$';"
            " find releases/.build -mindepth 1 2>/dev/null; true"
        )
        return poor_lab.pct("exec", 212, "--", "sh", "-c", listing).split()

    before = names()
    done = poor("push", "lab-212", cwd=code)
    assert done.returncode == 1
    assert "lab-212" in done.stderr and "next: free some space" in done.stderr
    assert names() == before


def test_doctor_names_what_is_missing(poor: Cli) -> None:
    done = poor("doctor", "lab-213", code=4)
    assert "FAILED  modules" in done.stdout
    assert "-m pip install torch transformers pydantic" in done.stdout
    assert poor.json("doctor", "lab-213", "--no-trainer")["ready"] is True
