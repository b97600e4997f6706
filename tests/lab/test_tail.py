"""Reading a run's log: every line once and in order, whatever happens to the link."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from laptop import Cli, own_lines

from orchestrator.lab import Lab
from orchestrator.lab.proxy import Proxy

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]


def launch(cli: Cli, code: Path, script: str, ct: str = "lab-201", **words: str) -> str:
    (code / "start_training.sh").write_text(script)
    options = [word for name, value in words.items() for word in (f"--{name}", value)]
    return str(cli.json("launch", ct, *options, cwd=code)["run_id"])


def test_it_follows_to_the_end_and_tells_how_it_ended(cli: Cli, code: Path) -> None:
    script = "for i in $(seq 20); do echo line $i; sleep 0.1; done; exit 3\n"
    run_id = launch(cli, code, script)
    done = cli("tail", "-n", "1000", code=1)
    assert own_lines(done.stdout) == [f"line {i}" for i in range(1, 21)]
    assert f"{run_id} failed: exit code 3" in done.stderr
    assert f"dflashctl diag {run_id}" in done.stderr


def test_lines_are_whole_once_and_in_order_across_cuts(
    cli: Cli, lab: Lab, proxied: Proxy, code: Path
) -> None:
    script = "for i in $(seq 3000); do echo line $i; [ $((i % 300)) -gt 0 ] || sleep 0.5; done\n"
    launch(cli, code, script)
    process = cli.start("tail", "-n", "100000")
    for _ in range(3):
        time.sleep(2.0)
        proxied.cut()
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert own_lines(out) == [f"line {i}" for i in range(1, 3001)]
    assert "trying again in" in err


def test_a_silent_link_is_noticed_and_nothing_is_lost(cli: Cli, proxied: Proxy, code: Path) -> None:
    launch(cli, code, "for i in $(seq 40); do echo line $i; sleep 0.3; done\n")
    process = cli.start("tail", "-n", "100000")
    time.sleep(3.0)
    proxied.black_hole()
    assert process.stderr is not None
    said = process.stderr.readline()
    while "trying again" not in said and said:
        said = process.stderr.readline()
    assert "no answer for" in said
    proxied.cut()
    proxied.black_hole(False)
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 0
    assert own_lines(out) == [f"line {i}" for i in range(1, 41)]


def test_a_container_that_reboots_under_tail(cli: Cli, lab: Lab, code: Path) -> None:
    launch(cli, code, "echo before; sleep 60\n")
    process = cli.start("tail", "-n", "100")
    assert process.stdout is not None
    for line in process.stdout:
        if line == "before\n":
            break
    lab.reboot(201)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "failed" in err
    assert out.count("before") == 0


def test_a_container_that_is_down_from_the_first_is_not_waited_for(cli: Cli) -> None:
    done = cli("tail", "lab-202", code=4)
    assert "the container is not running" in done.stderr and "pct start 202" in done.stderr
    assert "trying again" not in done.stderr


def test_the_last_lines_and_the_last_seconds(cli: Cli, code: Path) -> None:
    launch(cli, code, "seq 50; sleep 3; seq 51 55\n")
    cli("tail", code=0)
    assert own_lines(cli("tail", "-n", "3", "--no-follow", code=0).stdout)[-2:] == ["54", "55"]
    recent = own_lines(cli("tail", "--since", "2s", "--no-follow", code=0).stdout)
    assert "50" not in recent
    assert len(own_lines(cli("tail", "-n", "1000", "-F", code=0).stdout)) == 55


def test_a_filter_and_json_lines(cli: Cli, code: Path) -> None:
    run_id = launch(cli, code, "seq 1 20\n")
    words = ("tail", "-n", "100", "-F", "--grep", "^1.$")
    assert cli(*words, code=0).stdout.split() == [str(n) for n in range(10, 20)]
    lines = [json.loads(line) for line in cli(*words, "--json", code=0).stdout.splitlines()]
    assert lines[0] == {"run_id": run_id, "host": "lab", "ct": 201, "line": "10"}


def test_progress_bars_are_shown_sensibly_and_stored_untouched(
    cli: Cli, lab: Lab, code: Path
) -> None:
    run_id = launch(cli, code, r"printf 'start\n10%%\r20%%\r100%%\nend\n'" + "\n")
    assert own_lines(cli("tail", "-n", "100", code=0).stdout) == ["start", "100%", "end"]
    log = f"/workspace/dflashctl/runs/{run_id}/train.log"
    stored = lab.pct("exec", 201, "--", "sh", "-c", f"od -c {log}")
    assert r"1   0   %  \r   2   0   %  \r" in stored


def test_several_runs_at_once_are_marked(cli: Cli, code: Path) -> None:
    one = launch(cli, code, "echo one; sleep 2; echo uno\n", "lab-200", name="one")
    two = launch(cli, code, "echo two; sleep 2; echo due; exit 1\n", "lab-201", name="two")
    done = cli("tail", "-n", "100", one, two, code=1)
    for run_id, words in ((one, ["one", "uno"]), (two, ["two", "due"])):
        mine = [line for line in done.stdout.splitlines() if line.startswith(run_id)]
        assert [line.partition(" | ")[2] for line in mine][:2] == words


def test_the_steps_alone(cli: Cli, code: Path) -> None:
    step = {"step": 1, "steps": 2, "loss": 2.5, "tokens": 10, "tokens_per_s": 1500.0, "time": 1}
    lines = "\\n".join(json.dumps({**step, "step": n}) for n in (1, 2))
    launch(cli, code, f"printf '{lines}\\n' > $DFLASH_RUN_DIR/metrics.jsonl; echo noise\n")
    out = cli("tail", "--metrics", "-n", "10", code=0).stdout
    assert [line.split()[:2] for line in out.splitlines()] == [["step", "1/2"], ["step", "2/2"]]
    assert "1.5k tok/s" in out and "noise" not in out


def test_ten_megabytes_a_second_arrive_whole(cli: Cli, lab: Lab, code: Path) -> None:
    launch(cli, code, "seq -f 'line %.0f of many, of a usual length for a log' 300000\n")
    out = own_lines(cli("tail", "-n", "400000", code=0).stdout)
    assert len(out) == 300_000
    assert out[-1].startswith("line 300000 ")
