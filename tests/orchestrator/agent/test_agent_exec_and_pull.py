"""exec and pull: true ends, whole bytes, resumable and verified."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent.process import read


def outputs(frames: list[tuple[dict[str, Any], bytes]]) -> dict[str, bytes]:
    found = {"stdout": b"", "stderr": b""}
    for head, payload in frames:
        found[head["stream"]] += payload
    return found


def test_outputs_and_exit_code(agent: Any) -> None:
    command = ["sh", "-c", "echo out; echo err >&2; exit 7"]
    head, frames = agent.finish(agent.send("exec", command=command))
    assert outputs(frames) == {"stdout": b"out\n", "stderr": b"err\n"}
    assert head["result"] == {"exit_code": 7, "signal": None, "timed_out": False}


def test_a_command_is_looked_for_beside_the_interpreter_first(agent: Any, tmp_path: Path) -> None:
    tool = tmp_path / "pip"
    tool.write_text('#!/bin/sh\necho "ours $PATH"\n')
    tool.chmod(0o755)
    python = str(tmp_path / "python")
    _, frames = agent.finish(agent.send("exec", command=["pip"], python=python))
    said, path = outputs(frames)["stdout"].decode().split()
    assert said == "ours" and path.split(":")[0] == str(tmp_path)
    own = {"PATH": "/usr/bin:/bin"}
    command = ["sh", "-c", "echo $PATH"]
    _, frames = agent.finish(agent.send("exec", command=command, python=python, env=own))
    assert outputs(frames)["stdout"] == b"/usr/bin:/bin\n"


def test_death_by_signal(agent: Any) -> None:
    result = agent.call("exec", command=["sh", "-c", "kill -9 $$"])
    assert result == {"exit_code": None, "signal": 9, "timed_out": False}


def test_environment_folder_and_words_meet_no_shell(agent: Any, tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv[1:], os.environ['X'], os.getcwd())"
    words = ["*", "$(id)", "", "new\nline", os.fsdecode(b"\xff")]
    fields = {"env": {"X": "a b;$Y"}, "cwd": str(tmp_path)}
    command = [sys.executable, "-c", code, *words]
    _, frames = agent.finish(agent.send("exec", command=command, **fields))
    expected = f"{words} a b;$Y {tmp_path}\n"
    assert outputs(frames)["stdout"].decode("utf-8", "surrogateescape") == expected


def test_without_input_a_command_reads_end_of_file(agent: Any) -> None:
    assert agent.call("exec", command=["cat"])["exit_code"] == 0


def test_a_command_that_ignores_its_input_still_ends(agent: Any) -> None:
    number = agent.stream("exec", bytes(5_000_000), command=["true"])
    assert agent.result(number)["exit_code"] == 0


def test_input_is_whole_although_its_writer_is_stopped_and_continued(
    agent: Any, tmp_path: Path
) -> None:
    """As by a backup that freezes the container."""
    reads = f"echo $$; until test -e {tmp_path}/go; do sleep 0.02; done; wc -c"
    number = agent.stream("exec", bytes(1_000_000), command=["sh", "-c", reads])
    _, pid = agent.receive(number)
    with open(f"/proc/{int(pid)}/fd/0", "rb") as pipe:
        waiting = bytearray(4)
        while int.from_bytes(waiting, sys.byteorder) < fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ):
            fcntl.ioctl(pipe, termios.FIONREAD, waiting)
        os.kill(agent.process.pid, signal.SIGSTOP)
        while read(agent.process.pid).state != "T":
            pass
        os.kill(agent.process.pid, signal.SIGCONT)
    (tmp_path / "go").touch()
    _, frames = agent.finish(number)
    assert outputs(frames)["stdout"].split() == [b"1000000"]


def test_a_background_child_that_holds_the_pipe_does_not_hold_the_answer(agent: Any) -> None:
    started = time.monotonic()
    head, frames = agent.finish(agent.send("exec", command=["sh", "-c", "sleep 30 & echo hi"]))
    assert head["result"]["exit_code"] == 0
    assert outputs(frames)["stdout"] == b"hi\n"
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_the_whole_group_is_ended(agent: Any, how: str) -> None:
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]
    limit = {"timeout_s": 0.5} if how == "timeout" else {}
    number = agent.send("exec", command=command, **limit)
    _, payload = agent.receive(number)
    if how == "cancel":
        agent.cancel(number)
        assert agent.error(number)["kind"] == "cancelled"
    else:
        result = agent.result(number)
        assert (result["timed_out"], result["signal"]) == (True, int(signal.SIGTERM))
    until = time.monotonic() + 20
    while (found := read(int(payload))) is not None and found.state != "Z":
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_cannot_be_started_is_named(agent: Any, tmp_path: Path) -> None:
    error = agent.error(agent.send("exec", command=["/no/such"]))
    assert error["kind"] == "command.not_found" and "/no/such" in error["message"]
    plain = tmp_path / "plain"
    plain.write_text("x")
    error = agent.error(agent.send("exec", command=[str(plain)]))
    assert (error["kind"], error["detail"]["errno"]) == ("file.unusable", 13)


# pull


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoint"
    (root / "sub" / "empty").mkdir(parents=True)
    (root / "model.safetensors").write_bytes(os.urandom(3_000_000))
    (root / "sub" / os.fsdecode(b"odd \xff\nname")).write_bytes(b"odd")
    (root / "link").symlink_to("model.safetensors")
    (root / "run.sh").write_bytes(b"#!")
    (root / "run.sh").chmod(0o755)
    os.mkfifo(root / "pipe")
    return root


def entries(agent: Any, **fields: Any) -> tuple[dict[str, Any], list[list[Any]]]:
    head, frames = agent.finish(agent.send("pull.list", **fields))
    assert head["ok"], head
    text = b"".join(payload for _, payload in frames)
    return head["result"], [json.loads(line) for line in text.splitlines()]


def test_a_listing_names_everything_but_pipes(agent: Any, folder: Path) -> None:
    result, found = entries(agent, path=str(folder))
    assert result == {"root": str(folder), "files": 3, "bytes": 3_000_005}
    by_name = {entry[1]: entry for entry in found}
    assert set(by_name) == {
        *("model.safetensors", "sub", "sub/empty", "link", "run.sh"),
        os.fsdecode(b"sub/odd \xff\nname"),
    }
    assert by_name["model.safetensors"][2] == 3_000_000
    assert by_name["run.sh"][4] == 0o755
    assert by_name["link"] == ["l", "link", "model.safetensors"]
    assert by_name["sub/empty"] == ["d", "sub/empty"]


def test_a_single_file_is_its_own_root(agent: Any, folder: Path) -> None:
    _, found = entries(agent, path=str(folder / "run.sh"))
    assert [(entry[0], entry[1], entry[2]) for entry in found] == [("f", "", 2)]


@pytest.mark.parametrize("offset", [0, 1, 1_500_000, 3_000_000])
def test_a_file_is_read_from_any_offset_and_hashed_whole(
    agent: Any, folder: Path, offset: int
) -> None:
    path = folder / "model.safetensors"
    head, frames = agent.finish(agent.send("pull.read", path=str(path), offset=offset))
    assert b"".join(payload for _, payload in frames) == path.read_bytes()[offset:]
    assert head["result"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert head["result"]["size"] == 3_000_000


def test_a_file_that_is_no_longer_the_same_is_not_resumed(agent: Any, folder: Path) -> None:
    path = folder / "model.safetensors"
    _, found = entries(agent, path=str(path))
    expected = {"size": found[0][2], "mtime_ns": found[0][3]}
    assert agent.call("pull.read", path=str(path), expect=expected)
    path.write_bytes(b"another")
    error = agent.error(agent.send("pull.read", path=str(path), offset=10, expect=expected))
    assert error["kind"] == "pull.changed"


def test_what_is_not_a_plain_file_is_refused(agent: Any, folder: Path) -> None:
    for path in (folder, folder / "pipe"):
        assert agent.error(agent.send("pull.read", path=str(path)))["kind"] == "request.invalid"
    assert agent.error(agent.send("pull.read", path="/no/such"))["kind"] == "file.not_found"
    assert agent.error(agent.send("pull.list", path="relative"))["kind"] == "request.invalid"


def test_the_newest_whole_checkpoint_of_a_run(runs: Any) -> None:
    make = "mkdir step-2 step-10 step-11.tmp step-12.part; echo x > step-2/a; ln -s step-2 best"
    script = f'cd "$DFLASH_RUN_DIR"/checkpoints; {make}'
    run = runs.start("bash", "-c", script)
    runs.ending(run)
    answer = runs.agent.call("pull.last_checkpoint", run_id=run["run_id"])
    assert (answer["path"], answer["step"]) == (f"{run['run_dir']}/checkpoints/step-10", 10)
    assert len(answer["checkpoints"]) == 2
    assert answer["best"] == f"{run['run_dir']}/checkpoints/step-2"
    _, found = entries(runs.agent, run_id=run["run_id"], path="checkpoints/step-2")
    assert [entry[1] for entry in found] == ["a"]
    result, found = entries(runs.agent, run_id=run["run_id"], path="checkpoints/best")
    assert (result["root"], [entry[1] for entry in found]) == (answer["best"], ["a"])
    error = runs.agent.error(
        runs.agent.send("pull.list", run_id=run["run_id"], path="../../secret")
    )
    assert error["kind"] == "request.invalid"
