"""The wheel is enough: code, playbooks, the lab's files, and no torch behind it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("dflashctl-*.whl")
    return zipfile.ZipFile(path)


def test_every_file_of_both_packages_is_in_it(wheel: zipfile.ZipFile) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "orchestrator", "trainer"], cwd=ROOT, capture_output=True, text=True
    )
    assert tracked.returncode == 0, tracked.stderr
    missing = set(tracked.stdout.splitlines()) - set(wheel.namelist())
    assert not missing


def test_the_playbooks_lie_where_the_controller_looks_for_them(wheel: zipfile.ZipFile) -> None:
    names = {p.name for p in (ROOT / "playbooks").glob("*.yaml")}
    assert names
    assert {f"orchestrator/_playbooks/{name}" for name in names} <= set(wheel.namelist())


def test_the_controller_alone_asks_for_no_torch(wheel: zipfile.ZipFile) -> None:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    needs = Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist") or []
    plain = [need for need in needs if "extra ==" not in need]
    assert any(need.startswith("fabric") for need in plain)
    assert not [n for n in plain if n.startswith(("torch", "transformers", "numpy", "safetensors"))]


def test_one_console_script_is_installed(wheel: zipfile.ZipFile) -> None:
    (name,) = (n for n in wheel.namelist() if n.endswith("entry_points.txt"))
    assert "dflashctl = orchestrator.cli:main" in wheel.read(name).decode()
