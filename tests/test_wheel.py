"""The wheel is enough: code, playbooks, the lab's files, and no torch behind it."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def build(kind: str, source: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("dflashctl-*")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("wheel", ROOT, tmp_path_factory.mktemp("wheel")))


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


@pytest.mark.slow
def test_the_program_in_it_finds_its_playbooks_and_its_commit(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """Unpacked, far from the checkout, beside the libraries of these tests."""
    wheel.extractall(tmp_path / "unpacked")

    def said(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator.cli", *words],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
            | {"PYTHONPATH": str(tmp_path / "unpacked")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    commit = wheel.read("orchestrator/_commit.txt").decode().strip()
    assert f"({commit})" in said("--version")
    assert "Usage: dflashctl" in said("--help")
    assert said("play").startswith("bring-up ")
    assert "wrote" in said("init", "--host", "root@10.1.2.6", "--ct", "200")
    assert "lab" in said("lab", "--help")


@pytest.mark.slow
def test_it_knows_its_commit_and_so_does_one_that_is_built_from_the_sdist(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    head = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    commit = wheel.read("orchestrator/_commit.txt").decode().strip()
    assert commit.removesuffix("-dirty") == head.stdout.strip()
    assert not (ROOT / "orchestrator" / "_commit.txt").exists()

    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("dflashctl-*")
    again = zipfile.ZipFile(build("wheel", source, tmp_path / "again"))
    assert again.read("orchestrator/_commit.txt").decode().strip() == commit
    assert set(again.namelist()) == set(wheel.namelist())
