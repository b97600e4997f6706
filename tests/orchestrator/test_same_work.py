"""Which program a command runs, and when one run's speed is a measure of another's."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.same_work import differences, is_other_program, program, work_of


@pytest.mark.parametrize(
    ("command", "runs"),
    [
        ("python train.py", "train.py"),
        ("python3.11 -u ./train.py --lr 1e-4", "train.py"),
        ("python sft/train.py", "sft/train.py"),
        ("/opt/venv/bin/python -m trainer train config.yaml", "trainer"),
        ("torchrun --nproc-per-node 8 train.py", "train.py"),
        ("torchrun --nproc-per-node 8 -m trainer train config.yaml", "trainer"),
        ("python -m torch.distributed.run --nnodes 2 -m trainer train c.yaml", "trainer"),
        ("python -m trainer.torchrun --nnodes 2 -m trainer train c.yaml", "trainer"),
        ("accelerate launch --config_file a.yaml train.py", "train.py"),
        ("accelerate launch --module mine.train", "mine.train"),
        ("python -m cProfile -o out train.py", "train.py"),
        # Configs and plots may be Python too.
        ("python -m mmdet.train configs/detr.py", "mmdet.train"),
        ("python train.py -m qwen3", "train.py"),
        ("numactl -m 0 python train.py", "train.py"),
        ("env CUDA_VISIBLE_DEVICES=0,1 OUT=/x/y.py nice -n 5 python train.py", "train.py"),
        ("bash start_training.sh", "start_training.sh"),
        ("./start_training.sh --fast", "start_training.sh"),
        ("bash -lc 'source env.sh && exec python -m trainer train c.yaml 2>&1'", "trainer"),
        ("sh -c 'cd /workspace; python train.py; echo done'", "train.py"),
        ("bash -l -c 'python train.py --lr 1'", "train.py"),
        ("bash -euo pipefail -c 'python train.py | tee log'", "train.py"),
        ("bash -c 'export A=1; ulimit -n 65536; ./a.out'", "a.out"),
        ("bash -c 'python \"unclosed train.py'", "train.py"),
        ("timeout 10m ./a.out --steps 3", "a.out"),
        ("/usr/local/bin/llama-train -m model.gguf", "/usr/local/bin/llama-train"),
        ("bash", "bash"),
        ("", ""),
    ],
)
def test_the_program_is_named_past_what_launches_it(command: str, runs: str) -> None:
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    assert program(words) == runs


LAUNCHERS = st.sampled_from(
    [
        "",
        "python",
        "python3 -u",
        "env A=1 B=/x/y python",
        "nohup nice -n 5 python3.12",
        "torchrun --standalone --nproc-per-node 8",
        "accelerate launch --num_processes 4",
        "deepspeed --num_gpus 8",
        "python -m torch.distributed.run --nnodes 2",
    ]
)
OPTIONS = st.lists(
    st.sampled_from(
        ["--lr", "1e-4", "-v", "train", "config.yaml", "--out=x.py", "seed=3", "other.py"]
    )
)
NAMES = st.from_regex(r"[a-z_]{1,8}(?:/[a-z_]{1,8}){0,2}", fullmatch=True)


@given(LAUNCHERS, NAMES, OPTIONS, st.booleans())
@examples(100)
def test_neither_launcher_nor_options_hide_a_script(
    front: str, name: str, options: list[str], shell: bool
) -> None:
    words = [*front.split(), f"./{name}.py", *options]
    if shell:
        words = ["bash", "-c", f"cd /workspace && exec {shlex.join(words)} 2>&1 | tee log.txt"]
    assert program(words) == f"{name}.py"


@given(LAUNCHERS.filter(bool), NAMES, OPTIONS)
@examples(100)
def test_nor_a_module(front: str, name: str, options: list[str]) -> None:
    module = name.replace("/", ".")
    assert program([*front.split(), "-m", module, *options]) == module


@given(st.lists(st.text()))
@examples(100)
def test_no_command_breaks_it(words: list[str]) -> None:
    work = work_of({"command": words}, "")
    assert differences(work, work) == []
    assert not is_other_program(work, work)


CONFIG: dict[str, Any] = {
    "target": {"model": "Qwen/Qwen3-8B", "dtype": "auto", "attention": "sdpa"},
    "drafter": {"num_layers": 5, "block_size": 16, "start": "random"},
    "data": {"sequence_length": 3072, "anchors": 512, "files": ["a.jsonl"]},
    "optimization": {"rows": 1, "microbatches": 8, "fp8": "off", "learning_rate": 6e-4},
    "pipeline": {"executor": "threads"},
}
COMMAND = ["python", "-m", "trainer", "train", "config.yaml"]
CARDS = [f"cuda:{index}" for index in range(8)]


def events(devices: list[str] = CARDS, seed: int = 0, **changed: Any) -> str:
    """``drafter__num_layers=3`` is that field of the config."""
    config = json.loads(json.dumps(CONFIG)) | {"seed": seed}
    for name, value in changed.items():
        section, _, key = name.partition("__")
        config[section][key] = value
    lines = [
        {"event": "started", "detail": {"config": config}},
        {"event": "plan", "detail": {"targets": devices[:5], "drafters": devices[5:]}},
    ]
    return "\n".join(map(json.dumps, lines))


def unlike(before: str, now: str) -> list[str]:
    record = {"command": COMMAND}
    return differences(work_of(record, before), work_of(record, now))


def unlike_words(before: list[str], now: list[str], told: str = "") -> list[str]:
    return differences(work_of({"command": before}, told), work_of({"command": now}, told))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"target__model": "Qwen/Qwen3-4B"}, "target.model Qwen/Qwen3-8B → Qwen/Qwen3-4B"),
        ({"drafter__block_size": 8}, "drafter.block_size 16 → 8"),
        ({"drafter__num_layers": 8}, "drafter.num_layers 5 → 8"),
        ({"data__sequence_length": 8192}, "data.sequence_length 3072 → 8192"),
        ({"data__anchors": 1024}, "data.anchors 512 → 1024"),
        ({"optimization__microbatches": 1}, "optimization.microbatches 8 → 1"),
        ({"devices": CARDS[:6]}, "GPUs 8 → 6"),
    ],
)
def test_what_makes_a_token_dear_makes_rates_incomparable(
    changed: dict[str, Any], told: str
) -> None:
    assert unlike(events(), events(**changed)) == [told]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"seed": 1},
        {"optimization__learning_rate": 1e-3},
        {"data__files": ["b.jsonl"]},
        {"drafter__start": "target"},
        # What a slow run is to be blamed on.
        {"target__attention": "eager"},
        {"optimization__fp8": "head"},
        {"pipeline__executor": "inline"},
        # It fell back to the CPU.
        {"devices": ["cpu"]},
        # A field that came with another version of the trainer.
        {"drafter__new_field": 3},
    ],
)
def test_what_does_not_leaves_the_one_before_a_measure(changed: dict[str, Any]) -> None:
    assert unlike(events(), events(**changed)) == []


def test_more_devices_make_no_run_slower() -> None:
    assert unlike(events(CARDS[:6]), events()) == []


def test_the_target_is_told_first() -> None:
    told = unlike(events(), events(target__model="other", data__anchors=64))
    assert told[0].startswith("target.model ")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--lr 3e-4 --run-name b --resume last", []),
        ("--output-model-path b --eval-batch-size 8 --log-config c.yaml", []),
        ("--model qwen-32b", ["model qwen-8b → qwen-32b"]),
        ("--max-seq-len=8192", ["max_seq_len None → 8192"]),
        ("configs/large.yaml", ["config None → configs/large.yaml"]),
        ("--per_device_train_batch_size 1", ["per_device_train_batch_size None → 1"]),
    ],
)
def test_of_another_program_the_options_names_tell(options: str, told: list[str]) -> None:
    before = ["python", "train.py", "--model", "qwen-8b"]
    now = [*before[: 2 if "--model" in options else 4], *options.split()]
    assert unlike_words(before, now) == told


def test_of_another_trainers_config_the_names_tell() -> None:
    def told(model: str, lr: float, out: str) -> str:
        config = {"model": {"name": model, "dropout": 0}, "optim": {"lr": lr}, "out_model": out}
        return json.dumps({"event": "started", "detail": {"config": config}})

    assert unlike(told("8b", 1e-4, "a"), told("70b", 2e-4, "b")) == ["model.name 8b → 70b"]


def test_fewer_processes_are_other_work_and_more_are_not() -> None:
    many, few = (["torchrun", "--nproc-per-node", n, "train.py"] for n in ("8", "4"))
    assert unlike_words(many, few) == ["nproc_per_node 8 → 4"]
    assert unlike_words(few, many) == []


def test_a_config_that_both_wrote_down_counts_more_than_its_files_name() -> None:
    assert unlike_words(COMMAND, [*COMMAND[:-1], "copy.yaml"], events()) == []


def test_fewer_nodes_and_leased_gpus() -> None:
    def work(gpus: int, nodes: int) -> Any:
        cards = [f"GPU-{index}" for index in range(gpus)]
        return work_of({"command": COMMAND, "gpus": cards, "nodes": {"rank": 0, "of": nodes}}, "")

    assert differences(work(8, 2), work(4, 1)) == ["GPUs 8 → 4", "nodes 2 → 1"]
    assert differences(work(8, 1), work(0, 1)) == []


@pytest.mark.parametrize("gpus", [3, True, "0,1", {"GPU-0": 1}])
def test_a_records_gpus_of_another_type_are_none(gpus: Any) -> None:
    assert work_of({"command": COMMAND, "gpus": gpus}, "").devices == {}
