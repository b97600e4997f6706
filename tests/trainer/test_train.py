"""A whole run on a tiny target: killed, resumed, stopped, refused. Each run is a process."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny_target import make_home, run_config
from transformers import GPT2Config
from warm_trainer import ROOT, Trainer, wait_for

from trainer.__main__ import main
from trainer.telemetry import read_events, read_steps

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("train"))


def write_config(home: Path, name: str, **changes: Any) -> Path:
    path = home / f"{name}.yaml"
    path.write_text(yaml.safe_dump(run_config(home, folder=str(home / name), **changes)))
    return path


def start(config: Path) -> Trainer:
    return Trainer(config.with_suffix(".log"), "train", config)


def run(config: Path) -> tuple[int, str]:
    with start(config) as process:
        return process.wait(), process.said()


def master(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / "master.safetensors")


def assert_equal_runs(one: Path, other: Path, step: int) -> None:
    for kind in ("master", "average", "square"):
        name = f"checkpoints/step-{step:08d}/{kind}.safetensors"
        first, second = load_file(one / name), load_file(other / name)
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert torch.equal(value, second[key]), (kind, key)


def last_loss(folder: Path) -> float | None:
    """Mean of the last five steps'."""
    return list(read_steps((folder / "metrics.jsonl").read_text()))[-1].loss


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """Twenty steps in one go, evaluated."""
    evaluation = {"count": 3, "max_new_tokens": 8}
    code, said = run(write_config(home, "whole", evaluation=evaluation))
    assert code == 0, said
    return home / "whole"


def test_a_run_tells_its_story(whole: Path) -> None:
    steps = list(read_steps((whole / "metrics.jsonl").read_text()))
    assert [line.step for line in steps] == [1, 5, 10, 15, 20]
    assert all(line.steps == 20 for line in steps)
    assert steps[-1].loss is not None
    assert steps[-1].loss < steps[0].loss
    assert [line.eta_s is None for line in steps] == [False, False, False, False, True]
    events = [line.event for line in read_events((whole / "events.jsonl").read_text())]
    assert [e for e in events if e in ("started", "training", "evaluated", "finished")] == [
        "started",
        "training",
        "evaluated",
        "finished",
    ]
    assert events.count("checkpoint") == 4
    # What is silent for long is announced: the states and `diag` read it.
    phases = ["validating", "validated", "checkpoint"]
    assert all(events[i - 2 : i + 1] == phases for i, e in enumerate(events) if e == "checkpoint")
    assert events[events.index("evaluated") - 1] == "evaluating"
    report = json.loads((whole / "evaluation.json").read_text())
    assert report["tau"] >= 1.0
    assert report["tau_low"] <= report["tau"] <= report["tau_high"]


def test_ten_steps_a_kill_and_ten_more_are_twenty_bit_for_bit(home: Path, whole: Path) -> None:
    config = write_config(home, "killed")
    with start(config) as process:
        wait_for((home / "killed" / "checkpoints" / "step-00000010").exists)
        process.signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    code, said = run(config)
    assert code == 0, said
    assert "resumed step-" in said
    assert_equal_runs(whole, home / "killed", 20)


class KilledTrainer(Trainer):
    """Its first two words say when (``killed_at.py``)."""

    module = "killed_at"


KILLS = [
    ("open", "step-00000005.part/drafter/.config.json.partial"),  # before the masters
    ("open", "step-00000010.part/state.json"),  # before the marker
    ("os.rename", "step-00000015.part"),  # whole, but not under its name
]


def test_a_run_killed_inside_its_saves_is_one_that_never_was_bit_for_bit(
    home: Path, whole: Path
) -> None:
    config, checkpoints = write_config(home, "killed-saving"), home / "killed-saving/checkpoints"
    for event, name in KILLS:
        with KilledTrainer(config.with_suffix(".log"), event, name, "train", config) as process:
            assert process.wait() == -signal.SIGKILL, process.said()
        assert [path.name for path in checkpoints.glob("*.part")] == [name.split("/")[0]]
    code, said = run(config)
    assert code == 0, said
    assert "resumed step-00000010" in said
    assert not list(checkpoints.glob("*.part"))
    assert_equal_runs(whole, checkpoints.parent, 20)
    assert last_loss(checkpoints.parent) == last_loss(whole)


def test_a_run_sent_back_to_an_earlier_checkpoint_makes_the_later_ones_anew(
    home: Path, whole: Path
) -> None:
    config = write_config(home, "back")
    shutil.copytree(whole, home / "back", symlinks=True)
    folder = home / "back" / "checkpoints"
    wanted = {"DFLASH_RESUME": str(folder / "step-00000015")}
    with Trainer(config.with_suffix(".log"), "train", config, **wanted) as process:
        assert process.wait() == 0, process.said()
    assert "resumed step-00000015" in process.said()
    assert "checkpoints beyond step 15 are put aside" in process.said()
    assert [path.name for path in (folder / ".abandoned").iterdir()] == ["step-00000020"]
    assert_equal_runs(whole, home / "back", 20)


def test_sigterm_finishes_the_step_saves_it_and_leaves_with_143(home: Path, whole: Path) -> None:
    config = write_config(home, "stopped", checkpoint={"every": 100})
    with start(config) as process:
        wait_for(lambda: "\nstep " in process.said())
        process.signal(signal.SIGTERM)
        assert process.wait() == 143, process.said()
    events = list(read_events((home / "stopped" / "events.jsonl").read_text()))
    assert [e.event for e in events][-3:] == ["stopping", "checkpoint", "stopped"] or [
        e.event for e in events
    ][-3:] == ["checkpoint", "stopping", "stopped"]
    code, said = run(config)
    assert code == 0, said
    assert_equal_runs(whole, home / "stopped", 20)


def test_another_config_is_refused_by_field_and_nothing_is_lost(home: Path, whole: Path) -> None:
    config = write_config(home, "whole", optimization={"learning_rate": 5e-3})
    code, said = run(config)
    assert code == 2
    assert "optimization.learning_rate: 0.001 in the checkpoint, 0.005 in the config" in said
    assert "Traceback" not in said
    assert master(whole, 20)


def test_losses_that_stay_infinite_stop_the_run_with_the_batch(home: Path) -> None:
    config = write_config(
        home,
        "nan",
        # Overflows float32 in the first steps.
        optimization={"learning_rate": 1e25, "nonfinite_limit": 1, "warmup": 0.0},
    )
    code, said = run(config)
    assert code == 1
    assert "not finite" in said
    assert "Traceback" not in said
    assert list((home / "nan" / "nonfinite").glob("step-*.json"))
    events = list(read_events((home / "nan" / "events.jsonl").read_text()))
    assert [e.event for e in events].count("nonfinite") == 2
    assert events[-1].event == "failed"


def test_a_resume_goes_on_counting_the_steps_that_were_skipped(home: Path) -> None:
    """A supervisor that starts it again and again would otherwise never see the limit."""
    config = write_config(
        home,
        "nan-again",
        optimization={"learning_rate": 1e25, "nonfinite_limit": 4, "warmup": 0.0},
        checkpoint={"every": 2},
        log_every=1,
    )
    counts = []
    for _ in range(2):
        code, said = run(config)
        assert code == 1, said
        events = read_events((home / "nan-again" / "events.jsonl").read_text())
        counts.append([e.detail["count"] for e in events if e.event == "nonfinite"])
    first, both = counts
    assert first == [1, 2, 3, 4, 5]
    again = both[len(first) :]
    assert again
    assert again == first[-len(again) :]
    assert len(again) < len(first)


def test_a_checkpoint_is_evaluated_and_exported_by_command(home: Path, whole: Path) -> None:
    checkpoint = str((whole / "checkpoints" / "best").resolve())
    prompts = home / "prompts.jsonl"
    prompts.write_text('{"prompt": "count from 3"}\n')
    out = home / "report.json"
    options = ["--prompts", str(prompts), "--max-new-tokens", "8", "--json", str(out)]
    with Trainer(home / "evaluate.log", "evaluate", checkpoint, *options) as process:
        assert process.wait() == 0, process.said()
    assert "identical to greedy" in process.said()
    assert json.loads(out.read_text())["prompts"] == 1
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "export", checkpoint, home / "zlab"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    words = ("export", checkpoint, home / "speculators", "--form", "speculators")
    with Trainer(home / "export.log", *words) as process:
        assert process.wait() == 0, process.said()
    for form in ("zlab", "speculators"):
        assert (home / form / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["export", "CHECKPOINT", "HOME/chats.jsonl"], "is no empty folder"),
        (["evaluate", "CHECKPOINT", "--prompts", "HOME/gone.jsonl"], "no data file"),
        (
            ["evaluate", "CHECKPOINT", "--prompts", "HOME/chats.jsonl", "--json", "HOME/gone/x"],
            "folder there is",
        ),
        (
            ["evaluate", "CHECKPOINT", "--prompts", "HOME/chats.jsonl", "--temperature", "nan"],
            "--temperature 0",
        ),
        (["evaluate", "CHECKPOINT", "--prompts", "x", "--seed", "-1"], "--seed is -1"),
        (
            ["evaluate", "CHECKPOINT", "--prompts", "HOME/chats.jsonl", "--max-new-tokens", "300"],
            "max_position_embeddings 256: no prompt has room",
        ),
        (
            ["evaluate", "CHECKPOINT", "--prompts", "HOME/chats.jsonl", "--target", "HOME/gpt2"],
            "rope_theta: the drafter has 10000.0, the target None",
        ),
    ],
)
def test_a_command_that_cannot_end_well_says_so_before_it_works(
    home: Path, whole: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    GPT2Config(vocab_size=264, n_embd=32, n_layer=6, n_head=4).save_pretrained(home / "gpt2")
    checkpoint = str((whole / "checkpoints" / "best").resolve())
    given = [w.replace("CHECKPOINT", checkpoint).replace("HOME", str(home)) for w in words]
    assert main(given) == 2
    assert says in capsys.readouterr().err


def test_a_checkpoint_whose_tensors_have_another_shape_is_not_resumed(
    home: Path, whole: Path
) -> None:
    """Copied, one row would have spread over the whole matrix."""
    narrow = home / "narrow"
    shutil.copytree((whole / "checkpoints" / "best").resolve(), narrow)
    tensors = load_file(narrow / "master.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"][:1].contiguous()
    save_file(tensors, narrow / "master.safetensors")
    config = write_config(home, "shapes")
    with Trainer(home / "shapes.log", "train", config, DFLASH_RESUME=str(narrow)) as process:
        assert process.wait() == 2, process.said()
    assert "fc.weight of master.safetensors has shape (1, 32)" in process.said()
    assert "\nstep " not in process.said()
