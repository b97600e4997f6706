"""One run on two real containers: they meet first, or nothing starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from laptop import Cli, new_name

from orchestrator.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]

# The first node waits at the port that was tried; the other goes there.
NODE = """\
import os, socket, time
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["NODE_RANK"] == "0":
    with socket.create_server(place) as door:
        print("met", door.accept()[0].recv(9).decode())
else:
    for _ in range(100):
        try:
            link = socket.create_connection(place, 2)
        except OSError:
            time.sleep(0.1)
            continue
        link.sendall(b"rank" + os.environ["NODE_RANK"].encode())
        break
"""


@pytest.fixture
def code(code: Path) -> Path:
    (code / "node.py").write_text(NODE)
    return code


def test_two_containers_make_one_run_that_meets_where_it_was_tried(cli: Cli, code: Path) -> None:
    words = ("launch", "lab-200", "lab-201", "--name", "pair", "--wait")
    done = cli(*words, "--", "python3", "node.py", cwd=code, code=0)
    ids = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert [i.partition("-20")[0] for i in ids] == ["pair-n0", "pair-n1"]
    assert cli("tail", "--no-follow", ids[0], code=0).stdout == "met rank1\n"
    record = json.loads(cli("status", ids[1], "--json", code=0).stdout)["record"]
    assert (record["nodes"]["rank"], record["nodes"]["run_ids"]) == (1, ids)


@pytest.fixture
def cut_off(lab: Lab) -> Iterator[None]:
    """Container 201 is on no network."""
    lab.pct("exec", 201, "--", "ip", "link", "set", "eth0", "down")
    yield
    lab.pct("exec", 201, "--", "ip", "link", "set", "eth0", "up")


@pytest.mark.usefixtures("cut_off")
def test_a_node_that_cannot_reach_the_first_keeps_all_from_starting(cli: Cli, code: Path) -> None:
    words = ("launch", "lab-200", "lab-201", "--name", "apart", "--", "python3", "node.py")
    done = cli(*words, cwd=code, code=4)
    assert "lab-201: it cannot reach the first node, lab-200" in done.stderr
    runs = cli.json("ps", "lab-200", "lab-201", "--all")["runs"]
    assert not [run for run in runs if run["run_id"].startswith("apart")]


def test_a_node_that_does_not_start_takes_the_others_down_with_it(cli: Cli, code: Path) -> None:
    name = new_name("busy")
    cli("launch", "lab-201", "--name", f"{name}-n1", "--", "sleep", "99", cwd=code, code=0)
    words = ("launch", "lab-200", "lab-201", "--name", name, "--", "sleep", "99")
    done = cli(*words, cwd=code, code=4)
    assert f"already running here: {name}-n1-" in done.stderr
    runs = cli.json("ps", "lab-200", "--all")["runs"]
    (run,) = [run for run in runs if run["run_id"].startswith(f"{name}-n0-")]
    assert run["state"] == "stopped"


def test_a_stopped_container_among_them_is_told_before_anything_is_sent(
    cli: Cli, code: Path
) -> None:
    done = cli("launch", "lab", "--", "true", cwd=code, code=4)
    assert "lab-202: the container is not running" in done.stderr


@pytest.mark.parametrize("named", ["one of its nodes", "the whole run"])
def test_to_stop_one_node_is_to_stop_them_all(cli: Cli, code: Path, named: str) -> None:
    words = ("launch", "lab-200", "lab-201", "--name", "pair", "--", "sleep", "99")
    done = cli(*words, cwd=code, code=0)
    ids = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    word = ids[1] if named == "one of its nodes" else ids[1].replace("pair-n1-", "pair-")
    stopped = cli("stop", word, "--grace", "5s", code=0)
    for run_id in ids:
        assert f"{run_id} stopped" in stopped.stdout
        assert json.loads(cli("status", run_id, "--json", code=0).stdout)["state"] == "stopped"


def test_a_node_alone_is_stopped_alone(cli: Cli, code: Path) -> None:
    """Its name looks like a node's."""
    done = cli("launch", "lab-200", "--name", "single-n0", "--", "sleep", "99", cwd=code, code=0)
    run_id = done.stdout.splitlines()[0]
    said = cli("stop", run_id, "--grace", "5s", code=0).stdout
    assert said.count(f"{run_id} stopped") == said.count("single-n0") == 1
