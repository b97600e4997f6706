"""A link that is cut at any moment of any verb: nothing is lost, nothing done twice, all is told.

Every kind runs a seed or two here and twenty in the soak.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from agent_peer import seeds
from laptop import Cli, new_name, own_lines, tree, until

from orchestrator.lab import Lab
from orchestrator.lab.proxy import Direction, Proxy

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]

CT = "lab-201"
# Connecting and starting the agent take some 3 kB each way, where its program is there already.
DOOR = 3_000


def cut(proxied: Proxy, dice: random.Random, up: int, down: int, first: int = 1) -> None:
    """After so many bytes at most, in a direction that the dice choose."""
    direction: Direction = dice.choice(["up", "down"])  # type: ignore[assignment]
    proxied.cut_after(dice.randrange(first, up if direction == "up" else down), direction)


def over(proxied: Proxy) -> None:
    """A cut that is still waiting for its last bytes must not meet what comes after."""
    proxied.cut()


def told(err: str) -> bool:
    """A link that was lost is made again where everybody can see it."""
    return "trying again in" in err or "going on in" in err


def processes(lab: Lab, words: str) -> int:
    line = f"ps axww | grep -c '[{words[0]}]{words[1:]}' || true"
    return int(lab.pct("exec", 201, "--", "sh", "-c", line))


def test_a_login_that_is_cut_off_is_not_called_refused(cli: Cli, proxied: Proxy) -> None:
    """A refused key is for the user to mend; a lost link is not, and is tried again."""
    said = []
    # Bytes that the laptop has sent when the keys are exchanged, and 300 later when it is let in.
    for at in range(1_200, 1_560, 40):
        proxied.cut_after(at, "up")
        done = cli("exec", CT, "--", "true")
        over(proxied)
        assert "refused user" not in done.stderr and "passphrase" not in done.stderr
        said.append(done.stderr)
    assert any("ended during the login" in words for words in said)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_link_that_is_cut_while_it_is_made_is_made_again(
    cli: Cli, proxied: Proxy, code: Path, direction: Direction
) -> None:
    """Banner, keys, login, session, the agent's start: a push tells each cut and goes on."""
    (code / "a").write_text("a\n")
    cli("push", CT, cwd=code, code=0)
    said = []
    for at in range(1, DOOR, 499):
        proxied.cut_after(at, direction)
        said.append(cli("push", CT, cwd=code, code=0).stderr)
        over(proxied)
    assert all(told(words) for words in said), said
    assert "ended during the login" in said[0] and "the connection was lost" in said[-1]


def test_a_look_whose_login_is_cut_is_answered_all_the_same(cli: Cli, proxied: Proxy) -> None:
    cli("ps", CT, code=0)
    for at in (1, 1_000, 1_500):
        proxied.cut_after(at, "down")
        assert told(cli("ps", CT, code=0).stderr)
        over(proxied)


def test_a_host_that_ends_every_login_is_out_of_reach(
    cli: Cli, lab: Lab, code: Path, tmp_path: Path
) -> None:
    """A few attempts, not many: whoever is ended for his keys is locked out in the end."""
    known = yaml.safe_load(lab.inventory.read_text())
    with Proxy(1) as proxy:  # where nothing listens: it accepts, and resets
        known["hosts"]["lab"]["port"] = proxy.port
        cli.inventory = tmp_path / "elsewhere.yaml"
        cli.inventory.write_text(yaml.safe_dump(known))
        error = cli.json("push", CT, cwd=code, code=3)
    assert (error["error"], error["host"]) == ("HostUnreachable", "lab")
    assert "ended during the login" in error["message"] and "MaxStartups" in error["next"]


@pytest.mark.parametrize("seed", seeds(1, 20))
def test_a_push_goes_on_and_is_whole(
    cli: Cli, lab: Lab, proxied: Proxy, code: Path, seed: int
) -> None:
    dice = random.Random(seed)
    for n in range(20):
        (code / f"file{n}").write_bytes(dice.randbytes(100_000))
    releases = lab.files(201) / "workspace/dflashctl/releases"
    before = set(os.listdir(releases)) if releases.exists() else set()
    cut(proxied, dice, 2_200_000, 12_000)
    done = cli("push", CT, cwd=code)
    over(proxied)
    made = {name for name in set(os.listdir(releases)) - before if not name.startswith(".b")}
    assert done.returncode == 0, done.stderr
    assert f" pushed on {CT}: " in done.stdout, "its own, whichever attempt made it"
    answer = cli.json("push", CT, cwd=code)
    assert answer["existing"], "the first push made it, whole"
    assert {name.split(".")[0] for name in made} == {answer["release"]}
    assert tree(lab.files(201) / answer["path"].lstrip("/")) == tree(code)


@pytest.mark.parametrize("seed", seeds(2, 20))
def test_a_launch_never_starts_two(
    cli: Cli, lab: Lab, proxied: Proxy, code: Path, seed: int
) -> None:
    dice = random.Random(seed)
    (code / "blob").write_bytes(dice.randbytes(300_000))
    cut(proxied, dice, 400_000, 14_000)
    name = new_name("cut")
    done = cli("launch", CT, "--name", name, "--", "sleep", "3030", cwd=code)
    over(proxied)
    runs = [r for r in cli.json("ps", CT, "--all")["runs"] if r["name"] == name]
    assert done.returncode == 0, done.stderr
    assert [run["run_id"] for run in runs] == [done.stdout.splitlines()[0]]
    assert processes(lab, "sleep 3030") == len(runs)


@pytest.mark.parametrize("seed", seeds(1, 20))
def test_a_tail_has_every_line_once(cli: Cli, proxied: Proxy, code: Path, seed: int) -> None:
    dice = random.Random(seed)
    script = "for i in $(seq 2000); do echo line $i; [ $((i % 200)) -gt 0 ] || sleep 0.2; done\n"
    (code / "start_training.sh").write_text(script)
    cli("launch", CT, cwd=code, code=0)
    cut(proxied, dice, 9_000, 60_000)
    done = cli("tail", "-n", "100000")
    over(proxied)
    assert done.returncode == 0, done.stderr
    assert own_lines(done.stdout) == [f"line {i}" for i in range(1, 2001)]


@pytest.mark.parametrize("seed", seeds(1, 20))
def test_a_stop_stops_once_and_keeps_the_last_lines(
    cli: Cli, lab: Lab, proxied: Proxy, code: Path, seed: int
) -> None:
    dice = random.Random(seed)
    (code / "start_training.sh").write_text(
        "trap 'echo saving; sleep 1; echo saved; exit 130' INT\necho on\n"
        "while :; do sleep 0.1; done\n"
    )
    run_id = cli.json("launch", CT, cwd=code)["run_id"]
    cut(proxied, dice, 9_000, 9_000, first=DOOR)
    done = cli("stop", run_id)
    over(proxied)
    if done.returncode == 3:
        cli("stop", run_id, code=0)
    else:
        assert done.returncode == 0
        assert "saved" in done.stdout and f"{run_id} stopped" in done.stdout
    found = cli.json("status", run_id)
    assert (found["state"], found["exit_code"]) == ("stopped", 130)
    log = cli("tail", run_id, "-F", "-n", "100", code=0).stdout.split()
    assert log.count("saving") == log.count("saved") == 1


@pytest.fixture(scope="module")
def weights() -> bytes:
    return random.Random(0).randbytes(3_000_000)


@pytest.fixture
def checkpoint(cli: Cli, lab: Lab, weights: bytes, code: Path) -> str:
    """A finished run with one checkpoint of 3 MB."""
    (code / "start_training.sh").write_text("mkdir $DFLASH_RUN_DIR/checkpoints/step-1\n")
    run_id = cli("launch", CT, "--wait", cwd=code, code=0).stdout.splitlines()[0]
    folder = lab.files(201) / f"workspace/dflashctl/runs/{run_id}/checkpoints/step-1"
    (folder / "weights").write_bytes(weights)
    return run_id


@pytest.mark.parametrize("seed", seeds(1, 20))
def test_a_pull_goes_on_where_it_was(
    cli: Cli, proxied: Proxy, checkpoint: str, weights: bytes, tmp_path: Path, seed: int
) -> None:
    # From the first question on: which run, which files.
    at = random.Random(seed).choice([3_000, 4_000, random.Random(seed).randrange(6_000, 2_990_000)])
    before = proxied.traffic()["down"]
    proxied.cut_after(at, "down")
    out = tmp_path / "out"
    done = cli("pull", checkpoint, "--path", "checkpoints/step-1", "--to", out, code=0)
    assert told(done.stderr)
    assert (out / "weights").read_bytes() == weights
    # What had arrived was not fetched again (a window may have been on its way).
    assert proxied.traffic()["down"] - before < 3_000_000 + at + 400_000


# The far side


class Axe(threading.Thread):
    """Kills the server's side of every connection once, a moment after it was made."""

    def __init__(self, lab: Lab, after: float) -> None:
        super().__init__(daemon=True)
        self.lab = lab
        self.after = after
        self.victims: list[int] = []
        self.before = set(lab.sessions())

    def run(self) -> None:
        until = time.monotonic() + 30
        while not set(self.lab.sessions()) - self.before and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(self.after)
        self.victims = sorted(set(self.lab.sessions()) - self.before)
        for pid in self.victims:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def axe(lab: Lab) -> Iterator[type[Axe]]:
    yield Axe


@pytest.mark.parametrize("seed", seeds(1, 20))
def test_sshds_session_killed_under_a_launch_that_follows(
    cli: Cli, lab: Lab, code: Path, seed: int
) -> None:
    dice = random.Random(seed)
    script = "for i in $(seq 60); do echo line $i; sleep 0.05; done\n"
    (code / "start_training.sh").write_text(script)
    name = new_name("axe")
    killer = Axe(lab, dice.uniform(0.0, 4.0))
    killer.start()
    done = cli("launch", CT, "--name", name, "--follow", cwd=code)
    killer.join()
    runs = [r for r in cli.json("ps", CT, "--all")["runs"] if r["name"] == name]
    assert done.returncode == 0, done.stderr
    assert [run["state"] for run in runs] == ["finished"]
    assert own_lines(done.stdout)[-60:] == [f"line {i}" for i in range(1, 61)]
    assert done.stdout.count("line 1\n") == 1


# The laptop


@pytest.mark.parametrize("seed", seeds(1, 20))
def test_a_laptop_that_dies_during_a_launch_leaves_one_run_or_none(
    cli: Cli, lab: Lab, code: Path, seed: int
) -> None:
    dice = random.Random(seed)
    (code / "blob").write_bytes(dice.randbytes(3_000_000))
    name = new_name("dies")
    process = cli.start("launch", CT, "--name", name, "--", "sleep", "3131", cwd=code)
    time.sleep(dice.uniform(0.4, 2.0))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    # What it had asked for may still come about; the agent leaves with its input.
    until = time.monotonic() + 20
    while processes(lab, "DFLASH1") and time.monotonic() < until:
        time.sleep(0.1)
    assert processes(lab, "DFLASH1") == 0
    runs = [r for r in cli.json("ps", CT, "--all")["runs"] if r["name"] == name]
    assert len(runs) <= 1
    assert processes(lab, "sleep 3131") == len(runs)
    half = lab.pct("exec", 201, "--", "sh", "-c", "ls -A /workspace/dflashctl/runs")
    assert ".start-" not in half
    again = cli("launch", CT, "--name", name, "--", "true", cwd=code)
    # A run that lives there is named; else nothing is in the way.
    assert again.returncode == (4 if runs else 0), again.stderr
    assert not runs or runs[0]["run_id"] in again.stderr


@pytest.mark.parametrize("seed", seeds(1, 20))
def test_a_laptop_that_dies_at_any_byte_of_a_push_leaves_what_was_there_and_nothing_half_made(
    cli: Cli, lab: Lab, proxied: Proxy, code: Path, seed: int
) -> None:
    dice = random.Random(seed)
    folder = lab.files(201) / "workspace/dflashctl"
    releases = folder / "releases"

    def change() -> None:
        for n in range(20):
            (code / f"file{n}").write_bytes(dice.randbytes(20_000))

    change()
    whole = {cli.json("push", CT, cwd=code)["release"]: tree(code)}
    before = set(os.listdir(releases))
    proxied.set(rtt_ms=0, rate=1_000_000)
    for _ in range(3):
        change()
        last = proxied.traffic()["up"] + dice.randrange(1, 420_000)
        process = cli.start("push", CT, cwd=code)
        while proxied.traffic()["up"] < last and process.poll() is None:
            time.sleep(0.001)
        process.kill()
        process.communicate()
        until(lambda: processes(lab, "DFLASH1") == 0)
        made = {name.split(".")[0] for name in set(os.listdir(releases)) - before} - {""}
        # One at most: where all of it was there before the end.
        whole |= dict.fromkeys(made - whole.keys(), tree(code))
        assert {name: tree(releases / name) for name in whole} == whole
    proxied.set(rtt_ms=0)
    whole[cli.json("push", CT, cwd=code)["release"]] = tree(code)
    assert {name: tree(releases / name) for name in whole} == whole
    left = [path.name for path in (*releases.iterdir(), *(folder / "blobs").iterdir())]
    assert not [name for name in left if name.startswith((".staging-", ".in-"))]
