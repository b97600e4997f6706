"""What the benchmarks say is kept, however their parts end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "trainer"))

from measure import Figures, watch_part

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PART = """
import subprocess, sys, time
print('FIGURE {"name": "one", "value": 1}', flush=True)
print('of another rank FIGURE {"name": "two", "value": [2]}', flush=True)
print("and then it hangs", flush=True)
if "hang" in sys.argv:
    subprocess.run(["sleep", "600"])
sys.exit(3)
"""


@pytest.mark.parametrize("hangs", [True, False])
def test_figures_come_before_the_end_and_survive_it(hangs: bool) -> None:
    told: dict[str, Any] = {}
    words = ["hang"] if hangs else []
    ended = watch_part([sys.executable, "-c", PART, *words], 3 if hangs else 60, told.__setitem__)
    assert told == {"one": 1, "two": [2]}
    assert ended.lines == ["of another rank ", "and then it hangs"]
    assert ended.over == hangs
    assert ended.code == (-9 if hangs else 3)


def test_each_figure_is_a_line_of_the_file_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCHMARK_OUT", str(tmp_path))
    figures = Figures("some.jsonl")
    for value in (1.23456789, "text"):
        figures.tell("part", "name", value)
        line = (tmp_path / "some.jsonl").read_text().splitlines()[-1]
        shown = round(value, 4) if isinstance(value, float) else value
        assert json.loads(line)["value"] == shown
