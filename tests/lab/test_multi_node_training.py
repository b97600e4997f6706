"""The trainer in containers: two of them through torchrun as one run, and the shipped playbooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from laptop import Cli

from orchestrator.lab import Container, Lab
from trainer.telemetry import read_events, read_steps

pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parents[1] / "trainer"))

from tiny_target import run_config, save_target, write_chats

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.slow]
STEPS = 12


@pytest.fixture(scope="module")
def pair(make_lab: object) -> Iterator[Lab]:
    """Two containers with torch."""
    containers = (Container(200, python="shared"), Container(201, python="shared"))
    lab: Lab = make_lab(containers=containers)  # type: ignore[operator]
    if not lab.spec.shared_python.is_dir():
        pytest.skip("there is no training interpreter: make lab-python")
    lab.up()
    yield lab


def write_run(tmp_path: Path) -> tuple[Path, Path]:
    """(home, the folder to push): a tiny target, chats, and ``nodes.yaml`` for the processes."""
    home, code = tmp_path / "home", tmp_path / "code"
    home.mkdir()
    code.mkdir()
    save_target(code / "target")
    write_chats(code / "chats.jsonl", 40)
    settings = run_config(
        code,
        optimization={"microbatches": 4, "steps": STEPS},
        pipeline={"executor": "processes", "targets": 1, "drafters": 1},
        checkpoint={"every": STEPS},
        log_every=1,
    )
    text = yaml.safe_dump(settings).replace(f"{code}/", "")
    (code / "nodes.yaml").write_text(text)
    return home, code


def wait_for_end(cli: Cli, code: Path, run_id: str, *names: str) -> None:
    """Of what runs in the containers; a failure shows the run's last lines."""
    watching = cli.start("watch", *names, "--every", "1s", cwd=code)
    told, _ = watching.communicate(timeout=240)
    assert watching.returncode == 0, told + cli("tail", "--no-follow", "-n", "60", run_id).stdout


def check_run(cli: Cli, run_id: str, out: Path) -> None:
    """Every step has its line, the loss fell, and the checkpoint is there."""
    cli("pull", run_id, "--to", out, code=0)
    lines = list(read_steps((out / "metrics.jsonl").read_text()))
    assert [line.step for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1].loss is not None and lines[0].loss is not None
    assert lines[-1].loss < lines[0].loss
    assert (out / "checkpoints" / f"step-{STEPS:08d}").is_dir()


def test_two_containers_train_one_drafter(pair: Lab, tmp_path: Path) -> None:
    home, code = write_run(tmp_path)
    cli = Cli(home, pair.inventory)
    words = ("play", "multi-node", "lab-200", "lab-201", "--set", "config=nodes.yaml")
    cli(*words, "--set", "ranks=2", cwd=code, code=0)
    runs = {run["name"]: run["run_id"] for run in cli.json("ps", "lab-200", "--all")["runs"]}
    first = runs["nodes-n0"]
    wait_for_end(cli, code, first, "lab-200", "lab-201")
    check_run(cli, first, tmp_path / "out")


# `test_pipeline_train.py` shows it of the trainer, the test above what containers add.
@pytest.mark.soak
def test_one_container_starts_its_own_ranks(pair: Lab, tmp_path: Path) -> None:
    home, code = write_run(tmp_path)
    cli = Cli(home, pair.inventory)
    words = ("launch", "lab-200", "--name", "alone", "--config", "nodes.yaml")
    done = cli(*words, "--env", "OMP_NUM_THREADS=1", cwd=code, code=0)
    run_id = done.stdout.splitlines()[0]
    wait_for_end(cli, code, run_id, "lab-200")
    said = cli("tail", "--no-follow", "-n", "500", run_id).stdout
    assert "starting 1 targets and 1 drafters by torchrun" in said
    check_run(cli, run_id, tmp_path / "out")


def test_the_playbooks_bring_a_container_up_and_go_on_with_its_run(
    pair: Lab, tmp_path: Path
) -> None:
    home, code = write_run(tmp_path)
    settings = yaml.safe_load((code / "nodes.yaml").read_text())
    settings["pipeline"] = {"executor": "inline"}
    settings["optimization"]["steps"] = 100_000
    (code / "one.yaml").write_text(yaml.safe_dump(settings))
    cli = Cli(home, pair.inventory)
    began = cli("play", "bring-up", "lab-200", "--set", "config=one.yaml", cwd=code, code=0)
    assert began.stdout.splitlines()[-1].startswith("6/6 diag       ok")
    (run,) = [r for r in cli.json("ps", "lab-200")["runs"] if r["name"] == "first"]
    cli("stop", run["run_id"], code=0)
    cli("play", "resume", "lab-200", "--set", "config=one.yaml", cwd=code, code=0)
    (again,) = [r for r in cli.json("ps", "lab-200")["runs"] if r["name"] == "resumed"]
    assert again["state"] == "training"
    cli("stop", again["run_id"], code=0)
    cli("pull", again["run_id"], "--path", "events.jsonl", "--to", tmp_path / "out", code=0)
    events = list(read_events((tmp_path / "out" / "events.jsonl").read_text()))
    (resumed,) = [event for event in events if event.event == "resumed"]
    assert resumed.detail["step"] > 0 and run["run_id"] in resumed.detail["path"]
