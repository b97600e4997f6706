"""What a launch would run and send, decided before anything is reached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator import launch as launching
from orchestrator.cli.starting import words
from orchestrator.errors import RefusedError, UsageError
from orchestrator.inventory import ContainerSettings, Host
from orchestrator.launch import Order, Started, command_for
from orchestrator.lease import wanted
from orchestrator.nodes import node_id
from orchestrator.paths import LaptopPaths
from orchestrator.preflight import read, refusal
from orchestrator.release import Entry, Release
from orchestrator.run import RunSummary, group_id, new_run_id, seconds
from orchestrator.snapshot import Root
from orchestrator.state import LaptopState
from orchestrator.target import RUN_ID, HostTarget, Target

TARGET = Target(
    name="train-a",
    host=HostTarget(name="pve1", settings=Host(address="10.1.2.6", user="root")),
    ct=200,
    settings=ContainerSettings(python="/opt/py/bin/python", gpus=(0, 1)),
)
RELEASE = Release(Root(Path("/code"), False), [Entry(["f", "start_training.sh", "0" * 64, 5, 0])])


def order(**changes: object) -> Order:
    fields: dict[str, object] = {
        "run_id": "run-20260101-000000-abcd",
        "name": "run",
        "command": ("bash", "start_training.sh"),
    }
    return Order(**{**fields, **changes})  # type: ignore[arg-type]


# What runs


def test_a_command_is_taken_as_it_is() -> None:
    assert command_for(TARGET, ["a b", "*"], None, True, "/code") == ("a b", "*")


def test_a_config_runs_the_trainer_under_the_containers_python() -> None:
    assert command_for(TARGET, [], "c.yaml", True, "/code") == (
        *("/opt/py/bin/python", "-m", "trainer", "train", "c.yaml"),
    )


def test_else_the_start_script_of_the_pushed_folder() -> None:
    assert command_for(TARGET, [], None, True, "/code") == ("bash", "start_training.sh")


@pytest.mark.parametrize("pushed", ["/code", None])
def test_else_the_three_ways_are_named(pushed: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        command_for(TARGET, [], None, False, pushed)
    text = str(caught.value)
    assert "-- COMMAND" in text and "--config FILE" in text and "start_training.sh" in text


def test_two_ways_at_once_are_wrong_usage() -> None:
    with pytest.raises(UsageError, match="both"):
        command_for(TARGET, ["x"], "c.yaml", False, "/code")


# What is sent


def test_the_plan_reads_as_the_exact_commands() -> None:
    steps = [step.line() for step in launching.plan(TARGET, order(), RELEASE)]
    assert steps[0] == (
        "ssh     ssh -l root -o ConnectTimeout=10 -- 10.1.2.6 "
        "'pct exec 200 --keep-env 0 -- /opt/py/bin/python -I -S -c LOADER'"
    )
    assert [line.split()[1] for line in steps[1:]] == [
        *("preflight", "release.begin", "release.blobs", "release.commit", "run.start"),
        "release.prune",
    ]
    start = json.loads(steps[-2].partition("run.start ")[2])
    assert start["command"] == ["bash", "start_training.sh"]
    assert (start["gpus"], start["python"]) == ([0, 1], "/opt/py/bin/python")
    assert start["release"] == RELEASE.id
    assert start["force"] is False


def test_secrets_are_in_no_plan() -> None:
    steps = launching.plan(TARGET, order(secrets={"TOKEN": "hush"}), None)
    assert "hush" not in "".join(step.text for step in steps)
    assert '"TOKEN": "***"' in steps[-1].text


def test_without_a_push_nothing_of_the_release_is_sent() -> None:
    steps = launching.plan(TARGET, order(), None)
    assert [step.text.split()[0] for step in steps] == ["ssh", "preflight", "run.start"]


@pytest.mark.parametrize(
    ("release", "code"),
    [(RELEASE, f"(release {RELEASE.id}, 1 file, 5 B)"), (None, "(nothing was pushed)")],
)
def test_a_launch_says_what_code_runs(release: Release | None, code: str) -> None:
    answer = {"state": "starting", "release": release.id if release else None}
    text = words(Started("run-20260101-000000-abcd", TARGET, answer, []), release)
    assert text.splitlines()[:2] == ["run-20260101-000000-abcd", f"  started on train-a {code}"]


# Words of the command line


def test_variables() -> None:
    assert launching.parse_environment(["A=b=c", "D="]) == {"A": "b=c", "D": ""}
    for wrong in ("A", "=b", "1A=b", "A B=c", "É=x"):
        with pytest.raises(UsageError) as caught:
            launching.parse_environment([wrong])
        assert "KEY=VALUE" in caught.value.what


def test_an_environment_file(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("# c\n\nexport A='b c'\nD=\"e\"\nF=g'h\n")
    assert launching.read_environment_file(path) == {"A": "b c", "D": "e", "F": "g'h"}
    path.write_text("A=b\ns3cr3t\n")
    with pytest.raises(UsageError) as caught:
        launching.read_environment_file(path)
    assert ":2 " in caught.value.what and "s3cr3t" not in str(caught.value)


def test_a_nodes_id_tells_the_id_of_the_whole_run() -> None:
    for name in ("big", "n1", "a-n2"):
        whole = new_run_id(name)
        assert group_id(node_id(whole, 13)) == whole
        assert RUN_ID.match(whole)
    assert group_id("big-20261129-192106-82b5") is None
    assert group_id("big-n1") is None


def test_run_ids_and_names() -> None:
    made = new_run_id("my-run_2")
    assert RUN_ID.match(made) and made.startswith("my-run_2-")
    assert new_run_id(None) != new_run_id(None)
    for wrong in ("-x", "a b", "a/b", "a.b", "a:b", "x" * 41, "ü", "a\n"):
        with pytest.raises(UsageError):
            new_run_id(wrong)


@pytest.mark.parametrize(
    "text,value", [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86400)]
)
def test_durations(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "x", "1w", "-5s", "1h30"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError):
        seconds(text)


# Preflight and leases


def test_only_what_a_run_cannot_do_without_refuses_it() -> None:
    answer = {
        "checks": {
            "shm": {"ok": False, "error": "small"},
            "python": {"ok": True, "value": {"version": "3.11"}},
        }
    }
    assert refusal(read(answer, TARGET), TARGET) is None
    answer["checks"]["tmux"] = {"ok": False, "error": "there is no tmux"}
    answer["checks"]["disk"] = {"ok": False, "error": "full", "value": {"free": 5e9}}
    found = refusal(read(answer, TARGET), TARGET)
    assert isinstance(found, RefusedError)
    assert "full" in found.what and "also: there is no tmux" in found.what
    assert found.where == "pve1/200"


def test_missing_modules_come_with_the_command_that_installs_them() -> None:
    found = {"ok": False, "error": "no torch", "value": {"missing": ["torch", "pydantic"]}}
    (check,) = read({"checks": {"modules": found}}, TARGET)
    assert check.next_step.endswith("/opt/py/bin/python -m pip install torch pydantic")


@pytest.mark.parametrize("python", ["python3", "/usr/bin/python3.11"])
def test_debians_own_interpreter_takes_no_pip(python: str) -> None:
    target = TARGET.model_copy(update={"settings": ContainerSettings(python=python)})
    found = {"ok": False, "error": "no torch", "value": {"missing": ["torch"]}}
    (check,) = read({"checks": {"modules": found}}, target)
    assert f"dflashctl exec {target.name} -- python3 -m venv /opt/venv" in check.next_step
    assert "/opt/venv/bin/python -m pip install torch" in check.next_step
    assert f"{python} -m pip" not in check.next_step


def test_what_dflashctl_mends_itself_is_no_warning() -> None:
    (check,) = read({"checks": {"locale": {"ok": False, "error": "no UTF-8 locale"}}}, TARGET)
    assert check.ok and "LC_ALL=C.UTF-8" in check.text


def test_a_driver_that_hangs_is_not_a_card_that_was_not_passed_through() -> None:
    late = {"ok": False, "error": "timed out after 10 s"}
    (check,) = read({"checks": {"gpu": late}}, TARGET)
    assert check.text == "nvidia-smi timed out after 10 s"
    assert "grep -i xid" in check.next_step and "state D" in check.next_step
    assert "pass the GPU through" not in check.next_step
    absent = {"ok": False, "error": "GPU 1 is not visible here (0 are)"}
    (check,) = read({"checks": {"gpu": absent}}, TARGET)
    assert "pass the GPU through" in check.next_step


def test_what_was_measured_has_its_unit() -> None:
    value = {"path": "/workspace", "free": 60.9e9, "free_inodes": 12, "locked_memory": 8388608}
    (check,) = read({"checks": {"disk": {"ok": True, "value": value}}}, TARGET)
    assert check.text == "path /workspace, free 60.9 GB, free inodes 12, locked memory 8 MB"


def test_a_low_limit_comes_with_the_line_that_raises_it() -> None:
    (check,) = read({"checks": {"limits": {"ok": False, "error": "locked memory"}}}, TARGET)
    assert "/etc/pve/lxc/200.conf: lxc.prlimit.memlock: unlimited" in check.next_step


def test_the_gpus_of_a_run_are_the_named_ones_else_all_that_are_seen() -> None:
    visible = [{"index": n, "uuid": f"GPU-{n}"} for n in range(3)]
    checks = {"gpu": {"ok": True, "value": {"visible": visible}}}
    assert wanted(checks, TARGET) == ["GPU-0", "GPU-1"]
    by_uuid = TARGET.model_copy(update={"settings": ContainerSettings(gpus=("GPU-2",))})
    assert wanted(checks, by_uuid) == ["GPU-2"]
    every = TARGET.model_copy(update={"settings": ContainerSettings()})
    assert wanted(checks, every) == ["GPU-0", "GPU-1", "GPU-2"]
    assert wanted({}, every) == []


# What the laptop remembers


def test_the_newest_run_is_remembered_privately(tmp_path: Path) -> None:
    laptop = LaptopPaths({"HOME": str(tmp_path)})
    state = LaptopState(laptop)
    assert state.newest() is None
    state.remember("a-20260101-000000-0001", TARGET)
    state.remember("b-20260101-000000-0002", TARGET)
    newest = state.newest()
    assert newest is not None and newest.run_id.startswith("b-")
    assert newest.target == TARGET
    for path in laptop.state.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    state.forget("b-20260101-000000-0002")
    newest = state.newest()
    assert newest is not None and newest.run_id.startswith("a-")


def test_a_damaged_state_file_is_as_none(tmp_path: Path) -> None:
    laptop = LaptopPaths({"HOME": str(tmp_path)})
    laptop.runs.mkdir(parents=True)
    laptop.newest_run.write_text('{"run_id": "x"}')
    laptop.run("x").write_text("{")
    assert LaptopState(laptop).newest() is None


@pytest.mark.parametrize(
    "state,exit_code,signal,code,words",
    [
        ("finished", 0, None, 0, "finished: exit code 0"),
        ("failed", 3, None, 1, "failed: exit code 3"),
        ("failed", None, 9, 1, "failed: signal 9"),
        ("stopped", 130, None, 0, "stopped: exit code 130"),
    ],
)
def test_how_a_run_ended(
    state: str, exit_code: int | None, signal: int | None, code: int, words: str
) -> None:
    run = RunSummary(run_id="x", state=state, exit_code=exit_code, signal=signal)
    assert (run.verdict, run.ending()) == (code, words)


def test_a_tmux_whose_socket_has_no_place_is_moved_aside_not_installed() -> None:
    folder = "/tmp/tmux-0"
    found = {"ok": False, "error": "tmux cannot keep its socket", "value": {"folder": folder}}
    error = refusal(read({"checks": {"tmux": found}}, TARGET), TARGET)
    assert error is not None and error.next_step is not None
    assert f"dflashctl exec {TARGET.name} -- mv {folder} {folder}.aside" in error.next_step
    absent = {"ok": False, "error": "there is no tmux"}
    error = refusal(read({"checks": {"tmux": absent}}, TARGET), TARGET)
    assert error is not None and "apt install tmux" in str(error.next_step)
