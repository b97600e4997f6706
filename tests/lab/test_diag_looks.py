"""What ``diag`` looks at on a live run: both machines side by side, with one end for all looks; the
trainer's plan among the records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ill import launch
from laptop import Cli

from orchestrator import inventory as inventories
from orchestrator import target as targets
from orchestrator.agent.looking import Limit
from orchestrator.agent.probe import SIDES, Scene
from orchestrator.agent.probe import looks as looks_of
from orchestrator.channel import AgentChannel
from orchestrator.collect import AFTERWARDS, LOOK_LIMIT_S, Collected, collect
from orchestrator.fleet import Fleet
from orchestrator.lab import Container, Lab
from orchestrator.paths import LaptopPaths
from orchestrator.run import RunRef
from orchestrator.state import LaptopState

pytestmark = [pytest.mark.lab, pytest.mark.slow]

HANGS = "#!/bin/sh\ntrap '' TERM\nexec sleep 600\n"
TOOLS = ("nvidia-smi", "df")
"""What hangs in the kernel on a lost card, on a dead mount."""


@pytest.fixture(scope="module")
def sick(make_lab: Any) -> Lab:
    """Container 300 and its host, on both of which ``TOOLS`` never end; 301 is sound."""
    lab: Lab = make_lab(containers=(Container(300), Container(301)))
    lab.up()
    return lab


@pytest.fixture
def here(sick: Lab, tmp_path: Path) -> Cli:
    return Cli.at_home(tmp_path / "home", sick.inventory)


@pytest.fixture
def hung(sick: Lab, here: Cli, code: Path, tmp_path: Path) -> Iterator[str]:
    """A run of container 300 that lives, and under it ``TOOLS`` begin to hang: on the host by the
    PATH of its Python, because its own tools are the machine's."""
    run_id = launch(here, code, "echo step 1/9 loss 8.1; sleep 600", 300)
    outside, inside = sick.layout.root / "hanging", sick.files(300) / "usr/local/bin"
    outside.mkdir()
    tools = [folder / tool for folder in (outside, inside) for tool in TOOLS]
    for tool in tools:
        tool.write_text(HANGS)
    python = outside / "python3"
    python.write_text(f'#!/bin/sh\nPATH={outside}:$PATH exec /usr/bin/python3 "$@"\n')
    for path in (*tools, python):
        path.chmod(0o755)
    known = yaml.safe_load(sick.inventory.read_text())
    known["hosts"]["lab"]["python"] = str(python)
    here.inventory = tmp_path / "hanging.yaml"
    here.inventory.write_text(yaml.safe_dump(known))
    yield run_id
    for path in (*tools, python):
        path.unlink()
    outside.rmdir()


def look(cli: Cli, tmp_path: Path, run_id: str, ct: int) -> Collected:
    """As the verb does, in this process."""
    laptop = LaptopPaths({"HOME": str(cli.home)})
    known = inventories.load(cli.inventory, laptop)
    (target,) = targets.resolve(known, [f"lab-{ct}"], None, None)
    with Fleet(LaptopState(laptop), patient=False) as fleet:
        return collect(fleet, RunRef(target, run_id), tmp_path / "train.log")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Every request of the diagnosis, in order: its name and its fields."""
    found: list[tuple[str, dict[str, Any]]] = []
    request = AgentChannel.request

    def listen(self: AgentChannel, op: str, payload: bytes = b"", /, **fields: Any) -> Any:
        found.append((op, fields))
        return request(self, op, payload, **fields)

    monkeypatch.setattr(AgentChannel, "request", listen)
    return found


def test_tools_that_hang_on_both_sides_are_evidence(
    here: Cli,
    tmp_path: Path,
    hung: str,
    asked: list[tuple[str, dict[str, Any]]],
) -> None:
    probes = look(here, tmp_path, hung, 300).probes

    late = f"timed out after {LOOK_LIMIT_S:g} s"
    inside = {name for name, value in probes.items() if value == late}
    # Each is told, and takes nothing else with it: not those that were to begin after it.
    assert inside >= {"nvidia_smi", "nvidia_smi_L", "nvidia_smi_q", "nvidia_smi_topo"}
    assert inside >= {"df", "inodes", "shm", "host_nvidia_smi_L", "host_compute_apps"}
    scene = Scene(None, "python3", 300, "/etc/pve", Limit(LOOK_LIMIT_S))
    for side in SIDES:
        assert set(looks_of(side, scene)) - AFTERWARDS <= probes.keys()
    assert "sleep 600" in probes["ps"]
    assert probes["pct_status"] == "status: running"
    assert not {"host_agent", "container_agent"} & probes.keys()
    # One request a machine, with the one limit; the log is asked for while they look.
    looks = [fields for op, fields in asked if op == "probe"]
    assert [fields["timeout_s"] for fields in looks] == [LOOK_LIMIT_S] * 2
    assert sorted(fields.get("side", "container") for fields in looks) == ["container", "host"]


def test_a_hanging_tool_alarms_nobody_about_a_run_that_lives(here: Cli, hung: str) -> None:
    codes = {f["code"] for f in here.json("diag", hung)["findings"] if f["severity"] != "info"}

    assert not codes


def plan() -> str:
    costs = {"target_s": 0.05, "drafter_s": 0.1}
    detail = {"context_tokens": 4096, "costs": costs, "tokens_per_s": 40_960.0}
    detail |= {"targets": ["cuda:0"], "drafters": ["cuda:1"]}
    return json.dumps({"time": 1.0, "event": "plan", "detail": detail})


def test_the_plan_of_a_live_run(here: Cli, code: Path) -> None:
    """It is told and no alarm, and not taken for another run's rate."""
    steps = "".join(
        json.dumps({"time": 9.0 * i, "step": i, "steps": 400, "loss": 8.0, "tokens_per_s": 12e3})
        + "\n"
        for i in range(1, 30)
    )
    (code / "events.jsonl").write_text(plan() + "\n")
    (code / "metrics.jsonl").write_text(steps)
    script = 'cp events.jsonl metrics.jsonl "$DFLASH_RUN_DIR"\necho step 29/400; sleep 600\n'
    run_id = launch(here, code, script, 301)
    for _ in range(100):
        if here.json("status", run_id)["step"] == 29:
            break

    found = here.json("diag", run_id)

    (finding,) = [f for f in found["findings"] if f["code"] == "throughput.collapse"]
    assert "measured 12.0k tok/s; planned 41.0k" in finding["title"]
    assert found["healthy"]
    here("stop", run_id, "--grace", "1s")
