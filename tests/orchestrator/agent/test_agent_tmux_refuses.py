"""A tmux that cannot keep its socket: named before a launch, and nothing is left of the attempt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def closed_to_others(folder: Path) -> None:
    folder.mkdir(0o700)


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def no_folder(folder: Path) -> None:
    folder.write_text("")


@pytest.fixture
def refusing(runs: Any, tmp_path: Path) -> Any:
    """Runs whose tmux is given a folder of its own, that a test has prepared."""
    import os

    def prepared(make: Callable[[Path], None]) -> Any:
        place = tmp_path / "place"
        place.mkdir()
        make(place / f"tmux-{os.getuid()}")
        runs.environment = {**runs.environment, "TMUX_TMPDIR": str(place)}
        runs.agent = runs.new_agent()
        return runs

    return prepared


@pytest.mark.parametrize(
    ("make", "words"),
    [(open_to_all, "it is open to all users"), (no_folder, "it is no folder")],
)
def test_preflight_names_the_folder_and_why(refusing: Any, make: Any, words: str) -> None:
    check = refusing(make).agent.call("preflight")["checks"]["tmux"]
    assert not check["ok"] and words in check["error"]
    assert check["value"]["folder"] in check["error"]


def test_a_folder_that_is_tmuxs_own_is_good(refusing: Any) -> None:
    assert refusing(closed_to_others).agent.call("preflight")["checks"]["tmux"]["ok"]


def test_what_tmux_refused_to_start_leaves_no_run_and_no_secret(refusing: Any) -> None:
    runs = refusing(open_to_all)
    run_id = runs.new_id()
    number = runs.agent.send(
        "run.start", run_id=run_id, command=["true"], name=run_id, secrets={"T": "hunter2"}
    )
    assert runs.agent.error(number)["kind"] == "tmux.failed"
    root = runs.workdir / "dflashctl/runs"
    assert [path.name for path in root.iterdir() if path.name != ".lock"] == []
    assert not runs.agent.call("run.list")["runs"]
