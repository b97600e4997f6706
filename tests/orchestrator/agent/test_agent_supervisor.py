"""The supervisor: stands where tee stood, and is still there when tee would be gone."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent.process import Tree, alive, read

COUNT = """
import sys, time
for number in range({count}):
    print("line", number, flush=True)
    time.sleep({pause})
"""


def lines(run: dict[str, Any]) -> list[str]:
    """All of the log, the rotated files first."""
    log = Path(run["log"])
    rotated = sorted(log.parent.glob("train.log.[0-9]*"), key=lambda path: -int(path.suffix[1:]))
    return [line for path in (*rotated, log) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_exit_code_is_the_commands_own(runs: Any, code: int) -> None:
    run = runs.start("bash", "-c", f"echo out; echo err >&2; exit {code}")
    end = runs.ending(run)
    assert (end["exit_code"], end["signal"]) == (code, None)
    assert end["reason"] == ("finished" if code == 0 else "failed")
    assert lines(run)[:2] == ["out", "err"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_death_by_a_signal_is_told_from_an_exit_code(runs: Any, number: signal.Signals) -> None:
    end = runs.ending(runs.start("bash", "-c", f"kill -{int(number)} $$"))
    assert (end["exit_code"], end["signal"], end["reason"]) == (None, int(number), "failed")


def test_a_command_that_is_not_there(runs: Any) -> None:
    end = runs.ending(runs.start("/no/such/program"))
    assert end["exit_code"] == 127
    assert "cannot start '/no/such/program'" in end["error"]


@pytest.mark.parametrize(
    ("text", "mode", "code", "why"),
    [
        (b"#!/bin/bash\r\necho\r\n", 0o755, 127, "its lines end in CRLF, so that '/bin/bash\\r'"),
        (b"#!/no/such/bash\necho\n", 0o755, 127, "its first line names /no/such/bash"),
        (b"#!/bin/bash\necho\n", 0o644, 126, "it is not executable: chmod +x"),
        (b"echo\n", 0o755, 126, "its first line names no program"),
    ],
    ids=["crlf", "no-interpreter", "not-executable", "no-first-line"],
)
def test_a_script_that_is_there_and_cannot_be_started(
    runs: Any, tmp_path: Path, text: bytes, mode: int, code: int, why: str
) -> None:
    script = tmp_path / "train.sh"
    script.write_bytes(text)
    script.chmod(mode)
    end = runs.ending(runs.start(str(script)))
    assert end["exit_code"] == code
    assert why in end["error"]


def test_both_outputs_stay_in_order_and_reach_the_pane(runs: Any) -> None:
    code = "import sys\nfor n in range(20): print(n, file=(sys.stdout, sys.stderr)[n % 2])"
    run = runs.python(code)
    runs.ending(run)
    assert lines(run) == [str(number) for number in range(20)]
    shown = runs.wait(lambda: runs.tmux("capture-pane", "-p", "-t", run["session"]))
    assert "19" in shown.split()


def test_the_pane_stays_with_what_was_said(runs: Any) -> None:
    run = runs.start("bash", "-c", "echo why; exit 5")
    runs.ending(run)
    # Not #{pane_dead_status}: tmux 3.3a leaves its child a zombie in 1 of 6 such ends, no status.
    runs.wait(lambda: runs.tmux("list-panes", "-a", "-F", "#{pane_dead}").strip() == "1")
    # With the history: the notice of its death pushes the first line up into it.
    assert "why" in runs.tmux("capture-pane", "-p", "-S", "-", "-t", run["session"]).split()


def kill_server(runs: Any, run: dict[str, Any]) -> None:
    runs.tmux("kill-server")


def kill_server_hard(runs: Any, run: dict[str, Any]) -> None:
    os.kill(run["supervisor"]["tmux_pid"], signal.SIGKILL)


def kill_session(runs: Any, run: dict[str, Any]) -> None:
    runs.tmux("kill-session", "-t", run["session"])


def kill_pane_process(runs: Any, run: dict[str, Any]) -> None:
    pid = int(runs.tmux("list-panes", "-a", "-F", "#{pane_pid}"))
    os.kill(pid, signal.SIGKILL)


def hang_up(runs: Any, run: dict[str, Any]) -> None:
    os.kill(run["supervisor"]["pid"], signal.SIGHUP)
    os.kill(run["supervisor"]["pid"], signal.SIGPIPE)


def freeze_server(runs: Any, run: dict[str, Any]) -> None:
    os.kill(run["supervisor"]["tmux_pid"], signal.SIGSTOP)


def remove_socket(runs: Any, run: dict[str, Any]) -> None:
    next(runs.sockets.glob("tmux-*/default")).unlink()


QUICK = [kill_server, kill_pane_process, remove_socket]
OTHERS = [kill_server_hard, kill_session, hang_up, freeze_server]
FAULTS = [*QUICK, *(pytest.param(fault, marks=pytest.mark.slow) for fault in OTHERS)]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_run_goes_on_whatever_happens_to_tmux(runs: Any, fault: Any) -> None:
    run = runs.python(COUNT.format(count=20, pause=0.02))
    runs.says(run, "line 5")
    fault(runs, run)
    end = runs.ending(run)
    assert (end["exit_code"], end["reason"], end["lost_bytes"]) == (0, "finished", 0)
    assert lines(run) == [f"line {number}" for number in range(20)]
    if fault in (freeze_server, remove_socket):
        # No `kill-server` reaches it any more.
        os.kill(run["supervisor"]["tmux_pid"], signal.SIGKILL)


def test_a_lost_socket_comes_back_when_someone_attaches(runs: Any) -> None:
    run = runs.start("sleep", "60")
    remove_socket(runs, run)
    assert "error connecting" in runs.tmux("ls")
    answer = runs.agent.call("run.attach", run_id=run["run_id"])
    assert answer["alive"]
    assert run["session"] in runs.tmux("ls")


def test_supervisor_and_command_stand_apart_from_the_pane(runs: Any) -> None:
    run = runs.start("sleep", "60")
    supervisor, child = run["supervisor"]["pid"], run["supervisor"]["child"]["pid"]
    pane = int(runs.tmux("list-panes", "-a", "-F", "#{pane_pid}"))
    assert len({os.getsid(pid) for pid in (pane, supervisor, child)}) == 3
    ignored = next(
        line.split()[1]
        for line in Path(f"/proc/{child}/status").read_text().splitlines()
        if line.startswith("SigIgn")
    )
    # Signals 1..31: glibc's posix_spawn leaves its own signal 32 ignored in all that it starts.
    assert int(ignored, 16) & 0x7FFFFFFF == 0, "the command must not inherit ignored signals"


def test_the_log_is_rotated_by_name_between_lines(runs: Any) -> None:
    code = "for n in range(3000): print(f'line {n:05} ' + 'x' * 40)"
    run = runs.python(code, log_bytes=20_000, log_files=20)
    runs.ending(run)
    log = Path(run["log"])
    rotated = list(log.parent.glob("train.log.[0-9]*"))
    assert len(rotated) > 5
    assert all(path.stat().st_size <= 20_000 for path in rotated)
    assert all(path.read_bytes().endswith(b"\n") for path in rotated)
    assert lines(run) == [f"line {number:05} " + "x" * 40 for number in range(3000)]


def test_only_so_many_rotated_logs_are_kept(runs: Any) -> None:
    run = runs.python("for n in range(3000): print('x' * 50)", log_bytes=5_000, log_files=3)
    runs.ending(run)
    names = {path.name for path in Path(run["run_dir"]).glob("train.log.[0-9]*")}
    assert names == {"train.log.1", "train.log.2", "train.log.3"}


def test_output_that_is_no_text_is_stored_untouched(runs: Any) -> None:
    run = runs.python(
        "import sys; sys.stdout.buffer.write(bytes(range(256)) * 100 + b'\\r50%\\r100%')"
    )
    runs.ending(run)
    assert Path(run["log"]).read_bytes() == bytes(range(256)) * 100 + b"\r50%\r100%"


@pytest.mark.slow
def test_a_log_that_someone_removed_goes_on_in_a_new_file(runs: Any) -> None:
    run = runs.python(COUNT.format(count=200, pause=0.02))
    runs.says(run, "line 3")
    Path(run["log"]).unlink()
    runs.wait(lambda: Path(run["log"]).exists())
    runs.says(run, "line 199")


def test_a_supervisor_whose_folder_somebody_removed_ends_with_its_command(runs: Any) -> None:
    run = runs.start("bash", "-c", 'rm -rf "$DFLASH_RUN_DIR"; sleep 0.2')
    supervisor = run["supervisor"]
    runs.wait(lambda: not alive(supervisor["pid"], supervisor["start"]))


def test_what_the_script_left_running_is_still_the_run(runs: Any) -> None:
    """`python train.py &` at a script's end: with tee it ran on, and so it does here."""
    run = runs.start("bash", "-c", "(sleep 0.7; echo late) & exit 0")
    end = runs.ending(run)
    assert lines(run) == ["late"]
    assert end["exit_code"] == 0


def test_a_daemon_with_outputs_of_its_own_does_not_hold_up_the_end(runs: Any) -> None:
    started = time.monotonic()
    run = runs.start("bash", "-c", "setsid sleep 60 > /dev/null 2>&1 & exit 0")
    assert runs.ending(run)["exit_code"] == 0
    assert time.monotonic() - started < 30


def test_what_a_crashed_command_left_behind_is_ended(runs: Any) -> None:
    """Seven ranks of eight in a collective would keep their GPUs for ever."""
    code = """
import subprocess
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
raise SystemExit(9)
"""
    run = runs.python(code)
    end = runs.ending(run)
    assert end["exit_code"] == 9
    assert read(int(lines(run)[0])) is None


# Restarts


def test_a_failed_run_starts_again_from_the_newest_whole_checkpoint(runs: Any) -> None:
    script = """
    echo "attempt $DFLASH_ATTEMPT from ${DFLASH_RESUME:-nothing}"
    mkdir -p "$DFLASH_RUN_DIR"/checkpoints/step-9 "$DFLASH_RUN_DIR"/checkpoints/step-10 \
        "$DFLASH_RUN_DIR"/checkpoints/.step-11 "$DFLASH_RUN_DIR"/checkpoints/step-12.tmp
    [ "$DFLASH_ATTEMPT" = 3 ]
    """
    restart = {"max": 5, "backoff_s": 0.05, "backoff_max_s": 0.1}
    run = runs.start("bash", "-c", script, restart=restart)
    end = runs.ending(run)
    newest = f"{run['run_dir']}/checkpoints/step-10"
    assert [line for line in lines(run) if line.startswith("attempt ")] == [
        "attempt 1 from nothing",
        f"attempt 2 from {newest}",
        f"attempt 3 from {newest}",
    ]
    assert end["reason"] == "finished"
    assert [one["exit_code"] for one in end["attempts"]] == [1, 1, 0]
    assert "attempt 2 begins in 0.05 s" in Path(run["log"]).read_text()


def test_restarts_have_a_limit(runs: Any) -> None:
    restart = {"max": 2, "backoff_s": 0.01, "backoff_max_s": 0.01}
    end = runs.ending(runs.start("bash", "-c", "exit 4", restart=restart))
    assert (end["reason"], len(end["attempts"])) == ("failed", 3)


def test_a_stop_during_the_back_off_is_a_stop(runs: Any) -> None:
    restart = {"max": 2, "backoff_s": 60, "backoff_max_s": 60}
    run = runs.start("bash", "-c", "exit 4", restart=restart)
    runs.says(run, "begins in 60 s")
    answer = runs.agent.call("run.stop", run_id=run["run_id"])
    assert (answer["state"], answer["exit_code"]) == ("stopped", 4)


# Stopping


def test_stop_gives_the_trainer_time_for_its_checkpoint(runs: Any) -> None:
    code = """
import signal, sys, time
def leave(number, frame):
    print("writing the checkpoint", flush=True); time.sleep(0.5); print("done"); sys.exit(130)
signal.signal(signal.SIGINT, leave)
print("ready", flush=True)
time.sleep(60)
"""
    run = runs.python(code)
    runs.says(run, "ready")
    head, frames = runs.agent.finish(
        runs.agent.send("run.stop", run_id=run["run_id"], who="ann", grace_s=20)
    )
    answer = head["result"]
    assert (answer["state"], answer["exit_code"]) == ("stopped", 130)
    assert answer["last_lines"][:3] == ["ready", "writing the checkpoint", "done"]
    assert [part["signal"] for part, _ in frames] == ["INT"]
    assert runs.ending(run)["stop"]["who"] == "ann"


def test_a_process_whose_first_thread_has_ended_lives_until_its_others_have(runs: Any) -> None:
    """As torch's does, whose threads free gigabytes: a zombie to look at, and not to be reaped."""
    code = """
import ctypes, os, signal, threading, time
def last():
    leaving.wait(); time.sleep(1); os._exit(7)
leaving = threading.Event()
threading.Thread(target=last).start()
def leave(number, frame):
    leaving.set(); ctypes.CDLL(None).syscall(EXIT, 0)
signal.signal(signal.SIGINT, leave)
print("ready", flush=True)
time.sleep(60)
""".replace("EXIT", {"x86_64": "60", "aarch64": "93"}[os.uname().machine])
    run = runs.python(code)
    runs.says(run, "ready")
    answer = runs.agent.call("run.stop", run_id=run["run_id"], grace_s=20)
    assert (answer["state"], answer["exit_code"]) == ("stopped", 7)
    assert "error" not in runs.ending(run)["attempts"][-1]


@pytest.mark.slow
def test_stop_reaches_children_that_left_their_parents(runs: Any) -> None:
    script = """
    (setsid setsid sleep 600 & ) ; (setsid nohup bash -c 'trap "" INT TERM; sleep 600' &)
    sleep 0.3; echo ready; sleep 600
    """
    run = runs.start("bash", "-c", script)
    runs.says(run, "ready")
    members = Tree(run["run_id"], run["supervisor"]["pid"]).members()
    assert len(members) >= 4
    head, frames = runs.agent.finish(runs.agent.send("run.stop", run_id=run["run_id"], grace_s=0.3))
    assert head["result"]["state"] == "stopped"
    assert [part["signal"] for part, _ in frames][:2] == ["INT", "TERM"]
    assert not [one for one in members if alive(one.pid, one.start)]


def test_stop_works_without_a_supervisor(runs: Any) -> None:
    run = runs.start("bash", "-c", "echo ready; sleep 600")
    runs.says(run, "ready")
    members = Tree(run["run_id"], run["supervisor"]["pid"]).members()
    os.kill(run["supervisor"]["pid"], signal.SIGKILL)
    runs.wait(lambda: not runs.status(run)["alive"])
    assert runs.status(run)["state"] == "training"
    assert "supervisor is gone" in runs.status(run)["reason"]
    answer = runs.agent.call("run.stop", run_id=run["run_id"], grace_s=1)
    assert answer["state"] == "stopped"
    assert not [one for one in members if alive(one.pid, one.start)]


def test_stop_ends_what_outlived_supervisor_and_command(runs: Any) -> None:
    run = runs.start("bash", "-c", "setsid sleep 600 & echo ready; sleep 600; true")
    runs.says(run, "ready")
    members = Tree(run["run_id"], run["supervisor"]["pid"]).members()
    for pid in (run["supervisor"]["pid"], runs.status(run)["supervisor"]["child"]["pid"]):
        os.kill(pid, signal.SIGKILL)
    runs.wait(lambda: runs.status(run)["state"] == "failed")
    assert re.search(r"; left of it: PID \d+, \d+, which stop ends$", runs.status(run)["reason"])
    answer = runs.agent.call("run.stop", run_id=run["run_id"], grace_s=1)
    assert (answer["state"], answer["already"]) == ("failed", False)
    assert not [one for one in members if alive(one.pid, one.start)]
    # What diag names: it was killed, nobody stopped it.
    assert runs.status(run)["reason"] == "the supervisor was killed and left no record"


def test_stop_wakes_a_stopped_supervisor(runs: Any) -> None:
    run = runs.start("sleep", "600")
    os.kill(run["supervisor"]["pid"], signal.SIGSTOP)
    answer = runs.agent.call("run.stop", run_id=run["run_id"], grace_s=5)
    assert (answer["state"], answer["signal"]) == ("stopped", int(signal.SIGINT))


def test_a_terminated_supervisor_stops_its_run_and_says_so(runs: Any) -> None:
    run = runs.start("bash", "-c", "echo ready; sleep 600")
    runs.says(run, "ready")
    os.kill(run["supervisor"]["pid"], signal.SIGTERM)
    end = runs.ending(run)
    assert (end["reason"], end["stop"]["who"]) == ("stopped", "a signal")


def test_a_second_stop_says_that_it_is_over(runs: Any) -> None:
    run = runs.start("true")
    runs.ending(run)
    answer = runs.agent.call("run.stop", run_id=run["run_id"])
    assert (answer["already"], answer["state"]) == (True, "finished")


def test_ctrl_c_in_an_attached_pane_is_a_stop(runs: Any) -> None:
    run = runs.start("bash", "-c", "echo ready; sleep 600")
    runs.says(run, "ready")
    runs.tmux("send-keys", "-t", run["session"], "C-c")
    assert runs.ending(run)["reason"] == "stopped"


@pytest.mark.slow
def test_the_heartbeat_beats(runs: Any) -> None:
    run = runs.start("sleep", "60")
    path = Path(run["run_dir"], "heartbeat.json")
    first = runs.wait(lambda: path.exists() and json.loads(path.read_text() or "null"))
    later = runs.wait(
        lambda: (beat := json.loads(path.read_text()))["time"] > first["time"] and beat
    )
    assert later["lost_bytes"] == 0
    assert runs.status(run)["heartbeat_s"] < 30
