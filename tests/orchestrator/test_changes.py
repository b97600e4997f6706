"""What differs between a run and the one before it, as a diagnosis quotes it."""

from __future__ import annotations

import json
from typing import Any

from orchestrator.changes import Past, changes, drift, installed
from orchestrator.diag import Evidence, diagnose
from orchestrator.environment.lock import Environment

ENVIRONMENT: dict[str, Any] = {
    "python": {"version": "3.11.9"},
    "torch": {"version": "2.13.0+cu130", "cuda": "13.0"},
    "packages": {"torch": "2.13.0+cu130", "triton": "3.6.0", "idna": "3.10"},
    "variables": {"NCCL_P2P_DISABLE": "0"},
}
RECORD: dict[str, Any] = {
    "release": "aaaa",
    "command": ["bash", "start_training.sh"],
    "gpus": ["GPU-1", "GPU-2"],
    "git": {"commit": "1111111111111111", "dirty": False},
}


def events(rows: int = 400, rate: float = 6e-4) -> str:
    config = {"optimization": {"learning_rate": rate}, "seed": 1}
    return "\n".join(
        json.dumps({"time": 1.0, "event": event, "detail": detail})
        for event, detail in (
            ("started", {"config": config}),
            ("data", {"fingerprint": {"train": {"rows": rows, "hash": "x"}}}),
        )
    )


def manifest(**files: str) -> str:
    return "\n".join(json.dumps(["f", path, digest, 1, 0]) for path, digest in files.items())


def past(**other: Any) -> Past:
    made: dict[str, Any] = {
        "run_id": "r-1",
        "record": RECORD,
        "manifest": manifest(model="a1", train="b1"),
        "environment": Environment.model_validate(ENVIRONMENT),
        "events": events(),
    }
    return Past(**made | other)


def test_the_same_twice_has_no_changes() -> None:
    assert changes(past(), past(run_id="r-2")) == []


def test_code_is_told_by_release_commit_and_files() -> None:
    now = past(
        record=RECORD | {"release": "bbbb", "git": {"commit": "2222222222222222", "dirty": True}},
        manifest=manifest(model="a2", train="b1", extra="c1"),
    )

    (line,) = changes(past(), now)

    assert line == (
        "code: release aaaa → bbbb; commit 111111111111 → 222222222222 + uncommitted changes; "
        "2 files differ: extra, model"
    )


def test_uncommitted_changes_alone_are_told() -> None:
    dirty = RECORD | {"release": "bbbb", "git": RECORD["git"] | {"dirty": True}}

    (line,) = changes(past(), past(record=dirty, manifest=manifest(model="a2", train="b1")))

    assert line.startswith("code: release aaaa → bbbb; uncommitted changes differ; 1 file differs")


def test_data_and_config_are_told_by_field() -> None:
    assert changes(past(), past(events=events(rows=900, rate=1e-3))) == [
        "config: optimization.learning_rate 0.0006 → 0.001",
        "data: train.rows 400 → 900",
    ]


def test_gpus_and_command() -> None:
    other = RECORD | {"gpus": ["GPU-1"], "command": ["bash", "slow.sh"]}

    assert changes(past(), past(record=other)) == [
        "command: bash start_training.sh → bash slow.sh",
        "GPUs: GPU-1, GPU-2 → GPU-1",
    ]


def test_of_the_environment_only_what_may_matter() -> None:
    other = ENVIRONMENT | {
        "packages": ENVIRONMENT["packages"] | {"triton": "3.5.0", "idna": "3.11"},
        "variables": {"NCCL_P2P_DISABLE": "1"},
    }

    lines = changes(past(), past(environment=Environment.model_validate(other)))

    assert [line.split(" (")[0] for line in lines] == [
        "environment: triton 3.6.0 → 3.5.0",
        "environment: $NCCL_P2P_DISABLE 0 → 1",
    ]


def test_what_an_older_run_did_not_record_is_no_change() -> None:
    assert changes(Past("r-0"), past(environment=None, events="")) == [
        "code: release None → aaaa; commit none → 111111111111",
        "GPUs: none → GPU-1, GPU-2",
    ]


def test_packages_that_came_went_or_changed_are_drift() -> None:
    before = {"torch": "2.11.0", "triton": "3.5.0", "idna": "3.10"}
    now = installed("torch 2.13.0\nTriton 3.5.0\nhuggingface_hub 1.2.0\nsome noise in a line")

    assert drift(before, now) == [
        "huggingface-hub absent -> 1.2.0",
        "idna 3.10 -> absent",
        "torch 2.11.0 -> 2.13.0",
    ]


def test_drift_explains_an_error_of_that_package_and_nothing_else() -> None:
    probes = {"env_drift": "transformers 5.2.0 -> 5.24.0", "exit_record": {"exit_code": 1}}

    def root(error: str) -> str:
        log = (
            "Traceback (most recent call last):\n"
            f'  File "/w/train.py", line 4, in <module>\n    go()\n{error}\n'
        )
        return diagnose(Evidence.from_text(log, probes)).findings[0].code

    assert root("AttributeError: module 'transformers' has no attribute 'AutoTap'") == "env.drift"
    assert root("KeyError: 'row 7'") == "code.error"
