"""A launched run and its supervisor, from the laptop: what hangs up, what fills the log, what fails
again and again."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from laptop import Cli, own_lines, until

from orchestrator.lab import Lab
from orchestrator.lab.proxy import Proxy

pytestmark = pytest.mark.lab

ROTATED_AT = 256 << 20


class Watched(NamedTuple):
    cli: Cli
    run_id: str
    watch: subprocess.Popen[str]

    @property
    def folder(self) -> str:
        return f"/workspace/dflashctl/runs/{self.run_id}"


@pytest.fixture(scope="module", autouse=True)
def failing(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A run that fails three times, watched by who launched it. It pauses for 15 s in all, in which
    the other tests have their turn."""
    code = tmp_path_factory.mktemp("code")
    cli = Cli.at_home(code.with_name("home"), lab.inventory)
    (code / "start_training.sh").write_text(
        "echo attempt $DFLASH_ATTEMPT from ${DFLASH_RESUME:-the start}\n"
        "until [ -e $DFLASH_RUN_DIR/watched ]; do sleep 0.1; done\n"
        "cd $DFLASH_RUN_DIR/checkpoints; mkdir -p step-00000003 step-00000004.tmp\n"
        "exit $((DFLASH_ATTEMPT + 4))\n"
    )
    run_id = cli.json("launch", "lab-200", "--restarts", "2", cwd=code)["run_id"]
    with cli.start("watch", run_id, "--every", "0.5s", "--json") as watch:
        made = Watched(cli, run_id, watch)
        assert watch.stdout is not None
        assert json.loads(watch.stdout.readline())["state"] in {"starting", "training"}
        lab.pct("exec", 200, "--", "touch", f"{made.folder}/watched")
        yield made
        watch.kill()
    cli.end_runs()


def test_between_two_attempts_it_lives_and_says_when_it_goes_on(failing: Watched) -> None:
    said = f"attempt 1 failed, exit code 5; attempt 2 begins in 5 s from {failing.folder}"
    shown = until(
        lambda: said in (text := failing.cli("status", failing.run_id, code=0).stdout) and text
    )
    assert re.search(r"^attempt +[12] of 3$", shown, re.MULTILINE)
    (run,) = (
        run for run in failing.cli.json("ps", "lab-200")["runs"] if run["run_id"] == failing.run_id
    )
    assert (run["state"], run["exit_code"]) == ("training", None)


def test_a_hang_up_ends_nothing_and_a_rotation_is_not_seen_by_who_follows(
    cli: Cli, lab: Lab, code: Path
) -> None:
    filler = (ROTATED_AT - 20_000) // 1000 * 1000
    lines = [f"line {i} of those about the rotation" for i in range(1, 2001)]
    (code / "start_training.sh").write_text(
        f"yes {'x' * 999} | head -c {filler}\n"
        "echo ready; until [ -e $DFLASH_RUN_DIR/go ]; do sleep 0.05; done\n"
        "for i in $(seq 2000); do echo line $i of those about the rotation; done\n"
    )
    run_id = cli.json("launch", "lab-201", cwd=code)["run_id"]
    folder = lab.files(201) / f"workspace/dflashctl/runs/{run_id}"
    until(lambda: (folder / "train.log").stat().st_size > filler)
    tail = cli.start("tail", run_id, "-n", "1")
    assert tail.stdout is not None
    assert tail.stdout.readline() == "ready\n"
    supervisor = json.loads((folder / "supervisor.json").read_text())["pid"]
    pane = f"pane=$(tmux list-panes -t {run_id} -F '#{{pane_pid}}')"
    lab.pct("exec", 201, "--", "sh", "-c", f"{pane} && kill -HUP {supervisor} $pane")
    (folder / "go").touch()
    out, err = tail.communicate(timeout=60)
    assert (out.splitlines(), tail.returncode) == (lines, 0), err
    old = folder / "train.log.1"
    assert old.stat().st_size <= ROTATED_AT
    rest = (folder / "train.log").read_text().splitlines()
    assert rest == lines[-len(rest) :]
    # And afterwards from both files.
    found = cli("tail", run_id, "-n", "2001", "--no-follow", code=0).stdout.splitlines()
    assert found == ["ready", *lines]
    old.unlink()


def test_every_line_of_every_attempt_comes_once_across_restarts_and_a_cut(
    cli: Cli, proxied: Proxy, code: Path
) -> None:
    (code / "start_training.sh").write_text(
        "for i in $(seq 20); do echo attempt $DFLASH_ATTEMPT line $i; sleep 0.1; done\n"
        "[ $DFLASH_ATTEMPT = 2 ]\n"
    )
    run_id = cli.json("launch", "lab-201", "--restarts", "2", cwd=code)["run_id"]
    process = cli.start("tail", run_id, "-n", "1000")
    time.sleep(2.0)
    proxied.cut()  # after the first failure comes a pause of 5 s
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    wanted = [f"attempt {attempt} line {i}" for attempt in (1, 2) for i in range(1, 21)]
    assert own_lines(out) == wanted


def test_the_limit_ends_it_as_it_last_ended_and_each_attempt_began_from_the_checkpoint(
    failing: Watched,
) -> None:
    assert failing.watch.stdout is not None
    told = [json.loads(line) for line in failing.watch.stdout]
    assert failing.watch.wait() == 1
    again = [(event["alarm"], event["text"]) for event in told if event["event"] == "restarted"]
    where = f"lab-200 {failing.run_id}: it was started again"
    assert again == [(True, f"{where} (attempt {n})") for n in (2, 3)]
    assert (told[-1]["state"], told[-1]["exit_code"]) == ("failed", 7)
    found = failing.cli.json("status", failing.run_id, code=1)
    assert (found["state"], found["exit_code"], found["attempt"]) == ("failed", 7, 3)
    attempts = found["attempts"]
    checkpoint = f"{failing.folder}/checkpoints/step-00000003"
    assert [one["resume"] for one in attempts] == [None, checkpoint, checkpoint]
    assert [one["exit_code"] for one in attempts] == [5, 6, 7]
    first, second = (
        after["started"] - before["ended"] for before, after in itertools.pairwise(attempts)
    )
    assert first < second
    log = failing.cli("tail", failing.run_id, "-n", "9", "--no-follow", code=0).stdout
    assert own_lines(log) == ["attempt 1 from the start"] + [
        f"attempt {n} from {checkpoint}" for n in (2, 3)
    ]
