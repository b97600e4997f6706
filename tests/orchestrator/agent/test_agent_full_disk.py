"""A run on a disk that fills up: it goes on, its end is recorded, what was lost is told."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agent.process import alive

COUNT = """
import time
for number in range(100):
    print("line", number, flush=True)
    time.sleep(0.02)
"""


def lines(run: dict[str, Any]) -> list[str]:
    """All of a log that was not rotated."""
    return Path(run["log"]).read_text().splitlines()


@pytest.fixture
def small_disk(make_disk: Callable[[str], Path]) -> Path:
    return make_disk("2m")


def fill(folder: Path) -> Path:
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return path


def on(runs: Any, folder: Path) -> None:
    runs.agent = runs.new_agent(workdir=folder)


@pytest.mark.slow
def test_a_full_disk_stops_neither_the_run_nor_its_record(runs: Any, small_disk: Path) -> None:
    on(runs, small_disk)
    run = runs.python(COUNT)
    runs.says(run, "line 3")
    filler = fill(small_disk)
    # One page of the log is still free to be filled.
    child = run["supervisor"]["child"]
    time.sleep(1)
    assert alive(child["pid"], child["start"])
    filler.unlink()
    end = runs.ending(run)
    assert (end["exit_code"], end["lost_bytes"]) == (0, 0)
    assert lines(run) == [f"line {number}" for number in range(100)]
    runs.agent.close()


@pytest.mark.slow
def test_on_a_disk_that_stays_full_the_end_is_still_recorded(runs: Any, small_disk: Path) -> None:
    on(runs, small_disk)
    code = """
import time
print("begun", flush=True)
time.sleep(1)
for n in range(300): print(n, "x" * 40_000, flush=True)
print("the last line", flush=True)
raise SystemExit(3)
"""
    run = runs.python(code)
    runs.says(run, "begun")
    filler = fill(small_disk)
    end = runs.ending(run)
    assert (end["exit_code"], end["reason"]) == (3, "failed")
    assert end["lost_bytes"] > 0
    assert runs.status(run)["state"] == "failed"
    filler.unlink()
    runs.agent.close()


@pytest.mark.slow
def test_lost_output_is_counted_and_told_where_it_is_missing(runs: Any, small_disk: Path) -> None:
    on(runs, small_disk)
    code = """
import os, time
print("begun", flush=True)
while not os.path.exists(os.environ["GO"]): time.sleep(0.01)
for n in range(300): print(n, "x" * 40_000, flush=True)
print("flooded", flush=True)
os.rename(os.environ["GO"], os.environ["GO"] + ".done")
time.sleep(2)
print("the last line", flush=True)
"""
    go = runs.workdir / "go"
    # What is kept in memory is written when there is space: 2 MB hold only the end of it.
    run = runs.python(code, env={"GO": str(go)}, log_bytes=400_000, log_files=2)
    runs.says(run, "begun")
    filler = fill(small_disk)
    go.touch()
    runs.wait(lambda: not go.exists())
    filler.unlink()
    end = runs.ending(run)
    text = "\n".join(lines(run))
    assert end["lost_bytes"] > 1_000_000
    assert "the last line" in text
    runs.agent.close()


def test_a_push_that_fills_the_disk_names_a_file_on_it(runs: Any, small_disk: Path) -> None:
    on(runs, small_disk)
    data = os.urandom(4 << 20)
    name = [[hashlib.sha256(data).hexdigest(), len(data)]]
    error = runs.agent.error(runs.agent.stream("release.blobs", data, blobs=name))
    assert error["kind"] == "disk.full"
    assert error["detail"]["path"].startswith(f"{small_disk}/dflashctl/blobs/")
    assert error["detail"]["path"] in error["message"]
    runs.agent.close()
