"""The trainer on two containers through torchrun: one run, the losses of one machine's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from laptop import Cli

from orchestrator.lab import Container, Lab
from trainer.telemetry import read_steps

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


def test_two_containers_train_one_drafter(pair: Lab, tmp_path: Path) -> None:
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
    cli = Cli(home, pair.inventory)
    words = ("launch", "lab-200", "lab-201", "--name", "pair", "--config", "nodes.yaml")
    limits = ("--ranks", "2", "--env", "OMP_NUM_THREADS=1")
    done = cli(*words, *limits, cwd=code, code=0)
    first = next(line for line in done.stdout.splitlines() if line.startswith("pair-n0"))
    watching = cli.start("watch", "lab-200", "lab-201", "--every", "1s", cwd=code)
    told, _ = watching.communicate(timeout=240)
    assert watching.returncode == 0, told + cli("tail", "--no-follow", "-n", "60", first).stdout
    cli("pull", first, "--to", tmp_path / "out", code=0)
    lines = list(read_steps((tmp_path / "out" / "metrics.jsonl").read_text()))
    assert [line.step for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1].loss is not None and lines[0].loss is not None
    assert lines[-1].loss < lines[0].loss
    assert (tmp_path / "out" / "checkpoints" / f"step-{STEPS:08d}").is_dir()
