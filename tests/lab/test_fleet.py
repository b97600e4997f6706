"""Many containers and hosts at once; stopping; diagnosing what is live."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from laptop import Cli, Terminal, until

from orchestrator import agent_bundle, channel
from orchestrator import inventory as inventories
from orchestrator.errors import ConnectionLost
from orchestrator.fleet import Fleet
from orchestrator.lab import Lab
from orchestrator.lab.faults import CLUSTER_DOWN
from orchestrator.lab.proxy import Proxy
from orchestrator.paths import LaptopPaths
from orchestrator.state import LaptopState
from orchestrator.target import Target, everything

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]


def test_a_dead_host_takes_one_time_out_and_never_holds_up_the_others(
    cli: Cli, lab: Lab, code: Path, tmp_path: Path, proxied: Proxy
) -> None:
    run_id = cli.json("launch", "lab-201", "--", "sleep", "60", cwd=code)["run_id"]
    known = yaml.safe_load(lab.inventory.read_text())
    known["hosts"]["dead"] = {"address": "127.0.0.1", "port": proxied.port}
    known["hosts"]["dead"] |= {k: v for k, v in known["hosts"]["lab"].items() if "file" in k}
    known["hosts"]["dead"]["known_hosts"] = known["hosts"]["lab"]["known_hosts"]
    gone = {f"gone-{number}": {"host": "dead", "ct": number} for number in range(1, 11)}
    known["containers"] = {**gone, **known["containers"]}
    proxied.black_hole()
    before = proxied.traffic()["connections"]
    cli.inventory = tmp_path / "two-hosts.yaml"
    cli.inventory.write_text(yaml.safe_dump(known))
    terminal = Terminal(cli, "ps")
    terminal.until(run_id.encode())
    # The dead one takes its 10 s; the others were on the screen before.
    assert b"unreachable" not in terminal.seen
    assert terminal.exit_code() == 0
    assert b"unreachable" in terminal.seen and all(name.encode() in terminal.seen for name in gone)
    assert proxied.traffic()["connections"] == before + 1


def test_ps_tells_what_is_not_running_apart_from_what_failed(
    cli: Cli, lab: Lab, code: Path, tmp_path: Path
) -> None:
    cli("launch", "lab-201", "--wait", "--", "false", cwd=code, code=1)
    found = cli.json("ps")
    assert [(gone["ct"], gone["state"]) for gone in found["unreachable"]] == [(202, "not running")]
    assert next(run for run in found["runs"] if run["ct"] == 201)["state"] == "failed"
    # Of a colleague's run id nobody knows how long it is before it comes.
    ben = Cli.at_home(tmp_path / "ben", lab.inventory)
    long = ben.json("launch", "lab-200", "--name", 40 * "n", "--", "true", cwd=code)["run_id"]
    header, *rows = cli("ps", code=0).stdout.splitlines()
    assert any(row.startswith(long) for row in rows)
    assert {row.index("lab-20") for row in rows} == {header.index("WHERE")}


def test_stop_lets_the_run_save_and_keeps_its_last_lines(cli: Cli, lab: Lab, code: Path) -> None:
    (code / "start_training.sh").write_text(
        "trap 'echo saving; sleep 1; echo saved; exit 130' INT\necho on\n"
        "while :; do sleep 0.1; done\n"
    )
    run_id = cli.json("launch", "lab-201", cwd=code)["run_id"]
    done = cli("stop", run_id, code=0)
    assert "saved" in done.stdout and f"{run_id} stopped" in done.stdout
    found = cli.json("status", run_id)
    assert (found["state"], found["exit_code"]) == ("stopped", 130)
    assert "had already ended" in cli("stop", run_id, code=0).stdout


def test_stop_ends_what_will_not_listen(cli: Cli, lab: Lab, code: Path) -> None:
    (code / "start_training.sh").write_text("trap '' INT TERM\necho on\nsleep 1234 & wait\n")
    run_id = cli.json("launch", "lab-201", cwd=code)["run_id"]
    done = cli("stop", run_id, "--grace", "1s", code=0)
    assert "SIGKILL" in done.stderr
    assert "1234" not in lab.pct("exec", 201, "--", "ps", "axww")


# diag, live


def codes(report: dict[str, object]) -> list[str]:
    findings = report["findings"]
    assert isinstance(findings, list)
    return [finding["code"] for finding in findings]


def test_an_exception_is_named_with_its_line(cli: Cli, code: Path) -> None:
    (code / "train.py").write_text("def step():\n    raise ValueError('bad shape')\nstep()\n")
    cli("launch", "lab-201", "--wait", "--", "python3", "train.py", cwd=code, code=1)
    report = cli.json("diag", code=1)
    assert codes(report)[0] == "code.error"
    assert "bad shape" in report["findings"][0]["title"]
    assert report["state"] == "failed"


def test_a_stopped_container_is_named(cli: Cli) -> None:
    report = cli.json("diag", "--host", "lab", "--ct", "202", code=1)
    assert codes(report)[0] == "ct.stopped"


def test_a_host_that_is_not_there_is_named_and_unknown(cli: Cli) -> None:
    done = cli("diag", "--host", "127.0.0.1:1", "--ct", "200", "--json", code=3)
    assert codes(json.loads(done.stdout))[0] == "ssh.unreachable"


def test_a_saved_log_is_read_without_reaching_anything(cli: Cli, tmp_path: Path) -> None:
    log = tmp_path / "old.log"
    log.write_text(
        "step 1\nTraceback (most recent call last):\n  File \"t.py\", line 3, in f\nKeyError: 'x'\n"
    )
    cli.inventory = tmp_path / "empty.yaml"
    cli.inventory.write_text("{}")
    assert "code.error" in cli("diag", "--log", log, code=1).stdout
    assert "no such file" in cli("diag", "--log", tmp_path / "none", code=5).stderr


# Many containers of one host, through its own agent


@pytest.fixture
def crowd(cli: Cli, proxied: Proxy) -> list[str]:
    """Twenty containers by the inventory: two real ones with ten work folders each."""
    known = yaml.safe_load(cli.inventory.read_text())
    ones = [known["containers"][name] for name in ("lab-200", "lab-201")]
    known["containers"] = {
        f"c{n}": {**ones[n % 2], "workdir": f"/workspace/{n}"} for n in range(20)
    }
    cli.inventory.write_text(yaml.safe_dump(known))
    return list(known["containers"])


@pytest.fixture
def fleet(cli: Cli, crowd: list[str]) -> Iterator[tuple[Fleet, list[Target]]]:
    laptop = LaptopPaths({"HOME": str(cli.home)})
    targets = everything(inventories.load(cli.inventory, laptop))
    with Fleet(LaptopState(laptop)) as made:
        made.expect(targets)
        yield made, targets


def agents_in(lab: Lab, ct: int) -> int:
    return lab.pct("exec", ct, "--", "ps", "axww").count(" -I -S -c ")


def test_twenty_containers_stay_open_on_one_connection(
    fleet: tuple[Fleet, list[Target]], proxied: Proxy
) -> None:
    # sshd would allow ten sessions.
    made, targets = fleet
    ways = [made.container(target) for target in targets]
    for _ in range(2):
        asked = [way.request("run.list") for way in ways]
        assert [request.result()["runs"] for request in asked] == [[]] * 20
    assert proxied.traffic()["connections"] == 1
    assert made.room(targets[0].host) > 20


def test_ps_asks_them_all_with_the_program_sent_once(
    cli: Cli, crowd: list[str], proxied: Proxy
) -> None:
    assert cli.json("ps") == {"runs": [], "unreachable": []}
    seen = proxied.traffic()
    assert seen["connections"] == 1
    assert seen["up"] < 4 * len(agent_bundle.bundle().data)


def test_they_can_be_entered_by_lxc_attach(cli: Cli, lab: Lab, crowd: list[str]) -> None:
    known = yaml.safe_load(cli.inventory.read_text())
    known["hosts"]["lab"]["enter"] = "lxc-attach"
    known["containers"]["off"] = {"host": "lab", "ct": 202}
    cli.inventory.write_text(yaml.safe_dump(known))
    # Every `pct` fails: none is used for several, one alone goes by pct.
    with lab.fault(CLUSTER_DOWN):
        said = cli("inventory", "check", code=4).stdout
        assert said.count("answers") == 20
        assert "the container is not running, or there is none of that number" in said
        assert "cluster filesystem is down" in cli("exec", "c1", "--", "true", code=3).stderr


def test_a_frozen_container_holds_up_no_other(cli: Cli, lab: Lab, crowd: list[str]) -> None:
    lab.freeze(200)
    try:
        process = cli.start("inventory", "check")
        said, err = process.communicate(timeout=60)
    finally:
        lab.thaw(200)
    # Told by its host at once: nobody waits for its silence.
    assert sum(line.endswith("  answers") for line in said.splitlines()) == 10, err
    assert said.count("container 200 is frozen") == 10 and "lxc-unfreeze" in said
    assert process.returncode == 3


def test_a_stopped_one_is_told_as_such_beside_the_others(cli: Cli, crowd: list[str]) -> None:
    known = yaml.safe_load(cli.inventory.read_text())
    known["containers"]["off"] = {"host": "lab", "ct": 202}
    known["containers"]["none"] = {"host": "lab", "ct": 999}
    cli.inventory.write_text(yaml.safe_dump(known))
    said = cli("inventory", "check", code=5).stdout
    assert said.count("answers") == 20
    assert "the container is not running" in said and "no such container" in said


def test_a_cut_link_ends_what_was_relayed_and_a_new_one_goes_on(
    fleet: tuple[Fleet, list[Target]], lab: Lab, proxied: Proxy
) -> None:
    made, targets = fleet
    ways = [made.container(target) for target in targets[:6]]
    waiting = [way.request("exec", command=["sleep", "600"]) for way in ways]
    for way in ways:
        way.hello()
    proxied.cut()
    for request in waiting:
        with pytest.raises(ConnectionLost):
            request.result()
    for way in ways:
        made.drop(way)
    until(lambda: agents_in(lab, 200) + agents_in(lab, 201) == 0)
    assert made.container(targets[0]).call("ping")
    assert proxied.traffic()["connections"] == 2


def test_a_relayed_pct_that_is_killed_takes_no_other_with_it(
    fleet: tuple[Fleet, list[Target]], lab: Lab
) -> None:
    made, targets = fleet
    one, other = made.container(targets[0]), made.container(targets[1])
    waiting = one.request("exec", command=["sleep", "600"])
    one.hello()
    other.hello()
    agent = made.host(targets[0].host).hello()["pid"]
    children = lab.host(["ps", "--ppid", str(agent), "-o", "pid=,args="])
    found = [line.split() for line in children.stdout.splitlines()]
    pid = next(words[0] for words in found if "200" in words)
    lab.host(["kill", "-9", pid])
    with pytest.raises(ConnectionLost, match="the agent ended"):
        waiting.result()
    made.drop(one)
    assert other.call("ping") and made.container(targets[0]).call("ping")
    until(lambda: agents_in(lab, 200) == 1)


def test_both_streams_flooded_arrive_whole(fleet: tuple[Fleet, list[Target]]) -> None:
    made, targets = fleet
    script = "head -c 10000000 /dev/zero & head -c 10000000 /dev/zero | tr '\\0' x >&2; wait"
    asked = [
        made.container(target).request("exec", command=["sh", "-c", script])
        for target in targets[:2]
    ]
    for request in asked:
        heard = {"stdout": 0, "stderr": 0}
        for head, payload in request.frames():
            heard[head["stream"]] += len(payload)
        assert heard == {"stdout": 10_000_000, "stderr": 10_000_000}


def test_without_an_agent_on_the_host_they_take_turns_with_one_notice(
    cli: Cli, crowd: list[str]
) -> None:
    known = yaml.safe_load(cli.inventory.read_text())
    known["hosts"]["lab"]["python"] = "/no/such/python"
    cli.inventory.write_text(yaml.safe_dump(known))
    done = cli("inventory", "check", code=0)
    assert done.stdout.count("answers") == 20
    assert done.stderr.count("the agent cannot run on the host itself") == 1


def test_a_command_in_several_runs_at_once_and_marks_their_lines(
    cli: Cli, lab: Lab, crowd: list[str]
) -> None:
    words = ("sh", "-c", "echo out $(pwd); echo err >&2; printf end; exit 3")
    done = cli("exec", "lab/200", "lab/201", "lab/202", "--", *words, code=4)
    for name in ("lab/200", "lab/201"):
        # The first name of the inventory that has this container.
        mark = f"{'c0' if name == 'lab/200' else 'c1':<7} | "
        assert {f"{mark}out /root", f"{mark}end"} <= set(done.stdout.splitlines()), done.stdout
        assert f"{mark}err" in done.stderr.splitlines()
    assert "lab/202: the container is not running" in done.stderr
    assert done.stderr.count("exit code 3") == 2


def test_the_answers_of_several_are_an_object_each(cli: Cli, crowd: list[str]) -> None:
    done = cli("exec", "c0", "c1", "--json", "--", "sh", "-c", "exit 3", code=3)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(one["ct"], one["exit_code"]) for one in found} == {(200, 3), (201, 3)}


def test_input_is_for_one_container(cli: Cli, crowd: list[str]) -> None:
    assert "2 were named" in cli("exec", "c0", "c1", "--stdin", "--", "cat", code=2).stderr


def test_a_push_to_several_reaches_all_that_can_be_reached(
    cli: Cli, lab: Lab, crowd: list[str], code: Path, proxied: Proxy
) -> None:
    (code / "data").write_bytes(os.urandom(2_000_000))
    done = cli("push", "c0", "c1", "lab/202", cwd=code, code=4)
    assert done.stdout.count("pushed on") == 2
    assert "lab/202: the container is not running" in done.stderr
    assert cli("push", "c0", "c1", cwd=code, code=0).stdout.count("was there already") == 2


def test_one_that_freezes_while_it_is_asked_is_lost_alone(
    fleet: tuple[Fleet, list[Target]], lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "QUIET_S", 0.3)
    monkeypatch.setattr(channel, "DEAD_S", 2.0)
    made, targets = fleet
    one, other = made.container(targets[0]), made.container(targets[1])
    for way in (one, other):
        way.hello()
    lab.freeze(200)
    try:
        asked = one.request("run.list")
        for _ in range(20):
            assert other.call("run.list")["runs"] == []
        with pytest.raises(ConnectionLost, match="no answer"):
            asked.result()
        made.drop(one)
        assert other.call("ping"), "the host's connection lives on"
    finally:
        lab.thaw(200)
    assert made.container(targets[0]).call("ping")


def test_a_login_shell_that_prints_first_harms_none_of_many(
    cli: Cli, lab: Lab, crowd: list[str]
) -> None:
    profile = "/root/.bashrc"
    lab.host(["sh", "-c", f"test ! -e {profile} || mv {profile} {profile}.kept"])
    lab.host(["sh", "-c", f"echo 'echo Welcome to PVE; seq 5000; seq 5000 >&2' > {profile}"])
    try:
        assert cli.json("ps") == {"runs": [], "unreachable": []}
        assert cli("exec", "c0", "c1", "--", "echo", "hi", code=0).stdout.count(" | hi") == 2
    finally:
        lab.host(
            ["sh", "-c", f"rm {profile}; test ! -e {profile}.kept || mv {profile}.kept {profile}"]
        )


def test_a_further_session_is_answered_from_inside_the_same_container(
    lab: Lab, tmp_path: Path
) -> None:
    laptop = LaptopPaths({"HOME": str(tmp_path)})
    targets = everything(inventories.load(lab.inventory, laptop))
    target = next(one for one in targets if one.ct == 201)
    with Fleet(LaptopState(laptop)) as fleet:
        first = fleet.container(target).hello()
        beside = fleet.beside(target)
        assert beside is not None
        second = beside().hello()
    same = ("hostname", "boot_id", "workdir", "uid", "python")
    assert [second[name] for name in same] == [first[name] for name in same]
    assert second["pid"] != first["pid"]
