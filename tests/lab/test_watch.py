"""Watching real runs: what is told, when, and what a lost link is not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from laptop import Cli, Terminal

from orchestrator.lab import Lab
from orchestrator.lab.proxy import Proxy

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]

FAKE = Path(__file__).with_name("fake_run.py")


@pytest.fixture
def code(code: Path) -> Path:
    shutil.copy(FAKE, code)
    return code


def launch(cli: Cli, code: Path, target: str, *words: object) -> str:
    command = ("python3", "fake_run.py", *map(str, words))
    return str(cli.json("launch", target, "--", *command, cwd=code)["run_id"])


def watched(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_run_that_slows_down_is_told_with_numbers_and_finishing_is_good(
    cli: Cli, code: Path
) -> None:
    run_id = launch(cli, code, "lab-201", 40, 0.1, 20)
    told = watched(cli("watch", run_id, "--every", "0.2s", "--json", code=0))
    slow = [event for event in told if event["event"] == "slow"]
    assert len(slow) == 1
    assert "4.6k tok/s, 77% below its recent best of 20.0k" in slow[0]["text"]
    assert slow[0]["alarm"] is True
    assert slow[0]["eta_s"] > 0 and told[-1]["eta_s"] is None
    assert (told[-1]["state"], told[-1]["exit_code"], told[-1]["step"]) == ("finished", 0, 40)


def test_a_run_is_measured_by_the_one_before_it_in_its_container_whoever_launched_that(
    cli: Cli, lab: Lab, code: Path, tmp_path: Path
) -> None:
    ben = Cli.at_home(tmp_path / "ben", lab.inventory)
    before = launch(ben, code, "lab-201", 20, 0)
    ben("watch", before, "--every", "0.2s", code=0)
    launch(cli, code, "lab-200", 1, 0)  # this laptop's newest is elsewhere
    run_id = launch(cli, code, "lab-201", 40, 0.1, 1)
    told = watched(cli("watch", run_id, "--every", "0.2s", "--json", code=0))
    (slower,) = [event for event in told if event["event"] == "slower"]
    assert "4.6k tok/s, 77% below the run before it (20.0k)" in slower["text"]


def test_a_run_is_not_measured_by_another_program(cli: Cli, code: Path) -> None:
    shutil.copy(FAKE, code / "other_run.py")
    good = ("python3", "other_run.py", "20", "0")
    other = cli.json("launch", "lab-201", "--", *good, cwd=code)["run_id"]
    cli("watch", str(other), "--every", "0.2s", code=0)
    run_id = launch(cli, code, "lab-201", 40, 0.05, 1)
    told = watched(cli("watch", run_id, "--every", "0.2s", "--json", code=0))
    assert [event["text"] for event in told if event["alarm"]] == []
    assert cli.json("diag", run_id)["findings"] == []


def test_a_failed_run_gives_exit_code_1_and_the_others_are_watched_on(cli: Cli, code: Path) -> None:
    bad = launch(cli, code, "lab-201", 2, 0.1, 9, 3)
    good = launch(cli, code, "lab-200", 20, 0.1)
    told = watched(cli("watch", bad, good, "--every", "0.2s", "--json", code=1))
    ends = {event["run_id"]: event["state"] for event in told}
    assert ends == {bad: "failed", good: "finished"}


class Receiver(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(json.loads(body))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_each_notice_is_posted_to_the_webhook(cli: Cli, code: Path, receiver: Receiver) -> None:
    run_id = launch(cli, code, "lab-201", 3, 0.1)
    url = f"http://127.0.0.1:{receiver.server_port}/hook"
    told = watched(cli("watch", run_id, "--every", "0.2s", "--webhook", url, "--json", code=0))
    assert receiver.bodies == told
    assert receiver.bodies[-1]["state"] == "finished"


def test_a_lost_link_is_unreachable_never_failed_and_the_end_is_heard_all_the_same(
    cli: Cli, lab: Lab, code: Path, proxied: Proxy
) -> None:
    script = "echo on; until [ -e $DFLASH_RUN_DIR/go ]; do sleep 0.1; done"
    run_id = cli.json("launch", "lab-201", "--", "sh", "-c", script, cwd=code)["run_id"]
    process = cli.start("watch", run_id, "--every", "0.2s", "--json")
    assert process.stdout
    told = map(json.loads, process.stdout)
    while next(told)["state"] != "training":
        pass
    proxied.refuse()
    proxied.cut()
    lost = next(told)
    assert (lost["event"], lost["state"], lost["exit_code"]) == ("unreachable", "unreachable", None)
    # It ends while nobody hears it.
    (lab.files(201) / f"workspace/dflashctl/runs/{run_id}/go").touch()
    proxied.refuse(False)
    back, *_, end = told
    assert back["event"] == "reachable"
    assert (end["event"], end["state"], end["exit_code"]) == ("state", "finished", 0)
    assert process.wait(timeout=60) == 0


def test_a_host_that_was_never_reached_is_exit_code_3(cli: Cli, code: Path, proxied: Proxy) -> None:
    run_id = launch(cli, code, "lab-201", 1, 0)
    proxied.refuse()
    cli("watch", run_id, "--json", code=3)


def test_silence_is_a_stall_where_a_limit_says_so(cli: Cli, code: Path) -> None:
    run_id = launch(cli, code, "lab-201", 2, 4)
    told = watched(cli("watch", run_id, "--every", "0.2s", "--stall", "1s", "--json", code=0))
    stalls = [event for event in told if event["event"] == "stalled"]
    assert stalls and stalls[0]["alarm"] is True
    assert told[-1]["state"] == "finished"


def test_a_compile_may_be_silent_for_longer_than_that_limit(cli: Cli, code: Path) -> None:
    compiling = """printf '{"event": "compiling", "time": %s}\\n' $(date +%s.%N) """
    script = compiling + ">> $DFLASH_RUN_DIR/events.jsonl; sleep 4"
    run_id = cli.json("launch", "lab-201", "--", "sh", "-c", script, cwd=code)["run_id"]
    told = watched(cli("watch", run_id, "--every", "0.2s", "--stall", "1s", "--json", code=0))
    assert {"compiling", "finished"} <= {event["state"] for event in told}
    assert not [event for event in told if event["event"] == "stalled"]


def test_more_runs_than_a_host_has_channels_are_all_watched_to_their_end(
    cli: Cli, code: Path
) -> None:
    command = ("--", "python3", "fake_run.py", "20", "0.3")
    starts = [
        cli.start(
            *("launch", "lab-201", "--name", f"crowd{n}", "--force", "--json"), *command, cwd=code
        )
        for n in range(9)
    ]
    ids = [json.loads(process.communicate(timeout=120)[0])["run_id"] for process in starts]
    told = watched(cli("watch", *ids, "--every", "0.5s", "--json", code=0))
    assert {event["run_id"] for event in told if event["state"] == "finished"} == set(ids)


def test_how_a_run_stands_is_a_line_on_a_terminal_and_a_row_of_top_in_a_pipe(
    cli: Cli, code: Path
) -> None:
    launch(cli, code, "lab-201", 100, 0.2)
    terminal = Terminal(cli, "watch", "--every", "0.2s")
    # The run itself says none: it is reckoned from the pace of its steps.
    terminal.until(b"eta ")
    (line,) = re.findall(r"training · step \d+/100 .*eta", terminal.seen.decode())
    assert re.fullmatch(r".*/100 · 20\.0k tok/s · loss \d\.\d{4} · eta", line)
    terminal.type(b"\x03")
    assert terminal.exit_code() == 130
    lines = cli("top", code=0).stdout.splitlines()
    assert "1 training" in lines[0]
    rows = {line.split()[1]: line.split()[2] for line in lines[3:] if line}
    assert rows["lab-201"] == "training"
    assert rows["lab-202"] == "off"
    assert max(map(len, lines)) <= 80


def test_a_report_is_one_page_with_the_runs_curves_and_environment(
    cli: Cli, code: Path, tmp_path: Path
) -> None:
    run_id = launch(cli, code, "lab-201", 5, 0.05)
    cli("watch", run_id, "--every", "0.2s", code=0)
    made = cli.json("report", run_id, "-o", tmp_path / "out" / "page.html")
    page = (tmp_path / "out" / "page.html").read_text()
    assert made["steps"] == 5
    assert run_id in page and "<svg" in page and "environment.python" in page


def test_a_report_of_a_program_that_writes_no_metrics_draws_its_log(
    cli: Cli, code: Path, tmp_path: Path
) -> None:
    steps = "for n in 1 2 3 4; do echo step $n loss $((9 - n)).5 lr 3e-4 tok/s 1050$n; done"
    run_id = cli("launch", "lab-201", "--wait", "--", "sh", "-c", steps, cwd=code).stdout.split()[0]
    told = cli("report", run_id, "-o", tmp_path / "page.html", code=0)
    assert "4 steps of its log" in told.stdout and "no curves" not in told.stderr
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 2 and "<dt>loss</dt><dd>5.5000</dd>" in page
    (row,) = [row for row in cli.json("top", "lab-201")["runs"] if row["run_id"] == run_id]
    assert (row["step"], row["tokens_per_s"]) == (4, 10504)
