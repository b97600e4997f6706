"""run.start: exactly once, with the right environment, and never beside one that is in the way."""

from __future__ import annotations

import json
import os
import pwd
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from agent_peer import seeds
from test_agent_releases import push

from orchestrator.agent.frames import encode
from orchestrator.agent.process import Tree, command, table

SHOW = "import json, os; print(json.dumps(dict(os.environ))); print(os.getcwd())"


def shown(runs: Any, run: dict[str, Any]) -> tuple[dict[str, str], str]:
    """The environment and the folder that a run of ``SHOW`` found."""
    runs.ending(run)
    environment, folder = Path(run["log"]).read_text().splitlines()[:2]
    return json.loads(environment), folder


def supervisors(run_id: str) -> int:
    """Of the two processes with that command line, the pane's leads its session."""
    lines = {pid: command(pid) for pid in table()}
    named = [pid for pid, line in lines.items() if "supervise" in line and run_id in line]
    return sum(os.getsid(pid) != pid for pid in named)


def test_a_retry_after_a_lost_answer_starts_nothing(runs: Any) -> None:
    run_id = runs.new_id()
    first = runs.start("sleep", "60", run_id=run_id)
    other = runs.new_agent()
    again = other.call("run.start", run_id=run_id, command=["sleep", "60"], name=run_id)
    assert not first["already"] and again["already"]
    assert again["supervisor"]["child"] == first["supervisor"]["child"]
    assert len(Tree(run_id, first["supervisor"]["pid"]).members()) == 1


def test_a_retry_after_the_end_starts_nothing(runs: Any) -> None:
    run = runs.start("true")
    runs.ending(run)
    again = runs.start("true", run_id=run["run_id"])
    assert (again["already"], again["state"]) == (True, "finished")


def test_the_same_run_id_with_another_command_is_a_conflict(runs: Any) -> None:
    run = runs.start("sleep", "60")
    number = runs.agent.send("run.start", run_id=run["run_id"], command=["rm", "-rf", "x"])
    assert runs.agent.error(number)["kind"] == "run.conflict"


@pytest.mark.parametrize("seed", seeds(3, 100))
def test_an_agent_killed_at_any_moment_of_a_start_never_makes_two(runs: Any, seed: int) -> None:
    chance = random.Random(seed)
    run_id = runs.new_id()
    for _ in range(3):
        victim = runs.new_agent()
        victim.hello()
        victim.send("run.start", run_id=run_id, command=["sleep", "60"], name="n")
        time.sleep(chance.random() * 0.08)
        victim.process.kill()
        victim.process.wait()
    run = runs.start("sleep", "60", run_id=run_id, name="n")
    sleeping = Tree(run_id, run["supervisor"]["pid"]).members()
    assert [one.name for one in sleeping] == ["sleep"]
    assert supervisors(run_id) == 1


def test_two_people_launching_at_once_get_one_run(runs: Any) -> None:
    agents = [runs.new_agent() for _ in range(4)]
    for agent in agents:
        agent.hello()
    answers: list[dict[str, Any]] = []

    def launch(agent: Any, run_id: str) -> None:
        number = agent.send("run.start", run_id=run_id, command=["sleep", "60"], name="train")
        answers.append(agent.finish(number)[0])

    names = [(agent, runs.new_id()) for agent in agents]
    threads = [threading.Thread(target=launch, args=pair) for pair in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    good = [answer for answer in answers if answer["ok"]]
    refused = [answer["error"] for answer in answers if not answer["ok"]]
    assert len(good) == 1
    assert {error["kind"] for error in refused} == {"run.busy"}
    assert refused[0]["detail"]["runs"][0]["run_id"] == good[0]["result"]["run_id"]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [([], []), ([0], []), ([], [0]), ([0, 1], [1, 2])],
    ids=["neither names a GPU", "only they do", "only we do", "one is shared"],
)
def test_a_second_run_is_refused_unless_forced(
    runs: Any, theirs: list[int], ours: list[int]
) -> None:
    """Whatever it is called. One that names no GPU may use all of them."""
    first = runs.start("sleep", "60", gpus=theirs, meta={"who": "anna@desk"})
    fields = {"command": ["sleep", "60"], "name": "other", "gpus": ours}
    error = runs.agent.error(runs.agent.send("run.start", run_id=runs.new_id(), **fields))
    assert error["kind"] == "run.busy"
    assert f"{first['run_id']} of anna@desk" in error["message"]
    (busy,) = error["detail"]["runs"]
    assert (busy["run_id"], busy["who"]) == (first["run_id"], "anna@desk")
    assert busy["gpus"] == [str(gpu) for gpu in theirs if gpu in ours]
    look = runs.agent.call("preflight", python=sys.executable, gpus=ours)["checks"]["runs"]
    assert not look["ok"] and "anna@desk" in look["error"], "doctor says what launch would"
    forced = runs.agent.call("run.start", run_id=runs.new_id(), force=True, **fields)
    assert not forced["already"]


def test_two_runs_with_gpus_of_their_own_share_a_container(runs: Any) -> None:
    runs.start("sleep", "60", gpus=[0, 1])
    look = runs.agent.call("preflight", python=sys.executable, gpus=[2, 3])["checks"]["runs"]
    assert look["ok"]
    started = runs.agent.call(
        "run.start", run_id=runs.new_id(), command=["sleep", "60"], name="other", gpus=[2, 3]
    )
    assert not started["already"]


def test_a_run_that_ended_is_not_in_the_way(runs: Any) -> None:
    runs.ending(runs.start("true", name="train"))
    assert runs.start("true", name="train")["already"] is False


def test_the_environment_is_the_containers_and_the_given_one(runs: Any) -> None:
    # The tmux server is older and has another environment.
    runs.environment |= {"OLD": "server"}
    runs.start("sleep", "60")
    runs.environment.pop("OLD")
    agent = runs.new_agent()
    run_id = runs.new_id()
    odd = {"QUOTED": "a'b\"c$(id)`id`\n;", "EMPTY": "", "LANG": "C", "LD_LIBRARY_PATH": "/x"}
    words = [sys.executable, "-c", SHOW]
    run = agent.call("run.start", run_id=run_id, command=words, env=odd, name="e", force=True)
    found, folder = shown(runs, run)
    assert {key: found[key] for key in odd} == odd
    assert "OLD" not in found and "TMUX" not in found
    assert found["DFLASH_RUN_ID"] == run_id and found["DFLASH_RUN_DIR"] == run["run_dir"]
    assert found["PYTHONUNBUFFERED"] == found["PYTHONFAULTHANDLER"] == "1"
    assert "/usr/local/bin" in found["PATH"].split(":")
    assert folder == str(runs.workdir)


def test_a_program_finds_the_interpreter_that_the_inventory_names_first(
    runs: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "env" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    (folder / "torchrun").symlink_to("/bin/true")
    python = str(folder / "python")
    run = runs.python(SHOW, python=python)
    found, _ = shown(runs, run)
    assert found["PATH"].split(":")[0] == str(folder)
    assert found["PATH"].split(":").count(str(folder)) == 1
    assert "/usr/local/bin" in found["PATH"].split(":")
    assert "VIRTUAL_ENV" not in found, "no virtual environment"
    record = json.loads(Path(run["run_dir"], "run.json").read_text())
    assert record["environment"] == {"PATH": found["PATH"]}
    (tmp_path / "env" / "pyvenv.cfg").touch()
    found, _ = shown(runs, runs.python(SHOW, python=python))
    assert found["VIRTUAL_ENV"] == str(tmp_path / "env")
    assert runs.ending(runs.start("torchrun", python=python))["exit_code"] == 0


@pytest.mark.parametrize("how", ["env", "secrets"])
def test_a_path_that_was_given_wins_over_the_interpreters(runs: Any, how: str) -> None:
    found, _ = shown(
        runs, runs.python(SHOW, python="/opt/py/bin/python", **{how: {"PATH": "/bin"}})
    )
    assert found["PATH"].split(":")[0] == "/bin" and "/opt/py/bin" not in found["PATH"]


def test_a_bare_interpreter_leaves_the_path_alone(runs: Any) -> None:
    run = runs.python(SHOW, python="python3")
    assert shown(runs, run)[0]["PATH"] == shown(runs, runs.python(SHOW))[0]["PATH"]
    assert json.loads(Path(run["run_dir"], "run.json").read_text())["environment"] == {}


def test_a_run_sees_the_gpus_that_it_asked_for(runs: Any) -> None:
    found, _ = shown(runs, runs.python(SHOW, gpus=[5, 2]))
    assert (found["CUDA_VISIBLE_DEVICES"], found["CUDA_DEVICE_ORDER"]) == ("5,2", "PCI_BUS_ID")
    own = {"CUDA_VISIBLE_DEVICES": "1"}
    found, _ = shown(runs, runs.python(SHOW, gpus=["GPU-a"], env=own))
    assert found["CUDA_VISIBLE_DEVICES"] == "1"
    found, _ = shown(runs, runs.python(SHOW))
    assert "CUDA_VISIBLE_DEVICES" not in found


def test_without_a_utf8_locale_the_run_gets_one(runs: Any) -> None:
    runs.environment = {
        "PATH": "/sbin:/bin:/usr/sbin:/usr/bin",
        "LC_ALL": "C",
        "TMUX_TMPDIR": runs.environment["TMUX_TMPDIR"],
    }
    runs.agent = runs.new_agent()
    run = runs.python("import os; print(os.environ['LC_ALL'], 'ü')")
    runs.ending(run)
    assert Path(run["log"]).read_text() == "C.UTF-8 ü\n"


def test_a_run_has_a_home_and_a_user_though_pct_gives_none(runs: Any) -> None:
    runs.environment = {
        "PATH": "/sbin:/bin:/usr/sbin:/usr/bin",
        "USER": "",
        "LOGNAME": "of-ones-own",
        "TMUX_TMPDIR": runs.environment["TMUX_TMPDIR"],
    }
    runs.agent = runs.new_agent()
    found, _ = shown(runs, runs.python(SHOW))
    user = pwd.getpwuid(os.getuid())
    named = (found["HOME"], found["USER"], found["LOGNAME"])
    assert named == (user.pw_dir, user.pw_name, "of-ones-own")


def test_secrets_reach_the_command_and_nothing_else(runs: Any) -> None:
    code = "import os, time; print(len(os.environ['HF_TOKEN']), flush=True); time.sleep(60)"
    run = runs.python(code, secrets={"HF_TOKEN": "hunter2-secret"}, env={"PLAIN": "seen-by-all"})
    runs.says(run, "14")
    folder = Path(run["run_dir"])
    for path in folder.rglob("*"):
        if path.is_file():
            assert b"hunter2" not in path.read_bytes(), path
            assert path.stat().st_mode & 0o077 == 0, path
    lines = [Path(f"/proc/{pid}/cmdline") for pid in table()]
    assert not any(b"hunter2" in line.read_bytes() for line in lines if line.exists())
    # Nor does the tmux server show for ever what it was first started with.
    assert not any(b"seen-by-all" in line.read_bytes() for line in lines if line.exists())
    assert "hunter2" not in runs.tmux("show-environment", "-t", run["session"])
    record = json.loads((folder / "run.json").read_text())
    assert record["secret_names"] == ["HF_TOKEN"]


def test_the_record_says_who_started_what(runs: Any) -> None:
    meta = {"who": "ann@laptop", "git": {"commit": "abc", "dirty": True}}
    diff = b"--- a\n+++ b\n"
    number = runs.agent.send(
        "run.start", diff, run_id="r-1", command=["true"], name="n", env={"A": "1"}, meta=meta
    )
    run = runs.agent.result(number)
    record = runs.status(run)["record"]
    assert record["who"] == "ann@laptop" and record["git"]["commit"] == "abc"
    assert record["command"] == ["true"] and record["env_names"] == ["A"]
    assert Path(run["run_dir"], "dirty.diff").read_bytes() == diff
    assert Path(run["run_dir"]).stat().st_mode & 0o777 == 0o700


def test_the_log_can_be_had_at_a_path_of_ones_choice(runs: Any) -> None:
    link = runs.workdir / "logs" / "train_stdout_diag.log"
    run = runs.python("print('hello')", log_link=str(link))
    runs.ending(run)
    assert link.is_symlink() and link.read_text() == "hello\n"
    again = runs.python("print('again')", log_link=str(link))
    runs.ending(again)
    assert link.read_text() == "again\n"
    assert Path(run["log"]).read_text() == "hello\n"


def test_a_file_at_that_path_is_moved_aside_not_lost(runs: Any) -> None:
    link = runs.workdir / "diag.log"
    link.write_text("of last night")
    run = runs.python("print('hello')", log_link=str(link))
    assert Path(run["log_link_moved"]).read_text() == "of last night"
    runs.ending(run)
    assert link.read_text() == "hello\n"


def test_an_answer_too_long_for_a_frame_is_an_error_not_silence(runs: Any) -> None:
    run = runs.start("true")
    runs.ending(run)
    Path(run["run_dir"], "run.json").write_text(json.dumps({"name": "x" * (9 << 20)}))
    number = runs.agent.send("run.status", run_id=run["run_id"])
    assert "cannot be sent" in runs.agent.error(number)["message"]


@pytest.mark.parametrize("kind", ["folder", "pipe", "foreign link", "no folder to be made"])
def test_where_no_link_to_the_log_can_stand_nothing_starts(runs: Any, kind: str) -> None:
    link = runs.workdir / "diag.log"
    if kind == "folder":
        link.mkdir()
    elif kind == "pipe":
        os.mkfifo(link)
    elif kind == "foreign link":
        link.symlink_to("/proc/self/fd/1")
    else:
        link = Path("/proc/none/diag.log")
    before = link.lstat() if kind != "no folder to be made" else None
    fields = {"run_id": runs.new_id(), "command": ["true"], "name": "n", "log_link": str(link)}
    assert runs.agent.error(runs.agent.send("run.start", **fields))["kind"] == "run.log_link"
    assert [path for path in runs.workdir.glob("dflashctl/runs/*") if path.is_dir()] == []
    assert before is None or link.lstat().st_ino == before.st_ino


def test_a_run_starts_from_the_release_that_is_just_being_committed(runs: Any) -> None:
    import hashlib

    from orchestrator.agent.manifest import Entry, dump

    agent = runs.agent
    data = b"echo from the release; pwd\n"
    entry = Entry("f", "go.sh", hashlib.sha256(data).hexdigest(), len(data))
    begun = agent.stream("release.begin", dump([entry]))
    agent.result(begun)
    blobs = agent.stream("release.blobs", data, blobs=[[entry.digest, len(data)]])
    commit = agent.send("release.commit", begin=begun, after=[blobs])
    run_id = runs.new_id()
    start = agent.send(
        "run.start", run_id=run_id, command=["bash", "go.sh"], release_from=commit, name="n"
    )
    run = agent.result(start)
    runs.ending(run)
    path = agent.result(commit)["path"]
    assert Path(run["log"]).read_text() == f"from the release\n{path}\n"
    assert run["release"] == agent.call("run.status", run_id=run_id)["release"]


@pytest.mark.parametrize("run_id", ["", "a b", "../x", "a.b", "a:b", "-x", "x" * 101, "a/b"])
def test_run_ids_that_could_mean_something_else_are_refused(runs: Any, run_id: str) -> None:
    number = runs.agent.send("run.start", run_id=run_id, command=["true"])
    assert runs.agent.error(number)["kind"] == "request.invalid"


def test_arguments_meet_no_shell(runs: Any) -> None:
    words = ["*", "$(id)", ";", "a;", "-x", "", "two words", "new\nline", "#{pane_id}", "é"]
    run = runs.start("printf", "[%s]\\n", *words)
    runs.ending(run)
    assert Path(run["log"]).read_text() == "".join(f"[{word}]\n" for word in words)


def test_what_is_asked_of_a_run_that_is_not_there_says_so(runs: Any) -> None:
    for op in ("run.attach", "run.status", "run.stop", "stacks", "tail"):
        assert runs.agent.error(runs.agent.send(op, run_id="no-1"))["kind"] == "run.not_found"
    assert runs.agent.error(runs.agent.send("run.status"))["kind"] == "run.not_found"


def test_attach_names_the_first_terminal_that_is_described_here(runs: Any) -> None:
    run = runs.start("sleep", "60")

    def terminal(*names: str) -> Any:
        found = runs.agent.call("run.attach", run_id=run["run_id"], terminals=list(names))
        return found["terminal"]

    assert terminal("xterm-nobodys", "../etc/passwd", "", "xterm", "linux") == "xterm"
    assert terminal("xterm-nobodys") is None


def test_a_start_cut_in_its_input_leaves_no_run(runs: Any) -> None:
    agent = runs.new_agent()
    agent.hello()
    number = agent.send("run.start", run_id="cut-1", command=["true"], more=True)
    agent.write(encode({"id": number, "more": True}, b"half a diff"))
    agent.close()
    assert runs.agent.call("run.list")["runs"] == []
    runs.start("true")
    folder = runs.workdir / "dflashctl/runs"
    assert not list(folder.glob(".start-*"))


def test_a_release_that_is_pruned_while_a_start_is_under_way_is_refused(runs: Any) -> None:
    """Not before the run is written down is its release in use."""
    agent = runs.agent
    old, new = (push(agent, {b"go.sh": b"echo %d\n" % number}) for number in range(2))
    fields = {"run_id": runs.new_id(), "command": ["bash", "go.sh"], "name": "n"}
    starting = agent.send("run.start", release=old["release"], more=True, **fields)
    time.sleep(0.2)  # it has looked for its code, and waits for the uncommitted changes
    assert agent.call("release.prune", keep=1)["removed"] == [old["release"]]
    agent.write(encode({"id": starting}))
    assert agent.error(starting)["kind"] == "release.not_found"
    assert [path for path in runs.workdir.glob("dflashctl/runs/*") if path.is_dir()] == []
    run = agent.call("run.start", release=new["release"], **fields)
    runs.ending(run)
    assert Path(run["log"]).read_text() == "1\n"
