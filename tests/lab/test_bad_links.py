"""Links that are slow, narrow and lossy: every verb still does what it says, only later."""

from __future__ import annotations

import random
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from laptop import Cli, Terminal, own_lines, tree

from orchestrator.errors import RefusedError
from orchestrator.lab import Lab
from orchestrator.lab.loss import loss, missing
from orchestrator.lab.proxy import Proxy

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]

CT = "lab-201"
NARROW = 64 * 1024
"""Bytes a second."""
LOST = 20
"""Percent of all packets, in both directions."""

SCRIPT = """
for i in $(seq 100); do echo line $i; sleep 0.02; done
mkdir $DFLASH_RUN_DIR/checkpoints/step-1
head -c 200000 /dev/urandom > $DFLASH_RUN_DIR/checkpoints/step-1/weights
trap 'echo saved; exit 130' INT
echo ready
while :; do sleep 0.1; done
"""


@pytest.fixture
def lossy(lab: Lab, stopped_after: None) -> Iterator[None]:
    """Real packets of the lab's sshd are lost on the loopback, and TCP has to mend it.

    What is left running is ended when they are no more: nobody there tries again after 10 s.
    """
    if package := missing():
        pytest.skip(f"losing packets needs {package}")
    try:
        with loss(lab.spec.port, LOST):
            yield
    except RefusedError as error:
        pytest.skip(error.what)


class Patient(Cli):
    """A user who tries again where the host was not reached within 10 s, and only there."""

    def __call__(
        self, *words: str | Path, cwd: Path | None = None, code: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        for _ in range(4):
            done = super().__call__(*words, cwd=cwd)
            said = done.stdout + done.stderr
            if not (done.returncode == 3 and "within 10 s" in said and "trying" not in said):
                break
        assert code is None or done.returncode == code, f"exit {done.returncode}: {said}"
        return done


def whole_life(cli: Cli, lab: Lab, code: Path, tmp_path: Path) -> None:
    """push, launch, tail, pull, stop, once each, and what each must leave behind."""
    (code / "start_training.sh").write_text(SCRIPT)
    (code / "blob").write_bytes(random.Random(7).randbytes(150_000))
    answer = cli.json("push", CT, cwd=code)
    assert tree(lab.files(201) / answer["path"].lstrip("/")) == tree(code)
    run_id = cli.json("launch", CT, cwd=code)["run_id"]
    own = [run for run in cli.json("ps", CT)["runs"] if run["run_id"] == run_id]
    assert [run["state"] for run in own] == ["training"]
    run = lab.files(201) / f"workspace/dflashctl/runs/{run_id}"
    weights = run / "checkpoints/step-1/weights"
    while "ready" not in (run / "train.log").read_text():
        time.sleep(0.1)
    cli("pull", run_id, "--path", "checkpoints/step-1", "--to", tmp_path / "out", code=0)
    assert (tmp_path / "out/weights").read_bytes() == weights.read_bytes()
    stopped = cli("stop", run_id, code=0)
    assert "saved" in stopped.stdout
    lines = own_lines(cli("tail", run_id, "-n", "1000", code=0).stdout)
    assert lines == [*(f"line {i}" for i in range(1, 101)), "ready", "saved"]
    flood = "head -c 100000 /dev/zero & head -c 100000 /dev/zero >&2; wait"
    done = cli("exec", CT, "--", "sh", "-c", flood, code=0)
    assert len(done.stdout) == len(done.stderr) == 100_000


def test_a_whole_life_at_100_ms(
    cli: Cli, lab: Lab, proxied: Proxy, code: Path, tmp_path: Path
) -> None:
    proxied.set(rtt_ms=100)
    whole_life(cli, lab, code, tmp_path)


def test_who_sits_before_a_slow_link_is_told_what_is_waited_for(cli: Cli, proxied: Proxy) -> None:
    """A login takes a dozen round trips; a program, a pipe and a cron job are told nothing."""
    proxied.set(rtt_ms=300)
    terminal = Terminal(cli, "exec", CT, "--", "true")
    assert terminal.exit_code() == 0
    assert terminal.seen.count(b"connecting to lab") == 1
    terminal = Terminal(cli, "status", CT, "--json")
    terminal.exit_code()
    assert b"connecting" not in terminal.seen
    assert cli("exec", CT, "--", "true", code=0).stderr == ""


METER = re.compile(rb"pushing to lab-201 ([0-9.]+) (k?B|MB) of 1\.2 MB")


def test_a_pushs_meter_shows_what_has_arrived_and_no_cut_turns_it_back(
    cli: Cli, proxied: Proxy, code: Path
) -> None:
    for number in range(4):
        (code / f"part{number}").write_bytes(random.Random(f"part{number}").randbytes(300_000))
    cli("exec", CT, "--", "true", code=0)  # the agent's program is there
    proxied.set(rtt_ms=20, rate=4 * NARROW)
    proxied.cut_after(900_000, "up")
    terminal = Terminal(cli, "push", CT, "--code", str(code))
    assert terminal.exit_code() == 0, terminal.seen
    assert b"trying again in" in terminal.seen
    factor = {b"B": 1, b"kB": 1_000, b"MB": 1_000_000}
    shown = [float(count) * factor[unit] for count, unit in METER.findall(terminal.seen)]
    assert len(shown) > 3 and shown == sorted(shown) and shown[-1] <= 1_200_000


@pytest.mark.soak
def test_a_whole_life_at_64_kilobytes_a_second(
    cli: Cli, lab: Lab, proxied: Proxy, code: Path, tmp_path: Path
) -> None:
    proxied.set(rtt_ms=0, rate=NARROW)
    whole_life(cli, lab, code, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("lossy")
def test_a_launch_that_follows_with_every_fifth_packet_lost(cli: Cli, code: Path) -> None:
    (code / "start_training.sh").write_text("for i in $(seq 50); do echo line $i; done; exit 3\n")
    done = cli("launch", CT, "--follow", cwd=code, code=1)
    run_id = done.stdout.splitlines()[0]
    assert own_lines(done.stdout)[-50:] == [f"line {i}" for i in range(1, 51)]
    assert f"{run_id} failed: exit code 3" in done.stderr


@pytest.mark.soak
@pytest.mark.usefixtures("lossy")
def test_a_whole_life_with_every_fifth_packet_lost(
    cli: Cli, lab: Lab, code: Path, tmp_path: Path
) -> None:
    whole_life(cli, lab, code, tmp_path)


@pytest.mark.soak
@pytest.mark.usefixtures("lossy")
@pytest.mark.parametrize("turn", range(5))
def test_a_whole_life_on_a_link_that_is_all_of_it(
    cli: Cli, lab: Lab, proxied: Proxy, code: Path, tmp_path: Path, turn: int
) -> None:
    """The proxy ends TCP: the loss is between it and sshd, delay and rate between it and us."""
    proxied.set(rtt_ms=100, rate=NARROW)
    whole_life(Patient(cli.home, cli.inventory), lab, code, tmp_path)


@pytest.mark.slow
def test_a_file_larger_than_the_link_carries_within_the_time_limit_for_silence(
    cli: Cli, lab: Lab, proxied: Proxy, code: Path
) -> None:
    """1 MB takes 16 s, and a link is dead after 9 s without a word."""
    (code / "large").write_bytes(random.Random(1).randbytes(1_000_000))
    proxied.set(rtt_ms=20, rate=NARROW)
    done = cli("push", CT, cwd=code, code=0)
    assert "trying again" not in done.stderr and "no record" not in done.stderr
    assert proxied.traffic()["connections"] == 1
